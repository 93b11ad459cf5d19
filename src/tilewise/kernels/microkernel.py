"""The micro-kernel: a register tile of accumulators, one outer product a step. Both products of attention are this.

Assumes whole vectors and whole register tiles: tails and masks are the business of pack and softmax.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tilewise.simd.builder import LANES, Builder, Int, IntLike, Ptr, Var, Vec
from tilewise.simd.target import TALLEST_TILE

UNROLL = 2  # steps a turn of the loop: fewer instructions beside the products, where another thread shares the core
Accumulators = list[list[Var[Vec]]]
Put = Callable[[Int, Int, list[Vec]], None]  # takes scores of a row: (row, group, a vector for it and each next group)


def outer_products(
    b: Builder, acc: Accumulators, left: Ptr, left_row: int, right: Ptr, right_step: int, right_column: int,
    lo: IntLike, hi: IntLike,
) -> None:  # fmt: skip
    """acc[r][c] = fma(left[r, k], right[k, c], acc[r][c]) for k = lo, lo + 1, ... < hi: one ascending chain each.

    left[r, k] is a float at left + r * left_row + k; right[k, c] is a vector at right + k * right_step +
    c * right_column. A step costs len(acc) broadcasts, len(acc[0]) loads and their product of fma.
    """
    at = b.var(b.integer(lo) * right_step)  # the compiler would multiply at each step
    for k in _unrolled(b, lo, hi):
        columns = [b.load(right + at.value + c * right_column) for c in range(len(acc[0]))]
        at.value = at.value + right_step
        for r, row in enumerate(acc):
            x = b.broadcast(left + k + r * left_row)
            for c, column in enumerate(columns):
                row[c].value = b.fma(x, column, row[c].value)


def _unrolled(b: Builder, lo: IntLike, hi: IntLike) -> Iterator[Int]:
    """lo, lo + 1, ... < hi, UNROLL of them in a turn of the kernel's loop; those that may be left in another."""
    whole = lo + (hi - lo) // UNROLL * UNROLL
    for k in b.loop(lo, whole, UNROLL):
        for x in range(UNROLL):
            yield k + x
    if whole != hi:
        yield from b.loop(whole, hi)


def accumulators(b: Builder, mr: int, nr: int) -> Accumulators:
    """mr by nr accumulators at +0."""
    return [[b.var(b.vec(0.0)) for _ in range(nr)] for _ in range(mr)]


def widths(count: int, widest: int) -> list[int]:
    """`count` vectors in as few chunks of at most `widest` as will do, of nearly equal width."""
    chunks = -(-count // widest)
    return [count // chunks + (i < count % chunks) for i in range(chunks)]


def scores(
    b: Builder, rows: int, mr: int, nr: int, D: int, queries: Ptr, keys: Ptr, put: Put, lo: Int, hi: Int
) -> None:
    """Q[r] . K for the groups lo <= g < hi of a tile, for every row of a panel: put(r, g, vectors from group g on)."""
    query_row, first = -(-D // LANES) * LANES, lo
    for width in (nr >> n for n in range(nr.bit_length())):  # what is left over in narrower blocks
        end = first + (hi - first) // width * width
        for r, height in blocks(b, rows, tallest(mr, nr, width)):
            for group in b.loop(first, end, width):
                acc = accumulators(b, height, width)
                tile = keys + group * (LANES * D)
                outer_products(b, acc, queries + r * query_row, query_row, tile, LANES, LANES * D, 0, D)
                for x, row in enumerate(acc):
                    put(r + x, group, [cell.value for cell in row])
        first = end


def weighted_sum(
    b: Builder, rows: int, mr: int, nr: int, a: Ptr, width: int, alpha: Ptr, P: Ptr, columns: int,
    values: Ptr, value_step: int, lo: Int, hi: Int,
) -> None:  # fmt: skip
    """a[r] = alpha[r] * a[r] + P[r, lo:hi] @ V[lo:hi] for every row of a panel."""
    for vector, count in blocks(b, width // LANES, nr):
        c = vector * LANES
        for r, height in blocks(b, rows, tallest(mr, nr, count)):
            acc = load_outputs(b, height, count, a + r * width + c, width, alpha + r)
            outer_products(b, acc, P + r * columns, columns, values + c, value_step, LANES, lo, hi)
            store_outputs(b, acc, a + r * width + c, width)


def tallest(mr: int, nr: int, width: int) -> int:
    """Rows of a block of that width: a narrow one is taller in the registers of mr by nr accumulators."""
    return min(TALLEST_TILE, (mr * nr + nr) // width - 1)


def load_outputs(b: Builder, rows: int, count: int, a: Ptr, width: int, alpha: Ptr) -> Accumulators:
    """alpha[r] * a[r] for a register tile of the output."""
    factors = [b.broadcast(alpha + r) for r in range(rows)]
    return [[b.var(factors[r] * b.load(a + (r * width + y * LANES))) for y in range(count)] for r in range(rows)]


def store_outputs(b: Builder, acc: Accumulators, a: Ptr, width: int) -> None:
    for r, row in enumerate(acc):
        for y, cell in enumerate(row):
            b.store(a + (r * width + y * LANES), cell.value)


def blocks(b: Builder, count: int, most: int) -> Iterator[tuple[Int, int]]:
    """`count` rows, or vectors, in blocks of at most `most`: (first, how many); a run-time loop over equal blocks."""
    first = 0
    for size, equal in itertools.groupby(widths(count, most)):
        end = first + size * len(list(equal))
        for x in b.loop(first, end, size):
            yield x, size
        first = end
