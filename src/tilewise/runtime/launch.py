"""Run a plan: the tables for the kernel, scratch from the arena, workers that claim work items."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import SIZE, Array, F32Array, I64Array, float32_bits
from tilewise.config import current
from tilewise.errors import ArenaExhausted, KernelError
from tilewise.kernels.hooks import MAX_TABLES
from tilewise.kernels.tables import CALL, CALL_INDEX, SEQUENCE, SEQUENCE_INDEX
from tilewise.plan import Plan
from tilewise.problem import Operands, Problem, reach
from tilewise.runtime.arena import Arena, aligned
from tilewise.runtime.pool import Pool
from tilewise.simd.builder import Kernel
from tilewise.simd.jit import Entry, executable

# Where an address in the tables starts from: nothing, the tables themselves, or an array of the call.
EXTRA = ("kinds", "tiles", *(f"table{n}" for n in range(MAX_TABLES)))  # arrays that belong to a prepared call
BASES = ("none", "tables", "scratch", "q", "k", "v", "o", "lse", "sinks", "blocks", "slopes", "bias", "mask", *EXTRA)
_MOST_BYTES = 1 << 62  # what 64-bit tables can still tell a kernel
ONE_PAGE = 1 << 60  # the page size of keys that lie one after the other
_DATA = object.__basicsize__  # where an ndarray holds the address of its data
_pointer_at = ctypes.c_ssize_t.from_address
_COUNTER, _ABORT = CALL_INDEX["counter"], CALL_INDEX["abort"]
_EXTENTS = [index for name, index in CALL_INDEX.items() if name.endswith(("_lo", "_hi"))]
_OF_PART = tuple(SEQUENCE_INDEX[name] for name in ("keys", "first_key", "q_offset", "first_column", "k", "v"))
_FEW = 24  # cells that are filled in sooner one by one than by NumPy
IDLE = 2  # tables and scratch that are kept for the next call; more were needed by several threads at once
_SMALL = 1 << 16  # bytes of scratch that are kept


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything about a call but its addresses. Cell i of its tables is offsets[i] + the address of BASES[base[i]]."""

    problem: Problem
    plan: Plan
    entry: Entry
    offsets: I64Array
    base: NDArray[np.intp]
    extra: dict[str, NDArray[Any]]  # the arrays of EXTRA that there are
    checked: bool  # bounds are checked and scratch is poisoned
    bounded: bool  # extents are read: by these checks, or by the interpreter
    idle: list[Table] = field(default_factory=list)


