"""What becomes of a call to a pool when work fails or the caller is interrupted: all workers stop, then it raises."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.runtime.support import calls_of_run, until
from tilewise.runtime import pool as module
from tilewise.runtime.pool import Pool

# Errors


def test_error_of_a_worker_comes_when_all_have_stopped(pool: Pool) -> None:
    finished: list[int] = []

    def work(w: int) -> None:
        if w == 1:
            raise KeyError("one")
        time.sleep(0.05)
        finished.append(w)

    with pytest.raises(KeyError, match="one"):
        pool.run(3, work)
    assert sorted(finished) == [0, 2]
    calls_of_run(pool, 3)


def test_first_error_by_index_carries_the_others(pool: Pool) -> None:
    def work(w: int) -> None:
        time.sleep(0.03 * (3 - w))  # the last worker fails first
        try:
            raise KeyError(w)
        except KeyError:
            raise ValueError(w)  # noqa: B904

    with pytest.raises(ValueError, match="0") as raised:
        pool.run(3, work)
    chain: list[BaseException] = [raised.value]
    while (context := chain[-1].__context__) is not None:
        chain.append(context)
    assert [(type(error), error.args[0]) for error in chain] == [
        (kind, w) for w in range(3) for kind in (ValueError, KeyError)
    ]
    calls_of_run(pool, 3)


def test_one_error_object_raised_by_every_worker(pool: Pool) -> None:
    error = ValueError("shared")

    def work(_w: int) -> None:
        raise error

    with pytest.raises(ValueError, match="shared"):
        pool.run(3, work)
    assert error.__context__ is None


@pytest.mark.parametrize("w", [0, 1, 2])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_any_exception_reaches_the_caller(pool: Pool, w: int, kind: type[BaseException]) -> None:
    def work(v: int) -> None:
        if v == w:
            raise kind("text")

    for _ in range(3):
        with pytest.raises(kind):
            pool.run(3, work)
        calls_of_run(pool, 3)


def test_cancel_is_called_for_an_error_of_the_caller_only(pool: Pool) -> None:
    stop = threading.Event()

    def work(w: int) -> None:
        if w == 0:
            raise ValueError("work")
        assert stop.wait(10)

    with pytest.raises(ValueError, match="work"):
        pool.run(3, work, stop.set)
    stop.clear()

    def fails_elsewhere(w: int) -> None:
        if w == 2:
            raise KeyError

    with pytest.raises(KeyError):
        pool.run(3, fails_elsewhere, stop.set)
    pool.run(3, lambda w: None, stop.set)
    assert not stop.is_set()


def test_cancel_that_fails_does_not_leave_workers_alone(pool: Pool) -> None:
    finished: list[int] = []

    def work(w: int) -> None:
        if w == 0:
            raise ValueError("work")
        time.sleep(0.05)
        finished.append(w)

    def cancel() -> None:
        raise KeyError("cancel")

    with pytest.raises(KeyError, match="cancel") as raised:
        pool.run(3, work, cancel)
    assert isinstance(raised.value.__context__, ValueError)
    assert sorted(finished) == [1, 2]
    calls_of_run(pool, 3)


def test_parallel_for_raises_what_a_loop_would_have(pool: Pool) -> None:
    for _ in range(20):
        seen: list[int] = []

        def work(i: int, seen: list[int] = seen) -> None:
            seen.append(i)
            if i >= 5:
                time.sleep(0.002 if i == 5 else 0)  # a later one fails before it
                raise ValueError(i)

        with pytest.raises(ValueError, match=r"^5$"):
            pool.parallel_for(1000, work)
        assert set(range(6)) <= set(seen)
        assert len(seen) <= 8  # nobody goes on


def test_errors_leave_no_cycle_behind(pool: Pool) -> None:
    class Array:
        pass

    def fail(call: Callable[[Any], None]) -> weakref.ref[Array]:
        array = Array()

        def work(_i: int, array: Array = array) -> None:
            raise ValueError

        with contextlib.suppress(ValueError):
            call(work)
        return weakref.ref(array)

    gc.collect()
    gc.disable()
    try:
        assert fail(lambda work: pool.run(3, work))() is None
        assert fail(lambda work: pool.parallel_for(9, work))() is None
    finally:
        gc.enable()


# Interrupts


def interrupted_run(pool: Pool, caller: Callable[[], None], worker: Callable[[], None]) -> None:
    """A run that goes on until cancelled; asserts that the interrupt arrives after the workers have stopped."""
    stop = threading.Event()
    stopped: list[int] = []

    def work(w: int) -> None:
        if w == 0:
            caller()
            return
        if w == 1:
            worker()
        assert stop.wait(10)
        time.sleep(0.02)
        stopped.append(w)

    with pytest.raises(KeyboardInterrupt):
        pool.run(3, work, stop.set)
    assert sorted(stopped) == [1, 2]
    calls_of_run(pool, 3)


def test_interrupt_in_the_callers_own_part(pool: Pool) -> None:
    interrupted_run(pool, lambda: signal.raise_signal(signal.SIGINT), lambda: None)


def test_interrupt_while_the_caller_waits(pool: Pool) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    interrupted_run(pool, lambda: None, interrupt)


def test_second_interrupt_while_the_first_is_handled(pool: Pool) -> None:
    main = threading.get_ident()
    active: list[int] = []

    def work(w: int) -> None:
        if w == 0:
            signal.raise_signal(signal.SIGINT)
        active.append(w)
        time.sleep(0.05)
        if w == 1:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        active.remove(w)

    with pytest.raises(KeyboardInterrupt):
        pool.run(3, work)
    assert active == []
    calls_of_run(pool, 3)


def test_interrupts_at_any_point(pool: Pool) -> None:
    """Once in each call a timer interrupts the caller, wherever it happens to be in the pool."""

    class Tick(Exception):
        pass

    active: set[int] = set()
    finished = ticks = 0
    random = np.random.default_rng(3)

    def tick(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == module.__file__:
                raise Tick
            frame = frame.f_back

    def work(w: int) -> None:
        active.add(w)
        sum(range(200))
        active.discard(w)

    calls_of_run(pool, 3)  # on Python 3.10 Thread.start, when it is interrupted, complains on stderr
    previous = signal.signal(signal.SIGALRM, tick)
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
            try:
                pool.run(3, work)
                finished += 1
            except Tick:
                ticks += 1
            active.discard(0)  # the caller's own part may have been cut short
            assert not active
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert ticks > 20
    assert finished > 20
    calls_of_run(pool, 3)


def test_a_torn_crew_is_not_trusted_again(pool: Pool) -> None:
    """What a second interrupt at the worst moment leaves: a worker that was woken and never waited for."""
    first = calls_of_run(pool, 3)
    crew: Any = pool._crew
    threads = crew.threads
    crew.tally[0].append(None)
    del crew
    second = calls_of_run(pool, 3)
    assert not set(first.values()) & set(second.values()) - {first[0]}
    until(lambda: not any(thread.is_alive() for thread in threads))
