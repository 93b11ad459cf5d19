"""Worker threads: who calls what where, nesting, many callers, and the end of a pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tests.runtime.support import calls_of_run, until
from tilewise.config import config, reload
from tilewise.errors import InvalidArgument
from tilewise.runtime import pool as module
from tilewise.runtime.pool import Pool, available_cores, default_pool, pool_for

# Who calls what where


def test_run_gives_each_worker_its_own_thread(pool: Pool) -> None:
    first = calls_of_run(pool, 3)
    assert first[0] == threading.get_ident()
    assert len(set(first.values())) == 3
    for _ in range(50):
        assert calls_of_run(pool, 3) == first  # the threads stay
    assert calls_of_run(pool, 2) == {w: first[w] for w in (0, 1)}
    assert calls_of_run(pool, 1) == {0: first[0]}


def test_workers_run_at_the_same_time(pool: Pool) -> None:
    meeting = threading.Barrier(3, timeout=10)
    pool.run(3, lambda w: meeting.wait())


def test_a_pool_of_one_starts_no_thread() -> None:
    before = threading.active_count()
    with Pool(1) as one:
        calls_of_run(one, 1)
        one.parallel_for(5, lambda i: None)
        assert threading.active_count() == before


def test_threads_start_when_they_are_needed() -> None:
    before = threading.active_count()
    with Pool(3) as three:
        calls_of_run(three, 1)
        assert threading.active_count() == before
        calls_of_run(three, 2)
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 1000])
def test_parallel_for_calls_each_once(threads: int, n: int) -> None:
    seen: list[int] = []
    with Pool(threads) as some:
        some.parallel_for(n, seen.append)
    assert sorted(seen) == list(range(n))


def test_parallel_for_gives_work_to_whoever_is_free(pool: Pool) -> None:
    caller_holds_the_first = threading.Event()
    done: list[int] = []

    def work(i: int) -> None:
        if i == 0:
            assert caller_holds_the_first.wait(10)
        done.append(i)
        if len(done) == 9:
            caller_holds_the_first.set()

    pool.parallel_for(10, work)
    assert done[-1] == 0


def test_the_work_is_forgotten_after_the_call(pool: Pool) -> None:
    class Array:
        pass

    array = Array()
    reference = weakref.ref(array)
    pool.run(3, lambda w, array=array: None)
    pool.parallel_for(3, lambda w, array=array: None)
    del array
    assert reference() is None


def test_what_is_refused(pool: Pool) -> None:
    for workers in (0, 4, -1):
        with pytest.raises(InvalidArgument, match=f"workers: got {workers}, expected 1 to 3"):
            pool.run(workers, print)
    with pytest.raises(InvalidArgument, match="n: got -1, expected 0 or more"):
        pool.parallel_for(-1, print)
    for make in (Pool, pool_for):
        for threads in (0, -3):
            with pytest.raises(InvalidArgument, match=f"got {threads}, expected at least 1 thread"):
                make(threads)
        for other in (True, 2.0, "2"):
            with pytest.raises(TypeError, match=r"expected an? "):
                make(other)  # type: ignore[arg-type]


def test_threads_that_cannot_start(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def fail_at_the_second(thread: threading.Thread) -> None:
        if thread.name == "tilewise-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_at_the_second)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.run(3, print)
    until(lambda: threading.active_count() == before)  # the first one left
    calls_of_run(pool, 3)


# Nesting, and many callers


def test_nested_calls_run_serially_in_their_thread(pool: Pool) -> None:
    with Pool(2) as other:
        threads: list[set[int]] = []

        def work(_w: int) -> None:
            here = threading.get_ident()
            threads.append({here, *calls_of_run(pool, 3).values(), *calls_of_run(other, 2).values()})
            seen: list[int] = []
            pool.parallel_for(5, lambda i: seen.append(threading.get_ident()))
            assert seen == [here] * 5

        pool.run(3, work)
        assert [len(some) for some in threads] == [1, 1, 1]
        assert len(set(calls_of_run(pool, 3).values())) == 3  # and not for ever


def test_two_pools_that_call_each_other(pool: Pool) -> None:
    with Pool(3) as other:

        def start(first: Pool, second: Pool) -> threading.Thread:
            nested = lambda w: second.run(3, lambda v: first.run(3, lambda u: None))  # noqa: E731
            thread = threading.Thread(target=lambda: [first.run(3, nested) for _ in range(30)])
            thread.start()
            return thread

        for thread in [start(pool, other), start(other, pool)]:
            thread.join()


def test_many_threads_call_at_once(pool: Pool) -> None:
    totals = [0] * 8
    inside: list[int] = []
    crowded: list[int] = []

    def call(k: int) -> None:
        for _ in range(50):
            seen: list[int] = []

            def work(w: int, seen: list[int] = seen) -> None:
                inside.append(k)
                if any(other != k for other in inside):
                    crowded.append(k)
                seen.append(w)
                inside.remove(k)

            pool.run(3, work)
            totals[k] += sorted(seen) == [0, 1, 2]

    callers = [threading.Thread(target=call, args=(k,)) for k in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert totals == [50] * 8
    assert not crowded  # they took turns


# The end


def test_close_ends_the_threads_and_refuses_calls() -> None:
    before = threading.active_count()
    some = Pool(3)
    calls_of_run(some, 3)
    some.close()
    some.close()
    assert some.closed
    assert threading.active_count() == before
    for call in (lambda: some.run(1, print), lambda: some.run(3, print), lambda: some.parallel_for(2, print)):
        with pytest.raises(InvalidArgument, match=r"got Pool\(3, closed\), expected one that is open"):
            call()
    with some:
        pass


def test_close_waits_for_the_call_under_way() -> None:
    some, going, finished = Pool(2), threading.Event(), []

    def work(w: int) -> None:
        going.set()
        time.sleep(0.05)
        finished.append(w)

    caller = threading.Thread(target=lambda: some.run(2, work))
    caller.start()
    assert going.wait(10)
    some.close()
    assert sorted(finished) == [0, 1]
    caller.join()


def test_close_from_inside_its_own_work() -> None:
    before, some = threading.active_count(), Pool(2)
    some.run(2, lambda w: some.close())
    with pytest.raises(InvalidArgument, match="closed"):
        some.run(2, print)
    until(lambda: threading.active_count() == before)


def test_a_call_that_waits_for_its_turn_sees_that_the_pool_was_closed() -> None:
    some, going, stop = Pool(2), threading.Event(), threading.Event()
    refused: list[bool] = []

    def work(_w: int) -> None:
        going.set()
        assert stop.wait(10)

    def second() -> None:
        with pytest.raises(InvalidArgument, match="closed"):
            some.run(2, print)
        refused.append(True)

    callers = [threading.Thread(target=call) for call in (lambda: some.run(2, work), second, some.close)]
    for caller in callers:
        caller.start()
        assert going.wait(10)
        time.sleep(0.02)
    stop.set()
    for caller in callers:
        caller.join()
    assert refused == [True]


def test_a_dropped_pool_ends_its_threads() -> None:
    before, some = threading.active_count(), Pool(3)
    calls_of_run(some, 3)
    del some
    until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_do_not_hold_up_exit(busy: bool) -> None:
    wait = "import time; threading.Thread(target=lambda: p.run(3, lambda w: time.sleep(100)), daemon=True).start()"
    code = f"""
