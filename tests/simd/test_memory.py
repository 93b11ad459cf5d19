"""Each word of memory, in each ring: what it moves, to the bit, what it leaves alone, and where it may not go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simd.support import (
    INT64_MAX,
    INT64_MIN,
    INTERPRETED,
    NATIVE_TARGETS,
    RINGS,
    SPECIAL,
    floats,
    random_bits,
    run,
)  # fmt: skip
from tilewise.errors import KernelError
from tilewise.simd.builder import F32, I64, LANES, Builder, Int, Ptr, Vec

ROOT = Path(__file__).parents[2]
COUNTS = [*range(LANES + 1), LANES + 1, 100, -1, -17, 1 << 32, (1 << 32) + 3, -(1 << 32), INT64_MIN, INT64_MAX]
PATTERN = floats([*SPECIAL, *random_bits(64, 11)])  # NaN with payloads among them: memory keeps their bits
UNTOUCHED = np.float32(-77.0)


def bits(x: Any) -> list[int]:
    return np.asarray(x).view(np.uint32).tolist()


def load(ring: str) -> None:
    """16 lanes from any element on: no alignment beyond the element's."""
    starts = range(len(PATTERN) - LANES + 1)
    out = np.zeros((len(starts), LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(starts)):
            b.store(result + j * LANES, b.load(source + j))

    assert run(body, ring, PATTERN, out) == 0
    assert bits(out) == [bits(PATTERN[j : j + LANES]) for j in starts]


def load_part(ring: str) -> None:
    """The first lanes, zeros after them, whatever the count; the extent ends with the last lane that is read."""
    counts = np.array(COUNTS, np.int64)
    out = np.full((len(COUNTS), LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, counts: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(COUNTS)):
            count = b.load_int(counts + j)
            start = b.imax(0, b.imin(count, LANES))
            b.store(result + j * LANES, b.load_part(source + (LANES - start), count))

    assert run(body, ring, PATTERN[:LANES].copy(), counts, out) == 0
    for row, count in zip(out, COUNTS, strict=True):
        n = max(0, min(count, LANES))
        assert bits(row) == [*bits(PATTERN[LANES - n : LANES]), *[0] * (LANES - n)], count


def load_halves(ring: str) -> None:
    """8 lanes from any element on, and 8 from any other."""
    half = LANES // 2
    starts = range(len(PATTERN) - half + 1)
    out = np.zeros((len(starts), LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(starts)):
            b.store(result + j * LANES, b.load_halves(source + j, source + (len(starts) - 1 - j)))

    assert run(body, ring, PATTERN, out) == 0
    assert bits(out) == [bits(PATTERN[j : j + half]) + bits(PATTERN[starts[-1] - j :][:half]) for j in starts]


def broadcast(ring: str) -> None:
    out = np.zeros((len(PATTERN), LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(PATTERN)):
            b.store(result + j * LANES, b.broadcast(source + j))

    assert run(body, ring, PATTERN, out) == 0
    assert bits(out) == [[x] * LANES for x in bits(PATTERN)]


def load_int(ring: str) -> None:
    cells = np.array([0, 1, -1, INT64_MIN, INT64_MAX, 1 << 40], np.int64)
    out = np.zeros_like(cells)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(cells)):
            b.store_int(result + j, b.load_int(source + j))

    assert run(body, ring, cells, out) == 0
    assert out.tolist() == cells.tolist()


def prefetch(ring: str) -> None:
    """Any address may be asked for, with any locality, and nothing changes."""
    data = PATTERN.copy()

    def body(b: Builder, p: Ptr) -> None:
        nowhere = b.pointer(0, 0, 0)
        for locality in range(4):
            for q in (p, p + 1, p + (-1), p + (1 << 40), nowhere):
                b.prefetch(q, locality)

    assert run(body, ring, data, checked=ring != INTERPRETED) == 0
    assert bits(data) == bits(PATTERN)


def store(ring: str) -> None:
    """16 lanes at any element, and no other."""
    rows = np.full((LANES, 3 * LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, LANES):
            b.store(result + j * (3 * LANES + 1), b.load(source + j))

    assert run(body, ring, PATTERN, rows) == 0
    for j, row in enumerate(rows):
        assert bits(row[j : j + LANES]) == bits(PATTERN[j : j + LANES])
        assert (np.delete(row, range(j, j + LANES)) == UNTOUCHED).all()


def store_part(ring: str) -> None:
    """The first lanes and nothing after them, whatever the count; the extent ends with the last lane."""
    counts, rows = np.array(COUNTS, np.int64), np.full((len(COUNTS), LANES), UNTOUCHED)

    def body(b: Builder, source: Ptr, counts: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(COUNTS)):
            count = b.load_int(counts + j)
            start = LANES - b.imax(0, b.imin(count, LANES))
            b.store_part(result + j * LANES + start, b.load(source), count)

    assert run(body, ring, PATTERN[:LANES].copy(), counts, rows) == 0
    for row, count in zip(rows, COUNTS, strict=True):
        n = max(0, min(count, LANES))
        assert bits(row) == [*bits([UNTOUCHED] * (LANES - n)), *bits(PATTERN[:n])], count


def store_lane(ring: str) -> None:
    rows = np.full((LANES, LANES + 2), UNTOUCHED)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for lane in range(LANES):
            b.store_lane(result + (lane * (LANES + 2) + lane + 1), b.load(source), lane)

    assert run(body, ring, PATTERN[:LANES].copy(), rows) == 0
    for lane, row in enumerate(rows):
        assert bits(row[lane + 1]) == bits(PATTERN[lane])
        assert (np.delete(row, lane + 1) == UNTOUCHED).all()


def store_int(ring: str) -> None:
    values = [0, -1, INT64_MIN, INT64_MAX, 1 << 40]
    cells = np.full(len(values) + 2, 5, np.int64)

    def body(b: Builder, p: Ptr) -> None:
        for j, x in enumerate(values):
            b.store_int(p + (j + 1), x)

    assert run(body, ring, cells) == 0
    assert cells.tolist() == [5, *values, 5]


def fetch_add(ring: str) -> None:
    """The value before, the sum in memory."""
    cells, out = np.array([7, 1 << 40, 9], np.int64), np.zeros(4, np.int64)

    def body(b: Builder, p: Ptr, result: Ptr) -> None:
        for j, x in enumerate((3, 0, -(1 << 41), 5)):
            b.store_int(result + j, b.fetch_add(p + 1, x))

    assert run(body, ring, cells, out) == 0
    assert out.tolist() == [1 << 40, (1 << 40) + 3, (1 << 40) + 3, 3 - (1 << 40)]
    assert cells.tolist() == [7, 8 - (1 << 40), 9]


def load_acquire(ring: str) -> None:
    cells = np.array([0, -1, INT64_MIN, INT64_MAX], np.int64)
    out = np.zeros_like(cells)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(cells)):
            b.store_int(result + j, b.load_acquire(source + j))

    assert run(body, ring, cells, out) == 0
    assert out.tolist() == cells.tolist()


def store_release(ring: str) -> None:
    values = [0, -1, INT64_MIN, INT64_MAX]
    cells = np.full(len(values) + 2, 5, np.int64)

    def body(b: Builder, p: Ptr) -> None:
        for j, x in enumerate(values):
            b.store_release(p + (j + 1), x)

    assert run(body, ring, cells) == 0
    assert cells.tolist() == [5, *values, 5]


def pause(ring: str) -> None:
    """Nothing changes; time passes."""
    data = PATTERN[:LANES].copy()

    def body(b: Builder, p: Ptr) -> None:
        x = b.load(p)
        for _ in b.loop(0, 3):
            b.pause()
        b.store(p, x)

    assert run(body, ring, data) == 0
    assert bits(data) == bits(PATTERN[:LANES])


MEMORY_WORDS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        load, load_halves, load_part, broadcast, load_int, prefetch, store, store_part, store_lane, store_int,
        fetch_add, load_acquire, store_release, pause,
    )
}  # fmt: skip


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("word", MEMORY_WORDS)
def test_word(word: str, ring: str) -> None:
    MEMORY_WORDS[word](ring)


@pytest.mark.parametrize("ring", RINGS)
def test_what_was_loaded_stays_when_memory_changes(ring: str) -> None:
    """Swap two vectors, two integers and two lanes in place."""
    data, cells = PATTERN[: 2 * LANES].copy(), np.array([3, 4], np.int64)

    def body(b: Builder, p: Ptr, cells: Ptr) -> None:
        x, y = b.load(p), b.load_part(p + LANES, LANES)
        b.store(p, y)
        b.store(p + LANES, x)
        i, j = b.load_int(cells), b.load_int(cells + 1)
        b.store_int(cells, j)
        b.store_int(cells + 1, i)
        x, y = b.broadcast(p + 1), b.broadcast(p + 2)
        b.store_lane(p + 1, y, 0)
        b.store_lane(p + 2, x, 0)

    assert run(body, ring, data, cells) == 0
    wanted = [*PATTERN[LANES : 2 * LANES], *PATTERN[:LANES]]
    wanted[1], wanted[2] = wanted[2], wanted[1]
    assert bits(data) == bits(np.array(wanted))
    assert cells.tolist() == [4, 3]


# word -> (bytes that it touches at p, what it does there)
ACCESSES: dict[str, tuple[int, Callable[[Builder, Ptr, Ptr, Vec], Any]]] = {
    "load": (4 * LANES, lambda b, p, q, x: b.store(q, b.load(p))),
    "load_halves": (2 * LANES, lambda b, p, q, x: b.store(q, b.load_halves(q, p))),
    "load_part": (4 * 5, lambda b, p, q, x: b.store(q, b.load_part(p, 5))),
    "broadcast": (4, lambda b, p, q, x: b.store(q, b.broadcast(p))),
    "load_int": (8, lambda b, p, q, x: b.store(q, b.where(b.between(0, b.load_int(p)), x, x))),
    "store": (4 * LANES, lambda b, p, q, x: b.store(p, x)),
    "store_part": (4 * 5, lambda b, p, q, x: b.store_part(p, x, 5)),
    "store_lane": (4, lambda b, p, q, x: b.store_lane(p, x, 3)),
    "store_int": (8, lambda b, p, q, x: b.store_int(p, -1)),
    "fetch_add": (8, lambda b, p, q, x: b.fetch_add(p, 1)),
    "load_acquire": (8, lambda b, p, q, x: b.store(q, b.where(b.between(0, b.load_acquire(p)), x, x))),
    "store_release": (8, lambda b, p, q, x: b.store_release(p, -1)),
}


def access(word: str, ring: str, offset: int, extent: tuple[int, int]) -> tuple[int, int, Any, Any]:
    """A checked access, `offset` bytes into an array of 1 KiB, of which bytes [lo, hi) are the extent.

    Gives (what the kernel returned, the address of the access, the array, what was stored after the access).
    """
    data, after = np.full(256, UNTOUCHED), np.zeros(LANES, np.float32)

    def body(b: Builder, data: Ptr, after: Ptr) -> None:
        base = Int(b, data.lo)
        element = I64 if ACCESSES[word][0] == I64.size else F32
        p = b.pointer(base + offset, base + extent[0], base + extent[1], element)
        ACCESSES[word][1](b, p, after, b.vec(1.0))
        b.store(after, b.vec(2.0))

    returned = run(body, ring, data, after, checked=ring != INTERPRETED)
    return returned, data.__array_interface__["data"][0] + offset, data, after


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("word", ACCESSES)
def test_access_at_both_ends_of_the_extent(word: str, ring: str) -> None:
    size = ACCESSES[word][0]
    for offset in (256, 512 - size):
        returned, _, _, after = access(word, ring, offset, (256, 512))
        assert returned == 0
        assert (after == 2.0).all()


@pytest.mark.parametrize("ring", NATIVE_TARGETS)
@pytest.mark.parametrize("word", ACCESSES)
def test_checked_native_code_stops_before_an_access_out_of_bounds(word: str, ring: str) -> None:
    """Just before, just past, far away on both sides, in an empty extent: the address comes back, nothing was done."""
    size = ACCESSES[word][0]
    for offset, extent in (
        (252, (256, 512)), (512 - size + 4, (256, 512)), (512, (256, 512)), (0, (256, 512)), (960, (256, 512)),
        (256, (256, 256)), (1 << 45, (256, 512)), (-(1 << 45), (256, 512)),
    ):  # fmt: skip
        returned, address, data, after = access(word, ring, offset, extent)
        assert returned == address
        assert (data == UNTOUCHED).all()
        assert (after == 0.0).all()  # neither the access nor what follows it


@pytest.mark.parametrize("word", ACCESSES)
def test_interpreter_refuses_an_access_out_of_bounds(word: str) -> None:
    size = ACCESSES[word][0]
    for offset in (252, 512 - size + 4, 512, 0, 1 << 45, -(1 << 45)):
        with pytest.raises(KernelError, match=f"{size} bytes"):
            access(word, INTERPRETED, offset, (256, 512))


def test_every_word_of_memory_is_checked() -> None:
    """Prefetch is not: it may name any address. Pause names none."""
    assert ACCESSES.keys() == MEMORY_WORDS.keys() - {"prefetch", "pause"}


@pytest.mark.parametrize("ring", NATIVE_TARGETS)
def test_checked_native_code_reports_the_null_pointer(ring: str) -> None:
    def body(b: Builder, result: Ptr) -> None:
        b.store(result, b.load(b.pointer(0, 0, 0)))

    out = np.zeros(LANES, np.float32)
    assert run(body, ring, out, checked=True) != 0


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("count", [0, -3])
@pytest.mark.parametrize("offset", [-1, 3 * LANES])
def test_part_of_no_lane_may_lie_anywhere(ring: str, count: int, offset: int) -> None:
    data = np.full(2 * LANES, UNTOUCHED)

    def body(b: Builder, p: Ptr) -> None:
        zeros = b.load_part(p + offset, count)
        b.store_part(p + offset, zeros, count)
        b.store(p, zeros)

    assert run(body, ring, data, checked=ring != INTERPRETED) == 0
    assert (data[:LANES] == 0.0).all()


def guard_page(ring: str, mode: str) -> int:
    """Run guard_page.py in a process of its own, where a read or write past the end is a crash."""
    command = [sys.executable, "-m", "tests.simd.guard_page", ring, mode]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("ring", RINGS)
def test_nothing_past_the_count_is_touched(ring: str) -> None:
    assert guard_page(ring, "within") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("mode", ["load", "store"])
def test_guard_page_would_show_it(mode: str) -> None:
    assert guard_page(NATIVE_TARGETS[0], mode) < 0  # killed by a signal
