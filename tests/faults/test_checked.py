"""The contract and the invariances with every access checked, and each element of the output written exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import Case, case, sinks_for
from tilewise.simd import interp

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["test_contract.py", "test_invariance.py"])
def test_suite_with_every_access_checked(suite: str) -> None:
    """Bounds of native code, scratch full of NaN, redzones: what `TILEWISE_CHECK=2 scripts/test tests/api/...` runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/api/{suite}"]
    environment = {**os.environ, "TILEWISE_CHECK": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_variable_does_check() -> None:
    """A kernel with a wrong extent is caught in that mode, and only there."""
    program = """
import numpy as np
import tilewise as tw
from tilewise import entry
from tilewise.runtime import launch
real = launch.prepare
def prepare(*arguments):
    prepared = real(*arguments)
    prepared.offsets[launch.CALL_INDEX["v_hi"]] -= 4
    return prepared
entry.prepare = prepare
x = np.ones((1, 1, 5, 16), np.float32)
tw.attention(x, x, x)
"""
    for level, error in (("0", ""), ("2", "KernelError: forward_f32_d16x16")):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "TILEWISE_CHECK": level}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert (error in done.stderr) if error else not done.stderr, done.stderr


class Stores:
    """The interpreter's words that store, counted for each element of some arrays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *arrays: Any) -> None:
        self.counts = [(x.__array_interface__["data"][0], x, np.zeros(x.size, int)) for x in arrays]
        lanes: dict[str, Callable[..., int]] = {
            "store": lambda p, x: 16,
            "store_part": lambda p, x, count: max(0, min(count, 16)),
            "store_lane": lambda p, x, lane: 1,
            "store_int": lambda p, x: 2,
            "store_release": lambda p, x: 2,
            "fetch_add": lambda p, x: 2,
        }
        for word, width in lanes.items():
            monkeypatch.setitem(interp._MEANING, word, self.counted(interp._MEANING[word], width))

    def counted(self, real: Callable[..., Any], width: Callable[..., int]) -> Callable[..., Any]:
        def word(p: Any, *operands: Any, **static: Any) -> Any:
            for start, x, count in self.counts:
                first = (p.raw - start) // 4
                last = first + width(p, *operands, **static)
                if last > 0 and first < x.size:
                    assert 0 <= first <= last <= x.size, "a store across the border of an output"
                    count[first:last] += 1
            return real(p, *operands, **static)

        return word


CASES: dict[str, Case] = {
    "causal": case(1, 4, 2, 5, 21, 5, 3, causal=True, q_offset=13, bc=4, span=8),
    "one row": case(2, 4, 1, 1, 40, 18, 20, bc=16, span=16),
    "window, sinks": case(1, 2, 1, 9, 9, 5, 17, causal=True, window=4, bc=16, sinks=sinks_for(2)),
    "ragged": case(
        2, 2, 1, 3, 20, 5, 17, causal=True, bc=4, span=8, q_offset=[7, 3], kv_start=[0, 6], kv_len=[20, 8],
        k_offset=[0, 2],
    ),
    "empty rows": case(1, 2, 2, 4, 9, 5, 3, window=3, q_offset=7, bc=4),
    "no keys": case(1, 2, 2, 4, 0, 5, 3, bc=4),
    "17 rows": case(1, 1, 1, 17, 9, 5, 33, bc=4),
}  # fmt: skip


@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("check", [0, 2])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_output_element_is_written_exactly_once(
    name: str, threads: int, check: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter, which runs the text of the native kernel; with threads, spans are work items of their own."""
    c = CASES[name]
    shape = (*c.q.shape[:3], c.v.shape[3])
    out, lse = np.empty(shape, np.float32), np.empty(shape[:3], np.float32)
    stores = Stores(monkeypatch, out, lse)
    with tw.config(interpret=True, check=check):
        c.run(pool=1, out=out, lse=lse)
        if threads > 1:
            for _, _, count in stores.counts:
                count[:] = 0
            with tw.Pool(threads) as pool, tw.config(interpret=True, check=check):
                c.run(pool=pool, out=out, lse=lse)
    for what, (_, _, count) in zip(("out", "lse"), stores.counts, strict=True):
        assert (count == 1).all(), f"{what}: elements were written {np.unique(count).tolist()} times"


def test_a_store_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(32, np.float32)
    stores = Stores(monkeypatch, x)
    from tilewise.simd.builder import I64, Int, Kernel

    def body(b: Any, table: Int, worker: Int) -> None:
        p = b.pointer(table, table, table + 128)
        b.store(p, b.vec(1.0))
        b.store_part(p + 15, b.vec(2.0), 4)
        b.store_int(b.pointer(table + 96, table, table + 128, I64), 3)

    interp.interpret(Kernel("twice", body), x.__array_interface__["data"][0], 0)
    assert stores.counts[0][2].tolist() == [1] * 15 + [2] + [1] * 3 + [0] * 5 + [1] * 2 + [0] * 6
