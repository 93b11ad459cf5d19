"""The front door: check, plan, run."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.config import current
from tilewise.plan import make_plan
from tilewise.problem import Operands, make_problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.launch import Prepared, launch, prepare
from tilewise.runtime.pool import Pool, pool_for
from tilewise.simd.target import current_target

_REMEMBERED = 256  # prepared calls; a decode loop makes a new one each step, so they are forgotten all at once
_REMEMBERED_BATCH = 64  # sequences: what is remembered grows with them
_memory: dict[tuple[Any, ...], Prepared] = {}


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: int | None = None, scale: float | None = None,
    q_offset: Any = None, sinks: Any = None, return_lse: bool = False, kv_start: Any = None, kv_len: Any = None,
    k_offset: Any = None, out: Any = None, lse: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None,
) -> Any:  # fmt: skip
    """Exact attention, softmax(scale * Q K^T + mask) V, one tile of keys at a time.

    The method is FlashAttention (Dao et al., 2022 and 2023) with the online softmax of Milakov and Gimelshein (2018),
    in the fixed order of operations of recipe 1: a row's bits depend on its own query, the keys and values that it
    sees, its position, `bc` and `span`, and on nothing else.

    Parameters
    ----------
    q : float32 array [B, H, Tq, D]
        Query rows; row i of sequence b is at position q_offset[b] + i. Any strides, the last axis contiguous.
    k : float32 array [B, Hkv, Tk, D]
        Keys; query head h reads KV head h // (H // Hkv).
    v : float32 array [B, Hkv, Tk, Dv]
        Values. D and Dv from 1 to 1024.
    causal : bool
        A row at position p sees keys at positions <= p.
    window : int, optional
        A row sees its own position and the window - 1 before it. None, 0 or negative: no window.
    scale : float, optional
        Factor of the scores, rounded to float32; D ** -0.5 by default.
    q_offset : int or int array [B], optional
        Position of the first query row. None means 0, and is refused where positions matter (causal or window) and the
        number of keys is not Tq or k_offset is not 0.
    sinks : float32 array [H], optional
        A logit for each query head that joins the denominator (and lse) without a value.
    return_lse : bool
        Also return the log-sum-exp of every row.
    kv_start, kv_len, k_offset : int or int array [B], optional
        The keys of sequence b are k[b, :, kv_start : kv_start + kv_len], the first of them at position k_offset. What
        lies outside is never read. By default all keys, from position 0.
    out : float32 array [B, H, Tq, Dv], optional
        Where to write the result; any strides, the last axis contiguous. Must not overlap an input.
    lse : float32 array [B, H, Tq], optional
        Where to write the log-sum-exp; any strides. Implies return_lse.
    br : int
        Query positions a work item; moves no bit. 0: chosen.
    bc, span : int
        Keys a tile (1 to 512) and a span (a multiple of bc), both anchored at position 0: the recipe's two numbers.
        0: 64, and 1024 or the largest multiple of bc below.
    arena : Arena, optional
        Where scratch comes from (`scratch_bytes` of it); rewound before return. None: private, freed.
    pool : Pool or int, optional
        Threads: a Pool, a number, or None for the shared default (TILEWISE_THREADS, else this process's cores).

    Returns
    -------
    o : float32 array [B, H, Tq, Dv]; with return_lse, (o, lse) with lse [B, H, Tq], a natural logarithm. A row that
    sees no key gives o = 0 and lse = -inf, or its sink.

    Raises
    ------
    InvalidArgument (a ValueError), ShapeError (a ValueError), ArenaExhausted (a MemoryError), TypeError, TargetError;
    all before anything is written.
    """
    workers = pool_for(pool)
    if arena is not None and not isinstance(arena, Arena):
        raise TypeError(f"arena must be a tilewise.Arena or None, got {type(arena).__name__}")
    call, operands = _prepared(
        workers.threads, q, k, v, sinks, out, lse, causal=causal, window=window, scale=scale, q_offset=q_offset,
        return_lse=return_lse, kv_start=kv_start, kv_len=kv_len, k_offset=k_offset, br=br, bc=bc, span=span,
    )  # fmt: skip
    run = launch
    if current().debug:
        from tilewise.runtime.trace import launch as run
    o, logsumexp = run(call, operands, arena, workers)
    return o if logsumexp is None else (o, logsumexp)


def _prepared(
    threads: int, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any, **arguments: Any
) -> tuple[Prepared, Operands]:
    """The prepared call: remembered where the same layouts and arguments came before, else checked and planned."""
    # An array to write into is checked anew each time: whether it overlaps another is a matter of addresses.
    key = None if out is not None or lse is not None else _key(threads, q, k, v, sinks, arguments)
    try:
        call = _memory.get(key) if key else None
    except TypeError:  # an argument that cannot be hashed: an array of offsets
        key = call = None
    if call is not None:
        return call, Operands(q, k, v, sinks, None, None)
    problem, operands = make_problem(q, k, v, sinks=sinks, out=out, lse=lse, **arguments)
    call = prepare(problem, make_plan(problem, current_target(), threads))
    if key and problem.B <= _REMEMBERED_BATCH:
        if len(_memory) >= _REMEMBERED:
            _memory.clear()
        _memory[key] = call
    return call, operands


def _key(threads: int, q: Any, k: Any, v: Any, sinks: Any, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that a check and a plan depend on, for arrays of NumPy's own; None for others."""
    layouts: list[Any] = []
    for x in (q, k, v) if sinks is None else (q, k, v, sinks):
        if type(x) is not np.ndarray or not x.flags.aligned:
            return None
        layouts += (x.shape, x.strides, x.dtype)
    scalars = arguments.values()
    types = tuple(map(type, scalars))  # True and 1 are equal keys but not equally good arguments
    if tuple in types:  # of which the elements' types would matter too
        return None
    knobs = current()
    return (*layouts, *scalars, *types, threads, knobs.interpret, knobs.target, knobs.check)


def scratch_bytes(
    q: Any, k: Any, v: Any, *, pool: Pool | int | None = None, arena: Arena | None = None, **arguments: Any
) -> int:
    """Exactly what `attention` with the same arguments takes from its arena, in bytes.

    It does not depend on the number of keys: it is a slice of (a few rows and two tiles) for each worker.
    """
    problem, _ = make_problem(q, k, v, **arguments)
    return make_plan(problem, current_target(), pool_for(pool).threads).scratch_bytes
