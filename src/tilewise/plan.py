"""What was chosen for a problem, and why. Nothing here moves a bit: the recipe's numbers (Bc, span) are the problem's."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.kernels.forward import forward_kernel
from tilewise.kernels.tables import Shape, up_to
from tilewise.problem import Problem
from tilewise.simd.builder import LANES, Kernel
from tilewise.simd.target import Target

PANELS = (1, 2, 4, 8, LANES)
ROWS = 192  # query rows a work item: packing K and V costs 1 / ROWS of the products
ROW_FLOATS = 1 << 17  # of q, a and a_total together a work item: they stay in the second-level cache
SMALLEST_JOB = 2_000_000  # flops that repay the wake-up of another worker
BATCH_FLOPS = 1_000_000_000  # between two looks at signals


@dataclass(frozen=True)
class Plan:
    """How a problem is run. `rows` are query rows of a work item, flattened as position * group + head of the group."""

    target: Target
    shape: Shape
    rows: int
    items: int
    workers: int
    batch: int  # work items between two looks at signals
    reasons: tuple[str, ...]

    @property
    def kernel(self) -> Kernel:
        return forward_kernel(self.shape)

    @property
    def scratch_bytes(self) -> int:
        """What the call takes from the arena: a slice for each worker."""
        return self.workers * self.worker_bytes

    @property
    def worker_bytes(self) -> int:
        return self.shape.scratch_bytes(self.rows)

    def explain(self) -> str:
        """The choices and their reasons, a line each."""
        return "\n".join(self.reasons)


def make_plan(problem: Problem, target: Target, threads: int) -> Plan:
    """Choose rows a work item, the panel, the register tile and the number of workers."""
    rows = _rows(problem)
    panel = next((p for p in PANELS if rows <= p), LANES)
    mr, nr = target.register_tile(panel)
    shape = Shape(problem.D, problem.Dv, problem.bc, panel, mr, nr)
    tiles = -(-problem.Tq * problem.group // rows)
    items = problem.B * problem.Hkv * tiles
    flops = problem.flops() if items else 0
    workers = max(1, min(threads, items, 1 + flops // SMALLEST_JOB))
    batch = max(1, BATCH_FLOPS * items // max(1, flops))
    reasons = (
        f"target {target.name}: {target.registers} registers of {target.vector_bits} bits, register tile {mr} x {nr}",
        f"rows {rows} a work item" + (f" (br = {problem.br} positions x group {problem.group})" if problem.br else ""),
        f"panel {panel} rows, Bc {problem.bc}, span {problem.span}",
        f"{items} work items: {problem.B} sequences x {problem.Hkv} KV heads x {tiles} query tiles, {flops:.3g} flops",
        f"workers {workers} of {threads} threads, {batch} work items a run",
        f"scratch {shape.scratch_bytes(rows)} bytes a worker, whatever Tk is",
    )
    return Plan(target, shape, rows, items, workers, batch, reasons)


def _rows(problem: Problem) -> int:
    """Rows a work item: what br asks for, or as many as repay packing and fit the cache; no more than there are."""
    row_floats = problem.D + 2 * problem.Dv
    wanted = problem.br * problem.group if problem.br else min(ROWS, max(LANES, ROW_FLOATS // row_floats))
    if wanted > LANES:
        wanted = up_to(LANES, wanted)
    return max(1, min(wanted, problem.Tq * problem.group))
