"""PyTorch: scaled_dot_product_attention as a user calls it, and the best ways known around its weak spots."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import numpy as np

from tilewise.arguments import Array, F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Batch, Workload

NAME = "torch"
NEEDS = ("torch",)
TYPES = ("f32", "bf16", "f16")


def start(threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch.__version__


def _tensors(w: Workload, *arrays: Array) -> list[Any]:
    """Over the same memory, in the workload's type."""
    import torch

    return [torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, w.type_name)) for x in arrays]


def _additive(w: Workload, visible: np.ndarray) -> Any:
    import torch

    zeros = torch.zeros(visible.shape, dtype=getattr(torch, w.type_name))
    return zeros.masked_fill_(torch.from_numpy(~visible), float("-inf"))


def _fetch(o: Any) -> F32Array:
    return np.asarray(o.float().numpy())


def sdpa(w: Workload, q: Array, k: Array, v: Array) -> Ready:
    """is_causal where its meaning, row i sees keys up to i, is ours; else an additive mask made beforehand."""
    from torch.nn.functional import scaled_dot_product_attention

    Q, K, V = _tensors(w, q, k, v)
    options: dict[str, Any] = {"enable_gqa": True} if w.group > 1 else {}
    if w.square_causal and w.Tq > 1:
        options["is_causal"] = True
    elif w.masked:
        options["attn_mask"] = _additive(w, w.mask())
    return Ready(lambda: scaled_dot_product_attention(Q, K, V, **options), _fetch)


def lower_right(w: Workload, q: Array, k: Array, v: Array) -> Ready | None:
    """A chunk: the mask object that aligns the last row with the last key."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    if not w.causal or w.window or w.decode or not w.q_offset or w.q_offset != w.Tk - w.Tq:
        return None
    Q, K, V = _tensors(w, q, k, v)
    mask, options = causal_lower_right(w.Tq, w.Tk), {"enable_gqa": True} if w.group > 1 else {}
    return Ready(lambda: scaled_dot_product_attention(Q, K, V, attn_mask=mask, **options), _fetch)


def decode_fold(w: Workload, q: Array, k: Array, v: Array) -> Ready | None:
    """The query heads of a group as query rows, so that keys and values are read once."""
    from torch.nn.functional import scaled_dot_product_attention

    if not w.decode or w.group == 1:
        return None
    Q, K, V = _tensors(w, q.reshape(w.B, w.Hkv, w.group, w.D), k, v)
    return Ready(lambda: scaled_dot_product_attention(Q, K, V), lambda o: _fetch(o.reshape(w.B, w.H, 1, w.D)))


def window_chunks(w: Workload, q: Array, k: Array, v: Array) -> Ready | None:
    """A window: blocks of query rows over the slice of keys that they see, an additive mask for each length of it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not w.window or not w.causal or w.Tq != w.Tk or w.q_offset:
        return None
    Q, K, V = _tensors(w, q, k, v)
    options = {"enable_gqa": True} if w.group > 1 else {}
    visible = w.mask()
    blocks, masks = [], {}
    for first in range(0, w.Tq, w.window):
        end = min(first + w.window, w.Tq)
        low = max(0, first - w.window + 1) // 64 * 64
        shape = (end - first, first - low, end - low)
        if shape not in masks:
            masks[shape] = _additive(w, visible[first:end, low:end])
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


def sequences(w: Batch, q: Array, k: Array, v: Array) -> Ready:
    """A call for each sequence, whose keys are in one piece. A decode row folds the heads of a group into rows."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    Q, K, V = _tensors(w, q, k, v)
    keys = w.starts.tolist()
    K, V = ([x[a:b].transpose(0, 1)[None].contiguous() for a, b in pairwise(keys)] for x in (K, V))
    if w.Tq:
        rows, options = Q.view(w.B, 1, w.Hkv, w.group, w.D), {}
    else:
        rows = [Q[a:b].transpose(0, 1)[None].contiguous() for a, b in pairwise(keys)]
        options = {"is_causal": True, "enable_gqa": w.group > 1}
    steps = itertools.cycle([w.lengths_at(call).tolist() for call in range(w.turnover)])

    def call() -> Any:
        return [
            scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], **options)
            for q, k, v, n in zip(rows, K, V, next(steps), strict=True)
        ]

    def fetch(o: Any) -> F32Array:
        if w.Tq:
            return _fetch(torch.cat(o).view(w.B, w.H, w.D))
        return _fetch(torch.cat(o, 2)[0].transpose(0, 1).contiguous())

    return Ready(call, fetch)


BATCHES: dict[str, Any] = {"sequences": sequences}
