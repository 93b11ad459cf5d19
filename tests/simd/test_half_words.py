"""The words of memory on half types, in each ring: what they load, how they round, what they leave alone.

Every one of the 65536 bit patterns goes through each word that loads; through each that stores go all numbers of the
type, the points between them, their float32 neighbours, infinities, NaN and random bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.half.halves import BF16_BITS, F16, Half
from tests.half.test_half_bits import dense_set
from tests.simd.support import INTERPRETED, RINGS, compiled, table_of
from tilewise.errors import KernelError
from tilewise.simd.builder import ELEMENTS, F32, I64, LANES, Builder, Int, Ptr

UNTOUCHED = np.uint16(0x4BCD)
every_type = pytest.mark.parametrize("half", [F16, BF16_BITS], ids=["f16", "bf16"])
every_ring = pytest.mark.parametrize("ring", RINGS)
EVERY = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def run(body: Callable[..., None], ring: str, half: Half, *arrays: Any, checked: bool = False) -> int:
    """body(b, a pointer for each array): uint16 arrays are of the half type."""
    kinds = {"float32": F32, "int64": I64, "uint16": ELEMENTS["f16" if half is F16 else "bf16"]}

    def kernel(b: Builder, table: Int, worker: Int) -> None:
        end = table + 16 * len(arrays)
        cells = [b.load_int(b.pointer(table + 8 * i, table, end, I64)) for i in range(2 * len(arrays))]
        pointers = [
            b.pointer(lo, lo, hi, kinds[str(x.dtype)])
            for lo, hi, x in zip(cells[::2], cells[1::2], arrays, strict=True)
        ]
        body(b, *pointers)

    table = table_of(arrays)
    return compiled(kernel, ring, checked)(table.__array_interface__["data"][0], 0)


def assert_values(got: Any, half: Half, patterns: Any) -> None:
    """float32s are what the patterns say, to the bit; a NaN for a NaN, and a quiet one stays the same."""
    expected = half.values(patterns)
    number = ~np.isnan(expected)
    assert (got.view(np.uint32)[number] == expected.view(np.uint32)[number]).all()
    assert np.isnan(got[~number]).all()
    quiet = ~number & (patterns >> (half.significant - 1) & 1 == 1)
    shift = 23 - half.significant
    payload = patterns[quiet].astype(np.uint32) & ((1 << half.significant) - 1)
    assert (got.view(np.uint32)[quiet] & 0x7FFFFF == payload << shift).all()
    assert (np.signbit(got)[quiet] == (patterns[quiet] >= 0x8000)).all()


def assert_rounded(got: Any, half: Half, x: Any) -> None:
    number = ~np.isnan(x)
    assert (got[number] == half.bits_of(x)[number]).all()
    assert np.isnan(half.values(got[~number])).all()


# ---- every pattern


@every_type
@every_ring
def test_load(half: Half, ring: str) -> None:
    out = np.zeros(1 << 16, np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, 1 << 16, LANES):
            b.store(result + j, b.load(source + j))

    assert run(body, ring, half, EVERY, out) == 0
    assert_values(out, half, EVERY)


@every_type
@every_ring
def test_load_halves(half: Half, ring: str) -> None:
    """All patterns, those of the lower half in ascending, those of the upper in descending eights."""
    eight, out = LANES // 2, np.zeros((1 << 12, LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, 1 << 12):
            b.store(result + j * LANES, b.load_halves(source + j * eight, source + ((1 << 16) - eight - j * eight)))

    assert run(body, ring, half, EVERY, out) == 0
    eights = EVERY.reshape(-1, eight)[: 1 << 13]
    assert_values(out[:, :eight].ravel(), half, eights[: 1 << 12].ravel())
    assert_values(out[:, eight:].ravel(), half, eights[::-1][: 1 << 12].ravel())


@every_type
@every_ring
def test_load_part(half: Half, ring: str) -> None:
    """All patterns by parts of 13; what is not asked for is +0."""
    count = 13
    source = EVERY[: len(EVERY) // count * count]
    out = np.full((len(source) // count, LANES), np.nan, np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(out)):
            b.store(result + j * LANES, b.load_part(source + j * count, count))

    assert run(body, ring, half, source, out) == 0
    assert_values(out[:, :count].reshape(-1).copy(), half, source)
    assert (out[:, count:].view(np.uint32) == 0).all()


@every_type
@every_ring
def test_broadcast(half: Half, ring: str) -> None:
    step = 1 if ring != INTERPRETED else 3
    patterns = EVERY[::step].copy()
    out = np.zeros((len(patterns), LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(patterns)):
            b.store(result + j * LANES, b.broadcast(source + j))

    assert run(body, ring, half, patterns, out) == 0
    assert_values(out[:, 0].copy(), half, patterns)
    assert (out.view(np.uint32) == out[:, :1].view(np.uint32)).all()


# ---- every rounding


@every_type
@every_ring
def test_store(half: Half, ring: str) -> None:
    x = dense_set(half)
    x = x[: len(x) // LANES * LANES].copy()
    out = np.full(len(x), UNTOUCHED)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(x), LANES):
            b.store(result + j, b.load(source + j))

    assert run(body, ring, half, x, out) == 0
    assert_rounded(out, half, x)


@every_type
@every_ring
@pytest.mark.parametrize("lane", [0, 7, 15])
def test_store_lane(half: Half, ring: str, lane: int) -> None:
    """One element of a vector, and none beside it."""
    x = dense_set(half)[:: 1 if ring != INTERPRETED else 7]
    x = x[: len(x) // LANES * LANES].copy()
    out = np.full(2 * len(x) // LANES + 1, UNTOUCHED)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(x) // LANES):
            b.store_lane(result + (2 * j + 1), b.load(source + j * LANES), lane)

    assert run(body, ring, half, x, out) == 0
    assert_rounded(out[1::2], half, x[lane::LANES])
    assert (out[::2] == UNTOUCHED).all()


@every_type
@every_ring
def test_store_part(half: Half, ring: str) -> None:
    """The first lanes of all counts, too small and too large ones among them; nothing past them."""
    counts = np.array([*range(-2, LANES + 3), 1 << 32, -(1 << 40)], np.int64)
    x = dense_set(half)[5 : 5 + LANES].copy()
    x[3], x[8], x[11] = np.nan, 1e30, -1e-30
    out = np.full((len(counts), 3 * LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, counts_: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(counts)):
            b.store_part(result + (j * 3 * LANES + LANES + 1), b.load(source), b.load_int(counts_ + j))

    assert run(body, ring, half, x, counts, out) == 0
    for row, count in zip(out, counts.tolist(), strict=True):
        n = max(0, min(count, LANES))
        assert_rounded(row[LANES + 1 : LANES + 1 + n], half, x[:n])
        assert (row[: LANES + 1] == UNTOUCHED).all()
        assert (row[LANES + 1 + n :] == UNTOUCHED).all()


@every_type
@every_ring
def test_counts_of_load_part(half: Half, ring: str) -> None:
    """Any count; and the extent may end with the last element that is asked for."""
    counts = np.array([*range(-2, LANES + 3), 1 << 32, -(1 << 40)], np.int64)
    patterns = EVERY[0x3C00 : 0x3C00 + LANES].copy()
    out = np.full((len(counts), LANES), np.nan, np.float32)

    def body(b: Builder, source: Ptr, counts_: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(counts)):
            count = b.load_int(counts_ + j)
            start = b.imax(0, b.imin(count, LANES))
            b.store(result + j * LANES, b.load_part(source + (LANES - start), count))

    assert run(body, ring, half, patterns, counts, out, checked=ring != INTERPRETED) == 0
    for row, count in zip(out, counts.tolist(), strict=True):
        n = max(0, min(count, LANES))
        assert_values(row[:n].copy(), half, patterns[LANES - n :])
        assert (row[n:].view(np.uint32) == 0).all()


@every_type
@every_ring
def test_elements_are_two_bytes_apart(half: Half, ring: str) -> None:
    """16 lanes from any element on, to any element: no alignment beyond the element's."""
    source, out = EVERY[0x3800 : 0x3800 + 64].copy(), np.full((LANES, 48), UNTOUCHED)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, LANES):
            b.store(result + (j * 48 + j), b.load(source + (j * 3)))

    assert run(body, ring, half, source, out) == 0
    for j, row in enumerate(out):
        assert row[j : j + LANES].tolist() == source[3 * j : 3 * j + LANES].tolist()
        assert (np.delete(row, range(j, j + LANES)) == UNTOUCHED).all()


