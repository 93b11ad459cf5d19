"""Run a plan: scratch from the arena, the tables for the kernel, workers that claim work items."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tilewise.errors import KernelError
from tilewise.kernels.tables import CALL, CALL_INDEX, SEQUENCE, SEQUENCE_INDEX
from tilewise.plan import Plan
from tilewise.problem import F32Array, I64Array, Problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool
from tilewise.simd.jit import executable


def launch(problem: Problem, plan: Plan, arena: Arena | None, pool: Pool) -> tuple[F32Array, F32Array | None]:
    """Compute (o, lse); lse is None where it was not asked for. The arena is rewound, also when something fails."""
    scratch_arena = Arena() if arena is None else arena
    mark = scratch_arena.mark()
    try:
        entry = executable(plan.kernel)
        scratch = scratch_arena.alloc(plan.scratch_bytes)
        B, H, Tq, Dv = problem.B, problem.H, problem.Tq, problem.Dv
        out = np.empty((B, H, Tq, Dv), np.float32) if problem.out is None else problem.out
        lse = np.empty((B, H, Tq), np.float32) if problem.lse is None and problem.return_lse else problem.lse
        if out.size:
            _run(problem, plan, out, lse, scratch, pool, entry)
        return out, lse
    finally:
        scratch_arena.rewind(mark)


def _run(
    problem: Problem, plan: Plan, out: F32Array, lse: F32Array | None, scratch: Any, pool: Pool, entry: Any
) -> None:
    sequences = _sequence_table(problem, plan, out, lse)
    table = _call_table(problem, plan, out, lse, scratch, sequences)
    counter, address = CALL_INDEX["counter"], _address(table)

    def work(worker: int) -> None:
        while table[counter] < plan.items:
            if fault := entry(address, worker):
                raise KernelError(f"{plan.shape.name}: access out of bounds at {fault:#x}")

    def cancel() -> None:
        table[counter] = plan.items

    pool.run(plan.workers, work, cancel)


def _address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def _extent(x: F32Array) -> tuple[int, int]:
    """The addresses [lo, hi) that an array's elements lie in."""
    lo = hi = _address(x)
    if not x.size:
        return lo, lo
    for stride, n in zip(x.strides, x.shape, strict=True):
        reach = stride * (n - 1)
        lo, hi = lo + min(reach, 0), hi + max(reach, 0)
    return lo, hi + x.itemsize


def _sequence_table(problem: Problem, plan: Plan, out: F32Array, lse: F32Array | None) -> I64Array:
    """A descriptor a sequence, and a last one that only says where the work items end."""
    B, rows = problem.B, problem.Tq * problem.group
    table = np.zeros((B + 1, len(SEQUENCE)), np.int64)
    sequence = np.arange(B, dtype=np.int64)
    columns: dict[str, Any] = {
        "q": _address(problem.q) + sequence * problem.q.strides[0],
        "k": _address(problem.k) + sequence * problem.k.strides[0] + problem.kv_start * problem.k.strides[2],
        "v": _address(problem.v) + sequence * problem.v.strides[0] + problem.kv_start * problem.v.strides[2],
        "o": _address(out) + sequence * out.strides[0],
        "lse": 0 if lse is None else _address(lse) + sequence * lse.strides[0],
        "rows": rows,
        "first_key": problem.k_offset,
        "keys": problem.kv_len,
        "q_offset": problem.q_offset,
    }
    for name, column in columns.items():
        table[:B, SEQUENCE_INDEX[name]] = column
    table[:, SEQUENCE_INDEX["first_item"]] = np.arange(B + 1) * (plan.items // max(1, B))
    return table


def _call_table(
    problem: Problem, plan: Plan, out: F32Array, lse: F32Array | None, scratch: Any, sequences: I64Array
) -> I64Array:
    left, right = problem.bounds
    fields: dict[str, int] = {
        "sequences": _address(sequences), "items": plan.items, "counter": 0, "batch": plan.batch,
        "scratch": _address(scratch), "scratch_bytes": plan.worker_bytes,
        "rows": plan.rows, "group": problem.group, "left": left, "right": right, "span": problem.span,
        "scale": struct.unpack("<q", struct.pack("<fi", problem.scale, 0))[0],
        "sinks": 0, "sinks_lo": 0, "sinks_hi": 0,
    }  # fmt: skip
    if problem.sinks is not None:
        fields["sinks"] = _address(problem.sinks)
        fields["sinks_lo"], fields["sinks_hi"] = _extent(problem.sinks)
    for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("o", out), ("lse", lse)):
        if x is not None:
            fields[name + "_row"], fields[name + "_head"] = x.strides[2] // x.itemsize, x.strides[1] // x.itemsize
            fields[name + "_lo"], fields[name + "_hi"] = _extent(x)
    return np.array([fields.get(name, 0) for name in CALL], np.int64)
