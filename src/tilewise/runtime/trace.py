"""The debug ladder: what TILEWISE_DEBUG prints to stderr, and what a call's time is worth.

    1  the target                            once a process
    2  a line a call: time, speed, share     every call
    3  the plan and its reasons              every call
    4  pseudo-code                           once a kernel
    5  IR and assembly                       once a kernel

Each level includes those before it. `launch` here stands in for the one in `launch.py` where a level is set; nothing
of this file runs otherwise.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.arguments import SIZE, Array, F32Array, I64Array
from tilewise.config import current
from tilewise.plan import Plan
from tilewise.problem import Operands, Problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.launch import Prepared
from tilewise.runtime.launch import launch as untraced
from tilewise.runtime.pool import Pool
from tilewise.runtime.roof import Roof, measure_roof
from tilewise.simd.jit import assembly
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import Target
from tilewise.visibility import visible_range

_shown: set[tuple[str, ...]] = set()  # what is printed only once


@dataclass(frozen=True)
class Speed:
    """What a time means: the work that had to be done in it, and how near that is to the machine's limits."""

    seconds: float
    flops: int  # of both products, over visible pairs
    nbytes: int  # that must cross memory at least once
    workers: int

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def gbytes(self) -> float:
        return self.nbytes / self.seconds / 1e9

    def share(self, roof: Roof) -> tuple[float, str]:
        """(the least time that `workers` cores at the roof need / the time it took, which limit sets it)."""
        arithmetic, reads = self.flops / roof.flops, self.nbytes / roof.read
        limit = "arithmetic" if arithmetic >= reads else "reads"
        return max(arithmetic, reads) / self.workers / self.seconds, limit


def speed_of(problem: Problem, plan: Plan, seconds: float) -> Speed:
    return Speed(max(seconds, 1e-9), problem.flops(), bytes_moved(problem), plan.workers)


def bytes_moved(problem: Problem) -> int:
    """Bytes of queries and results, and of the keys and values that some row sees, each once."""
    left, right = problem.bounds

    def seen_from(position: Any) -> tuple[Any, Any]:
        first: Any = problem.k_offset
        return visible_range(position, first, first + problem.kv_len, left, right, np.minimum, np.maximum)

    lo, _ = seen_from(problem.q_offset)
    _, hi = seen_from(problem.q_offset + problem.rows - 1)
    keys = int(np.where(problem.rows > 0, np.maximum(hi - lo, 0), 0).sum())
    rows = int(problem.rows.sum()) * problem.H
    size = {name: SIZE[problem.views[name].type] for name in problem.views.keys() & {"q", "k", "v", "o", "lse"}}
    row = problem.D * size["q"] + problem.Dv * size["o"] + size.get("lse", 0)
    return rows * row + keys * problem.Hkv * (problem.D * size["k"] + problem.Dv * size["v"])


@functools.cache
def roof_of(target: Target) -> Roof:
    """The roof of one core, measured once a process."""
    return measure_roof(target)


def mask_of(problem: Problem) -> str:
    """The mask in words."""
    parts = ["causal"] * problem.causal + [f"window {problem.window}"] * (problem.window is not None)
    return ", ".join(parts) or "no mask"


def launch(
    calls: Sequence[Prepared], operands: Operands, arena: Arena | None, pool: Pool
) -> tuple[Array, F32Array | None]:
    """`launch.launch`, told about on stderr: each call on its own, into the same o and lse."""
    problem = calls[0].problem
    out = np.empty(problem.out_shape, problem.out_dtype) if operands.out is None else operands.out
    lse = np.empty(problem.lse_shape, np.float32) if operands.lse is None and problem.return_lse else operands.lse
    for call in calls:
        _launch(call, operands._replace(out=out, lse=lse), arena, pool)
    return out, lse


def _launch(call: Prepared, operands: Operands, arena: Arena | None, pool: Pool) -> None:
    knobs, problem, plan = current(), call.problem, call.plan
    if _first("target", plan.target.name):
        _say(f"target {plan.target.name} ({plan.target.vector_bits}-bit vectors, {plan.target.registers} registers)")
    if knobs.debug >= 3:
        _say("plan of " + _shapes(problem) + "".join(f"\n    {line}" for line in plan.explain().splitlines()))
    if knobs.debug >= 4 and _first("kernel", plan.shape.name, plan.target.name, str(knobs.check)):
        _show_kernel(plan, knobs.debug, knobs.check >= 2)
    roof = None if knobs.interpret or knobs.debug < 2 else roof_of(plan.target)
    begin = time.perf_counter()
    untraced([call], operands, arena, pool)
    if knobs.debug >= 2:
        _say(_call_line(problem, speed_of(problem, plan, time.perf_counter() - begin), roof))


def _call_line(problem: Problem, speed: Speed, roof: Roof | None) -> str:
    line = f"{_shapes(problem)}: {1e3 * speed.seconds:.3f} ms  {speed.gflops:.1f} GFLOP/s  {speed.gbytes:.2f} GB/s"
    if roof is None:
        return f"{line}  interpreted"
    share, limit = speed.share(roof)
    of = f"{roof.flops / 1e9:.0f} GFLOP/s" if limit == "arithmetic" else f"{roof.read / 1e9:.1f} GB/s"
    cores = f"{speed.workers} x {of}" if speed.workers > 1 else of
    return f"{line}  {100 * share:.0f} % of the roof ({limit}: {cores})"


def _shapes(problem: Problem) -> str:
    return (
        f"attention B {problem.B} H {problem.H} Hkv {problem.Hkv} Tq {_range(problem.rows)} "
        f"Tk {_range(problem.kv_len)} D {problem.D} Dv {problem.Dv} {mask_of(problem)}"
    )


def _range(lengths: I64Array) -> str:
    """One length, or the least and the most."""
    sizes = sorted(set(lengths.tolist())) or [0]
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"


def _show_kernel(plan: Plan, level: int, checked: bool) -> None:
    _say(f"pseudo-code\n{plan.kernel}")
    if level >= 5:
        text = llvm_ir(plan.kernel, plan.target, checked)
        _say(f"IR\n{text}")
        _say(f"assembly for {plan.target.name}\n{assembly(text, plan.target)}")


def _first(*what: str) -> bool:
    """Whether this is the first time that it is asked for."""
    new = what not in _shown
    _shown.add(what)
    return new


def _say(text: str) -> None:
    print(f"tilewise: {text}", file=sys.stderr, flush=True)
