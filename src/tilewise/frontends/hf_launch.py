"""A layer's attention: blocks of rows as calls of the core, with as little Python around them as there can be.

Between two layers of a model the processor's caches are full of its weights, and a line of Python costs several times
what it costs in a loop. So whatever layers share is made once: the tables of a call for all layers of a forward pass
whose arrays lie alike, the plan of a decode step for as many steps as it is good for, tables and scratch in memory that
is used again. What is left for a layer is to look up its layout and to fill in four addresses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from torch.autograd import forward_ad

from tilewise.arguments import Array, F32Array
from tilewise.config import current
from tilewise.errors import KernelError
from tilewise.frontends.hf_ranges import Block, Calls
from tilewise.frontends.tensors import array, torch, workers
from tilewise.kernels.tables import CALL, CALL_INDEX, SEQUENCE, SEQUENCE_INDEX, up_to
from tilewise.plan import by_rows, make_plan
from tilewise.problem import Operands, Problem, make_problem
from tilewise.runtime.arena import aligned
from tilewise.runtime.launch import BASES, Prepared, address_of, launch, prepare, run_workers
from tilewise.runtime.pool import Pool, pool_for
from tilewise.simd.target import current_target

_REMEMBERED = 16  # layouts of layers that one mask serves, and plans of decode steps
_STEPS = 64  # keys: the plan of a decode step is made for the next multiple, and good for the steps up to it
_IDLE = 2  # workspaces that calls keep for their next layer; more were needed by several threads at once
_FILLED = ("q", "k", "v", "o", "sinks", "bias", "mask")  # of BASES: what a layer fills in
_COUNTER = CALL_INDEX["counter"]


class Layer(NamedTuple):
    """What a layer asks for: q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv], any strides; the numbers."""

    q: Any
    k: Any
    v: Any
    scale: float | None = None
    softcap: float | None = None
    sinks: F32Array | None = None  # [H]
    bias: Array | None = None  # broadcastable to [B, H, Tq, Tk]


def attend(calls: Calls, layer: Layer) -> Any:
    """o [B, Tq, H, Dv], new and contiguous; rows that see no key are 0."""
    q, k, v, scale, softcap, sinks, bias = layer
    if not (_readable(q) and _readable(k) and _readable(v)) or forward_ad._current_level >= 0:
        q, k, v = _detached("query", q), _detached("key", k), _detached("value", v)
    pool, knobs = calls.pool, current()
    if pool is None or calls.knobs is not knobs:
        pool = pool_for(workers(None))
        if calls.of_one_pass:
            calls.pool, calls.knobs = pool, knobs
    q_shape, v_shape = q.shape, v.shape
    key: tuple[Any, ...] = (
        q_shape, q.stride(), k.shape, k.stride(), v_shape, v.stride(), q.dtype, k.dtype, v.dtype, scale, softcap,
        pool.threads, knobs.interpret, knobs.target, knobs.check,
    )  # fmt: skip
    if sinks is not None or bias is not None:
        key += tuple(None if x is None else (x.shape, x.strides, x.dtype) for x in (sinks, bias))
    new = torch.zeros if calls.blind else torch.empty
    out = new((q_shape[0], q_shape[2], q_shape[1], v_shape[3]), dtype=q.dtype)
    ready = calls.ready.get(key)
    if ready is None:
        if len(calls.ready) >= _REMEMBERED:
            calls.ready.clear()
        ready = calls.ready[key] = _ready(calls, Layer(q, k, v, *layer[3:]), out, pool.threads, key)
    if knobs.debug or knobs.check >= 2:
        _launch_checked(ready, _operands(calls, Layer(q, k, v, *layer[3:]), out), pool)
        return out
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    if ready.further:
        ready.run((*addresses, *map(address_of, (sinks, bias, calls.mask)), 0), pool)
    else:
        ready.run((*addresses, 0, 0, 0, 0), pool)
    return out


def _readable(x: Any) -> bool:
    """Whether the memory of a tensor is what it means. That of a sparse one has no strides, which is seen later."""
    return type(x) is torch.Tensor and x.is_cpu and not x.requires_grad and not x.is_neg()


def _detached(name: str, x: Any) -> Any:
    """The tensor without its gradient; raises what `tensors.array` raises where its memory is not what it means."""
    array(name, x)
    return x.detach()


def _operands(calls: Calls, layer: Layer, out: Any) -> Operands:
    q, k, v = (array(name, x) for name, x in (("query", layer.q), ("key", layer.k), ("value", layer.v)))
    o = array("out", out).transpose(0, 2, 1, 3)
    return Operands(q, k, v, layer.sinks, o, bias=layer.bias, mask=calls.mask)


class _Table:
    """The table of a prepared call, in memory of its own, and which of its cells a layer fills in."""

    __slots__ = ("address", "call", "cells", "entry", "fills", "items", "tables", "workers")

    def __init__(self, call: Prepared, scratch: int) -> None:
        self.call, self.entry, self.items, self.workers = call, call.entry, call.plan.items, call.plan.workers
        self.tables = np.empty_like(call.offsets)
        self.address = address_of(self.tables)
        self.cells = memoryview(cast(Any, self.tables))
        bases = np.zeros(len(BASES), np.int64)
        bases[BASES.index("tables")], bases[BASES.index("scratch")] = self.address, scratch
        np.add(call.offsets, bases[call.base], out=self.tables)
        which = {BASES.index(name): n for n, name in enumerate(_FILLED)}
        written = {_COUNTER, CALL_INDEX["abort"], *range(len(self.tables) - self.workers, len(self.tables))}
        base, offsets = call.base.tolist(), call.offsets.tolist()
        self.fills = [
            (cell, offsets[cell], which.get(base[cell], len(_FILLED)))
            for cell in range(len(base))
            if base[cell] in which or cell in written
        ]

    def run(self, addresses: tuple[int, ...], pool: Pool) -> None:
        cells = self.cells
        for cell, offset, which in self.fills:
            cells[cell] = offset + addresses[which]
        if self.workers > 1:
            run_workers(self.call, self.tables, pool)
            return
        while cells[_COUNTER] < self.items:  # a run of the kernel ends after some items, to let signals in
            if fault := self.entry(self.address, 0):
                raise KernelError(f"{self.call.plan.shape.name}: access out of bounds at {fault:#x}")


class Ready:
    """Prepared calls, with the memory for their tables and scratch kept from one layer to the next.

    Two threads never share it: a layer takes a workspace, or makes one, and puts it back.
    """

    def __init__(self, calls: list[Prepared]) -> None:
        self.calls = [call for call in calls if call.plan.items]
        self.further = any((call.base >= BASES.index("sinks")).any() for call in calls)
        self.idle: list[tuple[list[_Table], Any]] = []

    def run(self, addresses: tuple[int, ...], pool: Pool) -> None:
        """Compute: addresses of _FILLED, 0 where there is none, and 0."""
        try:
            space = self.idle.pop()
        except IndexError:
            scratch = aligned(max((call.plan.scratch_bytes for call in self.calls), default=0))
            space = [_Table(call, address_of(scratch)) for call in self.calls], scratch
        for table in space[0]:
            table.run(addresses, pool)
        if len(self.idle) < _IDLE:
            self.idle.append(space)


def _launch_checked(ready: Ready, operands: Operands, pool: Pool) -> None:
    """The core's own way, with guarded scratch and its tracing."""
    run = launch
    if current().debug:
        from tilewise.runtime.trace import launch as run
    if ready.calls:
        run(ready.calls, operands, None, pool)


