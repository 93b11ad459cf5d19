"""Pack: queries, keys and values from any strides into aligned tiles; and rows out again.

All masks of memory live here: what lies past a row's end, or past the keys that some row of the work item sees, is
never read. The micro-kernel sees whole vectors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilewise.kernels.tables import NO_KEY, Fields, Row, Shape, up_to
from tilewise.simd.builder import BF16, BF16_PAIR, F32, I64, LANES, Bool, Builder, Element, Int, IntLike, Ptr, Vec
from tilewise.simd.math import QUARTER, transpose
from tilewise.visibility import visible_range

HALF = LANES // 2
BF16_SHIFT = 16  # a bfloat16 is the upper half of a float32

VectorAt = Callable[[IntLike], Vec]


def copy_row(b: Builder, width: int, source: Ptr, target: Ptr) -> None:
    """A row of `width` elements as float32, its tail filled with zeros up to whole vectors."""
    whole = width // LANES * LANES
    for c in b.loop(0, whole, LANES):
        b.store(target + c, b.load(source + c))
    if width % LANES:
        b.store(target + whole, b.load_part(source + whole, width % LANES))


def no_query(b: Builder, shape: Shape, scratch: Fields, row: Int) -> None:
    """A row that fills a panel: zeros, and no visible key."""
    for d in b.loop(0, up_to(LANES, shape.D), LANES):
        b.store(scratch.queries + row * up_to(LANES, shape.D) + d, b.vec(0.0))
    b.store_int(scratch.row_lo + row, NO_KEY[0])
    b.store_int(scratch.row_hi + row, NO_KEY[1])


def row_range(b: Builder, call: Row, scratch: Fields, row: Int, position: Int, first: Int, end: Int) -> None:
    """The keys of [first, end) that a row sees, as absolute positions [lo, hi)."""
    lo, hi = visible_range(position, first, end, call["left"], call["right"], b.imin, b.imax)
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


def places(b: Builder, call: Row, sequence: Row, k_at: Ptr, v_at: Ptr, t0: Int, lo: Int, hi: Int) -> None:
    """Where the keys and values [lo, hi) of the tile at t0 lie: k_at[j], v_at[j] for key t0 + j, in elements.

    Keys lie in pages of page_size; those that lie one after the other are one page. An entry of a group of 16 for a key
    outside [lo, hi) repeats the nearest inside: what is read there is masked later.
    """
    first, size = sequence["first_key"], call["page_size"]
    blocks = b.pointer(sequence["blocks"], call["blocks_lo"], call["blocks_hi"], I64)
    slot, end, at = b.var(lo - first), hi - first, first - t0
    page = b.var(slot.value // size)
    for _ in b.repeat(lambda: slot.value < end):
        number, inside = b.load_int(blocks + page.value), slot.value - page.value * size
        place = [b.var(number * call[name + "_page"] + inside * call[name + "_row"]) for name in ("k", "v")]
        stop = b.imin(end, slot.value - inside + size)
        for s in b.loop(slot.value, stop):
            for name, target, where in zip(("k", "v"), (k_at, v_at), place, strict=True):
                b.store_int(target + (s + at), where.value)
                where.value = where.value + call[name + "_row"]
        slot.value = stop
        page.value = page.value + 1
    lo, hi = lo - t0, hi - t0
    for target in (k_at, v_at):
        for j in b.loop(lo // LANES * LANES, lo):
            b.store_int(target + j, b.load_int(target + lo))
        for j in b.loop(hi, up_to(LANES, hi)):
            b.store_int(target + j, b.load_int(target + (hi - 1)))


def no_places(b: Builder, shape: Shape, scratch: Fields) -> None:
    """Zeros, so that what is asked for ahead of the last keys is the first ones, not what scratch happens to hold."""
    for at in (scratch.k_at.of(F32), scratch.v_at.of(F32)):
        for i in b.loop(0, 2 * shape.columns * (I64.size // F32.size), LANES):
            b.store(at + i, b.vec(0.0))


def next_places(b: Builder, shape: Shape, scratch: Fields) -> None:
    """The places of the next tile, which lie behind, are now those of this one."""
    size = shape.columns * (I64.size // F32.size)
    for at in (scratch.k_at.of(F32), scratch.v_at.of(F32)):
        for i in b.loop(0, size, LANES):
            b.store(at + i, b.load(at + size + i))


def pack_keys(b: Builder, shape: Shape, source: Ptr, k_at: Ptr, packed: Ptr, lo: Int, hi: Int) -> None:
    """Keys [lo, hi) of a tile, transposed in groups of 16: packed[group][d][x] = K[16 group + x][d].

    Key j lies k_at[j] from `source`; a group's keys outside [lo, hi) repeat the nearest key inside: their scores are
    masked later.
    """
    for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
        keys = [source + b.load_int(k_at + group * LANES + x) for x in range(LANES)]
        tile = packed + group * (LANES * shape.D)
        for d, count in steps_over(b, shape.D, source.element):
            store_columns(b, keys, d, count, tile)


def store_columns(b: Builder, keys: list[Ptr], d: Int, count: int, tile: Ptr) -> None:
    """tile[d + x] = column d + x of 16 rows, for x < count."""
    for x, column in enumerate(columns(b, [key + d for key in keys], count)):
        b.store(tile + (d + x) * LANES, column)


def step_of(element: Element) -> int:
    """How many columns `columns` takes at once: half a vector's, the transposition of which leaves registers free."""
    return 2 * HALF if element is BF16 else HALF


