#!/usr/bin/env python3
"""What a prefill could reach if its parts never waited for each other: each by itself, beside the whole.

    taskset -c 0 python benchmarks/parts.py [seconds]

The parts are the kernel's own: scores of a panel of 16 rows and a tile of 64 keys; their softmax; outputs. Each runs
again and again over the same operands, in the first- and second-level cache. `parts` is their sum: without packing,
without queries in and rows out, and without waiting of one for another. `whole` is a call of 512 rows that all see 4096
keys. All as shares of the multiply-add peak of the same round, medians; a round is `alone` or `shared` by whether
another hardware thread had its share of the core (see `RoofProbe.crowded`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import tilewise as tw
from tilewise.kernels.microkernel import scores, weighted_sum
from tilewise.kernels.softmax import OnlineSoftmax
from tilewise.kernels.tables import Fields, Row, Shape, size_of
from tilewise.runtime.roof import RoofProbe, written_floats
from tilewise.simd.builder import LANES, Builder, Int, Kernel
from tilewise.simd.jit import native
from tilewise.simd.target import current_target

ROWS, KEYS, TILE = 512, 4096, 64  # of the whole; keys of a tile
STEPS = 300  # of a part: some tenths of a millisecond, shorter than most phases of a shared machine
ALONE, SHARED = 1.15, 1.4  # crowding up to which, and from which, a round counts
TABLE = ("scratch", "steps", "groups")


def part_kernel(shape: Shape, part: str) -> Kernel:
    """`steps` times one part of a panel's work on a tile."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        call, rows = Row(b, table, TABLE), b.integer(LANES)
        scratch = Fields(b, shape.scratch_fields(), call["scratch"], rows)
        state = Fields(b, shape.state_fields(), call["scratch"] + size_of(shape.scratch_fields(), LANES), rows)
        softmax = OnlineSoftmax(b, shape, scratch, b.vec(1.0), together=4)
        groups, row = call["groups"], b.integer(0)
        none = groups * 0  # not a constant: the kernel's bounds are none
        b.store_int(scratch.panel_lo_max, 0)
        b.store_int(scratch.panel_hi_min, groups * LANES)
        for _ in b.loop(0, call["steps"]):
            if part == "scores":
                softmax.no_scores()
                keys, queries = scratch.keys, scratch.queries
                scores(b, LANES, shape.mr, shape.nr, shape.D, queries, keys, softmax.put, none, groups)
            elif part == "softmax":
                softmax.update(state, row, none, none, groups)
            else:
                weighted_sum(
                    b, LANES, shape.mr, shape.nr, state.a, shape.width, scratch.alpha, scratch.S, shape.columns,
                    scratch.values, shape.value_step, none, groups * LANES,
                )  # fmt: skip

    return Kernel(f"part_{part}_d{shape.D}", body)


def parts(shape: Shape) -> dict[str, Callable[[], object]]:
    """A call of STEPS steps of each part."""
    floats = (size_of(shape.scratch_fields(), LANES) + size_of(shape.state_fields(), LANES)) // 4
    found: dict[str, Callable[[], object]] = {}
    for part in ("scores", "softmax", "outputs"):
        scratch = written_floats(floats)
        scratch.fill(0.001)  # no result of it grows, or becomes subnormal
        table = np.array([scratch.ctypes.data, STEPS, TILE // LANES], np.int64)
        entry = native(part_kernel(shape, part), current_target())
        found[part] = lambda entry=entry, table=table, scratch=scratch: entry(table.ctypes.data, 0)
    return found


def whole(D: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, D), dtype=np.float32) for n in (ROWS, KEYS, KEYS))
    o = np.empty_like(q)
    return lambda: tw.attention(q, k, v, out=o)


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(D: int, probe: RoofProbe, budget: float) -> dict[str, list[dict[str, float]]]:
    """By state of the core: the rounds, each with seconds of a part or of the whole as multiples of an operation's."""
    mr, nr = current_target().register_tile(LANES)
    runs = {**parts(Shape(D, D, TILE, LANES, mr, nr)), "whole": whole(D)}
    panels = {name: KEYS // TILE * ROWS // LANES if name == "whole" else STEPS for name in runs}
    for run in runs.values():
        run()
    found: dict[str, list[dict[str, float]]] = {"alone": [], "shared": []}
    until = time.perf_counter() + budget
    while time.perf_counter() < until:
        took: dict[str, list[float]] = {name: [] for name in runs}
        crowding = []
        for name, run in runs.items():
            fma = seconds(probe.fma)
            took[name].append(seconds(run) / panels[name])
            after = seconds(probe.fma)
            crowding.append(seconds(probe.crowded) / after)
            took[name].append((fma + after) / 2 / probe.flops)
        state = "alone" if max(crowding) < ALONE else "shared" if min(crowding) > SHARED else None
        if state:
            found[state].append({name: x / operation for name, (x, operation) in took.items()})
    return found


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    print("| D | core | rounds | scores | outputs | both | with their softmax: parts | whole |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    with tw.config(threads=1):
        probe = RoofProbe(current_target(), 1 << 20, fma_steps=250_000)
        for D in (32, 64, 128):
            for state, rounds in measure(D, probe, budget).items():
                if len(rounds) < 5:
                    continue
                time_of = {name: statistics.median(x[name] for x in rounds) for name in rounds[0]}
                flops, both = 4.0 * LANES * TILE * D, time_of["scores"] + time_of["outputs"]
                each = [flops / 2 / time_of[name] for name in ("scores", "outputs")]
                shares = [*each, *(flops / x for x in (both, both + time_of["softmax"], time_of["whole"]))]
                cells = [D, state, len(rounds), *(f"{x:.2f}" for x in shares)]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
