"""The workloads, in groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tilewise.bench.workloads import Batch, Startup, Workload

SPEED = (
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
W1, W2, W3, W4, W4b, W6, CALL = (w for w in SPEED if w.name in ("W1", "W2", "W3", "W4", "W4b", "W6", "call"))
W4_LONG = replace(W4, name="W4x4", title="decode, 4 times the keys", Tk=32768, q_offset=32767)


def batch(name: str, title: str, H: int, Hkv: int, D: int, lengths: Iterable[int], Tq: int, **more: Any) -> Batch:
    lengths = tuple(lengths)
    return Batch(name, title, len(lengths), H, Hkv, Tq, max(lengths), D, causal=True, lengths=lengths, **more)


def half() -> Iterator[Workload]:
    """In half types, beside our own float32."""
    paged = batch("P16", "paged decode", 32, 8, 128, [8192], 1, page=16)
    for w in (W1, W2, W3, W4, W4_LONG, W4b, paged):
        for type in ("bf16", "f16"):
            yield replace(w, name=f"{w.name}.{type}", type=type, beside=w)


# Token counts as users have them: many short, few long, in no order
STEP_LENGTHS = [round(16 * 256 ** (i * 37 % 64 / 63)) for i in range(64)]
UNEVEN_LENGTHS = (700, 1, 32768, 17, 2048, 129, 5000, 2, 1000, 64, 12000, 333)


def serving() -> Iterator[Workload]:
    """Keys in pages beside keys in one piece; a step of many sequences; ragged prefill, uneven beside even."""
    for page in (1, 16, 128):
        yield batch(f"P{page}", "paged decode", 32, 8, 128, [8192], 1, page=page, beside=W4)
    for page in (1, 16):
        yield batch(f"P{page}s", "paged decode", 32, 8, 128, [8192], 1, page=page, shuffled=True, beside=W4)
    yield batch(
        "step", "decode step", 32, 8, 128, STEP_LENGTHS, 1, page=16, shuffled=True, turnover=512, beside=W4b
    )  # fmt: skip
    even = batch("even", "ragged prefill", 2, 1, 64, [4096] * 8, 0)
    yield even
    yield batch("uneven", "ragged prefill", 2, 1, 64, UNEVEN_LENGTHS, 0, beside=even)


def shapes() -> Iterator[Workload]:
    """Other head dimensions, beside 128."""
    for w, kind in ((W1, ""), (W4, "d")):
        for D in (80, 96, 112, 256):
            yield replace(w, name=f"D{D}{kind}", D=D, beside=w)


def flat() -> Iterator[Workload]:
    """Longer and longer, beside 1k: what a visible pair costs."""
    first = Workload("T1k", "length", 1, 1, 1, 1024, 1024, 64, causal=True, alone=True)
    yield first
    for thousands in (4, 16, 64):
        T = 1024 * thousands
        yield replace(first, name=f"T{thousands}k", Tq=T, Tk=T, beside=first)


def threads() -> Iterator[Workload]:
    """On two threads, beside one; each with its own roof."""
    for w in (W1, W2, W3, W4, W4b, W6):
        yield replace(w, name=f"{w.name}.x2", threads=2, alone=True, beside=replace(w, threads=1))


def targets() -> Iterator[Workload]:
    """With AVX2, beside the target that is asked for; each with its own roof."""
    for w in SPEED[:-1]:
        yield replace(w, name=f"{w.name}.v3", target="x86-64-v3", alone=True, beside=w)


def fixed() -> Iterator[Workload]:
    """What every call costs, and what the first one does: without compiled kernels on disk, and with them."""
    yield CALL
    for name, title, Tq in (("start", "prefill", 256), ("start1", "decode", 1)):
        w = Startup(
            name, f"first call, {title}", 1, 8, 2, Tq, 256, 128, causal=True, q_offset=256 - Tq, tiny=True, alone=True
        )
        yield w
        yield replace(w, name=f"{name}c", title=f"{w.title}, cached", cached=True, beside=w)


def memory() -> Iterator[Workload]:
    """Peak memory with 128 times the keys, beside few."""
    for name, title, Tq in (("M", "chunk", 128), ("Md", "decode", 1)):
        few = Workload(f"{name}1k", title, 1, 8, 2, Tq, 1024, 128, causal=True, q_offset=1024 - Tq, alone=True)
        yield few
        keys = 131072
        yield replace(few, name=f"{name}131k", Tk=keys, q_offset=keys - Tq, beside=few)


GROUPS: dict[str, tuple[Workload, ...]] = {
    "speed": SPEED, "half": tuple(half()), "serving": tuple(serving()), "shapes": tuple(shapes()),
    "flat": tuple(flat()), "threads": tuple(threads()), "targets": tuple(targets()), "fixed": tuple(fixed()),
    "memory": tuple(memory()),
}  # fmt: skip
WORKLOADS = {w.name: w for group in GROUPS.values() for w in group}
