"""Attention of PyTorch's CPU tensors, without a copy. Each function is its namesake in tilewise, for tensors."""

from __future__ import annotations

from typing import Any

from tilewise.arguments import Window
from tilewise.frontends.calls import call, call_by_token
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None, scale: float | None = None,
    q_offset: Any = None, sinks: Any = None, return_lse: bool = False, kv_start: Any = None, kv_len: Any = None,
    k_offset: Any = None, out: Any = None, lse: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    mask: Any = None, bias: Any = None, score: Any = None, keep: Any = None,
) -> Any:  # fmt: skip
    """`tilewise.attention` of tensors: the same arguments, the same bits, the same errors, the tensors' own memory.

    Parameters
    ----------
    q, k, v : float32, bfloat16 or float16 tensors [B, H, Tq, D], [B, Hkv, Tk, D], [B, Hkv, Tk, Dv]
        On the CPU, of one dtype. Any strides, the last axis contiguous.
    q_offset, kv_start, kv_len, k_offset : int or [B], optional
        A list, an array or an integer tensor; read before the call returns.
    out, lse : tensors [B, H, Tq, Dv] and float32 [B, H, Tq], optional
        Where to write; not while PyTorch traces the call, as in torch.compile.
    alibi_slopes, mask, bias : tensors, optional
        float32 [H] or [B, H]; bool and float, broadcastable to [B, H, Tq, Tk], the last axis contiguous or of stride 0.
    score, keep : functions, optional
        What they captured may be tensors, and they may call PyTorch's functions by the names of `tilewise.hooks`' words
        (torch.where, torch.tanh, ...). keep may be a BlockMask. Not while PyTorch traces the call.
    pool : Pool or int, optional
        Threads. None: TILEWISE_THREADS (or `tilewise.config`) where it is set, else torch.get_num_threads().

    Returns
    -------
    o, a tensor [B, H, Tq, Dv] of q's dtype; with return_lse (o, lse), lse float32 [B, H, Tq].

    Raises
    ------
    What `tilewise.attention` raises; NotImplementedError for a tensor that requires a gradient, outside no_grad;
    InvalidArgument or TypeError for one on another device, sparse, nested, quantised or of a subclass.
    """
    given = {
        "q": q, "k": k, "v": v, "causal": causal, "window": window, "scale": scale, "q_offset": q_offset,
        "sinks": sinks, "return_lse": return_lse, "kv_start": kv_start, "kv_len": kv_len, "k_offset": k_offset,
        "out": out, "lse": lse, "br": br, "bc": bc, "span": span, "arena": arena, "pool": pool,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "mask": mask, "bias": bias, "score": score, "keep": keep,
    }  # fmt: skip
    return call("attention", given)


def attention_varlen(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, q_offset: Any = None, k_offset: Any = None,
    causal: bool = False, window: Window = None, scale: float | None = None, sinks: Any = None,
    return_lse: bool = False, out: Any = None, lse: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    mask: Any = None, bias: Any = None, score: Any = None, keep: Any = None,
) -> Any:  # fmt: skip
    """`tilewise.attention_varlen` of tensors: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv].

    cu_seqlens_q and cu_seqlens_k, int32 or int64 [B + 1], say where each sequence begins and the last ends. Tensors,
    `pool` and errors as in `attention`. Returns o [total_q, H, Dv]; with return_lse (o, lse), lse [H, total_q].
    """
    given = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_offset": q_offset,
        "k_offset": k_offset, "causal": causal, "window": window, "scale": scale, "sinks": sinks,
        "return_lse": return_lse, "out": out, "lse": lse, "br": br, "bc": bc, "span": span, "arena": arena,
        "pool": pool, "softcap": softcap, "alibi_slopes": alibi_slopes, "mask": mask, "bias": bias,
        "score": score, "keep": keep,
    }  # fmt: skip
    return call("attention_varlen", given)


def attention_paged(
    q: Any, k_pages: Any, v_pages: Any, *, block_table: Any, kv_len: Any, cu_seqlens_q: Any = None,
    q_offset: Any = None, k_offset: Any = None, causal: bool = False, window: Window = None,
    scale: float | None = None, sinks: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
    br: int = 0, bc: int = 0, span: int = 0, arena: Arena | None = None, pool: Pool | int | None = None,
    softcap: float | None = None, alibi_slopes: Any = None, mask: Any = None, bias: Any = None, score: Any = None,
    keep: Any = None,
) -> Any:  # fmt: skip
    """`tilewise.attention_paged` of tensors: k_pages [pages, page_size, Hkv, D], v_pages [pages, page_size, Hkv, Dv].

    block_table [B, max_pages], int32 or int64, names the pages of each sequence, kv_len [B] (or an int) its keys.
    Tensors, `pool` and errors as in `attention`. q is [B, H, Tq, D] and gives o [B, H, Tq, Dv] and lse [B, H, Tq]; with
    cu_seqlens_q [B + 1] it is [total_q, H, D] and gives o [total_q, H, Dv] and lse [H, total_q].
    """
    given = {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table, "kv_len": kv_len,
        "cu_seqlens_q": cu_seqlens_q, "q_offset": q_offset, "k_offset": k_offset, "causal": causal, "window": window,
        "scale": scale, "sinks": sinks, "return_lse": return_lse, "out": out, "lse": lse, "br": br, "bc": bc,
        "span": span, "arena": arena, "pool": pool,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "mask": mask, "bias": bias, "score": score, "keep": keep,
    }  # fmt: skip
    return call("attention_paged", given)


def attention_by_token(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`attention` whose output lies token by token: the same values as a contiguous tensor [B, Tq, H, Dv].

    The layout of a model's hidden states, so that the heads of a token merge without a copy. Options as in `attention`,
    but for `out`; with return_lse (o, lse), lse [B, H, Tq].
    """
    return call_by_token("attention", {"q": q, "k": k, "v": v, **options})
