"""The short way from q, k and v to o and lse, for further calls of a layout that was checked before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.arguments import SIZE, Array, F32Array
from tilewise.problem import Operands, Problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.launch import Prepared, Step, address_of, run_calls
from tilewise.runtime.pool import Pool


class Short:
    """For calls of one layout that have no other array. What is left to look at is where the arrays lie."""

    __slots__ = ("calls", "extents", "misaligned", "problem", "scratch_bytes")

    def __init__(self, problem: Problem, calls: Sequence[Prepared]) -> None:
        self.problem, self.calls = problem, calls
        self.scratch_bytes = max(call.plan.scratch_bytes for call in calls)
        views = problem.views
        self.misaligned = max(SIZE[views[name].type] for name in "qkv") - 1  # bits of an address
        self.extents = {name: (view.lo, view.hi) for name, view in views.items()}

    def run(
        self, q: Array, k: Array, v: Array, out: Array | None, lse: F32Array | None, step: Step | None,
        arena: Arena | None, pool: Pool,
    ) -> Any:  # fmt: skip
        """What the call returns; or None where an array must be looked at: it is not aligned to the largest element of
        all, or one to write into is read-only or near another."""
        problem = self.problem
        at_q, at_k, at_v = address_of(q), address_of(k), address_of(v)
        if (at_q | at_k | at_v) & self.misaligned:
            return None
        at_lse = 0
        if out is not None or lse is not None:
            extents = self.extents if step is None else self.extents | {x: getattr(step, x)[-2:] for x in "kv"}
            read = [(at, *extents[name]) for name, at in (("q", at_q), ("k", at_k), ("v", at_v))]
            if not self._may_write({"o": out, "lse": lse}, read):
                return None
        if out is None:
            out = np.empty(problem.out_shape, problem.out_dtype)
        if problem.return_lse:
            lse = np.empty(problem.lse_shape, np.float32) if lse is None else lse
            at_lse = address_of(lse)
        addresses = (at_q, at_k, at_v, address_of(out), at_lse, 0, 0, 0, 0, 0)
        run_calls(self.calls, self.scratch_bytes, addresses, arena, pool, step)
        return out if lse is None else (out, lse)

    def _may_write(self, written: dict[str, Array | None], read: list[tuple[int, int, int]]) -> bool:
        """Whether arrays are aligned, writeable, and apart from what is read and from each other."""
        others = [(at + lo, at + hi) for at, lo, hi in read]
        for name, x in written.items():
            if x is not None:
                at, (lo, hi) = address_of(x), self.extents[name]
                lo, hi = at + lo, at + hi
                if at % x.itemsize or not x.flags.writeable or any(lo < end and first < hi for first, end in others):
                    return False
                others.append((lo, hi))
        return True


def short_way(problem: Problem, calls: Sequence[Prepared], operands: Operands) -> Short | None:
    """A short way for further calls of a layout, if there is one."""
    plain = operands.sinks is None and not problem.further_operands
    return Short(problem, calls) if plain and not any(call.checked for call in calls) else None