# ---- bounds


WORDS: dict[str, tuple[int, Callable[[Builder, Ptr, Ptr], None]]] = {  # elements, and what touches them
    "load": (LANES, lambda b, p, room: b.store(room, b.load(p))),
    "load_halves": (LANES // 2, lambda b, p, room: b.store(room, b.load_halves(p, p))),
    "load_part": (5, lambda b, p, room: b.store(room, b.load_part(p, 5))),
    "broadcast": (1, lambda b, p, room: b.store(room, b.broadcast(p))),
    "store": (LANES, lambda b, p, room: b.store(p, b.load(room))),
    "store_part": (5, lambda b, p, room: b.store_part(p, b.load(room), 5)),
    "store_lane": (1, lambda b, p, room: b.store_lane(p, b.load(room), 3)),
}


@every_type
@every_ring
@pytest.mark.parametrize("word", WORDS)
def test_bounds(half: Half, ring: str, word: str) -> None:
    """The last place that fits is fine, the next is not; nor is the one before the first."""
    elements, touch = WORDS[word]
    data, room = EVERY[0x3C00 : 0x3C00 + 40].copy(), np.ones(LANES, np.float32)
    for at, fine in ((40 - elements, True), (41 - elements, False), (0, True), (-1, False)):
        before = data.copy()

        def body(b: Builder, p: Ptr, room: Ptr, at: int = at) -> None:
            touch(b, p + at, room)

        if ring == INTERPRETED and not fine:
            with pytest.raises(KernelError, match="outside its extent"):
                run(body, ring, half, data, room)
        else:
            assert (run(body, ring, half, data, room, checked=ring != INTERPRETED) == 0) == fine
        if not fine:
            assert (data == before).all()
