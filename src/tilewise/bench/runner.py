"""Run a peer's workloads, in this process or in one of its own behind a pipe; both look the same to who measures."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import tilewise as tw
from tilewise.arguments import F32Array
from tilewise.bench.machine import peak_growth
from tilewise.bench.peers import Missing, Peer, Ready, load_peer
from tilewise.bench.workloads import Workload, inputs

WARM_BELOW = 0.25  # seconds; a longer call is not preceded by an untimed one, the caches matter little to it
NOT_FOR_IT = "does not apply"  # a variant that is meant for other workloads
MOST_CALLS = 2000  # in a burst
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_HARMFUL = ("OPENBLAS_CORETYPE",)  # would give NumPy's matrix product the kernels of another processor


@dataclass(frozen=True)
class Opened:
    """What came of the first calls of a variant."""

    reason: str = ""  # why it cannot be timed; empty: it can
    result: F32Array | None = None  # of q's shape
    first_seconds: float = 0.0
    typical_seconds: float = 0.0
    first_growth: int | None = None  # bytes, above the result
    growth: int | None = None  # of a later call


class PeerFailed(Exception):
    """The process of a peer ended, or a call of it raised; the message is one line."""


class Runner(Protocol):
    @property
    def version(self) -> str: ...
    @property
    def pids(self) -> list[int]: ...
    def open(self, w: Workload, variant: str) -> Opened: ...
    def sample(self, variant: str, seconds: float) -> list[float]: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class Local:
    """A peer in this process. With a target it is ours, whose knobs are set around its calls."""

    def __init__(self, peer: Peer, threads: int, target: str | None = None) -> None:
        self._peer = peer
        self._knobs = {"threads": threads, "target": target} if target else {}
        self._ready: dict[str, Ready] = {}
        self._typical: dict[str, float] = {}
        self.version = peer.start(threads)
        self.pids: list[int] = []

    def open(self, w: Workload, variant: str) -> Opened:
        """Prepare a variant, call it twice, and say what that gave and took."""
        try:
            if w.type not in self._peer.types:
                return Opened(f"computes nothing in {w.type_name}")
            with tw.config(**self._knobs):
                ready = self._peer.variants_for(w)[variant](w, *inputs(w))
                if not isinstance(ready, Ready):
                    return Opened(ready or NOT_FOR_IT)
                return self.add(variant, ready, w.out_bytes)
        except (Exception, SystemExit) as error:  # a peer that cannot do a shape is a finding, not the end
            return Opened(one_line(error))

    def add(self, variant: str, ready: Ready, out_bytes: int) -> Opened:
        """The second half of `open`."""
        begin = time.perf_counter()
        kept, first_growth = peak_growth(ready.call)
        first = time.perf_counter() - begin
        array = ready.fetch(kept).copy()  # the next call may write to the same place
        identity = id(kept)
        if ready.before:
            ready.before()
        result, growth = peak_growth(ready.call)
        # a result that is written to the same place each time was there before the call
        own = 0 if id(result) == identity else out_bytes
        del kept, result
        self._ready[variant] = ready
        self._typical[variant] = first
        typical = self._typical[variant] = min(self.sample(variant, 0.0))
        return Opened("", array, first, typical, _above(first_growth, own), _above(growth, own))

    def sample(self, variant: str, seconds: float) -> list[float]:
        """The times of a burst: calls for so many seconds, at least one, after an untimed one to warm the caches."""
        ready, spent = self._ready[variant], 0.0
        times: list[float] = []
        if ready.before:
            ready.before()
        with tw.config(**self._knobs), _without_collection():
            if self._typical[variant] < WARM_BELOW:
                ready.call()
            while not times or (spent < seconds and len(times) < MOST_CALLS):
                begin = time.perf_counter()
                result = ready.call()
                elapsed = time.perf_counter() - begin
                times.append(ready.seconds(result) if ready.seconds else elapsed)
                del result
                spent += elapsed
        return times

    def release(self) -> None:
        """Drop what a workload needed."""
        self._ready.clear()
        inputs.cache_clear()
        gc.collect()

    def close(self) -> None:
        self.release()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Remote:
    """A peer in a process of its own: it computes the same inputs and times itself when it is told to."""

    def __init__(self, peer: Peer, threads: int) -> None:
        self._peer, self._threads = peer, threads
        self._launch()

    def _launch(self) -> None:
        environment = {name: x for name, x in os.environ.items() if name not in _HARMFUL}
        environment |= dict.fromkeys(_THREADS, str(self._threads))
        command = [sys.executable, "-c", "from tilewise.bench.runner import serve; serve()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        try:
            self.version: str = self._ask("start", str(self._peer.path), self._threads)
        except PeerFailed:
            self.close()
            raise
        self.pids = [self._process.pid]

    def open(self, w: Workload, variant: str) -> Opened:
        try:
            if self._process.poll() is not None:  # a variant before brought it down
                self.close()
                self._launch()
            opened: Opened = self._ask("open", w, variant)
        except PeerFailed as error:
            return Opened(str(error))
        return opened

    def sample(self, variant: str, seconds: float) -> list[float]:
        times: list[float] = self._ask("sample", variant, seconds)
        return times

    def release(self) -> None:
        with contextlib.suppress(PeerFailed):  # whoever ended has released all it had
            self._ask("release")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):  # what was not sent yet goes nowhere
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, *message: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
            good, value = pickle.load(stdout)
        except Exception:  # it ended, or what came is no answer of ours
            self.close()
            raise PeerFailed(f"its process ended with code {self._process.returncode}") from None
        if not good:
            raise PeerFailed(value)
        return value


def start(peer: Peer, threads: int, isolate: bool = False) -> Runner:
    """Start a peer where it belongs."""
    return Remote(peer, threads) if peer.isolated or (isolate and peer.path) else Local(peer, threads)


def one_line(error: BaseException) -> str:
    """The beginning of an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200].rstrip(": ")


def _above(growth: int | None, own: int) -> int | None:
    return None if growth is None else max(0, growth - own)


def serve() -> None:
    """The life of a peer's process: answer messages on stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints must not end up between our answers
    messages: IO[bytes] = sys.stdin.buffer
    local: Local | None = None
    while True:
        try:
            name, *arguments = pickle.load(messages)
        except EOFError:
            return
        try:
            if name == "start":
                path, threads = arguments
                peer = load_peer(Path(path))
                if isinstance(peer, Missing):
                    raise PeerFailed(peer.reason)
                local = Local(peer, threads)
                answer: Any = local.version
            else:
                answer = getattr(local, name)(*arguments)
            good = True
        except Exception as error:
            good, answer = False, one_line(error)
        pickle.dump((good, answer), answers)
        answers.flush()
