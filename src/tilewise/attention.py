"""The front door: check, plan, run."""

from __future__ import annotations

from typing import Any

from tilewise.arguments import Window
from tilewise.entry import plans, run
from tilewise.problem import make_problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool, pool_for


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None, scale: float | None = None,
    q_offset: Any = None, sinks: Any = None, return_lse: bool = False, kv_start: Any = None, kv_len: Any = None,
    k_offset: Any = None, out: Any = None, lse: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None, softcap: float | None = None,
    alibi_slopes: Any = None, mask: Any = None, bias: Any = None, score: Any = None, keep: Any = None,
) -> Any:  # fmt: skip
    """Exact attention, softmax(scale * Q K^T + mask) V, one tile of keys at a time.

    The method is FlashAttention (Dao et al., 2022 and 2023) with the online softmax of Milakov and Gimelshein (2018),
    in the fixed order of operations of recipe 1: a row's bits depend on its own query, the keys and values that it
    sees, its position, `bc` and `span`, and on nothing else.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array [B, H, Tq, D]
        Query rows; row i of sequence b is at position q_offset[b] + i. Any strides, the last axis contiguous.
    k : array [B, Hkv, Tk, D], of any of these types
        Keys; query head h reads KV head h // (H // Hkv).
    v : array [B, Hkv, Tk, Dv], of any of these types
        Values. D and Dv from 1 to 1024.
    causal : bool
        A row at position p sees keys at positions <= p.
    window : int or (left, right), optional
        A row sees its own position and the window - 1 before it; of a pair, `left` positions before its own and `right`
        after it, None without a limit. None, 0 or negative: no window.
    scale : float, optional
        Factor of the scores, rounded to float32; D ** -0.5 by default.
    q_offset : int or int array [B], optional
        Position of the first query row. None means 0, and is refused where positions matter (causal, window, ALiBi,
        score, keep) and the number of keys is not Tq or k_offset is not 0.
    sinks : float32 array [H], optional
        A logit for each query head that joins the denominator (and lse) without a value.
    return_lse : bool
        Also return the log-sum-exp of every row.
    kv_start, kv_len, k_offset : int or int array [B], optional
        The keys of sequence b are k[b, :, kv_start : kv_start + kv_len], the first of them at position k_offset. What
        lies outside is never read. By default all keys, from position 0.
    out : array [B, H, Tq, Dv], of any of these types, optional
        Where to write the result, rounded to its type once; any strides, the last axis contiguous. Must not overlap an
        input.
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
    softcap : float, optional
        Scores become softcap * tanh(s / softcap) (Gemma Team, 2024), before anything else happens to them.
    alibi_slopes : float32 array [H] or [B, H], optional
        Scores become s - slope * |i - j| of the positions of row and key (Press et al., 2022).
    mask : bool array, optional
        True where a row sees a key; any shape that can be broadcast to [B, H, Tq, Tk], by index, not position. Any
        strides, 0 too, the last axis contiguous.
    bias : float32, float16 or bfloat16 array, optional
        Added to the scores; shapes and strides as of mask. -inf hides a key.
    score : function score(s, b, h, i, j), optional
        What a score becomes after softcap, of sequence b, query head h and absolute positions i and j, in the words of
        `tilewise.hooks`; compiled into the kernel, as FlexAttention does (Dong et al., 2024). Hides nothing.
    keep : function keep(b, h, i, j) -> bool, or BlockMask, optional
        Whether a row sees a key, likewise; tiles that it hides cost nothing. `block_mask` decides that once for many
        calls. causal, window, mask, bias and keep hide together what any of them hides.

    Returns
    -------
    o : array [B, H, Tq, Dv] of q's type; with return_lse, (o, lse) with lse float32 [B, H, Tq], a natural logarithm. A
    row that sees no key gives o = 0 and lse = -inf, or its sink.

    Raises
    ------
    InvalidArgument (a ValueError), ShapeError (a ValueError), ArenaExhausted (a MemoryError), TypeError, TargetError;
    all before anything is written.
    """
    arguments = {
        "causal": causal, "window": window, "scale": scale, "q_offset": q_offset, "alibi_slopes": alibi_slopes,
        "softcap": softcap, "bias": bias, "mask": mask, "return_lse": return_lse, "kv_start": kv_start,
        "kv_len": kv_len, "k_offset": k_offset, "br": br, "bc": bc, "span": span,
    }  # fmt: skip
    return run(make_problem, arguments, q, k, v, sinks, out, lse, arena, pool, score, keep)


def scratch_bytes(
    q: Any, k: Any, v: Any, *, pool: Pool | int | None = None, arena: Arena | None = None, score: Any = None,
    keep: Any = None, **arguments: Any,
) -> int:  # fmt: skip
    """Exactly what `attention` with the same arguments takes from its arena, in bytes.

    It does not depend on the number of keys: it is a slice of (a few rows and two tiles) for each worker.
    """
    problem, _ = make_problem(q, k, v, hooks=score is not None or keep is not None, **arguments)
    parts, _, _ = plans(problem, pool_for(pool).threads, score, keep)
    return max(plan.scratch_bytes for _, plan in parts)
