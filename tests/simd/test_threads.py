"""The words between threads: a counter gives each number once, and what was written before a release is seen after."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.simd.support import INTERPRETED, RINGS, compiled, over_arrays, table_of
from tilewise.simd.builder import I64, Builder, Int, Kernel, Ptr
from tilewise.simd.jit import assembly
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS


@pytest.fixture
def _hasty() -> Iterator[None]:
    """Python's threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(body: Any, ring: str, workers: int, *arrays: Any) -> None:
    """Run body(b, worker, a pointer for each array) in so many threads at once."""
    table = table_of(arrays)

    def kernel(b: Builder, address: Int, worker: Int) -> None:
        over_arrays(lambda b, *pointers: body(b, worker, *pointers), arrays)(b, address, worker)

    entry, address = compiled(kernel, ring), table.__array_interface__["data"][0]
    crew = [threading.Thread(target=entry, args=(address, w)) for w in range(workers)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("ring", RINGS)
def test_fetch_add_gives_each_number_once(ring: str) -> None:
    workers, steps = 4, 10_000 if ring == INTERPRETED else 100_000
    cell, seen = np.zeros(1, np.int64), np.zeros((workers, steps), np.int64)

    def body(b: Builder, worker: Int, p: Ptr, result: Ptr) -> None:
        for j in b.loop(0, steps):
            b.store_int(result + worker * steps + j, b.fetch_add(p, 1))

    in_threads(body, ring, workers, cell, seen)
    assert cell[0] == workers * steps
    assert sorted(seen.ravel().tolist()) == list(range(workers * steps))


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("ring", RINGS)
def test_what_was_written_before_a_release_is_seen(ring: str) -> None:
    """Two workers take turns at a cell; each finds what the other left behind it, and adds to it."""
    rounds = 20
    turn, data = np.zeros(1, np.int64), np.zeros(64, np.int64)

    def body(b: Builder, worker: Int, turn: Ptr, data: Ptr) -> None:
        for j in b.loop(0, rounds):
            mine = j * 2 + worker
            for _ in b.repeat(lambda mine=mine: b.load_acquire(turn) < mine):
                b.pause()
            for x in b.loop(0, 64):
                b.store_int(data + x, b.load_int(data + x) * 3 % 1000003 + mine + x)
            b.store_release(turn, mine + 1)

    in_threads(body, ring, 2, turn, data)
    expected = np.zeros(64, np.int64)
    for j in range(2 * rounds):
        expected = expected * 3 % 1000003 + j + np.arange(64)
    assert turn[0] == 2 * rounds
    assert data.tolist() == expected.tolist()


def words(b: Builder, table: Int, worker: Int) -> None:
    p = b.pointer(table, table, table + 8, I64)
    b.store_release(p, b.load_acquire(p) + b.fetch_add(p, 1))
    b.pause()


@pytest.mark.parametrize("target", TARGETS)
def test_order_is_asked_for_in_ir(target: str) -> None:
    """Threads on one core, or on one that keeps its stores in order, would not show it."""
    text = llvm_ir(Kernel("words", words), TARGETS[target])
    assert re.search(r"load atomic .* acquire", text)
    assert re.search(r"store atomic .* release", text)
    assert re.search(r"atomicrmw add ", text)


@pytest.mark.parametrize(
    ("target", "instructions"),
    [
        ("x86-64-v4", [r"callq\s+tilewise_yield", r"lock\s+(xadd|inc|add)", "xchg|mov"]),
        ("x86-64-v3", [r"callq\s+tilewise_yield", r"lock\s+(xadd|inc|add)", "xchg|mov"]),
        ("aarch64", [r"bl\s+tilewise_yield", "ldar", "stl"]),
    ],
)
def test_order_is_in_the_code(target: str, instructions: list[str]) -> None:
    text = assembly(llvm_ir(Kernel("words", words), TARGETS[target]), TARGETS[target])
    for instruction in instructions:
        assert re.search(rf"^\s+({instruction})", text, re.MULTILINE), instruction
