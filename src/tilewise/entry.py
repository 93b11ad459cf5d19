"""What every entry point does: check (or remember), plan, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tilewise.arguments import MAX_POSITION, Array, float_type, is_aligned
from tilewise.blockmask import BlockMask, as_block_mask, check_positions
from tilewise.config import Config, current
from tilewise.errors import InvalidArgument
from tilewise.kernels.hooks import MAX_TABLES, Hooks, trace
from tilewise.plan import Plan, by_rows, make_plan
from tilewise.problem import Operands, Problem, check_operands, check_overlaps, make_problem
from tilewise.ragged import check_blocks
from tilewise.runtime.arena import Arena
from tilewise.runtime.launch import Part, Prepared, Step, launch, lies, prepare
from tilewise.runtime.pool import Pool, pool_for
from tilewise.runtime.short import Short, short_way
from tilewise.simd.target import current_target

_REMEMBERED = 256  # layouts; a decode loop has a new one each step, so they are forgotten all at once
_REMEMBERED_BATCH = 64  # sequences: what is remembered grows with them
_REMEMBERED_BYTES = 4096  # of an array of lengths or offsets, which is compared by its contents
_NUMBERS = {int, float, bool, type(None), np.float32, np.float64, np.int32, np.int64}
VARIANT_ARRAYS = ("alibi_slopes", "bias", "mask")
_OF_LENGTHS = ("kv_start", "k_offset", *VARIANT_ARRAYS)  # what is checked against the number of keys


class _Known(NamedTuple):
    """What is remembered of a layout."""

    problem: Problem
    calls: list[Prepared]
    short: Short | None
    step: Step | None  # where it is prepared for several


_memory: dict[tuple[Any, ...], _Known] = {}
Maker = Callable[..., tuple[Problem, Operands]]


def run(
    make: Maker, arguments: dict[str, Any], q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any,
    arena: Arena | None, pool: Pool | int | None, score: Any = None, keep: Any = None,
) -> Any:  # fmt: skip
    """o, or (o, lse) where it is wanted. `make` checks `arguments`, all but those named here, and knows their meaning.

    They are a dict: for keywords that a function does not name, Python makes one in 3 microseconds.
    """
    workers = pool_for(pool)
    if arena is not None and not isinstance(arena, Arena):
        raise TypeError(f"arena must be a tilewise.Arena or None, got {type(arena).__name__}")
    key, knobs, arrays = None, current(), (q, k, v, sinks, out, lse)
    if score is None and keep is None:  # what a function captured may change between two calls
        key = _key(make, workers.threads, knobs, arrays, arguments)
    known = _memory.get(key) if key else None
    step, steps = None, None
    if known is not None:
        step = known.step
    elif key and make is make_problem and not (knobs.debug or knobs.interpret or knobs.check >= 2):
        step = _step(k, v, arguments)
        if step is not None:
            steps = _key_of_steps(workers.threads, knobs, arrays, arguments, step)
            alike = _memory.get(steps)
            if alike is not None:
                known = _remember(key, alike._replace(step=step))
    if known is not None and known.short is not None and not knobs.debug:
        result = known.short.run(q, k, v, out, lse, step, arena, workers)
        if result is not None:
            return result
    if known is not None and all(x is None or is_aligned(x) for x in arrays):
        problem, calls = known.problem, known.calls
        operands = Operands(q, k, v, sinks)
        if out is not None or lse is not None or problem.further_operands:
            operands = _operands(problem, operands, out, lse, arguments)
    else:
        hooks = score is not None or keep is not None
        problem, operands = make(q, k, v, sinks=sinks, out=out, lse=lse, hooks=hooks, **arguments)
        if step is not None:
            problem = _of_steps(problem, step)
        calls = _prepare(problem, workers.threads, score, keep)
        if key and problem.B <= _REMEMBERED_BATCH:
            known = _remember(key, _Known(problem, calls, short_way(problem, calls, operands), step))
            if steps:
                _remember(steps, known)
    if knobs.debug:
        from tilewise.runtime import trace

        o, logsumexp = trace.launch(calls, operands, arena, workers)
    else:
        o, logsumexp = launch(calls, operands, arena, workers, step)
    return o if logsumexp is None else (o, logsumexp)


def _remember(key: tuple[Any, ...], known: _Known) -> _Known:
    if len(_memory) >= _REMEMBERED:
        _memory.clear()
    _memory[key] = known
    return known


def plans(
    problem: Problem, threads: int, score: Any, keep: Any
) -> tuple[list[tuple[Problem, Plan]], BlockMask | None, dict[str, Array]]:
    """A plan for each class of sequences, the block mask, and the arrays that the hooks captured."""
    scores, blocks = None, None
    tables: list[Array] = []
    if score is not None or keep is not None or problem.slopes_view is not None:
        check_positions(problem)
    if score is not None:
        scores, tables = trace("score", score)
    if keep is not None:
        blocks = as_block_mask(keep)
        tables = [*tables, *blocks.arrays]
    if len(tables) > MAX_TABLES:
        raise InvalidArgument(f"score and keep capture {len(tables)} arrays, at most {MAX_TABLES} are possible")
    hooks = Hooks(scores, blocks.hook if blocks else None)
    parts = [(part, make_plan(part, current_target(), threads, hooks)) for part in by_rows(problem)]
    return parts, blocks, {f"table{n}": x for n, x in enumerate(tables)}


def _prepare(problem: Problem, threads: int, score: Any, keep: Any) -> list[Prepared]:
    """A call for each class of sequences, with the hooks and all that they captured."""
    parts, blocks, tables = plans(problem, threads, score, keep)
    return [prepare(part, plan, tables | (blocks.tables(part, plan.shape) if blocks else {})) for part, plan in parts]


def _operands(problem: Problem, operands: Operands, out: Any, lse: Any, arguments: dict[str, Any]) -> Operands:
    """The operands of a call of a known layout: all that is left to check is a matter of contents and addresses."""
    if out is not None or lse is not None:
        operands = check_operands(*operands[:4], out, lse, problem.out_shape, problem.lse_shape)
    slopes, bias, mask = (arguments[name] for name in VARIANT_ARRAYS)
    operands = operands._replace(slopes=slopes, bias=bias, mask=mask)
    check_overlaps(operands)
    if problem.page_size:
        blocks = check_blocks(arguments["block_table"], problem.kv_len, len(operands.k), problem.page_size)
        operands = operands._replace(blocks=blocks)
    return operands


def _key(
    make: Maker, threads: int, knobs: Config, arrays: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that a check and a plan depend on but the arrays' addresses, for arrays of NumPy's own and plain numbers;
    None for others."""
    parts: list[Any] = [make, threads]
    for x in arrays:
        if x is None:
            parts.append(None)
        elif type(x) is np.ndarray:
            parts += (x.shape, x.strides, x.dtype)
        else:
            return None
    values: Any = arguments.values()
    types = tuple(map(type, values))  # True and 1 are equal keys but not equally good arguments
    if not _NUMBERS.issuperset(types):
        values = [_lasting(name, x) for name, x in arguments.items()]
        if NotImplemented in values:
            return None
    return (*parts, *values, types, knobs.interpret, knobs.target, knobs.check, knobs.debug)