_steps: dict[Any, Ready] = {}  # decode steps, by what their plans depend on


def _ready(calls: Calls, layer: Layer, out: Any, threads: int, key: tuple[Any, ...]) -> Ready:
    knobs = current()
    options = {"scale": layer.scale, "softcap": layer.softcap}
    dense = calls.mask is not None or layer.bias is not None
    whole = layer.k.numel() and layer.k.shape[2] == layer.v.shape[2]  # else it is for make_problem to refuse
    if not calls.step or dense or knobs.debug or knobs.check >= 2 or not whole:
        made, operands = [], _operands(calls, layer, out)
        for (causal, window), parts in calls.parts.items():
            problem = _problem(operands, parts, causal=causal, window=window, **options)
            made += [prepare(part, make_plan(part, current_target(), threads)) for part in by_rows(problem)]
        return Ready(made)
    (parts,) = calls.parts.values()
    longest = max(block.keys for block in parts)
    top = up_to(_STEPS, longest)
    k_shape, k_stride, v_shape, v_stride = ((*x[:2], x[3]) for x in key[2:6])
    # strides of sequences and heads, and the number of keys, may change from step to step
    step = (*key[:2], k_shape, k_stride[2:], v_shape, v_stride[2:], *key[6:], top)
    template = _steps.get(step)
    if template is None:
        problem = _problem(_operands(calls, layer, out), parts, **options)
        more = top - longest
        problem = replace(problem, kv_len=problem.kv_len + more, q_offset=problem.q_offset + more)
        if len(_steps) >= _REMEMBERED:
            _steps.clear()
        template = _steps[step] = Ready([prepare(problem, make_plan(problem, current_target(), threads))])
    return Ready([_later(call, parts, layer.k, layer.v) for call in template.calls])


