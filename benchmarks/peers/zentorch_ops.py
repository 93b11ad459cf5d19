"""zentorch, AMD's extension of PyTorch for EPYC: both of its attention operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arguments import Array, F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload

NAME = "zentorch"
NEEDS = ("torch", "zentorch")
TYPES = ("f32", "bf16", "f16")
ISOLATED = True  # brings an OpenMP of its own, and changes PyTorch for the whole process


def start(threads: int) -> str:
    import torch
    import zentorch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return f"{zentorch.__version__} with torch {torch.__version__}"


def _tensors(w: Workload, *arrays: Array) -> list[Any]:
    """Over the same memory, in the workload's type."""
    import torch

    return [torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, w.type_name)) for x in arrays]


def _fetch(o: Any) -> F32Array:
    return np.asarray(o.float().contiguous().numpy())


def sdpa(w: Workload, q: Array, k: Array, v: Array) -> Ready:
    import torch

    Q, K, V = _tensors(w, q, k, v)
    options: dict[str, Any] = {}
    if w.masked and w.square_causal:
        options["is_causal"] = True
    elif w.masked:
        mask = torch.zeros((w.Tq, w.Tk), dtype=Q.dtype).masked_fill_(torch.from_numpy(~w.mask()), float("-inf"))
        options["attn_mask"] = mask[None, None]
    return Ready(lambda: torch.ops.zentorch.zentorch_sdpa(Q, K, V, **options)[0], _fetch)


def sdpa_attn(w: Workload, q: Array, k: Array, v: Array) -> Ready | None:
    """The other operator, which knows windows but no offset."""
    import torch

    if w.masked and w.q_offset:
        return None
    Q, K, V = _tensors(w, q, k, v)
    out = torch.empty_like(Q)
    options: dict[str, Any] = {"is_causal": w.causal and w.Tq > 1}
    if w.window and w.masked:
        options |= {"left_window_size": w.window - 1, "right_window_size": 0}

    def call() -> Any:
        torch.ops.zentorch.zentorch_sdpa_attn(Q, K, V, out, scale=w.D**-0.5, **options)
        return out

    return Ready(call, _fetch)


VARIANTS: dict[str, Any] = {"sdpa": sdpa, "sdpa_attn": sdpa_attn}