def _step(k: Any, v: Any, arguments: dict[str, Any]) -> Step | None:
    """What a call has of its own if it may be one of a loop that decodes: nothing that is checked depends on it."""
    if k is None or v is None or any(arguments[name] is not None for name in _OF_LENGTHS):
        return None
    if not k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or not k.size or len(k) > _REMEMBERED_BATCH:
        return None
    if any(float_type(x.dtype) is None or any(stride % x.itemsize for stride in x.strides) for x in (k, v)):
        return None
    keys, offset = arguments["kv_len"], arguments["q_offset"]
    if keys is None:
        keys = k.shape[2]
    if offset is None and arguments["causal"] is False and arguments["window"] is None:
        offset = 0
    if type(keys) is not int or not 0 < keys <= min(k.shape[2], MAX_POSITION):
        return None
    if type(offset) is not int or not 0 <= offset <= MAX_POSITION:
        return None
    parts = [Part(sequence, 0, keys, 0, offset) for sequence in range(len(k))]
    return Step(parts, *(lies(x.shape, x.strides, x.itemsize) for x in (k, v)))


def _key_of_steps(
    threads: int, knobs: Config, arrays: tuple[Any, ...], arguments: dict[str, Any], step: Step
) -> tuple[Any, ...]:  # fmt: skip
    """The key of all calls that differ in their step only, up to the same powers of two."""
    most = _most(step.parts[0].keys), _most(step.parts[0].q_offset)
    q, k, v, *others = arrays
    rows = k[0, 0, :1], v[0, 0, :1]
    arguments = arguments | {"kv_len": None, "q_offset": None if arguments["q_offset"] is None else most[1]}
    return k.shape[:2], most, _key(make_problem, threads, knobs, (q, *rows, *others), arguments)


def _of_steps(problem: Problem, step: Step) -> Problem:
    """The problem that stands for the same steps."""
    keys, q_offset = (np.full(problem.B, _most(x), np.int64) for x in (step.parts[0].keys, step.parts[0].q_offset))
    return replace(problem, kv_len=keys, q_offset=q_offset, shorter=True)


def _most(length: int) -> int:
    """The number of keys, or the position, up to which a call is prepared: a power of two."""
    return 1 << (length - 1).bit_length() if length else 0


def _lasting(name: str, x: Any) -> Any:
    """What of an argument a check and a plan depend on, as a part of a key; NotImplemented where it may change."""
    if type(x) in _NUMBERS:
        return x
    if type(x) is tuple and _NUMBERS.issuperset(map(type, x)):
        return x, tuple(map(type, x))
    if type(x) is np.ndarray:
        if name in VARIANT_ARRAYS:  # how it lies, whatever it holds
            return (x.shape, x.strides, x.dtype) if is_aligned(x) else NotImplemented
        if name == "block_table":  # whose contents are checked at every call
            return x.shape, x.dtype
        if x.nbytes <= _REMEMBERED_BYTES:
            return x.shape, x.dtype, x.tobytes()
    return NotImplemented
