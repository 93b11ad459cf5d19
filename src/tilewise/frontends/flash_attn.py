"""FlashAttention 2's functions, for code that imports flash_attn and a machine without a GPU.

Names, order of arguments, layouts and meanings are those of flash_attn 2.8: tensors [B, T, H, D], causal and windows
aligned to the bottom right, windows (left, right) that count the keys beside a row's own. What differs:

- float32 is taken as well as bfloat16 and float16, and any head dimension up to 1024.
- The lse of a row that sees no key is -inf, the logarithm of an empty sum (there it is +inf); its output is 0 as there.
- The last axis must be contiguous; there it would be copied.
- What is not supported is refused by name. deterministic, num_splits and rotary_interleaved change nothing here: every
  call is deterministic, however it is split.
"""

from __future__ import annotations

from typing import Any

from tilewise.errors import InvalidArgument, ShapeError
from tilewise.frontends.calls import call_by_token, traced
from tilewise.frontends.kvcache import Cache, integers_of_tensor
from tilewise.frontends.tensors import torch
from tilewise.frontends.torch import attention_by_token, attention_paged, attention_varlen

Window = tuple[int, int]
EVERYTHING: Window = (-1, -1)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = EVERYTHING, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch: q [B, Tq, H, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv].

    Row i is at position i + Tk - Tq among the keys. window_size: it sees keys from `left` before that position to
    `right` after it, -1 being unbounded; causal: right is 0. softcap: scores become softcap * tanh(score / softcap), 0
    being off. alibi_slopes, float32 [H] or [B, H]: slope * |i + Tk - Tq - j| is subtracted from the score of key j.

    Returns o [B, Tq, H, Dv], contiguous; with return_attn_probs (o, lse, probabilities), lse float32 [B, H, Tq] and the
    probabilities an empty tensor, as flash_attn returns them without dropout.

    Raises
    ------
    NotImplementedError: dropout_p, or a gradient; otherwise as `tilewise.torch.attention`.
    """
    _refuse(dropout_p=dropout_p)
    _expect_axes(4, q=q, k=k, v=v)
    options = _variant(causal, window_size, softcap, alibi_slopes, q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _answer(attention_by_token(q, k, v, scale=softmax_scale, return_lse=return_attn_probs, **options))


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = EVERYTHING, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of qkv [B, T, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = EVERYTHING, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of q [B, Tq, H, D] and kv [B, Tk, 2, Hkv, D]."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = EVERYTHING,
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:  # fmt: skip
    """Attention of sequences of different lengths, end to end: q [total_q, H, D], k and v [total_k, Hkv, D or Dv].

    cu_seqlens_q and cu_seqlens_k, int32 [B + 1], say where each sequence begins. With block_table, int32
    [B, max_pages], k and v are pages [pages, page_size, Hkv, D or Dv], of any size; cu_seqlens_k then gives lengths
    only. max_seqlen_q and max_seqlen_k must be at least the longest sequences, and mean nothing else. Masks and errors
    as in `flash_attn_func`.

    Returns o [total_q, H, Dv]; with return_attn_probs (o, lse, probabilities), lse float32 [H, total_q].
    """
    _refuse(dropout_p=dropout_p)
    queries = _lengths("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q)
    keys = _lengths("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k)
    if queries.shape != keys.shape:
        raise ShapeError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(cu_seqlens_q)} and {len(cu_seqlens_k)}"
        )
    options = _variant(causal, window_size, softcap, alibi_slopes, queries, keys)
    options.update(scale=softmax_scale, return_lse=return_attn_probs, cu_seqlens_q=cu_seqlens_q)
    if block_table is None:
        return _answer(attention_varlen(q, k, v, cu_seqlens_k=cu_seqlens_k, **options))
    return _answer(
        attention_paged(q, k, v, block_table=integers_of_tensor("block_table", block_table, 2), kv_len=keys, **options)
    )


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = EVERYTHING, softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [B, Tq, H, D] to a cache, to which new keys and values are first added where they are given.

    Parameters
    ----------
    k_cache, v_cache : tensors [B_cache, capacity, Hkv, D or Dv]
        With block_table: pages [pages, page_size, Hkv, D or Dv], of any size.
    k, v : tensors [B, new, Hkv, D or Dv], optional
        Written into the cache in place, behind the first cache_seqlens tokens. If the call fails they are taken out.
    cache_seqlens : int or int tensor [B]
        Tokens in the cache before this call, left padding included. None, without k and v: all of it is filled.
    cache_batch_idx : int tensor [B], optional
        Which sequence of the cache each one of q reads. Not together with cache_leftpad or block_table.
    cache_leftpad : int tensor [B], optional
        The index of a sequence's first token. Tokens before it are never read, and move no bit. Not with block_table.
    block_table : int tensor [B, max_pages], optional

    Returns
    -------
    o [B, Tq, H, Dv], contiguous; with return_softmax_lse (o, lse), lse float32 [B, H, Tq]. Masks as in
    `flash_attn_func`, Tk being the tokens of the sequence, the new ones included.

    Raises
    ------
    NotImplementedError: rotary_cos, rotary_sin, those combinations, a gradient; k and v while PyTorch traces the call.
    Otherwise as `tilewise.torch.attention`.
    """
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    _expect_axes(4, q=q, k_cache=k_cache, v_cache=v_cache)
    cache = Cache(k_cache, v_cache, len(q), cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    new = 0 if k is None and v is None else cache.expect_new(k, v)
    keys = cache.lengths + new if cache_leftpad is None else cache.lengths + new - cache_leftpad
    given = {
        "q": q.transpose(1, 2), "kv_len": keys, "scale": softmax_scale, "return_lse": return_softmax_lse,
        **_variant(causal, window_size, softcap, alibi_slopes, q.shape[1], keys), **cache.operands(),
    }  # fmt: skip
    function = "attention" if cache.table is None else "attention_paged"
    if not new:
        return call_by_token(function, given)
    with cache.appended(k, v):
        return call_by_token(function, given)


def _refuse(**options: Any) -> None:
    """Refuse what changes the result and is not supported: dropout and rotary embeddings."""
    for name, x in options.items():
        if isinstance(x, torch.Tensor) or x:
            raise NotImplementedError(
                f"{name} is not supported by tilewise, and must be {0.0 if name == 'dropout_p' else None}"
            )


def _variant(
    causal: bool, window_size: Window, softcap: float, alibi_slopes: Any, queries: Any, keys: Any
) -> dict[str, Any]:  # fmt: skip
    """The options of `tilewise.attention` that say the same, with positions aligned to the bottom right.

    `queries` and `keys` are lengths, ints or tensors [B]. The last row is at the last key's position; where there are
    more rows than keys it is the keys that start later, as no position is negative.
    """
    left, right = (None if side < 0 else side for side in window_size)
    if causal:
        right = 0
    options = {"softcap": softcap or None, "alibi_slopes": alibi_slopes}
    if left is right is alibi_slopes is None:  # no position matters, and keys that start later would move bits
        return {**options, "q_offset": 0}
    positions = {"q_offset": _positive_part(keys - queries), "k_offset": _positive_part(queries - keys)}
    return {**options, **positions, "window": None if left is right is None else (left, right)}


def _positive_part(x: Any) -> Any:
    return x.clamp(min=0) if isinstance(x, torch.Tensor) else max(0, x)


def _lengths(name: str, cu_seqlens: Any, limit_name: str, limit: int) -> Any:
    """The lengths of sequences, a tensor [B], of which none may pass the limit."""
    cu_seqlens = integers_of_tensor(name, cu_seqlens, 1)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if not traced() and len(lengths) and int(lengths.max()) > limit:
        raise InvalidArgument(f"{limit_name} must be at least the longest sequence, {int(lengths.max())}, got {limit}")
    return lengths


def _expect_axes(rank: int, **tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor of PyTorch, got {type(x).__name__}")
        if x.ndim != rank:
            raise ShapeError(f"{name} must have {rank} axes, got shape {tuple(x.shape)}")


def _unpacked(name: str, x: Any, count: int) -> Any:
    """The `count` tensors that lie beside each other on axis 2."""
    _expect_axes(5, **{name: x})
    if x.shape[2] != count:
        raise ShapeError(f"{name} must have {count} on axis 2, got shape {tuple(x.shape)}")
    return x.unbind(2)


def _answer(result: Any) -> Any:
    """(o, lse, probabilities) where the lse was asked for: what flash_attn returns without dropout has no element."""
    return (*result, result[0].new_empty(0)) if isinstance(result, tuple) else result