def prepare(problem: Problem, plan: Plan, extra: dict[str, NDArray[Any]] | None = None) -> Prepared:
    """Compile (or find) the kernel, and lay out the call's table and the descriptors of its sequences, in one array."""
    extra, knobs = extra or {}, current()
    if plan.scratch_bytes > _MOST_BYTES:
        raise ArenaExhausted(f"arena: requested {plan.scratch_bytes} bytes, more than any system gives")
    call = np.zeros(len(CALL), np.int64)
    call_base = np.zeros(len(CALL), np.intp)

    def put(name: str, value: int, base: str = "none") -> None:
        call[CALL_INDEX[name]], call_base[CALL_INDEX[name]] = value, BASES.index(base)

    put("sequences", call.nbytes, "tables")
    put("scratch", 0, "scratch")
    left, right = problem.bounds
    for name, value in (
        ("items", plan.items), ("batch", plan.batch), ("scratch_bytes", plan.worker_bytes), ("rows", plan.rows),
        ("units", plan.units), ("slots", plan.workers),
        ("group", problem.group), ("left", left), ("right", right), ("span", problem.span),
        ("scale", float32_bits(problem.scale)), ("page_size", problem.page_size or ONE_PAGE),
    ):  # fmt: skip
        put(name, value)
    for name, view in problem.views.items():
        put(name + "_lo", view.lo, name)
        put(name + "_hi", view.hi, name)
        if name in ("sinks", "slopes", "bias", "mask"):
            put(name, 0, name)
        if name in ("slopes", "bias", "mask"):
            put(name + "_batch", view.page)
        if name not in ("sinks", "slopes"):
            put(name + "_row", view.row)
        if name != "sinks":
            put(name + "_head", view.head)
        if name in "kv":
            put(name + "_page", view.page)
    if problem.softcap is not None:
        put("softcap", float32_bits(problem.softcap))
        put("inverse_softcap", float32_bits(1 / problem.softcap))
    for name, x in extra.items():
        put(name, 0, name)
        put(name + "_hi", x.nbytes, name)
    if "kinds" in extra:  # [sequence, head, panel, tile], one for all sequences or heads where it has size 1
        several, heads, panels, tiles = extra["kinds"].shape
        put("kinds_panel", tiles)
        put("panels_head", panels if heads > 1 else 0)
        put("panels_batch", heads * panels if several > 1 else 0)
    blocks, one = ("blocks", problem.blocks_bytes) if problem.page_size else ("tables", call.nbytes)
    put("blocks_lo", 0, blocks)
    put("blocks_hi", one, blocks)
    sequences, sequence_base = _sequences(problem, plan)
    put("progress", call.nbytes + sequences.nbytes, "tables")
    progress = np.zeros(plan.workers, np.int64)
    return Prepared(
        problem, plan, executable(plan.kernel), np.concatenate([call, sequences.ravel(), progress]),
        np.concatenate([call_base, sequence_base.ravel(), progress.astype(np.intp)]), extra, knobs.check >= 2,
        knobs.check >= 2 or knobs.interpret,
    )  # fmt: skip


def _sequences(problem: Problem, plan: Plan) -> tuple[I64Array, NDArray[np.intp]]:
    """A descriptor a sequence, and a last one that only says where the work items end."""
    table = np.zeros((problem.B + 1, len(SEQUENCE)), np.int64)
    base = np.zeros_like(table, np.intp)
    columns = {
        "rows": problem.rows * problem.group, "first_key": problem.k_offset, "keys": problem.kv_len,
        "q_offset": problem.q_offset, "index": problem.index, "first_row": problem.first_row,
        "first_column": problem.first_column,
    }  # fmt: skip
    for name in problem.views.keys() & {"q", "k", "v", "o", "lse"}:
        columns[name] = getattr(problem, name + "_base")
        base[:-1, SEQUENCE_INDEX[name]] = BASES.index(name)
    if problem.blocks_base is None:  # one page, whose number is a cell of the call's table
        columns["blocks"] = np.full(problem.B, 8 * CALL_INDEX["first_page"], np.int64)
    else:
        columns["blocks"] = problem.blocks_base
    base[:-1, SEQUENCE_INDEX["blocks"]] = BASES.index("tables" if problem.blocks_base is None else "blocks")
    for name, column in columns.items():
        table[:-1, SEQUENCE_INDEX[name]] = column[plan.order]
    table[:, SEQUENCE_INDEX["first_item"]] = plan.first_item
    return table, base


class Part(NamedTuple):
    """The keys of a sequence, and the position of its first row."""

    sequence: int  # of k and v
    start: int  # of its keys, among those of the sequence
    keys: int
    k_offset: int
    q_offset: int


class Lies(NamedTuple):
    """How keys, or values, lie: strides in bytes, and the bytes [lo, hi) around the first of all."""

    sequence: int
    head: int
    row: int
    lo: int
    hi: int


class Step(NamedTuple):
    """What may differ between calls that are prepared for as one: the steps of a loop that decodes."""

    parts: Sequence[Part]  # of each sequence of the problem
    k: Lies
    v: Lies


def lies(shape: Sequence[int], strides: Sequence[int], size: int) -> Lies:
    """Of an array [B, Hkv, Tk, D] with strides in bytes and elements of so many bytes."""
    sequence, head, row, _ = strides
    return Lies(sequence, head, row, *reach(shape, strides, size))


