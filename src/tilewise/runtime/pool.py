"""Worker threads that stay, woken in a few microseconds.

A call of attention may last 30 microseconds, so what counts is how soon the workers start and how soon the caller knows
that they have finished. A worker waits on a raw lock used as a binary semaphore, and says by another that it is done:
half the latency of a Condition or an executor. The work is native code that holds no GIL and claims items by itself.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from operator import index
from types import TracebackType
from typing import TypeAlias

from tilewise.config import current
from tilewise.errors import InvalidArgument

__all__ = ["Pool", "available_cores", "default_pool", "pool_for"]

Work: TypeAlias = Callable[[int], object]
Cancel: TypeAlias = Callable[[], object]

_acquire = _thread.LockType.acquire
_release = _thread.LockType.release


class _Here(threading.local):
    """What this thread is doing: `inside` is true while it works for a pool, as its worker or as its caller."""

    inside = False


_here = _Here()


class _Board:
    """What a crew's workers read and write. They do not know the crew, so that it can be dropped while they wait."""

    __slots__ = ("errors", "work")

    def __init__(self) -> None:
        self.work: Work | None = None
        self.errors: list[tuple[int, BaseException]] = []


def _attend(w: int, go: _thread.LockType, done: _thread.LockType, board: _Board) -> None:
    """The life of worker w: a woken worker that finds no work on the board leaves."""
    _here.inside = True
    while True:
        go.acquire()
        work = board.work
        if work is None:
            return
        try:
            work(w)
        except BaseException as error:
            board.errors.append((w, error))
        work = None  # the caller's arrays must not outlive its call here
        done.release()


class _Crew:
    """The worker threads 1 to `count` of a pool, and how to wake them. One caller at a time.

    An interrupt (KeyboardInterrupt, or whatever a signal handler raises) can come between any two bytecodes of the
    caller. How many workers were woken, and how many are known to have finished, is therefore counted by
    ``list.extend(map(...))``: one call in C for all of them, in which a lock is taken if and only if the list grows.
    """

    def __init__(self, count: int) -> None:
        self.board = _Board()
        self.go: list[_thread.LockType] = []
        self.done: list[_thread.LockType] = []
        self.threads: list[threading.Thread] = []
        self.tally: tuple[list[None], list[bool]] = [], []  # as long as workers were woken, and as have finished
        # Called once, by close() or when the crew is dropped. Not at exit: other functions of atexit may yet call us.
        self.dismiss = weakref.finalize(self, _send_home, self.board, self.go)
        self.dismiss.atexit = False
        for w in range(1, count + 1):
            self._hire(w)

    @property
    def idle(self) -> bool:
        """No worker is at work. False after a run only if a second interrupt tore its handling of the first one."""
        woken, finished = self.tally
        return len(woken) == len(finished)

    def run(self, workers: int, work: Work, cancel: Cancel | None) -> None:
        """work(0) here, work(w) on worker w for each other w < workers; return or raise when all have stopped."""
        self.board.errors.clear()
        self.tally = [], []  # one assignment, so that they are never out of step
        woken, finished = self.tally
        try:
            self.board.work = work
            woken.extend(map(_release, self.go[: workers - 1]))
            work(0)
            finished.extend(map(_acquire, self.done[: workers - 1]))
        except BaseException as error:
            self._settle(cancel)
            self.board.errors.append((0, error))
            _first(self.board.errors)  # this very error, now with those of the workers as its context
            raise
        finally:
            self.board.work = None
        if self.board.errors:
            raise _first(self.board.errors)

    def orphan(self) -> None:
        """In the child of a fork: the workers are gone. A caller that forked amid a run must not wait for them."""
        woken, _ = self.tally
        for w, done in enumerate(self.done[: len(woken)], start=1):
            if done.locked():
                self.board.errors.append(
                    (w, RuntimeError(f"the process forked while worker {w} of a Pool was at work"))
                )
                done.release()

    def _hire(self, w: int) -> None:
        go, done = _thread.allocate_lock(), _thread.allocate_lock()
        go.acquire()
        done.acquire()
        # A daemon: a worker that waits must not hold up the exit of the interpreter.
        thread = threading.Thread(target=_attend, args=(w, go, done, self.board), name=f"tilewise-{w}", daemon=True)
        self.go.append(go)
        self.done.append(done)
        self.threads.append(thread)
        thread.start()

    def _settle(self, cancel: Cancel | None) -> None:
        """After an error of the caller: stop the workers and wait for them, however often we are interrupted."""
        try:
            if cancel is not None:
                cancel()
        finally:
            woken, finished = self.tally
            while len(finished) < len(woken):
                try:  # and no `suppress`, which is Python code that can be interrupted itself
                    finished.extend(map(_acquire, self.done[len(finished) : len(woken)]))
                except BaseException:
                    continue


def _send_home(board: _Board, go: list[_thread.LockType]) -> None:
    """Make the workers leave: those that wait now, those at work when they have finished it."""
    board.work = None
    for lock in go:
        with suppress(RuntimeError):  # released already, by a run that was torn
            lock.release()


def _first(errors: list[tuple[int, BaseException]]) -> BaseException:
    """Empty the list and return the error with the lowest number, the others at the end of its chain of contexts."""
    ordered = [error for _, error in sorted(errors, key=lambda entry: entry[0])]
    errors.clear()  # a frame that the error's traceback refers to holds this list
    chain = _contexts(ordered[0])
    for error in ordered[1:]:
        contexts = _contexts(error)
        if not any(known is context for known in chain for context in contexts):  # as when two workers raise one object
            chain[-1].__context__ = error
            chain += contexts
    return ordered[0]


