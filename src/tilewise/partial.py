"""Attention in parts: states of spans of keys, computed anywhere, merged in order to the bits of one call."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import arguments
from tilewise.arguments import BFLOAT16, MAX_POSITION, SIZE, Array, F32Array, I64Array, Window, float32_bits
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.kernels.merge import merge_kernel, merge_shape
from tilewise.kernels.tables import MERGE
from tilewise.plan import make_plan
from tilewise.problem import MAX_BC, MAX_HEAD_DIM, Operands, Problem, View, make_problem
from tilewise.runtime.arena import Arena, aligned
from tilewise.runtime.launch import launch, prepare, run_once
from tilewise.runtime.pool import Pool, pool_for
from tilewise.simd.builder import LANES
from tilewise.simd.target import current_target
from tilewise.visibility import bounds, visible_range

_MAGIC, _VERSION = b"tilewise partial", 1
_PREFIX = struct.Struct("<16sII")  # magic, version, bytes of the header
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, eq=False)
class Partial:
    """What some keys of a longer context contribute to every row: a state (m, l, a) for each span of them.

    m is the largest base-2 score, l the sum of exp2(score - m), a the sum of exp2(score - m) v, unnormalised; a span
    that a row does not see has (-inf, 0, 0). States of spans that follow one another merge exactly, whoever computed
    them (Milakov and Gimelshein, 2018; recipe 1, step 5).
    """

    a: F32Array  # [B, spans, H, Tq, Dv]
    stats: F32Array  # [B, spans, H, Tq, 2]: m and l
    start: int  # position of the first key
    end: int  # and past the last
    q_offset: I64Array  # [B]
    causal: bool
    window: Window
    scale: float
    bc: int
    span: int
    dtype: np.dtype[Any]  # of o
    sinks: F32Array | None = None  # [H]

    @property
    def type(self) -> str:
        """The float type of o: f32, f16 or bf16."""
        return arguments.float_type(self.dtype) or ""

    @property
    def empty(self) -> bool:
        """Whether there are no keys: it merges as the identity."""
        return self.start == self.end

    def finish(self) -> tuple[Array, F32Array]:
        """(o [B, H, Tq, Dv] of q's type, float32 lse [B, H, Tq]) over all keys in here, and the sinks."""
        B, spans, H, Tq, Dv = self.a.shape
        o, lse = np.empty((B, H, Tq, Dv), self.dtype), np.empty((B, H, Tq), np.float32)
        left, right = bounds(self.causal, self.window)
        position: Any = self.q_offset[:, None] + np.arange(Tq)
        lo, hi = visible_range(position, self.start, self.end, left, right, np.minimum, np.maximum)
        seen = np.ascontiguousarray(np.broadcast_to((lo < hi)[:, None], (B, H, Tq)), np.int64)
        sinks = None if self.sinks is None else np.repeat(self.sinks, Tq)
        shape = merge_shape(Dv, self.type)
        scratch = aligned(shape.worker_bytes(LANES))
        numbers = {"sequences": B, "spans": spans, "rows": H * Tq}
        arrays = {
            "a": np.ascontiguousarray(self.a), "stats": np.ascontiguousarray(self.stats), "sinks": sinks, "seen": seen,
            "o": o, "lse": lse, "scratch": scratch,
        }  # fmt: skip
        run_once(merge_kernel(shape), MERGE, numbers, arrays)
        return o, lse

    def to_bytes(self) -> bytes:
        """For another process or machine: a versioned header, the arrays, and a checksum of it all."""
        header = json.dumps(
            {
                "recipe": 1, "shape": self.a.shape, "start": self.start, "end": self.end, "causal": self.causal,
                "q_offset": self.q_offset.tolist(), "window": self.window, "scale": float32_bits(self.scale),
                "bc": self.bc, "span": self.span, "type": self.type,
                "sinks": self.sinks is not None,
            }
        ).encode()  # fmt: skip
        arrays = [x for x in (self.a, self.stats, self.sinks) if x is not None]
        body = b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in arrays)
        data = _PREFIX.pack(_MAGIC, _VERSION, len(header)) + header + body
        return data + hashlib.sha256(data).digest()

    @staticmethod
    def from_bytes(data: bytes) -> Partial:
        """What to_bytes made. Raises InvalidArgument for anything else, and for bytes that were damaged."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data must be bytes, got {type(data).__name__}")
        data = bytes(data)
        if len(data) < _PREFIX.size + _DIGEST or not data.startswith(_MAGIC):
            raise InvalidArgument("data is not a partial result of tilewise")
        _, version, length = _PREFIX.unpack_from(data)
        if version != _VERSION:
            raise InvalidArgument(f"data is a partial result of version {version}, this is version {_VERSION}")
        if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
            raise InvalidArgument("data was damaged: its checksum does not hold")
        begin = _PREFIX.size + length
        try:
            return _parse(json.loads(data[_PREFIX.size : begin]), data[begin:-_DIGEST])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as failure:
            raise InvalidArgument(f"data is not a valid partial result: {failure}") from failure


def attention_partial(
    q: Any, k: Any, v: Any, *, k_offset: int, causal: bool = False, window: Window = None,
    scale: float | None = None, q_offset: Any = None, br: int = 0, bc: int = 0, span: int = 0,
    arena: Arena | None = None, pool: Pool | int | None = None,
) -> Partial:  # fmt: skip
    """What the keys at positions [k_offset, k_offset + n) of a longer context contribute.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array [B, H, Tq, D]
        Query rows at positions q_offset + i.
    k, v : arrays [B, Hkv, n, D] and [B, Hkv, n, Dv]
    k_offset : int
        Position of the first key, a multiple of the span: what another part must not share.

    The others as in `attention`. Sinks belong to the whole context: they are given to `merge`.

    Raises
    ------
    As `attention`; all before anything is written.
    """
    workers = pool_for(pool)
    if arena is not None and not isinstance(arena, Arena):
        raise TypeError(f"arena must be a tilewise.Arena or None, got {type(arena).__name__}")
    start = arguments.integer("k_offset", k_offset)
    whole, operands = make_problem(
        q, k, v, causal=causal, window=window, scale=scale, q_offset=q_offset, k_offset=start, br=br, bc=bc, span=span,
        return_lse=True,
    )  # fmt: skip
    if start % whole.span:
        raise InvalidArgument(f"k_offset must be a multiple of the span, {whole.span}, got {start}")
    problem = _by_spans(whole, operands, start)
    call = prepare(problem, make_plan(problem, current_target(), workers.threads))
    a, stats = launch([call], operands, arena, workers)
    assert stats is not None
    return Partial(
        a, stats, start, start + operands.k.shape[2], whole.q_offset, whole.causal, whole.window, whole.scale, whole.bc,
        whole.span, operands.q.dtype,
    )  # fmt: skip


def _by_spans(whole: Problem, operands: Operands, start: int) -> Problem:
    """The problem whose sequences are the spans of the sequences of `whole`, and whose results are their states."""
    (B, H, Tq, _), n = operands.q.shape, operands.k.shape[2]
    spans = -(-n // whole.span)
    first = np.arange(spans) * whole.span
    each = {"q_base", "rows", "q_offset", "first_row", "first_column", "index"}
    batch: dict[str, Any] = {name: np.repeat(getattr(whole, name), spans) for name in each}
    rows, f32 = B * spans * H * Tq, SIZE["f32"]
    index = np.arange(B * spans, dtype=np.int64) * (H * Tq * f32)
    return replace(
        whole, **batch, partial=True, out_dtype=np.dtype(np.float32),
        k_base=(whole.k_base[:, None] + first * operands.k.strides[2]).ravel(),
        v_base=(whole.v_base[:, None] + first * operands.v.strides[2]).ravel(),
        k_offset=np.tile(start + first, B), kv_len=np.tile(np.minimum(whole.span, n - first), B),
        out_shape=(B, spans, H, Tq, whole.Dv), o_base=index * whole.Dv,
        o_view=View("f32", whole.Dv, Tq * whole.Dv, 0, 0, rows * whole.Dv * f32),
        lse_shape=(B, spans, H, Tq, 2), lse_base=index * 2, lse_view=View("f32", 2, 2 * Tq, 0, 0, rows * 2 * f32),
    )  # fmt: skip


def merge(partials: Iterable[Partial], sinks: Any = None) -> Partial:
    """Partial results of the same rows over keys that follow one another, in order of position, as one.

    Parameters
    ----------
    partials : Partials
        The first key of each is the one after the last of the one before; those without keys count for nothing.
    sinks : float32 array [H], optional
        As in `attention`; given once.

    Raises
    ------
    InvalidArgument for parts that are out of order, overlap or leave a gap, that were computed with other arguments,
    or for sinks that are given twice.
    """
    parts = list(partials)
    for index, part in enumerate(parts):
        if not isinstance(part, Partial):
            raise TypeError(f"partials[{index}] must be a tilewise.Partial, got {type(part).__name__}")
    if not parts:
        raise InvalidArgument("there is no partial result to merge")
    given = [part.sinks for part in parts if part.sinks is not None]
    if sinks is not None:
        sinks = arguments.tensor("sinks", sinks, 1, "float32").copy()
        arguments.expect_shape("sinks", sinks, (parts[0].a.shape[2],))
        given.append(sinks)
    if len(given) > 1:
        raise InvalidArgument("sinks are given twice: they belong to the whole context, once")
    for index, part in enumerate(parts[1:], 1):
        _check_alike(parts[0], part, index)
    full = [part for part in parts if not part.empty] or parts[:1]
    for before, after in itertools.pairwise(full):
        if after.start != before.end:
            raise InvalidArgument(
                f"partial results must follow one another: one ends before position {before.end}, the next begins at "
                f"{after.start}"
            )
    return replace(
        full[0], a=np.concatenate([part.a for part in full], 1), stats=np.concatenate([part.stats for part in full], 1),
        end=full[-1].end, sinks=given[0] if given else None,
    )  # fmt: skip


def _check_alike(first: Partial, other: Partial, index: int) -> None:
    def shape(part: Partial) -> tuple[int, ...]:
        return part.a.shape[0], *part.a.shape[2:]

    if shape(first) != shape(other):
        raise ShapeError(f"partials[{index}] is of rows [B, H, Tq, Dv] = {shape(other)}, partials[0] of {shape(first)}")
    if not np.array_equal(first.q_offset, other.q_offset):
        raise InvalidArgument(f"partials[{index}] is of rows at other positions than partials[0]")
    for name in ("causal", "window", "bc", "span", "type"):
        mine, yours = getattr(first, name), getattr(other, name)
        if mine != yours:
            raise InvalidArgument(f"partials[{index}] was computed with {name} = {yours}, partials[0] with {mine}")
    if float32_bits(first.scale) != float32_bits(other.scale):
        raise InvalidArgument(
            f"partials[{index}] was computed with scale {other.scale}, partials[0] with {first.scale}"
        )


def _parse(header: dict[str, Any], body: bytes) -> Partial:
    """A Partial from its parts; raises whatever is wrong with them."""
    B, spans, H, Tq, Dv = (arguments.integer("shape", n) for n in header["shape"])
    start, end, span, bc = (arguments.integer(name, header[name]) for name in ("start", "end", "span", "bc"))
    if arguments.integer("recipe", header["recipe"]) != 1 or header["type"] not in SIZE:
        raise ValueError("of another recipe or type")
    if min(B, spans, H, Tq) < 0 or not 1 <= Dv <= MAX_HEAD_DIM or not 1 <= bc <= MAX_BC or span < 1 or span % bc:
        raise ValueError("its shape, bc or span cannot be")
    if not 0 <= start <= end <= MAX_POSITION or start % span or spans != -(-(end - start) // span):
        raise ValueError("its positions and spans disagree")
    if not isinstance(header["q_offset"], list) or len(header["q_offset"]) != B:
        raise ValueError("it does not say where the rows of each sequence are")
    q_offset = arguments.per_sequence("q_offset", header["q_offset"], B)
    scale = float(np.array(arguments.integer("scale", header["scale"]), np.uint32).view(np.float32))
    rows = math.prod((B, spans, H, Tq))
    counts = [rows * Dv, rows * 2, H * arguments.flag("sinks", header["sinks"])]
    if len(body) != SIZE["f32"] * sum(counts):
        raise ValueError("its arrays have another size than its shape says")
    a, stats, sinks = np.split(np.frombuffer(body, "<f4").astype(np.float32), np.cumsum(counts)[:2])
    return Partial(
        a.reshape(B, spans, H, Tq, Dv), stats.reshape(B, spans, H, Tq, 2), start, end, q_offset,
        arguments.flag("causal", header["causal"]), arguments.window(header["window"]), arguments.scale(scale, 1),
        bc, span, _dtype(header["type"]), sinks if header["sinks"] else None,
    )  # fmt: skip


def _dtype(type: str) -> np.dtype[Any]:
    """The dtype of a float type: for bfloat16 that of ml_dtypes, where the program uses it."""
    if type == "bf16":
        ml_dtypes = sys.modules.get("ml_dtypes")
        return BFLOAT16 if ml_dtypes is None else np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"f32": np.float32, "f16": np.float16}[type])
