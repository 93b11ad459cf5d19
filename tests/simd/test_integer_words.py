"""Words of int32 lanes in memory, of bytes, and of lanes that begin anywhere: what they move, where they may not go.

Those that compute are in test_words.py's table. An array of float32 holds the bits; the pointer is read as another
element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.simd.support import INT32, INTERPRETED, NATIVE_TARGETS, RINGS, SPECIAL, floats, random_bits, run
from tilewise.errors import KernelError
from tilewise.simd.builder import F32, I32, LANES, U8, Builder, Int, Ptr

PATTERN = floats([*SPECIAL, *random_bits(64, 41)])
UNTOUCHED = np.float32(-77.0)
FAR = 1 << 40
RANGES = [(lo, hi) for lo in range(-3, LANES + 3) for hi in range(-3, LANES + 3)]
RANGES += [(-FAR, FAR), (FAR, FAR + 5), (-FAR, 3), (13, FAR), (5, -FAR), (-(1 << 63), (1 << 63) - 1)]
ENDS = np.array(RANGES, np.int64).ravel()


def bits(x: Any) -> list[int]:
    return np.asarray(x).view(np.uint32).tolist()


def iota(ring: str) -> None:
    out = np.full(LANES, UNTOUCHED)
    assert run(lambda b, p: b.store(p, b.floats(b.iota())), ring, out) == 0
    assert bits(out) == list(range(LANES))


def load_ints(ring: str) -> None:
    """16 integers from any element on, to the bit."""
    starts = range(len(PATTERN) - LANES + 1)
    out = np.zeros((len(starts), LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(starts)):
            b.store(result + j * LANES, b.floats(b.load_ints(source.of(I32) + j)))

    assert run(body, ring, PATTERN, out) == 0
    assert bits(out) == [bits(PATTERN[j : j + LANES]) for j in starts]


def in_range(lane: int, lo: int, hi: int) -> bool:
    return lo <= lane < hi


def load_lanes(ring: str) -> None:
    """Lanes [lo, hi), zeros in the rest, for any lo and hi; no lane outside is in the extent."""
    out = np.full((len(RANGES), LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, ends: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(RANGES)):
            lo, hi = b.load_int(ends + j * 2), b.load_int(ends + (j * 2 + 1))
            first, end = (b.imin(b.imax(x, 0), LANES) for x in (lo, hi))
            address = Int(b, source.lo)
            p = b.pointer(address, address + first * 4, address + b.imax(end, first) * 4, F32)
            b.store(result + j * LANES, b.load_lanes(p, lo, hi))

    assert run(body, ring, PATTERN[:LANES].copy(), ENDS, out, checked=ring != INTERPRETED) == 0
    for row, (lo, hi) in zip(out, RANGES, strict=True):
        assert bits(row) == [x if in_range(n, lo, hi) else 0 for n, x in enumerate(bits(PATTERN[:LANES]))], (lo, hi)


def load_mask_lanes(ring: str) -> None:
    """Whether the bytes of lanes [lo, hi) are not 0, false in the rest."""
    source = np.zeros(LANES // 4, np.float32)
    source.view(np.uint8)[:] = [0, 1, 2, 128, 255, 0, 0, 1, 7, 0, 64, 1, 0, 1, 0, 9]
    out = np.full((len(RANGES), LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, ends: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(RANGES)):
            lo, hi = b.load_int(ends + j * 2), b.load_int(ends + (j * 2 + 1))
            first, end = (b.imin(b.imax(x, 0), LANES) for x in (lo, hi))
            address = Int(b, source.lo)
            p = b.pointer(address, address + first, address + b.imax(end, first), U8)
            mask = b.load_mask_lanes(p, lo, hi)
            b.store(result + j * LANES, b.where(mask, b.vec(1.0), b.vec(0.0)))

    assert run(body, ring, source, ENDS, out, checked=ring != INTERPRETED) == 0
    truths = source.view(np.uint8) != 0
    for row, (lo, hi) in zip(out, RANGES, strict=True):
        assert row.tolist() == [float(in_range(n, lo, hi) and x) for n, x in enumerate(truths)], (lo, hi)


INDICES = np.random.default_rng(42).integers(0, len(PATTERN), 6 * LANES).astype(np.int32)
INDICES[:LANES], INDICES[LANES : 2 * LANES] = 0, len(PATTERN) - 1


def _gather(ring: str, integers: bool) -> None:
    """Any entries of an array, in any order and more than once; also before the pointer."""
    out = np.zeros((len(INDICES) // LANES, LANES), np.float32)

    def body(b: Builder, source: Ptr, indices: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(INDICES), LANES):
            index = b.load_ints(indices.of(I32) + j) - b.ivec(3)
            if integers:
                b.store(result + j, b.floats(b.gather_ints(source.of(I32) + 3, index)))
            else:
                b.store(result + j, b.gather(source + 3, index))

    assert run(body, ring, PATTERN, INDICES.view(np.float32), out, checked=ring != INTERPRETED) == 0
    assert bits(out.ravel()) == bits(PATTERN[INDICES])


def gather(ring: str) -> None:
    _gather(ring, integers=False)


def gather_ints(ring: str) -> None:
    _gather(ring, integers=True)


MEMORY_OF_INTEGERS: dict[str, Callable[[str], None]] = {
    function.__name__: function for function in (iota, load_ints, load_lanes, load_mask_lanes, gather, gather_ints)
}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("word", MEMORY_OF_INTEGERS)
def test_word(word: str, ring: str) -> None:
    MEMORY_OF_INTEGERS[word](ring)


@pytest.mark.parametrize("ring", RINGS)
def test_integers_of_four_bytes(ring: str) -> None:
    """load_int keeps the sign; store_int touches no neighbour."""
    source, out = np.array(INT32, np.int32), np.full(2 * len(INT32), 5, np.int32)
    wide = np.zeros(len(INT32), np.int64)

    def body(b: Builder, source: Ptr, result: Ptr, wide: Ptr) -> None:
        for j in b.loop(0, len(INT32)):
            x = b.load_int(source.of(I32) + j)
            b.store_int(wide + j, x)
            b.store_int(result.of(I32) + j * 2, x)

    assert run(body, ring, source.view(np.float32), out.view(np.float32), wide) == 0
    assert wide.tolist() == INT32
    assert out.tolist() == [y for x in INT32 for y in (x, 5)]


@pytest.mark.parametrize("ring", RINGS)
def test_integers_of_a_byte(ring: str) -> None:
    """load_int has no sign; store_int touches no neighbour."""
    source, out = np.arange(256, dtype=np.uint8), np.full(512, 5, np.uint8)
    wide = np.zeros(256, np.int64)

    def body(b: Builder, source: Ptr, result: Ptr, wide: Ptr) -> None:
        for j in b.loop(0, 256):
            x = b.load_int(source.of(U8) + j)
            b.store_int(wide + j, x)
            b.store_int(result.of(U8) + j * 2, x)

    assert run(body, ring, source.view(np.float32), out.view(np.float32), wide) == 0
    assert wide.tolist() == list(range(256))
    assert out.tolist() == [y for x in range(256) for y in (x, 5)]


# word -> (bytes that it touches, from how many bytes after p on, what it does)
ACCESSES: dict[str, tuple[int, int, Callable[[Builder, Ptr], Any]]] = {
    "load_ints": (64, 0, lambda b, p: b.floats(b.load_ints(p.of(I32)))),
    "load_lanes": (12, 20, lambda b, p: b.load_lanes(p, 5, 8)),
    "load_mask_lanes": (4, 8, lambda b, p: b.where(b.load_mask_lanes(p.of(U8), 8, 12), b.vec(1.0), b.vec(0.0))),
    "gather": (64, 0, lambda b, p: b.gather(p, b.ivec(15) - b.iota())),
    "gather_ints": (64, 0, lambda b, p: b.floats(b.gather_ints(p.of(I32), b.iota()))),
    "load_int of 4 bytes": (4, 0, lambda b, p: b.floats(b.splat(b.load_int(p.of(I32))))),
    "load_int of a byte": (4, 0, lambda b, p: b.floats(b.splat(b.load_int(p.of(U8) + 3) + b.load_int(p.of(U8))))),
    "store_int of 4 bytes": (4, 0, lambda b, p: b.store_int(p.of(I32), 0)),
    "store_int of a byte": (4, 0, lambda b, p: [b.store_int(p.of(U8) + n, 0) for n in (0, 3)]),
}


def access(word: str, ring: str, offset: int, extent: tuple[int, int]) -> tuple[int, Any, Any]:
    """A checked access of bytes from `offset` on, of an array of 1 KiB, of which bytes [lo, hi) are the extent."""
    data, after = np.full(256, UNTOUCHED), np.zeros(LANES, np.float32)

    def body(b: Builder, data: Ptr, after: Ptr) -> None:
        base = Int(b, data.lo)
        p = b.pointer(base + (offset - ACCESSES[word][1]), base + extent[0], base + extent[1], F32)
        ACCESSES[word][2](b, p)
        b.store(after, b.vec(2.0))

    return run(body, ring, data, after, checked=ring != INTERPRETED), data, after


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("word", ACCESSES)
def test_access_at_both_ends_of_the_extent(word: str, ring: str) -> None:
    for offset in (256, 512 - ACCESSES[word][0]):
        returned, _, after = access(word, ring, offset, (256, 512))
        assert returned == 0
        assert (after == 2.0).all()


@pytest.mark.parametrize("ring", NATIVE_TARGETS)
@pytest.mark.parametrize("word", ACCESSES)
def test_checked_native_code_stops_before_an_access_out_of_bounds(word: str, ring: str) -> None:
    size = ACCESSES[word][0]
    for offset, extent in (
        (252, (256, 512)), (512 - size + 4, (256, 512)), (512, (256, 512)), (0, (256, 512)), (256, (256, 256)),
        (-(1 << 45), (256, 512)),
    ):  # fmt: skip
        returned, data, after = access(word, ring, offset, extent)
        assert returned != 0
        assert (after == 0.0).all()
        assert (data == UNTOUCHED).all() or (word == "store_int of a byte" and offset == 512 - size + 4)


@pytest.mark.parametrize("word", ACCESSES)
def test_interpreter_refuses_an_access_out_of_bounds(word: str) -> None:
    for offset in (252, 512 - ACCESSES[word][0] + 4, 512, 0, 1 << 45, -(1 << 45)):
        with pytest.raises(KernelError, match="bytes"):
            access(word, INTERPRETED, offset, (256, 512))


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (5, 5), (9, 2), (16, 99), (-7, 0), (FAR, -FAR)])
def test_no_lane_may_lie_anywhere(ring: str, lo: int, hi: int) -> None:
    data = np.full(LANES, UNTOUCHED)

    def body(b: Builder, p: Ptr) -> None:
        nowhere = b.pointer(8, 0, 0, F32)
        zeros = b.load_lanes(nowhere, lo, hi)
        b.store(p, b.where(b.load_mask_lanes(nowhere.of(U8), lo, hi), b.vec(1.0), zeros))

    assert run(body, ring, data, checked=ring != INTERPRETED) == 0
    assert (data == 0).all()
