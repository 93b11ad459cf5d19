"""Calls on PyTorch's own threads: the same bits, signals, forks, several callers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tilewise as tw  # noqa: E402
import tilewise.torch as tt  # noqa: E402
from tilewise.frontends.openmp import OpenMPPool, openmp_pool  # noqa: E402
from tilewise.frontends.tensors import workers  # noqa: E402

pytestmark = pytest.mark.skipif(openmp_pool(2) is None, reason="PyTorch's OpenMP runtime is not one that we know")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The workers of each run on PyTorch's threads."""
    found: list[int] = []
    run = OpenMPPool.run_native

    def counted(self: OpenMPPool, workers: int, entry: Any, table: int) -> bool:
        found.append(workers)
        return run(self, workers, entry, table)

    monkeypatch.setattr(OpenMPPool, "run_native", counted)
    return found


def inputs(T: int = 300, H: int = 4) -> list[Any]:
    return [torch.randn(1, heads, T, 32, generator=torch.Generator().manual_seed(heads)) for heads in (H, 2, 2)]


def test_they_are_the_default(runs: list[int]) -> None:
    q, k, v = inputs()
    one, one_lse = tt.attention(q, k, v, causal=True, return_lse=True, pool=1)
    assert not runs
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        o, lse = tt.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(o, one)
        assert torch.equal(lse, one_lse)
        assert runs.pop() == threads
        assert not runs
        pool = workers(None)
        assert isinstance(pool, OpenMPPool)
        assert pool._crew is None  # no worker of ours was woken beside them


def test_spans_that_wait_for_each_other(runs: list[int]) -> None:
    """One row on 20 spans of keys, each a work item that is merged in its turn."""
    q, k, v = inputs(20 * 1024)
    q = q[:, :, -1:]
    one = tt.attention(q, k, v, pool=1)
    for _ in range(20):
        assert torch.equal(tt.attention(q, k, v), one)
    assert set(runs) == {2}


def test_other_threads_where_they_are_asked_for(runs: list[int]) -> None:
    q, k, v = inputs()
    one = tt.attention(q, k, v, pool=1)
    assert torch.equal(tt.attention(q, k, v, pool=2), one)
    torch.set_num_threads(1)
    assert workers(None) == 1
    assert torch.equal(tt.attention(q, k, v), one)
    assert not runs


def test_checked_and_interpreted_kernels_run_on_ours() -> None:
    """A fault must stop the workers that wait for the one that had it."""
    q, k, v = inputs(40)
    one = tt.attention(q, k, v, pool=1)
    for knobs in ({"check": 2}, {"interpret": True}):
        with tw.config(**knobs):
            assert torch.equal(tt.attention(q, k, v), one)


def test_several_callers(runs: list[int]) -> None:
    q, k, v = inputs()
    one, wrong = tt.attention(q, k, v, pool=1), []

    def call() -> None:
        wrong.extend(n for n in range(20) if not torch.equal(tt.attention(q, k, v), one))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    assert len(runs) == 60


def test_a_signal_ends_a_long_call() -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: Any) -> None:
        raise Alarm

    q, k, v = inputs(40_000, H=8)
    tt.attention(q[:, :, :64], k, v)
    before = signal.signal(signal.SIGALRM, ring)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            tt.attention(q, k, v)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    took = time.monotonic() - begin
    assert took < 2, f"{took} s"
    small = inputs()
    assert torch.equal(tt.attention(*small), tt.attention(*small, pool=1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own() -> None:
    """OpenMP's threads are not there any more, and whoever waited for them would wait for ever."""
    q, k, v = inputs()
    one = tt.attention(q, k, v)
    child = os.fork()
    if not child:
        for threads in (2, 3):  # a pool that was there, and a new one
            torch.set_num_threads(threads)
            if not (tt.attention(q, k, v).numpy() == one.numpy()).all():
                os._exit(1)
        os._exit(0)
    end = time.monotonic() + 20
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert status[1] == 0