class Table:
    """The table of a prepared call, in memory of its own: filled with the addresses of one run after another."""

    __slots__ = ("address", "call", "cells", "fills", "many", "places", "step", "tables")

    def __init__(self, call: Prepared) -> None:
        few = len(call.base) if call.problem.shorter else _FEW
        self.step: Step | None = None
        self.call, self.tables = call, np.empty_like(call.offsets)
        self.address = address_of(self.tables)
        self.cells = memoryview(cast(Any, self.tables))
        bases = np.zeros(len(BASES), np.int64)
        bases[BASES.index("tables")] = self.address
        for name, x in call.extra.items():
            bases[BASES.index(name)] = address_of(x)
        np.add(call.offsets, bases[call.base], out=self.tables)
        changes = (call.base >= BASES.index("scratch")) & (call.base <= BASES.index("mask"))
        if not call.bounded:
            changes[_EXTENTS] = False
        changes[_COUNTER] = True
        if call.plan.workers > 1:  # one waits for nobody
            changes[_ABORT] = changes[-call.plan.workers :] = True
        cells = np.flatnonzero(changes)
        self.many = cells, call.offsets[cells], call.base[cells]
        self.fills = list(zip(*(x.tolist() for x in self.many), strict=True)) if len(cells) <= few else []
        self.places = {cell: n for n, (cell, _, _) in enumerate(self.fills)}

    def follow(self, step: Step) -> None:
        """Become the table of another step: other keys, which lie otherwise."""
        cells, fills, places = self.cells, self.fills, self.places

        def put(cell: int, value: int) -> None:
            if cell in places:
                fills[places[cell]] = (cell, value, fills[places[cell]][2])
            else:
                cells[cell] = value

        problem = self.call.problem
        for name, view, lies in (("k", problem.k_view, step.k), ("v", problem.v_view, step.v)):
            cells[CALL_INDEX[name + "_head"]] = lies.head // SIZE[view.type]
            if self.call.bounded:
                put(CALL_INDEX[name + "_lo"], lies.lo)
                put(CALL_INDEX[name + "_hi"], lies.hi)
        for n, index in enumerate(self.call.plan.order.tolist()):
            part = step.parts[index]
            k, v = (part.sequence * lies.sequence + part.start * lies.row for lies in (step.k, step.v))
            row = len(CALL) + n * len(SEQUENCE)
            of_part = part.keys, part.k_offset, part.q_offset, part.start, k, v
            for column, value in zip(_OF_PART, of_part, strict=True):
                put(row + column, value)
        self.step = step

    def run(self, addresses: Sequence[int], pool: Pool, step: Step | None = None) -> None:
        """Compute, given an address for each of BASES (0 for those of the call itself and those that there are not),
        and which step it is where the call was prepared for several."""
        cells, call = self.cells, self.call
        if step is not None and step is not self.step:
            self.follow(step)
        for cell, offset, base in self.fills:
            cells[cell] = offset + addresses[base]
        if not self.fills:
            which, offsets, bases = self.many
            self.tables[which] = offsets + np.array(addresses, np.int64)[bases]
        if call.plan.workers > 1:
            self._run_workers(pool)
        else:
            self._work(0)

    def _work(self, worker: int) -> None:
        """Until no item is left: a run of the kernel ends after `batch` items, to let signals in."""
        call, cells, items = self.call, self.cells, self.call.plan.items
        while cells[_COUNTER] < items:
            if fault := call.entry(self.address, worker):
                raise KernelError(f"{call.plan.shape.name}: access out of bounds at {fault:#x}")

    def _run_workers(self, pool: Pool) -> None:
        call, cells, items = self.call, self.cells, self.call.plan.items
        if not call.checked:
            while pool.run_native(call.plan.workers, call.entry, self.address):
                if cells[_COUNTER] >= items:
                    return

        def work(worker: int) -> None:
            try:
                self._work(worker)
            except BaseException:
                cells[_ABORT] = 1  # those that wait for this worker's span must not wait for ever
                raise

        def cancel() -> None:
            cells[_COUNTER] = items

        pool.run(call.plan.workers, work, cancel)


