"""What was asked: the arguments of a call, checked. Validation errors are raised here, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tilewise import arguments
from tilewise.arguments import MAX_POSITION, F32Array, I64Array
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.visibility import bounds, visible_pairs

DEFAULT_BC = 64
DEFAULT_SPAN = 1024
MAX_BC = 512
MAX_HEAD_DIM = 1024
ELEMENT = 4  # bytes of a float32


class Operands(NamedTuple):
    """The arrays of a call; out and lse are None where they are to be allocated (or lse is not wanted)."""

    q: F32Array
    k: F32Array
    v: F32Array
    sinks: F32Array | None
    out: F32Array | None
    lse: F32Array | None


class View(NamedTuple):
    """How rows of heads lie in an array: strides in elements, and the bytes [lo, hi) around its first element."""

    row: int
    head: int
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked problem, without the arrays' addresses: problems of the same layout are the same problem.

    The per-sequence fields are int64 arrays [B]; `*_base` are bytes from an array's first element to the sequence's.
    """

    B: int
    H: int
    Hkv: int
    Tq: int  # the most query rows of a sequence
    Tk: int
    D: int
    Dv: int
    scale: float
    causal: bool
    window: int | None
    return_lse: bool
    br: int  # 0: the plan chooses
    bc: int
    span: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    views: dict[str, View]  # of q, k, v, o, and of lse and sinks where there are any
    q_base: I64Array
    k_base: I64Array
    v_base: I64Array
    o_base: I64Array
    lse_base: I64Array
    rows: I64Array  # query rows
    q_offset: I64Array  # position of the first query row
    k_offset: I64Array  # position of the first key
    kv_len: I64Array  # keys

    @property
    def group(self) -> int:
        return self.H // max(1, self.Hkv)

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right): the keys that a row sees before and after its own position, at most."""
        return bounds(self.causal, self.window)

    def visible_pairs(self) -> int:
        """(row, key) pairs that enter the result, over all sequences and query heads."""
        pairs = visible_pairs(self.rows, self.q_offset, self.k_offset, self.kv_len, *self.bounds)
        return self.H * int(pairs.sum())

    def flops(self) -> int:
        """Floating-point operations of both products over visible pairs."""
        return 2 * (self.D + self.Dv) * self.visible_pairs()


def make_problem(
    q: Any, k: Any, v: Any, *, causal: Any = False, window: Any = None, scale: Any = None, q_offset: Any = None,
    sinks: Any = None, return_lse: Any = False, kv_start: Any = None, kv_len: Any = None, k_offset: Any = None,
    out: Any = None, lse: Any = None, br: Any = 0, bc: Any = 0, span: Any = 0,
) -> tuple[Problem, Operands]:  # fmt: skip
    """Check every argument of `tilewise.attention`; see there for their meaning and the errors."""
    q, k, v = (arguments.tensor(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v)))
    _check_shapes(q, k, v)
    (B, H, Tq, D), (_, Hkv, Tk, Dv) = q.shape, v.shape
    causal, window = arguments.flag("causal", causal), arguments.window(window)
    return_lse = arguments.flag("return_lse", return_lse) or lse is not None
    start, length, k_offset = _keys(B, Tk, kv_start, kv_len, k_offset)
    q_offset = _query_offset(q_offset, Tq, length, k_offset, causal or window is not None)
    bc = arguments.size("bc", bc, MAX_BC) or DEFAULT_BC
    span, br, scale = _span(span, bc), arguments.size("br", br, MAX_POSITION), arguments.scale(scale, D)
    operands = _operands(q, k, v, sinks, out, lse)
    views = {"q": _view(q), "k": _view(k), "v": _view(v)}
    views["o"] = _fresh_view((B, H, Tq, Dv)) if out is None else _view(out)
    if return_lse:
        views["lse"] = _fresh_view((B, H, Tq, 1)) if lse is None else _view(lse[..., None])
    if operands.sinks is not None:
        views["sinks"] = _view(operands.sinks[None, None, None])
    batch = np.arange(B, dtype=np.int64)
    problem = Problem(
        B, H, Hkv, Tq, Tk, D, Dv, scale, causal, window, return_lse, br, bc, span,
        out_shape=(B, H, Tq, Dv), lse_shape=(B, H, Tq), views=views,
        q_base=batch * q.strides[0],
        k_base=batch * k.strides[0] + start * k.strides[2],
        v_base=batch * v.strides[0] + start * v.strides[2],
        o_base=batch * (H * Tq * Dv * ELEMENT if out is None else out.strides[0]),
        lse_base=batch * (H * Tq * ELEMENT if lse is None else lse.strides[0]),
        rows=np.full(B, Tq, np.int64), q_offset=q_offset, k_offset=k_offset, kv_len=length,
    )  # fmt: skip
    return problem, operands


def _check_shapes(q: F32Array, k: F32Array, v: F32Array) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        raise ShapeError(f"q, k and v must have the same batch size on axis 0: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ShapeError(f"k and v must have the same KV heads and keys on axes 1 and 2: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ShapeError(f"q and k must have the same head dimension D on axis 3: {shapes}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads > heads or (heads % kv_heads if kv_heads else heads):
        raise ShapeError(f"the query heads must be a multiple of the KV heads: H = {heads}, Hkv = {kv_heads}")
    for name, size in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ShapeError(f"the head dimension {name} must lie in 1 ... {MAX_HEAD_DIM}: {shapes}")


def _operands(q: F32Array, k: F32Array, v: F32Array, sinks: Any, out: Any, lse: Any) -> Operands:
    B, H, Tq, Dv = *q.shape[:3], v.shape[3]
    if sinks is not None:
        sinks = arguments.tensor("sinks", sinks, 1)
        arguments.expect_shape("sinks", sinks, (H,))
    if out is not None:
        out = arguments.output("out", out, (B, H, Tq, Dv), contiguous=True)
    if lse is not None:
        lse = arguments.output("lse", lse, (B, H, Tq), contiguous=False)
    for name, x, others in (
        ("out", out, {"q": q, "k": k, "v": v, "sinks": sinks, "lse": lse}),
        ("lse", lse, {"q": q, "k": k, "v": v, "sinks": sinks}),
    ):
        for other, y in others.items():
            if x is not None and y is not None and arguments.share_memory(x, y):
                raise InvalidArgument(f"{name} overlaps {other}")
    return Operands(q, k, v, sinks, out, lse)


def _view(x: F32Array) -> View:
    """The view of an array [B, H, T, D]."""
    _, head, row, _ = x.strides
    reaches = [stride * (n - 1) for stride, n in zip(x.strides, x.shape, strict=True)] if x.size else [0]
    lo, hi = sum(min(r, 0) for r in reaches), sum(max(r, 0) for r in reaches)
    return View(row // ELEMENT, head // ELEMENT, lo, hi + (ELEMENT if x.size else 0))


def _fresh_view(shape: tuple[int, int, int, int]) -> View:
    """The view of an array [B, H, T, D] that is still to be allocated, in C order."""
    B, H, T, D = shape
    return View(D, T * D, 0, B * H * T * D * ELEMENT)


def _span(x: Any, bc: int) -> int:
    span = arguments.size("span", x, MAX_POSITION)
    if span % bc:
        raise InvalidArgument(f"span must be a multiple of bc = {bc}, got {span}")
    return span or max(1, DEFAULT_SPAN // bc) * bc


def _keys(B: int, Tk: int, kv_start: Any, kv_len: Any, k_offset: Any) -> tuple[I64Array, I64Array, I64Array]:
    start = arguments.per_sequence("kv_start", 0 if kv_start is None else kv_start, B)
    if (start > Tk).any():
        raise InvalidArgument(f"kv_start must lie in 0 ... Tk = {Tk}, got {start.max()}")
    length = Tk - start if kv_len is None else arguments.per_sequence("kv_len", kv_len, B)
    if (start + length > Tk).any():
        b = int(np.argmax(start + length))
        raise InvalidArgument(f"kv_start + kv_len must not pass Tk = {Tk}, got {start[b]} + {length[b]} (sequence {b})")
    return start, length, arguments.per_sequence("k_offset", 0 if k_offset is None else k_offset, B)


def _query_offset(x: Any, rows: int, kv_len: I64Array, k_offset: I64Array, positions_matter: bool) -> I64Array:
    if x is not None:
        return arguments.per_sequence("q_offset", x, len(kv_len))
    unclear = (kv_len != rows) | (k_offset != 0)
    if positions_matter and unclear.any():
        b = int(np.argmax(unclear))
        raise InvalidArgument(
            f"q_offset must be given: sequence {b} has {rows} query rows and {kv_len[b]} keys from position "
            f"{k_offset[b]}, so causal or window needs the position of its first query row. Common answers: "
            f"q_offset = 0 (top-left: rows and keys both start at position 0), "
            f"q_offset = Tk - Tq (bottom-right: the rows are the last of the keys)"
        )
    return np.zeros(len(kv_len), np.int64)
