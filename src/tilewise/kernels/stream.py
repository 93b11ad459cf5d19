"""Both products for a few query rows, with K and V read in place: what bounds them is memory, so nothing is packed.

K is transposed in registers and used at once. A row's arithmetic is that of the micro-kernel: the same chains.
"""

from __future__ import annotations

from tilewise.kernels.microkernel import accumulators, load_outputs, store_outputs, widths
from tilewise.kernels.tables import Shape, up_to
from tilewise.simd.builder import LANES, Bool, Builder, Int, IntLike, Ptr, Vec
from tilewise.simd.math import transpose

AHEAD = 64  # how many rows ahead memory is asked for; measured, see docs/explanation/performance.md
SECOND_LEVEL = 2  # into the second-level cache: the first is too small for what is asked for


def load_columns(b: Builder, row: Ptr, column: IntLike, width: int) -> Vec:
    """16 floats of a row of `width` from a column on; zeros past its end, where nothing is read."""
    if isinstance(column, int) and column + LANES > width:
        return b.load_part(row + column, width - column)
    return b.load(row + column)


def scores(
    b: Builder, shape: Shape, queries: Ptr, keys: Ptr, stride: Int, S: Ptr, lo: Int, hi: Int, ahead: Int
) -> None:
    """S[r, j] = Q[r] . K[j] for the keys lo <= j < hi of a tile, and what it may be for the rest of their groups of 16.

    `keys` is the tile's key 0, which need not exist; keys outside [lo, hi) repeat the nearest one inside. What lies
    `ahead` elements further is asked for, in the order in which it lies in memory.
    """
    whole, query_row, rows = shape.D // LANES * LANES, up_to(LANES, shape.D), range(shape.panel)
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        near = [keys + b.imin(b.imax(group * LANES + x, lo), hi - 1) * stride for x in range(LANES)]
        later = keys + group * LANES * stride + ahead
        acc = accumulators(b, shape.panel, 1)
        for d in b.loop(0, whole, LANES):
            for x in range(LANES):  # the lines of a group are spread over the steps of this loop
                line = d + x
                b.prefetch(later + line // (whole // LANES) * stride + line % (whole // LANES) * LANES, SECOND_LEVEL)
            columns = transpose(b, [b.load(key + d) for key in near])
            for x in range(LANES):
                for r in rows:
                    q = b.broadcast(queries + d + (x + r * query_row))
                    acc[r][0].value = b.fma(q, columns[x], acc[r][0].value)
        if shape.D % LANES:
            columns = transpose(b, [load_columns(b, key, whole, shape.D) for key in near])
            for x in range(shape.D % LANES):
                for r in rows:
                    q = b.broadcast(queries + (whole + x + r * query_row))
                    acc[r][0].value = b.fma(q, columns[x], acc[r][0].value)
        for r in rows:
            b.store(S + group * LANES + r * shape.columns, acc[r][0].value)


def weighted_sum(
    b: Builder, shape: Shape, c: int, count: int, a: Ptr, alpha: Ptr, P: Ptr, values: Ptr, stride: Int,
    lo: Int, hi: Int, ahead: Int,
) -> Bool:  # fmt: skip
    """a[r] = alpha[r] * a[r] + P[r, lo:hi] @ V[lo:hi] for `count` vectors from column c on; whether all V were finite.

    Where one is not, a is left as it was.
    """
    zero = b.vec(0.0)
    poison = b.var(zero)
    acc = load_outputs(b, shape.panel, count, a + c, shape.width, alpha)
    for j in b.loop(lo, hi):
        row = values + j * stride
        for y in range(count):
            b.prefetch(row + ahead + (c + y * LANES), SECOND_LEVEL)
        columns = [load_columns(b, row, c + y * LANES, shape.Dv) for y in range(count)]
        for column in columns:
            poison.value = b.fma(column, zero, poison.value)
        for r in range(shape.panel):
            weight = b.broadcast(P + j + r * shape.columns)
            for y, column in enumerate(columns):
                acc[r][y].value = b.fma(weight, column, acc[r][y].value)
    finite = b.all(poison.value.equals(zero))
    for _ in b.when(finite):
        store_outputs(b, acc, a + c, shape.width)
    return finite


def chunks(shape: Shape) -> list[tuple[int, int]]:
    """The columns of V in chunks that a register tile holds: (first column, vectors)."""
    counts = widths(shape.width // LANES, shape.nr)
    return [(LANES * sum(counts[:i]), count) for i, count in enumerate(counts)]