import threading
from tilewise.runtime.pool import Pool, default_pool
for p in (Pool(3), default_pool()):
    p.run(p.threads, lambda w: None)
p = Pool(3)
{wait if busy else "p.run(3, lambda w: None)"}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_calls_at_exit() -> None:
    code = """
import atexit
seen = []
atexit.register(lambda: (p.run(3, seen.append), print(sorted(seen))))
from tilewise.runtime.pool import Pool
p = Pool(3)
p.run(3, lambda w: None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2]\n", "")


# Shared pools


def test_pool_for(pool: Pool) -> None:
    assert pool_for(pool) is pool
    assert pool_for(2) is pool_for(2)
    assert pool_for(2).threads == 2
    assert pool_for(3) is not pool_for(2)
    assert pool_for(None) is default_pool()
    assert pool_for(1).threads == 1


def test_closing_a_shared_pool_harms_nobody() -> None:
    pool_for(2).close()
    calls_of_run(pool_for(2), 2)


def test_default_pool_follows_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    with config(threads=3):
        assert default_pool().threads == 3
        assert default_pool() is pool_for(3)
    with config(threads=None):
        assert default_pool().threads == available_cores()
    with monkeypatch.context() as patch:
        patch.setenv("TILEWISE_THREADS", "2")
        reload()
        assert default_pool().threads == 2
    reload()


def test_available_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        assert available_cores() == len(allowed)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {3, 5, 7})
        assert available_cores() == 3
        monkeypatch.delattr(module.os, "sched_getaffinity")
    monkeypatch.setattr(module.os, "cpu_count", lambda: 12)
    assert available_cores() == 12
    monkeypatch.setattr(module.os, "cpu_count", lambda: None)
    assert available_cores() == 1
