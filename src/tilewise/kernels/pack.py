"""Pack: queries, keys and values from any strides into aligned tiles; and rows out again.

All masks of memory live here: what lies past a row's end, or past the keys that some row of the work item sees, is
never read. The micro-kernel sees whole vectors only.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.kernels.tables import NO_KEY, Fields, Row, Shape, up_to
from tilewise.simd.builder import LANES, Bool, Builder, Int, IntLike, Ptr, Vec
from tilewise.simd.math import transpose
from tilewise.visibility import visible_range

VectorAt = Callable[[IntLike], Vec]


def pack_query(b: Builder, shape: Shape, source: Ptr, target: Ptr) -> None:
    """One query row, its tail filled with zeros."""
    whole = shape.D // LANES * LANES
    for d in b.loop(0, whole, LANES):
        b.store(target + d, b.load(source + d))
    if shape.D % LANES:
        b.store(target + whole, b.load_part(source + whole, shape.D % LANES))


def no_query(b: Builder, shape: Shape, scratch: Fields, row: Int) -> None:
    """A row that fills a panel: zeros, and no visible key."""
    for d in b.loop(0, up_to(LANES, shape.D), LANES):
        b.store(scratch.queries + row * up_to(LANES, shape.D) + d, b.vec(0.0))
    b.store_int(scratch.row_lo + row, NO_KEY[0])
    b.store_int(scratch.row_hi + row, NO_KEY[1])


def row_ranges(b: Builder, call: Row, sequence: Row, scratch: Fields, row: Int, position: Int) -> None:
    """The keys that a row sees, as absolute positions [lo, hi)."""
    first = sequence["first_key"]
    lo, hi = visible_range(position, first, first + sequence["keys"], call["left"], call["right"], b.imin, b.imax)
    some = lo < hi
    b.store_int(scratch.row_lo + row, b.choose(some, lo, NO_KEY[0]))
    b.store_int(scratch.row_hi + row, b.choose(some, hi, NO_KEY[1]))


def panel_ranges(b: Builder, shape: Shape, scratch: Fields, rows: Int) -> tuple[Int, Int]:
    """For each panel the union and the intersection of its rows' ranges; for the work item the union."""
    item_lo, item_hi = b.var(b.integer(NO_KEY[0])), b.var(b.integer(NO_KEY[1]))
    for r in b.loop(0, rows, shape.panel):
        lo, lo_max = (b.var(b.load_int(scratch.row_lo + r)) for _ in range(2))
        hi, hi_min = (b.var(b.load_int(scratch.row_hi + r)) for _ in range(2))
        for x in b.loop(r + 1, r + shape.panel):
            row_lo, row_hi = b.load_int(scratch.row_lo + x), b.load_int(scratch.row_hi + x)
            lo.value, lo_max.value = b.imin(lo.value, row_lo), b.imax(lo_max.value, row_lo)
            hi.value, hi_min.value = b.imax(hi.value, row_hi), b.imin(hi_min.value, row_hi)
        for field, value in (("panel_lo", lo), ("panel_lo_max", lo_max), ("panel_hi_min", hi_min), ("panel_hi", hi)):
            b.store_int(getattr(scratch, field) + r, value.value)
        item_lo.value, item_hi.value = b.imin(item_lo.value, lo.value), b.imax(item_hi.value, hi.value)
    return item_lo.value, item_hi.value


def pack_keys(b: Builder, shape: Shape, source: Ptr, stride: Int, packed: Ptr, lo: Int, hi: Int) -> None:
    """Keys [lo, hi) of a tile, transposed in groups of 16: packed[group][d][x] = K[16 group + x][d].

    `source` is the tile's key 0, which need not exist. A group's keys outside [lo, hi) repeat the nearest key inside:
    their scores are masked later.
    """
    whole = shape.D // LANES * LANES
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        keys = [source + b.imin(b.imax(group * LANES + x, lo), hi - 1) * stride for x in range(LANES)]
        tile = packed + group * (LANES * shape.D)
        for d in b.loop(0, whole, LANES):
            for x, column in enumerate(transpose(b, [b.load(key + d) for key in keys])):
                b.store(tile + (d + x) * LANES, column)
        if shape.D % LANES:
            tail = transpose(b, [b.load_part(key + whole, shape.D % LANES) for key in keys])
            for x in range(shape.D % LANES):
                b.store(tile + (whole + x) * LANES, tail[x])


def pack_values(b: Builder, shape: Shape, source: Ptr, stride: Int, packed: Ptr, lo: Int, hi: Int) -> Bool:
    """Values [lo, hi) of a tile: packed[j][c] = V[j][c], tails filled with zeros. Whether all of them are finite."""
    whole = shape.Dv // LANES * LANES
    zero = b.vec(0.0)
    poison = b.var(zero)  # 0 * v summed: NaN in a lane that met an infinity or a NaN
    for j in b.loop(lo, hi):
        row, target = source + j * stride, packed + j * shape.width
        for c in b.loop(0, whole, LANES):
            v = b.load(row + c)
            poison.value = b.fma(v, zero, poison.value)
            b.store(target + c, v)
        if shape.Dv % LANES:
            v = b.load_part(row + whole, shape.Dv % LANES)
            poison.value = b.fma(v, zero, poison.value)
            b.store(target + whole, v)
    return b.all(poison.value.equals(zero))


def unpack_row(b: Builder, width: int, target: Ptr, vector_at: VectorAt) -> None:
    """Write a row of `width` floats, nothing past it; vector_at(c) gives its 16 floats from column c on."""
    whole = width // LANES * LANES
    for c in b.loop(0, whole, LANES):
        b.store(target + c, vector_at(c))
    if width % LANES:
        b.store_part(target + whole, vector_at(whole), width % LANES)
