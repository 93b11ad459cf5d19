"""What is measured: shapes with a mask, their cost, and their inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import F32Array
from tilewise.runtime.roof import written_floats
from tilewise.visibility import bounds, visible_pairs

FLOAT = 4  # bytes
SEED = 0


@dataclass(frozen=True)
class Workload:
    """q [B,H,Tq,D], k and v [B,Hkv,Tk,D], float32; query row i is at position q_offset + i."""

    name: str
    title: str
    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    D: int
    causal: bool = False
    window: int | None = None
    q_offset: int = 0
    tiny: bool = False  # the fixed cost of a call is what counts: microseconds, no roof

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def decode(self) -> bool:
        """One query row a sequence, which sees every key: no mask is needed."""
        return self.Tq == 1 and self.window is None and (not self.causal or self.q_offset == self.Tk - 1)

    @property
    def masked(self) -> bool:
        """Some row does not see some key."""
        return self.pairs < self.B * self.H * self.Tq * self.Tk

    @property
    def square_causal(self) -> bool:
        """Causal from position 0 on, as many keys as rows, no window: what libraries mean by is_causal."""
        return self.causal and self.window is None and self.q_offset == 0 and self.Tq == self.Tk

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs."""
        left, right = bounds(self.causal, self.window)
        return self.B * self.H * int(visible_pairs(self.Tq, self.q_offset, 0, self.Tk, left, right))

    @property
    def flops(self) -> int:
        """Operations of both products over visible pairs."""
        return 4 * self.D * self.pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.B * self.Hkv * self.Tk * self.D * FLOAT

    @property
    def out_bytes(self) -> int:
        return self.B * self.H * self.Tq * self.D * FLOAT

    @property
    def arguments(self) -> dict[str, Any]:
        """What `tilewise.attention` is told besides q, k and v; nothing where the defaults say it."""
        chosen: dict[str, Any] = {"causal": self.causal, "window": self.window, "q_offset": self.q_offset}
        return {name: x for name, x in chosen.items() if x}

    @property
    def shape(self) -> str:
        rows = f"T{self.Tq}" if self.Tq == self.Tk else f"Tq{self.Tq} Tk{self.Tk}"
        parts = [f"B{self.B} H{self.H} Hkv{self.Hkv} {rows} D{self.D}"]
        parts += ["causal"] * (self.causal and not self.decode) + [f"window {self.window}"] * (self.window is not None)
        return ", ".join(parts)

    def mask(self) -> NDArray[np.bool_]:
        """[Tq, Tk], true where the row sees the key: for peers that know no better."""
        left, right = bounds(self.causal, self.window)
        p, c = self.q_offset + np.arange(self.Tq)[:, None], np.arange(self.Tk)
        return np.asarray((c >= p - left) & (c <= p + right))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "prefill", 1, 32, 8, 2048, 2048, 128, causal=True),
        Workload("W2", "prefill", 1, 12, 12, 1024, 1024, 64, causal=True),
        Workload("W2n", "not causal", 1, 12, 12, 1024, 1024, 64),
        Workload("W3", "chunk", 1, 32, 8, 128, 4096, 128, causal=True, q_offset=3968),
        Workload("W4", "decode", 1, 32, 8, 1, 8192, 128, causal=True, q_offset=8191),
        Workload("W4b", "decode, batch", 8, 32, 8, 1, 2048, 128, causal=True, q_offset=2047),
        Workload("W5", "window", 1, 8, 2, 8192, 8192, 64, causal=True, window=512),
        Workload("W6", "long", 1, 4, 1, 16384, 16384, 64, causal=True),
        Workload("W7", "decode, multi-query", 1, 8, 1, 1, 32768, 128, causal=True, q_offset=32767),
        Workload("W7b", "decode, 8 heads a group", 1, 64, 8, 1, 32768, 128, causal=True, q_offset=32767),
        Workload("W8", "encoder", 4, 12, 12, 512, 512, 32),
        Workload("call", "small call", 1, 8, 8, 1, 16, 64, tiny=True),
    )
}


@functools.lru_cache(maxsize=1)
def inputs(w: Workload) -> tuple[F32Array, F32Array, F32Array]:
    """(q, k, v), standard normal, on cache lines; the same in every process."""
    rng = np.random.default_rng(SEED)
    arrays = [written_floats(w.B, heads, rows, w.D) for heads, rows in ((w.H, w.Tq), (w.Hkv, w.Tk), (w.Hkv, w.Tk))]
    for x in arrays:
        rng.standard_normal(out=x, dtype=np.float32)
    q, k, v = arrays
    return q, k, v
