"""Workers that wait for their turn to merge a span must not hold up the worker they wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import tilewise as tw
from tilewise.plan import make_plan
from tilewise.problem import make_problem
from tilewise.simd.target import current_target

SCRIPT = """
    import os, time
    import numpy as np
    import tilewise as tw
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    q = np.ones((1, 1, 1, 16), np.float32)
    k = np.broadcast_to(q, (1, 1, 1 << 21, 16))
    tw.attention(q, k[:, :, :4096], k[:, :, :4096], pool=4)
    begin = time.perf_counter()
    tw.attention(q, k, k, pool=1)
    serial = time.perf_counter() - begin
    tw.attention(q, k, k, pool=4)
    print((time.perf_counter() - begin - serial) / serial)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot pin a process to a core")
def test_four_workers_on_one_core_take_turns() -> None:
    """Before a waiting worker let go of the core, each of 2048 spans cost a time slice: 700 times the serial time."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(run.stdout) < 50


@pytest.mark.parametrize("options", [{"q_offset": 100}, {"q_offset": 1 << 49, "window": 100}], ids=str)
def test_spans_that_no_row_sees_are_no_work(options: dict[str, int]) -> None:
    q = np.ones((1, 2, 3, 16), np.float32)
    k = np.broadcast_to(q[:, :1, :1], (1, 1, 1 << 50, 16))
    problem, _ = make_problem(q, k, k, causal=True, **options)
    assert make_plan(problem, current_target(), 2).units <= 2
    o = tw.attention(q, k, k, causal=True, pool=2, **options)
    np.testing.assert_allclose(o, 1, rtol=1e-5)


@pytest.mark.parametrize("T", [128, 256, 700])
def test_workers_do_not_wait_for_spans_that_are_not_there(T: int) -> None:
    """A prefill of 9 heads on 3 KV heads had 3 to 6 tiles, each with a second item for a span without keys: whoever
    took it waited for the first, so two threads were slower than one."""
    q, k = np.ones((1, 9, T, 64), np.float32), np.ones((1, 3, T, 64), np.float32)
    problem, _ = make_problem(q, k, k, causal=True)
    plan = make_plan(problem, current_target(), 2)
    assert plan.workers == 2
    assert plan.units == 1
    assert plan.items >= 8
    assert make_plan(problem, current_target(), 1).rows == min(512, 3 * T)  # alone, the most that fit


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_scratch_does_not_depend_on_the_keys(threads: int) -> None:
    """An arena that is made for a whole context serves its first chunks: tiles that get smaller for several threads
    did so only where there was work for them, so few keys took more scratch than many."""
    q = np.zeros((1, 8, 128, 64), np.float32)
    needs = {
        tw.scratch_bytes(q, k, k, pool=threads)
        for k in (np.broadcast_to(q[:, :2, :1], (1, 2, keys, 64)) for keys in (4, 16, 128, 1024, 100_000))
    }
    assert len(needs) == 1
