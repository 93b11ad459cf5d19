"""Both products for a few query rows, with K and V read in place: what bounds them is memory, so nothing is packed.

K is transposed in registers and used at once. A row's arithmetic is that of the micro-kernel: the same chains.
"""

from __future__ import annotations

import functools
import operator

from tilewise.kernels import pack
from tilewise.kernels.microkernel import accumulators, load_outputs, store_outputs, widths
from tilewise.kernels.tables import Shape, up_to
from tilewise.simd.builder import LANES, Bool, Builder, Int, IntLike, Ptr

LINE = 64  # bytes of a cache line
FIRST_LEVEL, SECOND_LEVEL = 3, 2  # of the cache, into which a prefetch goes


class Places:
    """Where the rows of K (or V) lie that this tile and the next one see: a ring of two tiles (`pack.places`)."""

    def __init__(self, b: Builder, ring: Ptr, columns: int, here: Int) -> None:
        self.b, self.ring, self.columns, self.here = b, ring, columns, here

    def at(self, j: IntLike) -> Int:
        """Row j of this tile, in elements."""
        return self.b.load_int(self.ring + self.here + j)

    def ahead(self, j: IntLike, count: int) -> Int:
        """The place `count` entries after that of row j, in the next tile where this one ends."""
        entry, end = self.here + j + count, 2 * self.columns
        return self.b.load_int(self.ring + self.b.choose(entry < end, entry, entry - end))


def scores(b: Builder, shape: Shape, queries: Ptr, keys: Ptr, places: Places, S: Ptr, lo: Int, hi: Int) -> None:
    """S[r, j] = Q[r] . K[j] for the keys lo <= j < hi of a tile, and what it may be for the rest of their groups of 16.

    The rows of K lie at `places` from `keys`. Those of the next group are asked for into the first-level cache, those
    of the next tile into the second.
    """
    query_row, rows = up_to(LANES, shape.D), range(shape.panel)
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        near = [keys + places.at(group * LANES + x) for x in range(LANES)]
        acc = accumulators(b, shape.panel, 1)
        for d, count in pack.steps_over(b, shape.D, keys.element):
            _ask(b, shape, keys, places, group * LANES, d, count)
            for x, column in enumerate(pack.columns(b, [key + d for key in near], count)):
                for r in rows:
                    q = b.broadcast(queries + d + (x + r * query_row))
                    acc[r][0].value = b.fma(q, column, acc[r][0].value)
        for r in rows:
            b.store(S + group * LANES + r * shape.columns, acc[r][0].value)


def _ask(b: Builder, shape: Shape, keys: Ptr, places: Places, first: Int, d: Int, count: int) -> None:
    """Prefetch, at each whole step over D, some rows of those a group and a tile ahead, in their order."""
    steps = shape.D // count
    each = -(-LANES // max(1, steps)) if count >= LANES else 0
    for x in range(each):
        row = first + b.imin(d // count * each + x, LANES - 1)
        for distance, level in ((LANES, FIRST_LEVEL), (places.columns, SECOND_LEVEL)):
            later = keys + places.ahead(row, distance)
            for column in range(0, shape.D, LINE // keys.element.size):
                b.prefetch(later + column, level)


def weighted_sum(
    b: Builder, shape: Shape, c: int, count: int, a: Ptr, alpha: Ptr, P: Ptr, values: Ptr, places: Places,
    lo: Int, hi: Int,
) -> Bool:  # fmt: skip
    """a[r] = alpha[r] * a[r] + P[r, lo:hi] @ V[lo:hi] for `count` vectors from column c on; whether all V were finite.

    Where one is not, a is left as it was. Rows of V are asked for as those of K are.
    """
    zero = b.vec(0.0)
    poison = [b.var(zero) for _ in range(count)]
    acc = load_outputs(b, shape.panel, count, a + c, shape.width, alpha)
    for j in b.loop(lo, hi):
        row = values + places.at(j)
        for distance, level in ((LANES, FIRST_LEVEL), (places.columns, SECOND_LEVEL)):
            later = values + places.ahead(j, distance)
            for line in range(c, c + count * LANES, LINE // values.element.size):
                b.prefetch(later + line, level)
        columns = [pack.load_columns(b, row + x, shape.Dv - x) for x in range(c, c + count * LANES, LANES)]
        for y, column in enumerate(columns):
            poison[y].value = b.fma(column, zero, poison[y].value)
        for r in range(shape.panel):
            weight = b.broadcast(P + j + r * shape.columns)
            for y, column in enumerate(columns):
                acc[r][y].value = b.fma(weight, column, acc[r][y].value)
    finite = b.all(functools.reduce(operator.add, (p.value for p in poison)).equals(zero))
    for _ in b.when(finite):
        store_outputs(b, acc, a + c, shape.width)
    return finite


def chunks(shape: Shape) -> list[tuple[int, int]]:
    """The columns of V in chunks that a register tile holds: (first column, vectors)."""
    counts = widths(shape.width // LANES, shape.nr)
    return [(LANES * sum(counts[:i]), count) for i, count in enumerate(counts)]
