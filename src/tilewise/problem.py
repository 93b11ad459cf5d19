"""What was asked: the arguments of a call, checked. Validation errors are raised here, before anything is written."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise import arguments
from tilewise.arguments import MAX_POSITION, SIZE, Array, F32Array, I64Array, Window
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.visibility import bounds, visible_pairs

DEFAULT_BC = 64
DEFAULT_SPAN = 1024
MAX_BC = 512
MAX_HEAD_DIM = 1024


class Operands(NamedTuple):
    """The arrays of a call; out and lse are None where they are to be allocated (or lse is not wanted)."""

    q: Array
    k: Array
    v: Array
    sinks: F32Array | None = None
    out: Array | None = None
    lse: F32Array | None = None
    blocks: I64Array | None = None  # the page numbers of every sequence, where keys and values lie in pages
    slopes: F32Array | None = None
    bias: Array | None = None
    mask: Array | None = None


class View(NamedTuple):
    """How rows of heads lie in an array: its float type, strides in elements, the bytes [lo, hi) around its first."""

    type: str  # f32, f16 or bf16; u8 for a mask
    row: int
    head: int
    page: int  # of keys and values; of slopes, bias and mask, the stride of sequences
    lo: int
    hi: int
    spread: bool = False  # whether a bias or mask has one element for all keys


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked problem, without the arrays' addresses: problems of the same layout are the same problem.

    The per-sequence fields are int64 arrays [B]; `*_base` are bytes from an array's first element to the sequence's.
    """

    H: int
    Hkv: int
    D: int
    Dv: int
    scale: float
    causal: bool
    window: Window
    return_lse: bool
    br: int  # 0: the plan chooses
    bc: int
    span: int
    out_dtype: np.dtype[Any]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    q_view: View
    k_view: View
    v_view: View
    o_view: View
    lse_view: View | None
    sinks_view: View | None
    slopes_view: View | None
    bias_view: View | None
    mask_view: View | None
    softcap: float | None
    q_base: I64Array
    k_base: I64Array
    v_base: I64Array
    o_base: I64Array
    lse_base: I64Array
    rows: I64Array  # query rows
    q_offset: I64Array  # position of the first query row
    k_offset: I64Array  # position of the first key
    kv_len: I64Array  # keys
    first_row: I64Array  # of a sequence, on the axis of rows of bias and mask
    first_column: I64Array  # of a sequence's first key, on their last axis
    index: I64Array  # of a sequence, on the first axis of slopes, bias and mask
    page_size: int = 0  # keys a page; 0: the keys of a sequence lie one after the other
    blocks_base: I64Array | None = None  # of a sequence's page numbers
    blocks_bytes: int = 0  # of all page numbers
    partial: bool = False  # the results are states, each sequence is a span of one
    shorter: bool = False  # whether it stands for those with fewer keys, or rows from lower positions on, too

    @property
    def views(self) -> dict[str, View]:
        """Of q, k, v, o, and of the others where there are any."""
        names = ("q", "k", "v", "o", "lse", "sinks", "slopes", "bias", "mask")
        views = {name: getattr(self, name + "_view") for name in names}
        return {name: view for name, view in views.items() if view is not None}

    @functools.cached_property
    def further_operands(self) -> bool:
        """Whether a call has more inputs than q, k, v and sinks."""
        return bool(self.page_size or self.slopes_view or self.bias_view or self.mask_view)

    @property
    def B(self) -> int:
        return len(self.rows)

    @property
    def group(self) -> int:
        return self.H // max(1, self.Hkv)

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right): the keys that a row sees before and after its own position, at most."""
        return bounds(self.causal, self.window)

    def pairs(self) -> I64Array:
        """[B]: the (row, key) pairs of each sequence that enter the result of one query head."""
        return visible_pairs(self.rows, self.q_offset, self.k_offset, self.kv_len, *self.bounds)

    def visible_pairs(self) -> int:
        """(row, key) pairs that enter the result, over all sequences and query heads."""
        return self.H * int(self.pairs().sum())

    def flops(self, pairs: I64Array | None = None) -> int:
        """Floating-point operations of both products over visible pairs."""
        return 2 * (self.D + self.Dv) * self.H * int((self.pairs() if pairs is None else pairs).sum())

    def of(self, sequences: NDArray[np.bool_]) -> Problem:
        """The same problem, of some of its sequences only."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays: dict[str, Any] = {name: x[sequences] for name, x in values.items() if isinstance(x, np.ndarray)}
        return replace(self, **arrays)


class Axes(NamedTuple):
    """Which axes of an array count sequences (or, in a ragged batch, the rows of all of them), rows and heads."""

    sequence: int
    row: int
    head: int


DENSE = Axes(sequence=0, row=2, head=1)  # [B, H, T, D], and lse [B, H, Tq]


