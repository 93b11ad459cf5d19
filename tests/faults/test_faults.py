"""Something goes wrong in the middle of a call: a clear error, and arena and pool as good as before."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import Case, assert_same_bits, case
from tilewise.runtime import launch
from tilewise.runtime.pool import available_cores

FRONT_DOOR = sys.modules["tilewise.entry"]
_memory = FRONT_DOOR._memory
# Spans are work items of their own here: one query tile, several spans, so that workers wait for each other.
SPLIT = {"H": 1, "Tq": 4, "Tk": 400, "D": 16, "Dv": 16, "bc": 16, "span": 32}


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    """A prepared call would keep an entry that was put in its place for a test."""
    _memory.clear()
    yield
    _memory.clear()


def assert_still_usable(c: Case, pool: tw.Pool, arena: tw.Arena, expected: Any) -> None:
    _memory.clear()
    assert arena.used == 0
    assert_same_bits(c.run(pool=pool, arena=arena), expected)
    assert arena.used == 0


def with_entry(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]) -> None:
    """The kernel's entry, wrapped."""
    real = launch.prepare

    def prepare(*arguments: Any) -> Any:
        prepared = real(*arguments)
        return replace(prepared, entry=wrap(prepared.entry))

    monkeypatch.setattr(FRONT_DOOR, "prepare", prepare)


