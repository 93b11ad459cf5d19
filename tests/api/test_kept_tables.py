"""What a small call keeps for the next one, its table and its scratch, is never shared, and never the wrong one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tilewise as tw
from tilewise import entry
from tilewise.arguments import Array
from tilewise.runtime import launch


def problem(seed: int, Tk: int = 40, B: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, heads, T, 16), dtype=np.float32) for heads, T in ((4, 3), (2, Tk), (2, Tk))]


def test_calls_of_several_threads_at_once() -> None:
    """More of them than tables are kept."""
    keys = 4000  # so that a call lasts until others come
    wanted = [tw.attention(*problem(seed, keys), pool=1) for seed in range(6)]
    wrong: list[int] = []
    barrier = threading.Barrier(len(wanted))

    def work(seed: int) -> None:
        arrays = problem(seed, keys)
        barrier.wait()
        for _ in range(300):
            if not np.array_equal(tw.attention(*arrays, pool=1), wanted[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(len(call.idle) <= launch.IDLE for known in entry._memory.values() for call in known.calls)
    assert len(launch._scratch) <= launch.IDLE


@pytest.mark.parametrize("B", [1, 3, 5, 40])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("eager_workers")
def test_a_kept_table_gets_all_new_addresses(B: int, threads: int) -> None:
    """Cells are filled in one by one or by NumPy; nothing of the call before is left in them."""
    sinks = [20 + np.random.default_rng(seed).standard_normal(4, dtype=np.float32) for seed in (1, 2)]
    alone = []
    for seed in (1, 2):
        entry._memory.clear()
        alone.append(tw.attention(*problem(seed, B=B), sinks=sinks[seed - 1], return_lse=True, pool=threads))
    entry._memory.clear()
    kept = []
    for seed in (1, 2, 1):
        out, lse = np.full((B, 4, 3, 16), np.nan, np.float32), np.full((B, 4, 3), np.nan, np.float32)
        arrays = problem(seed, B=B)
        kept.append(tw.attention(*arrays, sinks=sinks[seed - 1], out=out, lse=lse, pool=threads))
        for x in arrays:
            x[:] = np.nan  # who reads them again is seen
    for (o, lse), seed in zip(kept, (1, 2, 1), strict=True):
        assert np.array_equal(o, alone[seed - 1][0])
        assert np.array_equal(lse, alone[seed - 1][1])
        assert (lse >= sinks[seed - 1][:, None]).all()


def test_a_table_is_dropped_when_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be half filled, or tell workers not to wait."""
    wanted = tw.attention(*problem(1), pool=1)
    ((call,),) = [known.calls for known in entry._memory.values() if known.calls[0].idle][-1:]
    kept = len(call.idle)

    def fails(*_: object) -> int:
        raise KeyboardInterrupt

    entries = call.entry
    object.__setattr__(call, "entry", fails)
    with pytest.raises(KeyboardInterrupt):
        tw.attention(*problem(1), pool=1)
    object.__setattr__(call, "entry", entries)
    assert len(call.idle) == kept - 1
    assert np.array_equal(tw.attention(*problem(1), pool=1), wanted)
    assert len(call.idle) == 1
