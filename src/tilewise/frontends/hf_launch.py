"""A layer's attention: blocks of rows as calls of the core, with as little Python around them as there can be.

Between two layers of a model the processor's caches are full of its weights, and a line of Python costs several times
what it costs in a loop. So whatever layers share is made once: the tables of a call for all layers of a forward pass
whose arrays lie alike, the plan of a decode step for as many steps as it is good for, tables and scratch in memory that
is used again. What is left for a layer is to look up its layout and to fill in four addresses.
"""

from __future__ import annotations

import functools
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch.autograd import forward_ad

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # every layer is looked up, then
    TensorGuards = None

from tilewise.arguments import Array, F32Array
from tilewise.config import Config, current
from tilewise.errors import ShapeError
from tilewise.frontends.hf_ranges import Block, Calls
from tilewise.frontends.tensors import array, torch, workers
from tilewise.kernels.tables import up_to
from tilewise.plan import by_rows, make_plan
from tilewise.problem import Operands, Problem, make_problem
from tilewise.runtime.arena import aligned
from tilewise.runtime.launch import (
    BASES,
    IDLE,
    Lies,
    Part,
    Prepared,
    Step,
    Table,
    address_of,
    launch,
    lies,
    prepare,
    taken,
)  # fmt: skip
from tilewise.runtime.pool import Pool, pool_for
from tilewise.simd.target import current_target

_REMEMBERED = 16  # layouts of layers that one mask serves, and plans of decode steps
_STEPS = 64  # keys: the plan of a decode step is made for the next multiple, and good for the steps up to it
_Tensor = torch.Tensor


def attend(
    calls: Calls, q: Any, k: Any, v: Any, scale: float | None = None, softcap: float | None = None,
    sinks: F32Array | None = None, bias: Array | None = None,
) -> Any:  # fmt: skip
    """o [B, Tq, H, Dv], new and contiguous; rows that see no key are 0.

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] of any strides, sinks [H], bias broadcastable to
    [B, H, Tq, Tk]. One sequence of queries may be that of all sequences.
    """
    last = calls.last
    if (
        last is not None and last.guard.check(q, k, v) and last.scale == scale and last.softcap == softcap
        and sinks is None and bias is None and forward_ad._current_level < 0
    ):  # fmt: skip
        made, ready, out = calls.made, last.ready, (q.new_zeros if calls.blind else q.new_empty)(last.shape)
    else:
        made, ready, q, k, v, out = _looked_up(calls, Layer(q, k, v, scale, softcap, sinks, bias))
    if made.checked:
        _launch_checked(ready, _operands(calls, Layer(q, k, v, scale, softcap, sinks, bias), out), made.pool)
    elif ready.further:
        further = map(address_of, (sinks, bias, calls.mask))
        ready.run(made.pool, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), *further)
    else:
        ready.run(made.pool, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
    return out


def _looked_up(calls: Calls, layer: Layer) -> tuple[_Made, Ready, Any, Any, Any, Any]:
    """What is ready for a layer of any layout; the tensors to compute with, and a new one for the result."""
    q, k, v, scale, softcap, sinks, bias = layer
    if (
        not (type(q) is type(k) is type(v) is _Tensor and q.is_cpu and k.is_cpu and v.is_cpu)
        or q.is_neg() or k.is_neg() or v.is_neg() or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):  # fmt: skip
        q, k, v = _detached("query", q), _detached("key", k), _detached("value", v)
    if q.shape[0] != k.shape[0] and q.shape[0] == 1:  # learned queries
        q = q.expand(k.shape[0], -1, -1, -1)
    made = calls.made
    if made is None or not calls.of_one_pass:
        knobs, pool = current(), pool_for(workers(None))
        if made is None or made.knobs is not knobs or made.pool is not pool:
            made = calls.made = _Made(knobs, pool)
    key: tuple[Any, ...] = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, scale, softcap,
        *(None if x is None else (x.shape, x.strides, x.dtype) for x in (sinks, bias)),
    )  # fmt: skip
    shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
    out = (q.new_zeros if calls.blind else q.new_empty)(shape)
    ready = made.ready.get(key)
    if ready is None:
        if len(made.ready) >= _REMEMBERED:
            made.ready.clear()
        ready = made.ready[key] = _ready(calls, layer._replace(q=q, k=k, v=v), out, made.pool.threads, key)
    plain = sinks is None and bias is None and q is layer.q and k is layer.k and v is layer.v
    if plain and calls.of_one_pass and TensorGuards is not None:
        guard = TensorGuards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        calls.last = _Last(guard, scale, softcap, shape, ready)
    return made, ready, q, k, v, out


