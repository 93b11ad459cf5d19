#!/usr/bin/env python3
"""Shares of the roof on a core of one's own, though a neighbour uses its other hardware thread most of the time.

    taskset -c 0 python benchmarks/alone.py [seconds]

Moments without the neighbour are shorter than most workloads. So of each prefill one query tile of 512 rows is timed
(of the window four, of W2, W2n and W8 all rows of a head), where a row sees as many keys as in the whole on average:
causal tiles from the middle. A call has as many KV heads as make some milliseconds, others each time, and all data are
the whole workload's. A call counts where the core was ours alone, or shared, before it and after (see
`RoofProbe.crowded`); alone only where multiply-add was also as fast as the clock allows, or a neighbour that multiplies
would flatter us. Its share is of the multiply-add peak of the same moment. With `out`, so without the pages of a new
result.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from parts import ALONE, SHARED, seconds

import tilewise as tw
from tilewise.bench.table import SPEED
from tilewise.bench.workloads import Workload, inputs
from tilewise.kernels.roof import fma_kernel
from tilewise.runtime.roof import RoofProbe, written_floats
from tilewise.simd.builder import LANES
from tilewise.simd.jit import native
from tilewise.simd.target import current_target

ROWS, WINDOW_ROWS, WHOLE_ROWS = 512, 2048, 1024
OPERATIONS = 400_000_000  # of a call, at least: 3 ms
STEPS = 60_000  # of the roof: 0.3 ms
STEADY = 0.03  # by how much the roof may change over a call that counts
FULL = 1.03  # by how much multiply-adds may take longer, of a chain's time, than in the best twentieth of moments
OTHERS = 0.1  # of the calls where the core is not alone: there are more than enough of those
Part = Callable[[], tuple[float, Callable[[], object]]]


def part_of(w: Workload) -> Part:
    """Operations and call of a part of a workload, of other heads each time."""
    q, k, v = inputs(w)
    o = np.empty_like(q)
    group = w.H // w.Hkv
    rows = WINDOW_ROWS if w.window else w.Tq * group if w.Tq * group <= WHOLE_ROWS else ROWS
    first = (w.Tq - rows // group) // 2
    last = first + rows // group
    offset = (w.q_offset or 0) + first
    lo, hi = (offset + 1 - w.window if w.window else 0), (offset + rows // group if w.causal else w.Tk)
    position = np.arange(offset, offset + rows // group)
    pairs = int(np.minimum(position + 1, w.window or w.Tk).sum()) if w.causal else rows // group * w.Tk
    each = 4.0 * group * w.D * pairs
    heads = min(w.Hkv, int(-(-OPERATIONS // each)))
    options = {"causal": True, "window": w.window, "q_offset": offset - lo} if w.causal else {}

    def part() -> tuple[float, Callable[[], object]]:
        s, h = random.randrange(w.B), random.randrange(w.Hkv - heads + 1)
        queries = np.s_[s : s + 1, h * group : (h + heads) * group, first:last]
        keys = np.s_[s : s + 1, h : h + heads, lo:hi]
        arrays = q[queries], k[keys], v[keys]
        return each * heads, lambda: tw.attention(*arrays, out=o[queries], **options)

    return part


@dataclass(frozen=True)
class Moment:
    """What the core gave at one time: a pass of the roof, in seconds and against two other loops."""

    fma: float
    crowding: float  # the same beside as many other instructions / by itself: 1 on a core of one's own
    slowness: float  # multiply-adds that may overlap / those of one chain: least where nobody else multiplies


class Clock:
    """Multiply-adds of one chain: as slow as the latency, whoever shares the core."""

    def __init__(self) -> None:
        self._entry = native(fma_kernel(1, 1), current_target())
        self._data = written_floats(2 * LANES)
        start = self._data.ctypes.data
        self._table = np.array([start, start + self._data.nbytes, STEPS], np.int64)

    def __call__(self) -> None:
        self._entry(self._table.ctypes.data, 0)


def moment(probe: RoofProbe, clock: Clock) -> Moment:
    fma = seconds(probe.fma)
    return Moment(fma, seconds(probe.crowded) / fma, fma / seconds(clock))


def measure(parts: dict[str, Part], budget: float) -> list[tuple[str, float, Moment, Moment]]:
    """Calls: workload, operations a second, what the core gave before and after."""
    probe, clock, found = RoofProbe(current_target(), 1 << 20, fma_steps=STEPS), Clock(), []
    for part in parts.values():
        part()[1]()
    until = time.perf_counter() + budget
    while time.perf_counter() < until:
        for name, part in parts.items():
            operations, call = part()
            before = moment(probe, clock)
            if before.crowding < ALONE or random.random() < OTHERS:
                took = seconds(call)
                found.append((name, operations / took / probe.flops, before, moment(probe, clock)))
    return found


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    with tw.config(threads=1):
        calls = measure({w.name: part_of(w) for w in SPEED if w.Tq > 1}, budget)
    full = FULL * np.quantile([m.slowness for _, _, *both in calls for m in both], 0.05)
    shares: dict[tuple[str, str], list[float]] = {}
    for name, speed, before, after in calls:
        both = before, after
        if abs(before.fma / after.fma - 1) < STEADY:
            share = speed * (before.fma + after.fma) / 2
            if max(m.crowding for m in both) < ALONE and max(m.slowness for m in both) < full:
                shares.setdefault((name, "alone"), []).append(share)
            elif min(m.crowding for m in both) > SHARED:
                shares.setdefault((name, "shared"), []).append(share)
    print("| workload | core | calls | lower quartile | median | upper quartile |\n|---|---|--:|--:|--:|--:|")
    for (name, state), each in sorted(shares.items()):
        quartiles = " | ".join(f"{x:.3f}" for x in np.quantile(each, (0.25, 0.5, 0.75)))
        print(f"| {name} | {state} | {len(each)} | {quartiles} |")


if __name__ == "__main__":
    main()
