"""PyTorch: scaled_dot_product_attention as a user calls it, and the best ways known around its weak spots."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload

NAME = "torch"
NEEDS = ("torch",)


def start(threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch.__version__


def _tensors(*arrays: F32Array) -> list[Any]:
    import torch

    return [torch.from_numpy(x) for x in arrays]


def _additive(visible: np.ndarray) -> Any:
    import torch

    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), float("-inf"))


def _fetch(o: Any) -> F32Array:
    return np.asarray(o.numpy())


def sdpa(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready:
    """is_causal where its meaning, row i sees keys up to i, is ours; else an additive mask made beforehand."""
    from torch.nn.functional import scaled_dot_product_attention

    Q, K, V = _tensors(q, k, v)
    options: dict[str, Any] = {"enable_gqa": True} if w.group > 1 else {}
    if w.square_causal and w.Tq > 1:
        options["is_causal"] = True
    elif w.masked:
        options["attn_mask"] = _additive(w.mask())
    return Ready(lambda: scaled_dot_product_attention(Q, K, V, **options), _fetch)


def lower_right(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    """A chunk: the mask object that aligns the last row with the last key."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    if not w.causal or w.window or w.decode or not w.q_offset or w.q_offset != w.Tk - w.Tq:
        return None
    Q, K, V = _tensors(q, k, v)
    mask, options = causal_lower_right(w.Tq, w.Tk), {"enable_gqa": True} if w.group > 1 else {}
    return Ready(lambda: scaled_dot_product_attention(Q, K, V, attn_mask=mask, **options), _fetch)


def decode_fold(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    """The query heads of a group as query rows, so that keys and values are read once."""
    from torch.nn.functional import scaled_dot_product_attention

    if not w.decode or w.group == 1:
        return None
    Q, K, V = _tensors(q.reshape(w.B, w.Hkv, w.group, w.D), k, v)
    return Ready(
        lambda: scaled_dot_product_attention(Q, K, V), lambda o: np.asarray(o.reshape(w.B, w.H, 1, w.D).numpy())
    )


def window_chunks(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    """A window: blocks of query rows over the slice of keys that they see, an additive mask for each length of it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not w.window or not w.causal or w.Tq != w.Tk or w.q_offset:
        return None
    Q, K, V = _tensors(q, k, v)
    options = {"enable_gqa": True} if w.group > 1 else {}
    visible = w.mask()
    blocks, masks = [], {}
    for first in range(0, w.Tq, w.window):
        end = min(first + w.window, w.Tq)
        low = max(0, first - w.window + 1) // 64 * 64
        shape = (end - first, first - low, end - low)
        if shape not in masks:
            masks[shape] = _additive(visible[first:end, low:end])
        blocks.append((slice(first, end), slice(low, end), masks[shape]))

    def call() -> Any:
        o = torch.empty_like(Q)
        for rows, keys, mask in blocks:
            o[:, :, rows] = scaled_dot_product_attention(
                Q[:, :, rows], K[:, :, keys], V[:, :, keys], attn_mask=mask, **options
            )
        return o

    return Ready(call, _fetch)


VARIANTS: dict[str, Any] = {
    "sdpa": sdpa,
    "lower_right": lower_right,
    "decode_fold": decode_fold,
    "window_chunks": window_chunks,
}