class _Last(NamedTuple):
    """What the layer before had. One call of the guard, which is one of those that compiled models of PyTorch have,
    tells whether other tensors have the same types, dtypes, devices, flags, shapes and strides."""

    guard: Any
    scale: float | None
    softcap: float | None
    shape: tuple[int, ...]  # of the result
    ready: Ready


class _Made:
    """What layers share: knobs, a pool, and what is ready for each layout of their arrays."""

    __slots__ = ("checked", "knobs", "pool", "ready")

    def __init__(self, knobs: Config, pool: Pool) -> None:
        self.knobs, self.pool = knobs, pool
        self.checked = knobs.debug or knobs.check >= 2
        self.ready: dict[Any, Ready] = {}


class Layer(NamedTuple):
    """The arguments of `attend`."""

    q: Any
    k: Any
    v: Any
    scale: float | None
    softcap: float | None
    sinks: F32Array | None
    bias: Array | None


def _detached(name: str, x: Any) -> Any:
    """The tensor without its gradient; raises what `tensors.array` raises where its memory is not what it means."""
    array(name, x)
    return x.detach()


def _operands(calls: Calls, layer: Layer, out: Any) -> Operands:
    q, k, v = (array(name, x) for name, x in (("query", layer.q), ("key", layer.k), ("value", layer.v)))
    o = array("out", out).transpose(0, 2, 1, 3)
    return Operands(q, k, v, layer.sinks, o, bias=layer.bias, mask=calls.mask)


class _Workspace:
    """Tables and scratch of some calls."""

    __slots__ = ("address", "scratch", "tables")

    def __init__(self, calls: list[Prepared]) -> None:
        self.scratch = aligned(max((call.plan.scratch_bytes for call in calls), default=0))
        self.address = address_of(self.scratch)
        self.tables = [Table(call) for call in calls]


class Ready:
    """Prepared calls, with workspaces that are kept from one layer to the next, and between decode steps of one plan.

    Two threads never share one: a layer takes a workspace, or makes one, and puts it back.
    """

    def __init__(self, calls: list[Prepared]) -> None:
        self.calls = [call for call in calls if call.plan.items]
        self.further = any((call.base >= BASES.index("sinks")).any() for call in calls)
        self.step: Step | None = None
        self.idle: list[_Workspace] = []
        self.workspace = functools.partial(_Workspace, self.calls)

    def of_step(self, step: Step) -> Ready:
        """The same calls for another step, with the same workspaces."""
        ready = copy(self)
        ready.step = step
        return ready

    def run(self, pool: Pool, q: int, k: int, v: int, o: int, sinks: int = 0, bias: int = 0, mask: int = 0) -> None:
        """Compute, given addresses; 0 where there is none."""
        space = taken(self.idle, self.workspace)
        addresses = 0, 0, space.address, q, k, v, o, 0, sinks, 0, 0, bias, mask
        for table in space.tables:
            table.run(addresses, pool, self.step)
        if len(self.idle) < IDLE:
            self.idle.append(space)


def _launch_checked(ready: Ready, operands: Operands, pool: Pool) -> None:
    """The core's own way, with guarded scratch and its tracing."""
    run: Any = launch
    if current().debug:
        from tilewise.runtime.trace import launch as run
    if ready.calls:
        run(ready.calls, operands, None, pool)


_steps: dict[Any, Ready] = {}  # decode steps, by what their plans depend on


def _ready(calls: Calls, layer: Layer, out: Any, threads: int, key: tuple[Any, ...]) -> Ready:
    q, k, v, scale, softcap, _, bias = layer
    shape = (q.shape[0], q.shape[2], k.shape[2])
    if calls.shape != shape:
        raise ShapeError(f"the mask is for [B, Tq, Tk] = {list(calls.shape)}, not for {list(shape)}")
    knobs, options = current(), {"scale": scale, "softcap": softcap}
    dense = calls.mask is not None or bias is not None
    whole = k.numel() and k.shape[2] == v.shape[2]  # else it is for make_problem to refuse
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
    step = (*key[:2], k_shape, k_stride[2:], v_shape, v_stride[2:], *key[6:], threads, knobs, top)
    template = _steps.get(step)
    if template is None:
        problem = _problem(_operands(calls, layer, out), parts, **options)
        more = top - longest
        problem = replace(problem, kv_len=problem.kv_len + more, q_offset=problem.q_offset + more, shorter=True)
        if len(_steps) >= _REMEMBERED:
            _steps.clear()
        template = _steps[step] = Ready([prepare(problem, make_plan(problem, current_target(), threads))])
    places = [Part(part.sequence, part.start, part.keys, part.k_offset, part.q_offset) for part in parts]
    return template.of_step(Step(places, _lies(k), _lies(v)))


def _lies(x: Any) -> Lies:
    return lies(x.shape, [stride * x.itemsize for stride in x.stride()], x.itemsize)


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
