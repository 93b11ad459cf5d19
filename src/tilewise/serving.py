"""Attention as an inference engine needs it: ragged batches, keys in pages."""

from __future__ import annotations

from typing import Any

from tilewise.arguments import Window
from tilewise.entry import run
from tilewise.ragged import make_paged_problem, make_varlen_problem
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool


def attention_varlen(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, q_offset: Any = None, k_offset: Any = None,
    causal: bool = False, window: Window = None, scale: float | None = None, sinks: Any = None,
    return_lse: bool = False, out: Any = None, lse: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None, softcap: float | None = None,
    alibi_slopes: Any = None, mask: Any = None, bias: Any = None, score: Any = None, keep: Any = None,
) -> Any:  # fmt: skip
    """Exact attention for sequences of any lengths, packed one after the other (a ragged batch).

    Each row's bits are those that `attention` gives it alone. Arguments that are not named here are as there.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array [total_q, H, D]
        The query rows of all sequences.
    k, v : arrays [total_k, Hkv, D] and [total_k, Hkv, Dv]
        Their keys and values.
    cu_seqlens_q, cu_seqlens_k : int arrays [B + 1]
        Where each sequence begins, and the last one ends: the rows of sequence b are
        q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]].
    q_offset, k_offset : int or int array [B], optional
        Positions of a sequence's first query row and first key. q_offset None means 0, and is refused where positions
        matter and a sequence has other numbers of rows and keys.
    out : array [total_q, H, Dv], optional
    lse : float32 array [H, total_q], optional
    mask, bias : arrays, optional
        Of a shape that can be broadcast to [H, total_q, keys]: by row of q, and index of the key in its sequence; keys
        is the most keys of a sequence, or more.

    Returns
    -------
    o : array [total_q, H, Dv] of q's type; with return_lse, (o, lse) with lse float32 [H, total_q].

    Raises
    ------
    As `attention`; all before anything is written.
    """
    arguments = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_offset": q_offset, "k_offset": k_offset,
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "bias": bias, "mask": mask, "return_lse": return_lse, "br": br, "bc": bc, "span": span,
    }  # fmt: skip
    return run(make_varlen_problem, arguments, q, k, v, sinks, out, lse, arena, pool, score, keep)


def attention_paged(
    q: Any, k_pages: Any, v_pages: Any, *, block_table: Any, kv_len: Any, cu_seqlens_q: Any = None,
    q_offset: Any = None, k_offset: Any = None, causal: bool = False, window: Window = None,
    scale: float | None = None, sinks: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
    br: int = 0, bc: int = 0, span: int = 0, arena: Arena | None = None, pool: Pool | int | None = None,
    softcap: float | None = None, alibi_slopes: Any = None, mask: Any = None, bias: Any = None, score: Any = None,
    keep: Any = None,
) -> Any:  # fmt: skip
    """Exact attention over keys and values that lie in pages (Kwon et al., 2023), of any page size.

    Each row's bits are those that `attention` gives it over the same keys in one piece. Arguments that are not named
    here are as there.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array [B, H, Tq, D], or [total_q, H, D] with cu_seqlens_q
        Query rows.
    k_pages, v_pages : arrays [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv]
        Any strides, the last axis contiguous: memory that is [pages, Hkv, page_size, D] goes in transposed.
    block_table : int array [B, max_pages]
        Key j of sequence b is k_pages[block_table[b, j // page_size], j % page_size]. Entries past a sequence's length
        may hold anything.
    kv_len : int or int array [B]
        Keys of each sequence. Slots past them are never read.
    cu_seqlens_q : int array [B + 1], optional
        Where each sequence's rows begin in q, and the last ones end, for a ragged batch.
    q_offset : int or int array [B], optional
        Position of a sequence's first query row. None: the rows are the last of the sequence's keys.
    k_offset : int or int array [B], optional
        Position of the first key; 0 by default. A cache that dropped its oldest keys says here how many.
    out, lse : arrays, optional
        Of the shapes below.
    mask, bias : arrays, optional
        Of a shape that can be broadcast to [B, H, Tq, keys], or [H, total_q, keys] with cu_seqlens_q: by row of q, and
        index of the key in its sequence; keys is the largest kv_len, or more.

    Returns
    -------
    o : array [B, H, Tq, Dv] of q's type; with return_lse, (o, lse) with lse float32 [B, H, Tq]. With cu_seqlens_q,
    [total_q, H, Dv] and [H, total_q].

    Raises
    ------
    As `attention`; all before anything is written.
    """
    arguments = {
        "block_table": block_table, "kv_len": kv_len, "cu_seqlens_q": cu_seqlens_q, "q_offset": q_offset,
        "k_offset": k_offset, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "return_lse": return_lse, "br": br, "bc": bc,
        "span": span,
    }  # fmt: skip
    return run(make_paged_problem, arguments, q, k_pages, v_pages, sinks, out, lse, arena, pool, score, keep)