def _contexts(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (context := chain[-1].__context__) is not None:
        chain.append(context)
    return chain


class Pool:
    """`threads` threads, the caller's among them: a pool of 1 starts none. Workers start when they are first needed.

    Calls from several threads take turns. A call from inside a pool's work, this pool's or another's, runs serially in
    its own thread: it neither waits for itself nor asks for more threads than there are cores. A child process that was
    forked starts workers of its own. Workers see the environment's configuration, not the caller's `tw.config` blocks.

    Args:
        threads: at least 1.

    Raises:
        InvalidArgument: threads is less than 1.
        TypeError: threads is not an int.
    """

    def __init__(self, threads: int) -> None:
        self._threads = _thread_count("threads", threads)
        self._turn = threading.Lock()
        self._crew: _Crew | None = None
        self._closed = False
        _pools.add(self)

    @property
    def threads(self) -> int:
        """The most workers that a call can have, the calling thread included."""
        return self._threads

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def run(self, workers: int, fn: Work, cancel: Cancel | None = None) -> None:
        """Call fn(w) once for each w in range(workers): fn(0) in this thread, each other on its own worker thread.

        Returns when all of them have. A serial call (see `Pool`) makes them one after the other, so no fn may wait for
        another. An error does not interrupt the others; when they have stopped, that of the lowest w is raised, with
        the rest as its context. An error in this thread, a KeyboardInterrupt foremost, first calls `cancel`.

        Args:
            workers: from 1 to `threads`.
            fn: what it returns is dropped.
            cancel: tells workers that are running to stop soon. It must be quick.

        Raises:
            InvalidArgument: the pool is closed, or it has fewer threads than workers.
        """
        if not 1 <= workers <= self._threads:
            raise InvalidArgument(f"workers: got {workers}, expected 1 to {self._threads}, the threads of the pool")
        self._check_open()
        if workers == 1 or _here.inside:
            for w in range(workers):
                fn(w)
            return
        _here.inside = True
        try:
            with self._turn:
                self._idle_crew().run(workers, fn, cancel)
        finally:
            _here.inside = False

    def run_native(self, workers: int, entry: Callable[[int, int], int], table: int) -> bool:
        """Call a native kernel with (table, w) for some or all w in range(workers), on threads that are no Python
        threads. False, and nothing is called, where that cannot be: then it is `run` that will do."""
        return False

    def parallel_for(self, n: int, fn: Work) -> None:
        """Call fn(i) for each i in range(n), each on whichever thread is free; i are claimed in ascending order.

        After an error no further i are claimed. The error raised is that of the lowest i that failed, hence the one
        that a plain loop would have raised, with the others as its context.

        Args:
            n: 0 or more.
            fn: what it returns is dropped.

        Raises:
            InvalidArgument: the pool is closed, or n is negative.
        """
        if n < 0:
            raise InvalidArgument(f"n: got {n}, expected 0 or more")
        claim = threading.Lock()
        errors: list[tuple[int, BaseException]] = []
        following = 0

        def work(_w: int) -> None:
            nonlocal following
            while True:
                with claim:
                    i = following
                    if i >= n:
                        return
                    following = i + 1
                try:
                    fn(i)
                except Exception as error:
                    errors.append((i, error))
                    stop()

        def stop() -> None:
            nonlocal following
            with claim:
                following = n

        self.run(max(1, min(self._threads, n)), work, stop)
        if errors:
            raise _first(errors)

    def close(self) -> None:
        """Wait for a call that is under way, then end the worker threads. To close again does nothing."""
        self._closed = True
        if _here.inside:  # this very call may be the one to wait for; the crew leaves when it has ended
            self._crew = None
            return
        with self._turn:
            crew, self._crew = self._crew, None
        if crew is not None:
            crew.dismiss()
            for thread in crew.threads:
                thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self._threads}{', closed' if self._closed else ''})"

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument(f"pool: got {self}, expected one that is open")

    def _idle_crew(self) -> _Crew:
        self._check_open()  # again: it may have been closed while we waited for our turn
        if self._crew is None or not self._crew.idle:
            self._crew = _Crew(self._threads - 1)
        return self._crew

    def _after_fork_in_child(self) -> None:
        self._turn = threading.Lock()
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.orphan()


def available_cores() -> int:
    """The cores that this process may use: its affinity mask, where the system has such a thing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_pool() -> Pool:
    """The shared pool of TILEWISE_THREADS threads, else of as many as this process may use cores."""
    return _shared_pool(current().threads or available_cores())


def pool_for(pool: Pool | int | None) -> Pool:
    """The pool that an argument `pool` means: None the default one, an int the shared one of so many threads.

    Raises:
        InvalidArgument: an int less than 1, or a pool that is closed.
        TypeError: none of the three.
    """
    if pool is None:
        return default_pool()
    if isinstance(pool, Pool):
        pool._check_open()
        return pool
    return _shared_pool(_thread_count("pool", pool))


def _shared_pool(threads: int) -> Pool:
    pool = _shared.get(threads)
    if pool is None or pool.closed:
        pool = _shared[threads] = Pool(threads)
    return pool


def _thread_count(name: str, value: int) -> int:
    expected = "a Pool, an int or None" if name == "pool" else "an int"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: got {value!r}, expected {expected}")
    threads = index(value)
    if threads < 1:
        raise InvalidArgument(f"{name}: got {threads}, expected at least 1 thread")
    return threads


def _after_fork_in_child() -> None:
    _here.inside = False  # the thread that forked may be a worker; there is nothing left here that it could wait for
    for pool in list(_pools):
        pool._after_fork_in_child()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: dict[int, Pool] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
