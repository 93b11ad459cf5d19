"""With TILEWISE_CHECK=2 scratch is full of NaN and every access is checked: nothing is used before it is written.

What is compared with comes from a call without checks: compared with itself, a result full of NaN would pass. The
checked call is first, for it tells of what would end the process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tilewise as tw
from tests.support import Case, assert_same_bits, case, poisoned, sinks_for

# Odd sizes, so that every array ends in a tail, every tile in padding lanes, every item in padded rows.
CASES: dict[str, Callable[[], Case]] = {
    "packed": lambda: case(1, 4, 2, 37, 90, 19, 33, causal=True, q_offset=53, bc=33, span=33),
    "packed, window": lambda: case(2, 3, 1, 13, 90, 19, 33, causal=True, window=30, q_offset=[70, 77], bc=33, span=66),
    # the oldest keys dropped: what lies before them is not of the array
    "packed, dropped": lambda: case(
        1, 3, 1, 13, 90, 19, 33, causal=True, window=30, q_offset=117, k_offset=40, bc=33, span=66
    ),
    "packed, sinks": lambda: case(1, 4, 2, 37, 90, 19, 33, window=5, q_offset=50, sinks=sinks_for(4), bc=33),
    "streamed": lambda: case(1, 3, 1, 1, 90, 19, 33, bc=33, span=66),
    "streamed, ragged": lambda: case(
        2, 3, 1, 1, 90, 19, 33, causal=True, window=40, q_offset=[88, 71], kv_start=[11, 19], kv_len=[79, 71],
        k_offset=[10, 2], bc=33, span=33,
    ),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("eager_workers")
def test_nothing_is_used_before_it_is_written(name: str, threads: int) -> None:
    c = CASES[name]()
    shape = (*c.q.shape[:3], c.v.shape[3])
    with tw.config(check=2):
        checked = c.run(pool=threads, out=poisoned(shape), lse=poisoned(shape[:3]))
    plain = c.run(pool=1)
    for x in plain:
        assert np.isfinite(x).all()
    assert_same_bits(checked, plain, name)
