"""What was chosen for a problem, and why. Nothing here moves a bit: Bc and span are the problem's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilewise.arguments import I64Array
from tilewise.kernels.forward import forward_kernel
from tilewise.kernels.hooks import NO_HOOKS, Hooks
from tilewise.kernels.tables import Shape, up_to
from tilewise.kernels.variants import Operand, Variant
from tilewise.problem import Problem
from tilewise.simd.builder import LANES, Kernel
from tilewise.simd.target import Target

PANELS = (1, 2, 4, 8, LANES)
ROWS = 512  # query rows a tile: packing K and V costs 1 / ROWS of the products
ROW_FLOATS = 3 << 16  # of q, a and a_total of a work item together: they stay in the second-level cache
FEW_ROWS = 8  # query rows of a KV head that are better served by the streaming kernel
SMALLEST_JOB = 2_000_000  # flops that repay the wake-up of another worker
SPLIT_BELOW = 4  # query tiles a thread: with fewer, tiles get smaller, and spans become work items of their own
SMALLEST_TILE = 64  # query rows: in smaller ones packing would cost too much
BATCH_FLOPS = 1_000_000_000  # between two looks at signals
LARGEST_ITEM = 20_000_000_000  # flops: a query tile of more is split, or a signal would have to wait for it


@dataclass(frozen=True, eq=False)
class Plan:
    """How a problem is run. A query tile is `rows` query rows of a KV head, flattened as position * group + head."""

    target: Target
    shape: Shape
    rows: int
    units: int  # work items a query tile: 1, or as many as it may see spans
    order: I64Array  # the sequences, those with the most work first, so that workers end together
    first_item: I64Array  # [B + 1]: the work items before each sequence's in that order, and all of them
    workers: int
    threads: int
    batch: int  # work items between two looks at signals

    @cached_property
    def items(self) -> int:
        return int(self.first_item[-1])

    @cached_property
    def kernel(self) -> Kernel:
        return forward_kernel(self.shape)

    @cached_property
    def worker_bytes(self) -> int:
        """Scratch of one worker."""
        return self.shape.worker_bytes(self.rows)

    @cached_property
    def scratch_bytes(self) -> int:
        """What the call takes from the arena: a slice for each thread, also for one that a small call does not wake."""
        return self.threads * self.worker_bytes

    def explain(self) -> str:
        """The choices and their reasons, a line each."""
        t, s = self.target, self.shape
        return "\n".join(
            (
                f"target {t.name}: {t.registers} registers of {t.vector_bits} bits, a register tile of {s.mr} x {s.nr}",
                f"rows {self.rows} a query tile: packing K and V costs 1 / rows of the products; all fit the cache",
                f"panel {s.panel} rows go through a tile of Bc {s.Bc} keys together",
                f"{self.items} work items, {self.units} a query tile"
                + (
                    f": fewer than {SPLIT_BELOW} tiles a thread or tiles too long, so each span is one"
                    * (self.units > 1)
                ),
                f"at least {SMALLEST_JOB} flops for each of {self.workers} workers "
                f"(of {self.threads} threads), {self.batch} items between two looks at signals",
                f"scratch {self.worker_bytes} bytes a worker, whatever Tk is",
            )
        )


def make_plan(problem: Problem, target: Target, threads: int, hooks: Hooks = NO_HOOKS) -> Plan:
    """Choose rows a work item, the panel, the register tile and the number of workers."""
    rows = _rows(problem, threads)
    views = problem.views
    types = (views["q"].type, views["k"].type, views["v"].type, views["o"].type)
    panel = next((p for p in PANELS if rows <= p), LANES)
    shape = Shape(
        problem.D,
        problem.Dv,
        problem.bc,
        panel,
        *target.register_tile(panel),
        types,
        problem.partial,
        _variant(problem, hooks),
    )
    pairs = problem.pairs()
    order = np.argsort(-pairs, kind="stable")
    tiles = -(-problem.rows * problem.group // rows)
    flops, all_tiles = problem.flops(pairs), int(tiles.sum()) * problem.Hkv
    few = threads > 1 and all_tiles < SPLIT_BELOW * threads
    units = _spans(problem, rows) if not problem.partial and (few or flops > LARGEST_ITEM * all_tiles) else 1
    first_item = np.zeros(problem.B + 1, np.int64)
    np.cumsum(tiles[order] * (problem.Hkv * units), out=first_item[1:])
    items = int(first_item[-1])
    workers = max(1, min(threads, items, 1 + flops // SMALLEST_JOB))
    batch = max(1, min(items, BATCH_FLOPS * items // max(1, flops)))
    return Plan(target, shape, rows, units, order, first_item, workers, threads, batch)


def _variant(problem: Problem, hooks: Hooks) -> Variant:
    """What the kernel must know of softcap, ALiBi, bias, mask and hooks while it is written."""
    bias, mask = (
        None if view is None else Operand(view.type, view.spread) for view in (problem.bias_view, problem.mask_view)
    )
    alibi = problem.slopes_view is not None
    return Variant(problem.softcap is not None, hooks.score, alibi, bias, mask, hooks.keep)


def by_rows(problem: Problem) -> list[Problem]:
    """The sequences of few query rows, and the others: they need different kernels. One problem where all are alike."""
    few = problem.rows * problem.group <= FEW_ROWS
    if few.all() or not few.any():
        return [problem]
    return [problem.of(~few), problem.of(few)]


def _rows(problem: Problem, threads: int) -> int:
    """Rows a work item: what br asks for, or as many as repay packing, fit the cache and leave work for all threads;
    no more than there are. The keys have no say, as scratch depends on it."""
    rows = problem.rows * problem.group
    row_floats = problem.D + 2 * problem.Dv
    wanted = problem.br * problem.group if problem.br else min(ROWS, max(LANES, ROW_FLOATS // row_floats))
    if threads > 1 and not problem.br:
        each = int(rows.sum()) * problem.Hkv // (SPLIT_BELOW * threads)
        wanted = min(wanted, max(SMALLEST_TILE, each))
    wanted = up_to(LANES, wanted) if wanted > LANES else next(p for p in PANELS if wanted <= p)  # in whole panels
    return max(1, min(wanted, int(rows.max(initial=0))))


def _spans(problem: Problem, rows: int) -> int:
    """How many spans the keys that a query tile sees may touch, at most."""
    left, right = problem.bounds
    first, end = problem.k_offset, problem.k_offset + problem.kv_len
    lo = first if problem.shorter else np.maximum(first, problem.q_offset - left)
    hi = np.minimum(end, problem.q_offset + problem.rows + right)
    of_sequence = np.where(lo < hi, (hi - 1) // problem.span - lo // problem.span + 1, 1).max(initial=1)
    keys = left + right + 1 + -(-rows // max(1, problem.group))
    return min(int(of_sequence), (keys + problem.span - 2) // problem.span + 1)
