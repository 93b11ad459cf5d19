"""A pool in the child of a fork starts workers of its own, wherever the fork happened."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable

import pytest

from tests.runtime.support import calls_of_run
from tilewise.runtime.pool import Pool

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
fork_is_on_purpose = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked child; fail if it raises or hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 10
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(status[1]) == 0


@forks
@fork_is_on_purpose
def test_child_starts_workers_of_its_own(pool: Pool) -> None:
    calls_of_run(pool, 3)

    def work() -> None:
        threads = calls_of_run(pool, 3)
        assert len(set(threads.values())) == 3
        assert threading.active_count() == 3
        in_child(lambda: calls_of_run(pool, 3))
        pool.close()

    in_child(work)
    calls_of_run(pool, 3)


@forks
@fork_is_on_purpose
def test_fork_while_another_thread_is_in_a_run(pool: Pool) -> None:
    going, stop = threading.Event(), threading.Event()

    def work(_w: int) -> None:
        going.set()
        assert stop.wait(10)

    caller = threading.Thread(target=lambda: pool.run(3, work))
    caller.start()
    assert going.wait(10)
    try:
        in_child(lambda: calls_of_run(pool, 3))
    finally:
        stop.set()
        caller.join()
    calls_of_run(pool, 3)


@forks
@fork_is_on_purpose
@pytest.mark.parametrize("forker", [0, 1])
def test_fork_from_inside_a_run(pool: Pool, forker: int) -> None:
    def work(w: int) -> None:
        if w == forker:
            in_child(lambda: len(set(calls_of_run(pool, 3).values())) == 3 or os.abort())

    pool.run(3, work)
    calls_of_run(pool, 3)


@forks
@fork_is_on_purpose
def test_child_that_returns_into_the_run_it_was_forked_in(pool: Pool) -> None:
    parent, child, stop = os.getpid(), 0, threading.Event()

    def work(w: int) -> None:
        nonlocal child
        if w > 0:
            assert stop.wait(10)
            return
        child = os.fork()
        if child != 0:
            stop.set()

    code = 1
    try:
        pool.run(3, work)
    except RuntimeError as error:
        code = (
            0 if "forked while worker 1 of a Pool was at work" in str(error) and len(calls_of_run(pool, 3)) == 3 else 2
        )
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    calls_of_run(pool, 3)
