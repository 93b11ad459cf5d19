"""Both products for a few query rows, with K and V read in place: what bounds them is memory, so nothing is packed.

K is transposed in registers and used at once. A row's arithmetic is that of the micro-kernel: the same chains.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from tilewise.kernels import microkernel, pack
from tilewise.kernels.microkernel import Put, accumulators, load_outputs, store_outputs, widths
from tilewise.kernels.tables import Shape, up_to
from tilewise.simd.builder import BF16, BF16_PAIR, LANES, Bool, Builder, Int, IntLike, Ptr, Var, Vec

EVEN, ODD = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)  # lanes of two vectors
LOWER, UPPER = ([x // 2 + first + x % 2 * LANES for x in range(LANES)] for first in (0, LANES // 2))  # back again
LINE = 64  # bytes of a cache line
FIRST_LEVEL, SECOND_LEVEL = 3, 2  # of the cache, into which a prefetch goes
SOON = 4  # rows ahead, for V into the first level


class Rows:
    """The rows of K (or V) that this tile and, behind them, the next one see. `pack.places` finds where they lie."""

    def __init__(self, b: Builder, base: Ptr, places: Ptr, columns: int) -> None:
        self.b, self.base, self.places, self.columns = b, base, places, columns
        self.element = base.element

    def at(self, j: IntLike) -> Ptr:
        return self.base + self.b.load_int(self.places + j)

    def ask(self, j: Int, first: int, end: int, level: int) -> None:
        """Prefetch columns [first, end) of row j."""
        if first < end:
            ask(self.b, self.at(j), first, end, level)


def ask(b: Builder, row: Ptr, first: int, end: int, level: int) -> None:
    """Prefetch columns [first, end) of a row."""
    for column in range(first, end, LINE // row.element.size):
        b.prefetch(row + column, level)


def scores(
    b: Builder, shape: Shape, queries: Ptr, tile: Ptr, keys: Rows, values: Rows, put: Put, lo: Int, hi: Int
) -> None:
    """Q[r] . K[j] for the keys lo <= j < hi of a tile, and what it may be for the rest of their groups of 16.

    Rows of K of the next group are asked for into the first-level cache, those of the next tile into the second.
    """
    if len(row_blocks(shape)) > 1:
        _scores_by_blocks(b, shape, queries, tile, keys, values, put, lo, hi)
        return
    query_row, rows = up_to(LANES, shape.D), range(shape.panel)
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        near = [keys.at(group * LANES + x) for x in range(LANES)]
        acc = accumulators(b, shape.panel, 1)
        for d, columns in pack.columns_ahead(b, shape.D, near):
            _ask(b, shape, keys, values, group * LANES, d, len(columns))
            for x, column in enumerate(columns):
                for r in rows:
                    q = b.broadcast(queries + d + (x + r * query_row))
                    acc[r][0].value = b.fma(q, column, acc[r][0].value)
        for r in rows:
            put(b.integer(r), group, [acc[r][0].value])


def _scores_by_blocks(
    b: Builder, shape: Shape, queries: Ptr, tile: Ptr, keys: Rows, values: Rows, put: Put, lo: Int, hi: Int
) -> None:
    """The same where the sums of all rows do not fit into registers: a group of K goes through `tile`, transposed."""
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        near = [keys.at(group * LANES + x) for x in range(LANES)]
        for d, count in pack.steps_over(b, shape.D, keys.element):
            _ask(b, shape, keys, values, group * LANES, d, count)
            pack.store_columns(b, near, d, count, tile)

        def put_group(r: Int, _: Int, scores: list[Vec], group: Int = group) -> None:
            put(r, group, scores)

        one = b.integer(0), b.integer(1)
        microkernel.scores(b, shape.panel, shape.mr, 1, shape.D, queries, tile, put_group, *one)


def _ask(b: Builder, shape: Shape, keys: Rows, values: Rows, first: Int, d: Int, count: int) -> None:
    """Prefetch, at each whole step over D, its share of 16 rows: of the next group's, and of those a tile ahead.

    In the order of rows, and every step as much as another: memory is to have as much to do all the time.
    """
    if count != pack.step_of(keys.element) or count > shape.D:
        return
    steps, step = shape.D // count, d // count
    parts = -(-steps // LANES)  # of a row, where steps are more than rows
    units = LANES * parts
    each = units // steps
    even = [step * each + x for x in range(each)] if units % steps == 0 else None
    for unit in even or b.loop(step * units // steps, (step + 1) * units // steps):
        row, part = first + unit // parts, unit % parts
        for rows, ahead, columns, level in (
            (keys, LANES, shape.D, FIRST_LEVEL),
            (keys, shape.columns, shape.D, SECOND_LEVEL),
            (values, shape.columns, _early(shape, values), SECOND_LEVEL),
        ):
            size = up_to(LINE // rows.element.size, -(-columns // parts))
            ask(b, rows.at(row + ahead) + part * size, 0, size, level)


def _early(shape: Shape, values: Rows) -> int:
    """The columns of V's next tile that are asked for beside K's, a quarter of them: else memory has nothing to do for
    the second half of the scores, and more than it can during the sums."""
    return shape.Dv // (4 * _pair(values)) * _pair(values)


def _late(shape: Shape, values: Rows, c: int) -> tuple[int, int]:
    """The columns [first, end) of it that are asked for beside the sums of a chunk: whole pairs, as many for each."""
    first, pair, starts = _early(shape, values), _pair(values), [start for start, _ in chunks(shape)]
    pairs, chunk = -(-(shape.Dv - first) // pair), starts.index(c)
    begin, end = (first + pairs * x // len(starts) * pair for x in (chunk, chunk + 1))
    return begin, min(end, shape.Dv)


def _pair(values: Rows) -> int:
    """Columns in a pair of lines, which the second level fetches together."""
    return 2 * LINE // values.element.size


def weighted_sum(
    b: Builder, shape: Shape, rows: range, c: int, count: int, a: Ptr, alpha: Ptr, P: Ptr, values: Rows, lo: Int,
    hi: Int,
) -> Bool:  # fmt: skip
    """a[r] = alpha[r] * a[r] + P[r, lo:hi] @ V[lo:hi], some rows, `count` vectors from column c; whether all is finite.

    Where it is not, a is left as it was: a value that is not finite reaches every row, as 0 times it is NaN. Rows of V
    are asked for as those of K are.
    """
    at = rows.start * shape.width + c
    acc = load_outputs(b, len(rows), count, a + at, shape.width, alpha + rows.start)
    end = c + count * LANES
    paired = min(count, (shape.Dv - c) // LANES) // 2 * 2 if values.element is BF16 else 0
    for cells in acc:
        exchange(b, cells, paired, EVEN, ODD)
    for j in b.loop(lo, hi):
        row = values.at(j)
        if not rows.start:
            values.ask(j + SOON, c, end, FIRST_LEVEL)
            values.ask(j + shape.columns, *_late(shape, values, c), SECOND_LEVEL)
        columns = [x for y in range(0, paired, 2) for x in pack.halves(b, b.load((row + c + y * LANES).of(BF16_PAIR)))]
        columns += [pack.load_columns(b, row + x, shape.Dv - x) for x in range(c + paired * LANES, end, LANES)]
        for r, cells in zip(rows, acc, strict=True):
            weight = b.broadcast(P + j + r * shape.columns)
            for y, column in enumerate(columns):
                cells[y].value = b.fma(weight, column, cells[y].value)
    zero = b.vec(0.0)
    poison = [functools.reduce(lambda p, x: b.fma(x.value, zero, p), cells, zero) for cells in acc]
    finite = b.all(functools.reduce(operator.add, poison).equals(zero))
    for _ in b.when(finite):
        for cells in acc:
            exchange(b, cells, paired, LOWER, UPPER)
        store_outputs(b, acc, a + at, shape.width)
    return finite


def exchange(b: Builder, cells: list[Var[Vec]], paired: int, first: Sequence[int], second: Sequence[int]) -> None:
    """Replace each two of the first `paired` vectors by two choices of their 32 lanes.

    A pair of vectors of bfloat16 is loaded at once, and taken apart into its even and its odd columns.
    """
    for y in range(0, paired, 2):
        x0, x1 = cells[y].value, cells[y + 1].value
        cells[y].value, cells[y + 1].value = b.shuffle(x0, x1, first), b.shuffle(x0, x1, second)


def row_blocks(shape: Shape) -> list[range]:
    """The rows of the panel in blocks whose sums registers hold: all rows, where registers are many."""
    counts = widths(shape.panel, shape.mr)
    return [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]


def chunks(shape: Shape) -> list[tuple[int, int]]:
    """The columns of V in chunks that a register tile holds: (first column, vectors)."""
    counts = widths(shape.width // LANES, shape.nr)
    return [(LANES * sum(counts[:i]), count) for i, count in enumerate(counts)]