@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("sizes", [SPLIT, {**SPLIT, "Tq": 200, "br": 8}], ids=["split spans", "query tiles"])
@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("kind", [ValueError, MemoryError, KeyboardInterrupt])
def test_worker_that_raises(
    who: int, kind: type[BaseException], sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, arena = case(**sizes), tw.Arena()
    expected = c.run(pool=1)

    def wrap(entry: Any) -> Any:
        def failing(table: int, worker: int) -> int:
            if worker == who:
                raise kind("broken worker")
            time.sleep(0.001)  # so that there is work left for the one that fails
            return int(entry(table, worker))

        return failing

    with tw.Pool(3) as pool:
        with monkeypatch.context() as patch:
            _memory.clear()
            with_entry(patch, wrap)
            with pytest.raises(kind, match="broken worker"):
                c.run(pool=pool, arena=arena)
        assert_still_usable(c, pool, arena, expected)


@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("ring", ["native", "interpreted"])
def test_fault_in_a_span_that_others_wait_for(ring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of bounds fails in the first span, which worker 1 has: the caller, which has the next, must not wait for
    ever."""
    c, arena = case(**SPLIT), tw.Arena()
    expected = c.run(pool=1)
    real = launch.prepare
    failures: list[BaseException] = []

    def prepare(*arguments: Any) -> Any:
        prepared = real(*arguments)
        prepared.offsets[launch.CALL_INDEX["k_lo"]] += 32 * 16 * 4  # the keys of the first span are out of bounds
        return replace(prepared, entry=lambda table, w: (time.sleep(0.2 * (w == 0)), prepared.entry(table, w))[1])

    def call() -> None:
        with tw.config(interpret=ring == "interpreted", check=2):
            try:
                c.run(pool=pool, arena=arena)
            except BaseException as error:
                failures.append(error)

    pool = tw.Pool(2)  # not closed by `with`, which would wait for a worker that hangs
    with monkeypatch.context() as patch:
        patch.setattr(FRONT_DOOR, "prepare", prepare)
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "a worker waits for ever for a span whose worker has failed"
    assert [type(error) for error in failures] == [tw.KernelError]
    assert_still_usable(c, pool, arena, expected)
    pool.close()


def long_case(kind: str) -> Case:
    """Many seconds of work. Keys and rows are one and the same in memory."""
    sizes = {
        "query tiles": (8, 8, 60_000, 60_000),
        "long items": (4, 1, 96, 6_000_000),
        "longer items": (4, 1, 96, 60_000_000),
    }
    H, Hkv, Tq, Tk = sizes[kind]
    c = case(H=H, Hkv=Hkv, Tq=2, Tk=2, D=64, Dv=64)
    rows = [np.broadcast_to(x[:, :, :1], (*x.shape[:2], n, 64)) for x, n in ((c.q, Tq), (c.k, Tk), (c.v, Tk))]
    return Case(*rows, c.options)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["query tiles", "long items", "longer items"])
def test_interrupt_in_a_long_call(threads: int, kind: str) -> None:
    """Within a second of this process's own time; with threads, the long items are split into spans that wait."""
    c, small, arena = long_case(kind), case(**SPLIT), tw.Arena()
    expected = small.run(pool=1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with tw.Pool(threads) as pool:
        Case(c.q, c.k[:, :, :9], c.v[:, :, :9], c.options).run(pool=pool)  # compiles
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            begin = time.process_time()
            with pytest.raises(KeyboardInterrupt):
                c.run(pool=pool, arena=arena)
            busy = time.process_time() - begin
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        cores = min(threads, available_cores())
        assert busy < cores * 1.3, f"{busy:.2f} s of {cores} cores for 0.3 s of work"
        assert_still_usable(small, pool, arena, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_with_a_warm_pool(eager_workers: None) -> None:
    """The child computes with the parent's pool, its default pool and its own arena; then the parent goes on."""
    c, arena = case(**{**SPLIT, "Tq": 200, "br": 8}), tw.Arena()
    expected = c.run(pool=1)
    with tw.Pool(3) as pool:
        assert_still_usable(c, pool, arena, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a process with threads forks is the point
            child = os.fork()
        if child == 0:
            code = 1
            try:
                assert_still_usable(c, pool, arena, expected)
                assert_same_bits(c.run(), expected)
                assert_same_bits(c.run(pool=2), expected)
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 30
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status[1]) == 0
        assert_still_usable(c, pool, arena, expected)


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "own pools"])
def test_many_threads_at_once(shared: bool, eager_workers: None) -> None:
    """Each caller gets its own bits, from the shared default pool or from one of its own."""
    cases = [case(**{**SPLIT, "Tq": 5 + n, "Tk": 300 + n, "seed": n}) for n in range(8)]
    expected = [c.run(pool=1) for c in cases]
    results: list[list[Any]] = [[] for _ in cases]
    start = threading.Barrier(len(cases))

    def call(n: int) -> None:
        arena = tw.Arena()
        start.wait()
        for _ in range(20):
            results[n].append(cases[n].run(pool=None if shared else 2, arena=arena))
        results[n].append(arena.used)

    crew = [threading.Thread(target=call, args=(n,)) for n in range(len(cases))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    for n, found in enumerate(results):
        assert len(found) == 21
        assert found.pop() == 0
        for result in found:
            assert_same_bits(result, expected[n], f"caller {n}")


@pytest.mark.parametrize("room", [0, 64, -64])
def test_arena_at_its_limit(room: int) -> None:
    """With exactly what the call takes it works; with a line less it raises, and works again with more."""
    c = case(**SPLIT)
    expected = c.run(pool=1)
    need = tw.scratch_bytes(c.q, c.k, c.v, pool=2, **c.options)
    with tw.Pool(2) as pool:
        arena = tw.Arena(limit=need + room)
        if room < 0:
            out = np.full((1, 1, 4, 16), 7, np.float32)
            with pytest.raises(tw.ArenaExhausted):
                c.run(pool=pool, arena=arena, out=out)
            assert (out == 7).all()
            assert (arena.used, arena.high_water) == (0, 0)
            arena = tw.Arena(limit=need)
        assert_still_usable(c, pool, arena, expected)
        assert arena.high_water == need


def test_no_memory_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemoryError comes through as it is; nothing of the arena is kept, and the next call works."""
    c, arena = case(**SPLIT), tw.Arena()
    expected = c.run(pool=1)
    real = np.empty

    def empty(shape: Any, *more: Any, **options: Any) -> Any:
        if shape == (1, 1, 4, 16):
            raise MemoryError("Unable to allocate the output")
        return real(shape, *more, **options)

    with tw.Pool(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", empty)
            with pytest.raises(MemoryError, match="output"):
                c.run(pool=pool, arena=arena)
        assert_still_usable(c, pool, arena, expected)
