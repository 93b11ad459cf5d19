"""The invariances: the same row, the same bits, however and wherever it is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewise as tw
from tilewise.config import config
from tilewise.simd.target import host_architecture
from tilewise.verify.contract import in_chunks
from tilewise.verify.findings import Array, Check, Findings, inputs

FTZ_DAZ = {"x86_64": 1 << 15 | 1 << 6, "aarch64": 1 << 24}  # flush-to-zero, denormals-are-zero
FENV = {"x86_64": 28, "aarch64": 0}  # where those bits lie in a fenv_t of Linux


def _long(**arguments: Any) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
    """A causal problem whose rows cross tiles and spans, and its result in one call."""
    q, k, v = inputs(10, 1, 4, 2, 203, 2200, 64)
    return (q, k, v), tw.attention(q, k, v, causal=True, q_offset=1990, return_lse=True, **arguments)


def _chunks(found: Findings) -> None:
    (q, k, v), whole = _long()
    for size in (1, 3, 5, 16, 64, 100):
        found.same(f"chunks of {size}", in_chunks(q, k, v, size, 1990, causal=True), whole)


def _batch(found: Findings) -> None:
    """Sequences of different lengths, offsets and neighbours."""
    q, k, v = inputs(11, 4, 4, 2, 5, 1300, 64)
    kv_len, kv_start, offset = np.array([1300, 1, 700, 64]), np.array([0, 9, 100, 1200]), np.array([1295, 0, 698, 60])
    whole = tw.attention(q, k, v, causal=True, kv_len=kv_len, kv_start=kv_start, q_offset=offset, return_lse=True)
    for b in range(4):
        keys = slice(kv_start[b], kv_start[b] + kv_len[b])
        alone = tw.attention(
            q[b : b + 1], k[b : b + 1, :, keys], v[b : b + 1, :, keys], causal=True, q_offset=offset[b], return_lse=True
        )
        found.same(f"sequence {b} alone", alone, tuple(x[b : b + 1] for x in whole))


def _br(found: Findings) -> None:
    (q, k, v), whole = _long()
    for br in (1, 2, 7, 16, 33, 128):
        found.same(f"br {br}", tw.attention(q, k, v, causal=True, q_offset=1990, return_lse=True, br=br), whole)


def _threads(found: Findings) -> None:
    _, whole = _long(pool=1)
    for threads in (2, 3, 4):
        found.same(f"{threads} threads", _long(pool=threads)[1], whole)


def _decode(found: Findings) -> None:
    (q, k, v), whole = _long()
    for i in (0, 33, 34, 57, 58, 59, 202):  # around the borders of tiles (2048 = 1990 + 58) and the ends
        end = 1990 + i + 1
        row = tw.attention(
            q[:, :, i : i + 1], k[:, :, :end], v[:, :, :end], causal=True, q_offset=end - 1, return_lse=True
        )
        found.same(f"the row at {end - 1} as a decode step", row, tuple(x[:, :, i : i + 1] for x in whole))


def against_target(name: str) -> Callable[[Findings], None]:
    def check(found: Findings) -> None:
        for seed, D, Dv, bc in ((12, 64, 64, 0), (13, 40, 17, 23)):
            q, k, v = inputs(seed, 1, 4, 2, 45, 1500, D, Dv)
            arguments: dict[str, Any] = {"causal": True, "q_offset": 1455, "return_lse": True, "bc": bc}
            with config(target=name):
                other = tw.attention(q, k, v, **arguments)
            found.same(f"D {D}, Dv {Dv}, bc {bc or 64}", other, tw.attention(q, k, v, **arguments))

    return check


def _interpreted(found: Findings) -> None:
    for seed, D, Dv, masks in (
        (14, 8, 8, {"causal": True}),
        (15, 19, 5, {"causal": True, "window": 11}),
        (16, 5, 33, {"sinks": np.array([3, -1], np.float32)}),
    ):
        q, k, v = inputs(seed, 1, 2, 1, 9, 70, D, Dv)
        arguments: dict[str, Any] = {"q_offset": 61, "return_lse": True, "bc": 16, "span": 32, **masks}
        with config(interpret=True):
            slow = tw.attention(q, k, v, **arguments)
        found.same(f"D {D}, Dv {Dv}", slow, tw.attention(q, k, v, **arguments))


def _garbage(found: Findings) -> None:
    q, k, v = inputs(17, 2, 4, 2, 6, 200, 24)
    kv_start, kv_len = np.array([3, 60]), np.array([150, 90])
    clean = tw.attention(q, k, v, causal=True, kv_start=kv_start, kv_len=kv_len, q_offset=80, return_lse=True)
    for what, garbage in (("NaN", np.nan), ("inf", np.inf), ("-inf", -np.inf), ("huge", 3e38)):
        dirty_k, dirty_v = k.copy(), v.copy()
        for b in range(2):
            seen = np.arange(200)
            hidden = (seen < kv_start[b]) | (seen >= kv_start[b] + min(kv_len[b], 86))  # the last row is at 85
            dirty_k[b, :, hidden] = dirty_v[b, :, hidden] = garbage
        dirty = tw.attention(
            q, dirty_k, dirty_v, causal=True, kv_start=kv_start, kv_len=kv_len, q_offset=80, return_lse=True
        )
        found.same(f"{what} in keys and values that no row sees", dirty, clean)
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[0, :, 3 + 83 :] = dirty_v[0, :, 3 + 83 :] = garbage  # rows 0 to 2 of sequence 0 do not see position 83
        dirty = tw.attention(
            q, dirty_k, dirty_v, causal=True, kv_start=kv_start, kv_len=kv_len, q_offset=80, return_lse=True
        )
        found.same(f"{what} that other rows see", tuple(x[0, :, :3] for x in dirty), tuple(x[0, :, :3] for x in clean))


def _float_environment(found: Findings) -> None:
    q, k, v = inputs(18, 1, 2, 1, 5, 70, 24)
    v *= np.float32(1e-38)  # subnormal products and results
    clean = tw.attention(q, k, v, return_lse=True, pool=1)
    tiny, half = np.array([1e-38], np.float32), np.float32(0.25)
    found.holds("the results are not subnormal", (np.abs(clean[0]) < 1.2e-38).any())
    libm, architecture = ctypes.CDLL(None), host_architecture()
    ours, flushing = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    libm.fegetenv(ours)
    flushing.raw = ours.raw
    word = ctypes.c_uint32.from_buffer(flushing, FENV[architecture])
    word.value |= FTZ_DAZ[architecture]
    libm.fesetenv(flushing)
    try:
        before = float((tiny * half)[0])
        flushed = tw.attention(q, k, v, return_lse=True, pool=1)
        after = float((tiny * half)[0])
    finally:
        libm.fesetenv(ours)
    found.holds("flush-to-zero could not be set here", before == 0)
    found.holds("the caller's float environment was not restored", after == 0)
    found.same("flush-to-zero and denormals-are-zero set by the caller", flushed, clean)


INVARIANCES = (
    Check("chunks", "203 rows on 2200 keys at once = in chunks of 1 to 100", _chunks),
    Check("batch", "alone = in a batch of other lengths and offsets", _batch),
    Check("br", "br 1 to 128", _br),
    Check("threads", "1 to 4 threads", _threads),
    Check("decode", "a decode step = the same row of a prefill", _decode),
)
RINGS = (
    Check("interpreted", "native = the kernel run op by op in NumPy", _interpreted),
    Check("garbage", "NaN, inf and huge numbers in what a row does not see", _garbage),
    Check("float_environment", "flush-to-zero set by the caller", _float_environment),
)
