"""PyTorch's scaled_dot_product_attention, by its own signature."""

from __future__ import annotations

from typing import Any

from tilewise.errors import InvalidArgument, ShapeError
from tilewise.frontends.tensors import BOOLEANS, FLOATS, refuse_gradients, torch
from tilewise.frontends.torch import attention


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention with its arguments and their meaning, in tilewise's bits.

    Parameters
    ----------
    query, key, value : float32, bfloat16 or float16 tensors [..., H, L, E], [..., H, S, E], [..., H, S, Ev]
        On the CPU, two axes or more, the last one contiguous. Axes before the last two are broadcast, as views.
    attn_mask : bool or float tensor, broadcastable to [..., H, L, S], optional
        True: the key is seen. A float is added to the score, -inf hides the key. Read in place: any strides, but the
        last axis contiguous or of stride 0.
    dropout_p
        Refused unless 0.
    is_causal : bool
        Row i sees keys 0 ... i: top-left, whatever L and S are. (`attention` with q_offset = S - L is bottom-right.)
        Not together with attn_mask.
    scale : float, optional
        E ** -0.5 by default.
    enable_gqa : bool
        key and value may have fewer heads (axis -3) than query has: head h reads head h // (H // Hkv).

    Returns
    -------
    A tensor [..., H, L, Ev]. A row that sees no key is 0.

    Raises
    ------
    NotImplementedError: dropout_p, or a gradient. ShapeError: axes that do not fit. InvalidArgument: attn_mask with
    is_causal, or with a last axis of other strides. Else as `attention`.
    """
    options: dict[str, Any] = {"causal": is_causal, "q_offset": 0, "scale": scale}
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0: tilewise has no dropout, got {dropout_p}")
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x is attn_mask is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor of PyTorch, got {type(x).__name__}")
        if x.ndim < 2 and x is not attn_mask:
            raise ShapeError(f"{name} must have two axes or more, got shape {tuple(x.shape)}")
    q, k, v = _with_one_batch(query, key, value, enable_gqa)
    if attn_mask is not None:
        if is_causal:
            raise InvalidArgument("attn_mask and is_causal cannot be given together: put the one into the other")
        kind = "mask" if attn_mask.dtype is torch.bool else "bias"
        o = _attend({"q": q, "k": k, "v": v, kind: _expanded(attn_mask, q, k)}, options)
    else:
        o = _attend({"q": q, "k": k, "v": v}, options)
    return o[(0,) * (o.ndim - max(query.ndim, key.ndim, value.ndim))]


def _expanded(attn_mask: Any, q: Any, k: Any) -> Any:
    """attn_mask as a view [..., H, L, S], its last axis one that the core reads in place."""
    refuse_gradients("attn_mask", attn_mask)
    if attn_mask.dtype not in BOOLEANS + FLOATS:
        raise TypeError(f"attn_mask must be bool, float32, bfloat16 or float16, got {attn_mask.dtype}")
    if attn_mask.ndim and attn_mask.shape[-1] > 1 and attn_mask.stride(-1) not in (0, 1):
        raise InvalidArgument(
            f"the last axis of attn_mask must be contiguous or of stride 0, got the strides {attn_mask.stride()}: "
            f"pass attn_mask.contiguous(), which copies it"
        )
    shape = (*q.shape[:-1], k.shape[-2])
    try:
        return attn_mask.expand(shape)
    except RuntimeError:
        raise ShapeError(f"attn_mask must be broadcastable to {shape}, got shape {tuple(attn_mask.shape)}") from None


def _with_one_batch(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any, Any]:
    """The tensors as views [..., H or Hkv, T, D], four axes or more, with the same axes before the heads."""
    tensors = [x[(None,) * (4 - x.ndim)] for x in (query, key, value)]
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    heads, key_heads, value_heads = (x.shape[-3] for x in tensors)
    if enable_gqa:
        if key_heads != value_heads or not key_heads or heads % key_heads:
            raise ShapeError(
                f"with enable_gqa the heads of query must be a multiple of those of key and value: {shapes}"
            )
        kept = heads, key_heads, key_heads
    else:
        if len({heads, key_heads, value_heads} - {1}) > 1:
            raise ShapeError(f"the heads (axis -3) must be equal or 1, or pass enable_gqa=True: {shapes}")
        most = max(heads, key_heads, value_heads) if min(heads, key_heads, value_heads) else 0
        kept = most, *((1, 1) if key_heads == value_heads == 1 else (most, most))
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        raise ShapeError(f"the axes before the last three must be equal or 1: {shapes}") from None
    q, k, v = (x.expand(*batch, n, *x.shape[-2:]) for x, n in zip(tensors, kept, strict=True))
    return q, k, v


def _attend(tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """Attention of [..., H, T, D]: in one call where the axes before the heads are one axis in memory."""
    q = tensors["q"]
    if q.ndim == 4:
        return attention(**tensors, **options)
    if all(_is_one_axis(x) for x in tensors.values()):
        return _attend({name: x.flatten(0, 1) for name, x in tensors.items()}, options).unflatten(0, q.shape[:2])
    parts = ({name: x[i] for name, x in tensors.items()} for i in range(len(q)))
    return torch.stack([_attend(part, options) for part in parts])


def _is_one_axis(x: Any) -> bool:
    """Whether the first two axes can be seen as one, without a copy."""
    return 1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1)