def _later(call: Prepared, parts: list[Block], k: Any, v: Any) -> Prepared:
    """A decode step's call with other keys: the cells of its tables that tell how many there are and how they lie."""
    offsets = call.offsets.copy()
    rows = offsets[len(CALL) : len(CALL) + len(parts) * len(SEQUENCE)].reshape(len(parts), len(SEQUENCE))
    columns: Any = np.array([part[:7] for part in parts], np.int64)[call.plan.order].T
    sequence, _, _, start, keys, k_offset, q_offset = columns
    for name, x in (("k", k), ("v", v)):
        batch, head, row, _ = x.stride()
        reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        for cell, value in (("_row", row), ("_head", head), ("_hi", (1 + reach) * x.itemsize)):
            offsets[CALL_INDEX[name + cell]] = value
        rows[:, SEQUENCE_INDEX[name]] = (sequence * batch + start * row) * x.itemsize
    for name, column in (("keys", keys), ("first_key", k_offset), ("q_offset", q_offset), ("first_column", start)):
        rows[:, SEQUENCE_INDEX[name]] = column
    return replace(call, offsets=offsets)


def _problem(operands: Operands, parts: list[Block], **options: Any) -> Problem:
    """The checked problem of blocks: whole sequences as they are, others cut from these."""
    q, k, v, sinks, out, *_ = operands
    options |= {"sinks": sinks, "out": out, "bias": operands.bias, "mask": operands.mask}
    columns: Any = np.array([part[:7] for part in parts], np.int64).T
    sequence, row, rows, start, keys, k_offset, q_offset = columns
    if (rows == q.shape[2]).all() and np.array_equal(sequence, np.arange(len(q))):
        options |= {"q_offset": q_offset, "kv_start": start, "kv_len": keys, "k_offset": k_offset}
        return make_problem(q, k, v, **options)[0]
    whole = make_problem(q, k, v, q_offset=0, **options)[0].of(sequence)
    return replace(
        whole, q_base=whole.q_base + row * q.strides[2], o_base=whole.o_base + row * np.asarray(out).strides[2],
        k_base=whole.k_base + start * k.strides[2], v_base=whole.v_base + start * v.strides[2],
        first_row=whole.first_row + row, first_column=whole.first_column + start,
        rows=rows, k_offset=k_offset, q_offset=q_offset, kv_len=keys,
    )  # fmt: skip