def steps_over(b: Builder, width: int, element: Element) -> Iterator[tuple[Int, int]]:
    """The columns of a row in steps that `columns` takes: (first, how many), whole steps in a loop of the kernel."""
    step = step_of(element)
    whole = width // step * step
    for d in b.loop(0, whole, step):
        yield d, step
    if width % step:
        yield b.integer(whole), width % step


def columns(b: Builder, rows: list[Ptr], count: int) -> list[Vec]:
    """`count` columns of 16 rows as float32, transposed: a vector a column."""
    if count < step_of(rows[0].element):
        return transpose(b, [load_columns(b, row, count) for row in rows])[:count]
    return widened(b, rows[0].element, transposed(b, rows))


def transposed(b: Builder, rows: list[Ptr]) -> list[Vec]:
    """A step's columns of 16 rows. Pairs of bfloat16 are transposed as they lie, 32 bits each: half the shuffles."""
    rows = [row.of(BF16_PAIR) for row in rows] if rows[0].element is BF16 else rows
    pairs = [(rows[x + r], rows[x + r + QUARTER]) for x in (0, HALF) for r in range(QUARTER)]
    return transpose(b, [b.load_halves(*pair) for pair in pairs])


def widened(b: Builder, element: Element, vectors: list[Vec]) -> list[Vec]:
    """The same as float32: each half of a pair of bfloat16 is a float32's upper."""
    return [half for pair in vectors for half in halves(b, pair)] if element is BF16 else vectors


def columns_ahead(b: Builder, width: int, rows: list[Ptr]) -> Iterator[tuple[Int, list[Vec]]]:
    """(first, columns) of 16 rows by steps: those of the next step are on their way before these are used."""
    element = rows[0].element
    step = step_of(element)
    whole = width // step * step
    if whole:
        now = [b.var(vector) for vector in transposed(b, rows)]
        for d in b.loop(0, whole - step, step):
            then = transposed(b, [row + (d + step) for row in rows])
            yield d, widened(b, element, [vector.value for vector in now])
            for vector, after in zip(now, then, strict=True):
                vector.value = after
        yield b.integer(whole - step), widened(b, element, [vector.value for vector in now])
    if width % step:
        yield b.integer(whole), columns(b, [row + whole for row in rows], width % step)


def halves(b: Builder, pairs: Vec) -> tuple[Vec, Vec]:
    """The first and the second of each of 16 pairs of bfloat16, as float32."""
    x = b.bits(pairs)
    return b.floats(x << BF16_SHIFT), b.floats(x & b.ivec(-1 << BF16_SHIFT))


def load_columns(b: Builder, row: Ptr, count: int) -> Vec:
    """`count` elements of a row, at most 16; zeros past them, where nothing is read."""
    return b.load(row) if count >= LANES else b.load_part(row, count)


def pack_values(b: Builder, shape: Shape, source: Ptr, v_at: Ptr, packed: Ptr, lo: Int, hi: Int) -> Bool:
    """Values [lo, hi) of a tile: packed[j][c] = V[j][c], zeros up to shape.width. Whether all are finite."""
    whole = shape.Dv // LANES * LANES
    zero = b.vec(0.0)
    poison = b.var(zero)  # 0 * v summed: NaN in a lane that met an infinity or a NaN
    for j in b.loop(lo, hi):
        row, target = source + b.load_int(v_at + j), packed + j * shape.value_step
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