def launch(
    calls: Sequence[Prepared], operands: Operands, arena: Arena | None, pool: Pool, step: Step | None = None
) -> tuple[Array, F32Array | None]:
    """Compute (o, lse), each call its sequences; lse is None where it was not asked for. `step`: see `Table.run`.

    The arena is rewound, also when something fails.
    """
    problem, out, lse = calls[0].problem, operands.out, operands.lse
    if out is None:
        out = np.empty(problem.out_shape, problem.out_dtype)
    if lse is None and problem.return_lse:
        lse = np.empty(problem.lse_shape, np.float32)
    q, k, v, sinks, _, _, blocks, slopes, bias, mask = operands
    addresses = [*map(address_of, (q, k, v, out, lse, sinks, blocks, slopes, bias, mask))]
    run_calls(calls, max(call.plan.scratch_bytes for call in calls), addresses, arena, pool, step)
    return out, lse


def run_calls(
    calls: Sequence[Prepared], scratch_bytes: int, addresses: Sequence[int], arena: Arena | None, pool: Pool,
    step: Step | None,
) -> None:  # fmt: skip
    """With scratch from the arena, guarded where that is checked; or kept, if it is small; or new."""
    if arena is not None or calls[0].checked:
        arena = arena or Arena()
        mark = arena.mark()
        try:
            _run(calls, arena.alloc(scratch_bytes), addresses, pool, step)
        finally:
            arena.rewind(mark)
    elif scratch_bytes > _SMALL:
        _run(calls, aligned(scratch_bytes), addresses, pool, step)
    else:
        scratch = taken(_scratch, aligned, _SMALL)
        _run(calls, scratch, addresses, pool, step)
        if len(_scratch) < IDLE:
            _scratch.append(scratch)


def _run(
    calls: Sequence[Prepared], scratch: NDArray[np.uint8], addresses: Sequence[int], pool: Pool, step: Step | None
) -> None:
    """Given the addresses of the arrays of a call, in the order of BASES."""
    bases = [0, 0, address_of(scratch), *addresses]
    for call in calls:
        if call.plan.items:
            table = taken(call.idle, Table, call)
            table.run(bases, pool, step)
            if len(call.idle) < IDLE:
                call.idle.append(table)


_scratch: list[NDArray[np.uint8]] = []  # that no call uses
Taken = TypeVar("Taken")


def taken(idle: list[Taken], make: Callable[..., Taken], *arguments: Any) -> Taken:
    """One that is idle, or a new one: two threads never take the same."""
    try:
        return idle.pop()
    except IndexError:
        return make(*arguments)


def run_once(
    kernel: Kernel, fields: Sequence[str], numbers: dict[str, int], arrays: Mapping[str, NDArray[Any] | None]
) -> None:
    """Run a kernel without work items: its table has the numbers, and the address (and end, NAME_hi) of each array."""
    table = dict.fromkeys(fields, 0) | numbers
    for name, x in arrays.items():
        if x is not None:
            table[name] = address_of(x)
            if name + "_hi" in table:
                table[name + "_hi"] = table[name] + x.nbytes
    cells = np.array(list(table.values()), np.int64)
    if fault := executable(kernel)(address_of(cells), 0):
        raise KernelError(f"{kernel.name}: access out of bounds at {fault:#x}")


def address_of(x: NDArray[Any] | None) -> int:
    """The address of an array's first element; 0 for None.

    NumPy's own ways (`ctypes.data`, `__array_interface__`) build an object for it and take longer than a small kernel.
    The pointer is the first field of an array in NumPy's published binary interface.
    """
    return 0 if x is None else _pointer_at(id(x) + _DATA).value