def make_problem(
    q: Any, k: Any, v: Any, *, q_offset: Any = None, kv_start: Any = None, kv_len: Any = None, k_offset: Any = None,
    sinks: Any = None, alibi_slopes: Any = None, bias: Any = None, mask: Any = None, out: Any = None, lse: Any = None,
    hooks: bool = False, **options: Any,
) -> tuple[Problem, Operands]:  # fmt: skip
    """Check every argument of `tilewise.attention`; see there for their meaning and the errors."""
    q, k, v = (arguments.tensor(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v)))
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        raise ShapeError(f"q, k and v must have the same batch size on axis 0: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ShapeError(f"k and v must have the same KV heads and keys on axes 1 and 2: {shapes}")
    (B, H, Tq, D), (_, Hkv, Tk, Dv) = q.shape, v.shape
    check_heads(H, Hkv, D, k.shape[3], Dv, shapes)
    chosen = check_options(D, lse=lse, **options)
    start, length, k_offset = _keys(B, Tk, kv_start, kv_len, k_offset)
    rows = np.full(B, Tq, np.int64)
    matters = positions_matter(chosen, alibi_slopes, hooks)
    q_offset = query_offset(q_offset, rows, length, k_offset, matters)
    batch = np.arange(B, dtype=np.int64)
    operands = check_operands(q, k, v, sinks, out, lse, (B, H, Tq, Dv), (B, H, Tq))
    variants, operands = check_variants(operands, alibi_slopes, bias, mask, B, (B, H, Tq), Tk, exact=True)
    layouts = layout(operands, DENSE, DENSE, batch, (B, H, Tq, Dv), (B, H, Tq), chosen)
    problem = Problem(
        H, Hkv, D, Dv, **chosen, **layouts, **variants,
        k_view=view(k, DENSE), k_base=batch * k.strides[0] + start * k.strides[2],
        v_view=view(v, DENSE), v_base=batch * v.strides[0] + start * v.strides[2],
        rows=rows, q_offset=q_offset, k_offset=k_offset, kv_len=length, first_row=np.zeros_like(rows),
        first_column=start, index=batch,
    )  # fmt: skip
    return problem, operands


def check_options(
    D: int, *, causal: Any = False, window: Any = None, scale: Any = None, return_lse: Any = False, lse: Any = None,
    br: Any = 0, bc: Any = 0, span: Any = 0, softcap: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """The options that every entry point has, as fields of a Problem."""
    bc = arguments.size("bc", bc, MAX_BC) or DEFAULT_BC
    return {
        "scale": arguments.scale(scale, D),
        "softcap": arguments.softcap(softcap),
        "causal": arguments.flag("causal", causal),
        "window": arguments.window(window),
        "return_lse": arguments.flag("return_lse", return_lse) or lse is not None,
        "br": arguments.size("br", br, MAX_POSITION),
        "bc": bc,
        "span": _span(span, bc),
    }


def check_heads(heads: int, kv_heads: int, D: int, D_of_k: int, Dv: int, shapes: str) -> None:
    """The heads and head dimensions of q, k and v."""
    if D_of_k != D:
        raise ShapeError(f"q and k must have the same head dimension D on their last axis: {shapes}")
    if kv_heads > heads or (heads % kv_heads if kv_heads else heads):
        raise ShapeError(f"the query heads must be a multiple of the KV heads: H = {heads}, Hkv = {kv_heads}")
    for name, size in (("D", D), ("Dv", Dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ShapeError(f"the head dimension {name} must lie in 1 ... {MAX_HEAD_DIM}: {shapes}")


def check_operands(
    q: Array, k: Array, v: Array, sinks: Any, out: Any, lse: Any, o_shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> Operands:
    """Sinks, and the arrays to write into, which may overlap nothing."""
    if sinks is not None:
        sinks = arguments.tensor("sinks", sinks, 1, "float32")
        arguments.expect_shape("sinks", sinks, (q.shape[1],))
    if out is not None:
        out = arguments.output("out", out, o_shape, contiguous=True)
    if lse is not None:
        lse = arguments.output("lse", lse, lse_shape, contiguous=False, expected="float32")
    for name, x, others in (
        ("out", out, {"q": q, "k": k, "v": v, "sinks": sinks, "lse": lse}),
        ("lse", lse, {"q": q, "k": k, "v": v, "sinks": sinks}),
    ):
        for other, y in others.items():
            if x is not None and y is not None and arguments.share_memory(x, y):
                raise InvalidArgument(f"{name} overlaps {other}")
    return Operands(q, k, v, sinks, out, lse)


def check_variants(
    operands: Operands, slopes: Any, bias: Any, mask: Any, B: int, leading: tuple[int, ...], keys: int, exact: bool
) -> tuple[dict[str, Any], Operands]:
    """The views of ALiBi slopes, bias and mask, and the operands with them; `leading` is their shape but for keys."""
    H = leading[-2]
    if slopes is not None:
        slopes = arguments.tensor("alibi_slopes", slopes, 2 if np.ndim(slopes) == 2 else 1, "float32")
        if slopes.shape not in ((H,), (B, H)):
            raise ShapeError(f"alibi_slopes must have shape {(H,)} or {(B, H)}, got {slopes.shape}")
        slopes = np.broadcast_to(slopes, (B, H))
    if bias is not None:
        bias = arguments.spread("bias", bias, leading, keys, exact, boolean=False)
    if mask is not None:
        mask = arguments.spread("mask", mask, leading, keys, exact, boolean=True)
    operands = operands._replace(slopes=slopes, bias=bias, mask=mask)
    check_overlaps(operands)
    views = {
        "slopes_view": None if slopes is None else view(slopes, Axes(0, 0, 1), page=0),
        "bias_view": None if bias is None else _element_view(bias),
        "mask_view": None if mask is None else _element_view(mask.view(np.uint8)),
    }
    return views, operands


def check_overlaps(operands: Operands) -> None:
    """What is written may not be a slope, bias or mask."""
    for name, x in (("alibi_slopes", operands.slopes), ("bias", operands.bias), ("mask", operands.mask)):
        for written, y in (("out", operands.out), ("lse", operands.lse)):
            if x is not None and y is not None and arguments.share_memory(x, y):
                raise InvalidArgument(f"{written} overlaps {name}")


def _element_view(x: Array) -> View:
    """The view of a bias or mask [.., H, rows, keys]."""
    found = view(x, Axes(0, x.ndim - 2, x.ndim - 3), page=0)
    return found._replace(page=found.page if x.ndim == 4 else 0, spread=not x.size or x.strides[-1] == 0)


def layout(
    operands: Operands, axes: Axes, lse_axes: Axes, start: I64Array, o_shape: tuple[int, ...],
    lse_shape: tuple[int, ...], chosen: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """How q, o, lse and sinks lie, as fields of a Problem; sequence b begins at index start[b]."""
    q, out, lse, sinks = operands.q, operands.out, operands.lse, operands.sinks
    out_dtype = q.dtype if out is None else out.dtype
    o_strides = _c_strides(o_shape, out_dtype.itemsize) if out is None else out.strides
    lse_strides = _c_strides(lse_shape, SIZE["f32"]) if lse is None else lse.strides
    return {
        "out_dtype": out_dtype, "out_shape": o_shape, "lse_shape": lse_shape,
        "q_view": view(q, axes), "q_base": start * q.strides[axes.sequence],
        "o_view": _view(o_shape, o_strides, out_dtype, axes), "o_base": start * o_strides[axes.sequence],
        "lse_view": _view(lse_shape, lse_strides, np.dtype(np.float32), lse_axes) if chosen["return_lse"] else None,
        "lse_base": start * lse_strides[lse_axes.sequence],
        "sinks_view": None if sinks is None else view(sinks, Axes(0, 0, 0)),
    }  # fmt: skip


def view(x: Array, axes: Axes, page: int | None = None) -> View:
    return _view(x.shape, x.strides, x.dtype, axes, page)


def _view(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], axes: Axes, page: int | None = None
) -> View:
    size = dtype.itemsize
    return View(
        arguments.float_type(dtype) or "u8", strides[axes.row] // size, strides[axes.head] // size,
        0 if page is None else strides[page] // size, *reach(shape, strides, size),
    )  # fmt: skip


def reach(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, int]:
    """The bytes [lo, hi) around the first element of an array, of elements of so many bytes."""
    if not math.prod(shape):
        return 0, 0
    reaches = [stride * (n - 1) for stride, n in zip(strides, shape, strict=True)]
    return sum(min(r, 0) for r in reaches), sum(max(r, 0) for r in reaches) + size


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array that is still to be allocated."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


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


def positions_matter(chosen: dict[str, Any], alibi_slopes: Any, hooks: bool) -> bool:
    """Whether what a row gives depends on its position; `hooks`: whether there is a score or keep function."""
    return bool(chosen["causal"] or chosen["window"] is not None or alibi_slopes is not None or hooks)


def query_offset(x: Any, rows: I64Array, kv_len: I64Array, k_offset: I64Array, matters: bool) -> I64Array:
    """The position of each sequence's first query row: as given, or 0 where nothing else can be meant."""
    if x is not None:
        return arguments.per_sequence("q_offset", x, len(kv_len))
    unclear = (kv_len != rows) | (k_offset != 0)
    if matters and unclear.any():
        b = int(np.argmax(unclear))
        raise InvalidArgument(
            f"q_offset must be given: sequence {b} has {rows[b]} query rows and {kv_len[b]} keys from position "
            f"{k_offset[b]}, so causal, window, ALiBi, score or keep needs the position of its first query row. "
            f"Common answers: "
            f"q_offset = 0 (top-left: rows and keys both start at position 0), "
            f"q_offset = Tk - Tq (bottom-right: the rows are the last of the keys)"
        )
    return np.zeros(len(kv_len), np.int64)
