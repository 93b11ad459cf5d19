"""Spans that are work items of their own are merged in order, whichever worker is late, and a slot is used by one tile
at a time.

Here the kernel is interpreted by several threads, and one work item after the other is made late on purpose, so that a
worker that does not wait for its turn is found out each time and not once in a while.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import Case, assert_same_bits, assert_written, case, poisoned
from tilewise.kernels.forward import Item
from tilewise.simd.interp import NumpyBuilder

DELAY = 0.03  # seconds: many times what an interpreted work item of these problems takes to begin its merge
SPAN = 4


def problem(tiles: int, **options: Any) -> Case:
    """`tiles` query tiles of one row on 8 keys: 2 spans, and a third work item each that may find no span."""
    return case(1, 1, 1, tiles, 8, 2, 3, bc=4, span=SPAN, br=1, **options)


class Late:
    """Makes work items late: those of (first row of the tile, unit) in `items`, before they begin."""

    def __init__(self) -> None:
        self.items: set[tuple[int, int]] = set()
        self.seen: list[tuple[int, int]] = []

    def __call__(self, item: Any) -> None:
        if isinstance(item.b, NumpyBuilder):
            name = item.start.raw, item.unit.raw
            self.seen.append(name)
            if name in self.items:
                time.sleep(DELAY)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, eager_workers: None) -> Iterator[Late]:
    plan, run = Late(), Item.run

    def delayed(item: Item) -> None:
        plan(item)
        run(item)

    monkeypatch.setattr(Item, "run", delayed)
    with tw.config(interpret=True):
        yield plan


def assert_serial_bits(c: Case, late: Late, threads: int, items: list[tuple[int, int]]) -> None:
    shape = (*c.q.shape[:3], c.v.shape[3])
    late.items = set()
    expected = c.run(pool=1)
    for one in items:
        late.items, late.seen = {one}, []
        result = c.run(pool=threads, out=poisoned(shape), lse=poisoned(shape[:3]))
        assert sorted(late.seen) == sorted(items), "a work item was lost, or done twice"
        for x in result:
            assert_written(x)
        assert_same_bits(result, expected, f"{one} late")


@pytest.mark.parametrize("sinks", [None, [1.5]], ids=["no sink", "sink"])
def test_a_late_span_is_waited_for(late: Late, sinks: Any) -> None:
    c = problem(1).change(sinks=None if sinks is None else np.array(sinks, np.float32))
    assert_serial_bits(c, late, 2, [(0, unit) for unit in range(2)])


@pytest.mark.parametrize("threads", [2, 3])
def test_a_slot_is_not_reused_too_early(late: Late, threads: int) -> None:
    """More tiles than slots: a tile waits until the one that had its slot has written its rows."""
    tiles = 2 * threads + 1
    assert_serial_bits(problem(tiles), late, threads, [(start, unit) for start in range(tiles) for unit in range(2)])


def test_keys_that_begin_inside_a_span(late: Late) -> None:
    """6 keys from position 3 on lie in three spans of 4, though two would hold them: each has its work item."""
    c = problem(2, kv_len=6, k_offset=3)
    assert_serial_bits(c, late, 2, [(start, unit) for start in range(2) for unit in range(3)])


def test_a_tile_with_fewer_spans_than_others(late: Late) -> None:
    """Its last work item finds no span, and writes its rows when those before it are merged."""
    c = problem(2, causal=True, q_offset=SPAN - 1)
    assert_serial_bits(c, late, 2, [(start, unit) for start in range(2) for unit in range(2)])


FAULT = """
import os
import subprocess
import sys
import time
import numpy as np
import tilewise as tw
from tilewise.kernels.forward import Item

run = Item.run

def faulty(item):
    if item.unit.raw == 0:
        time.sleep(0.5)  # so that the other worker has claimed the next span and waits for its turn
        raise tw.KernelError("access out of bounds")
    run(item)

Item.run = faulty
q, k = np.ones((1, 1, 1, 2), np.float32), np.ones((1, 1, 8, 2), np.float32)
try:
    tw.attention(q, k, k, bc=4, span=4, pool=2)
except tw.KernelError as error:
    print(error)
"""


def test_a_fault_frees_those_that_wait_for_its_turn() -> None:
    environment = {**os.environ, "TILEWISE_INTERPRET": "1"}
    setup = "import tilewise.plan\ntilewise.plan.SMALLEST_JOB = 1\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + FAULT], env=environment, capture_output=True, text=True, timeout=15, check=False
    )
    assert done.stdout == "access out of bounds\n", done.stderr
