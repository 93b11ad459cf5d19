"""What was asked: the arguments of a call, checked. Every validation error is raised here, before anything is written."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidArgument, ShapeError
from tilewise.visibility import bounds, visible_pairs

F32Array = NDArray[np.float32]
I64Array = NDArray[np.int64]

DEFAULT_BC = 64
DEFAULT_SPAN = 1024
MAX_BC = 512
MAX_HEAD_DIM = 1024
MAX_POSITION = 1 << 56  # far from where 64-bit arithmetic on positions could overflow
_OVERLAP_WORK = 10_000  # effort spent to prove that two interleaved arrays share no element


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked problem. Keys of sequence b: k[b, :, kv_start[b] : kv_start[b] + kv_len[b]], from position k_offset[b]."""

    q: F32Array
    k: F32Array
    v: F32Array
    out: F32Array | None  # None: to be allocated
    lse: F32Array | None
    return_lse: bool
    sinks: F32Array | None
    scale: float
    causal: bool
    window: int | None
    q_offset: I64Array
    kv_start: I64Array
    kv_len: I64Array
    k_offset: I64Array
    br: int  # 0: the plan chooses
    bc: int
    span: int

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def H(self) -> int:
        return self.q.shape[1]

    @property
    def Hkv(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        return self.H // max(1, self.Hkv)

    @property
    def Tq(self) -> int:
        return self.q.shape[2]

    @property
    def Tk(self) -> int:
        return self.k.shape[2]

    @property
    def D(self) -> int:
        return self.q.shape[3]

    @property
    def Dv(self) -> int:
        return self.v.shape[3]

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right): the keys that a row sees before and after its own position, at most."""
        return bounds(self.causal, self.window)

    def visible_pairs(self) -> int:
        """(row, key) pairs that enter the result, over all sequences and query heads."""
        per_sequence = (
            visible_pairs(self.Tq, int(q), int(k), int(n), *self.bounds)
            for q, k, n in zip(self.q_offset, self.k_offset, self.kv_len, strict=True)
        )
        return self.H * sum(per_sequence)

    def flops(self) -> int:
        """Floating-point operations of both products over visible pairs."""
        return 2 * (self.D + self.Dv) * self.visible_pairs()


def make_problem(
    q: Any, k: Any, v: Any, *, causal: Any = False, window: Any = None, scale: Any = None, q_offset: Any = None,
    sinks: Any = None, return_lse: Any = False, kv_start: Any = None, kv_len: Any = None, k_offset: Any = None,
    out: Any = None, lse: Any = None, br: Any = 0, bc: Any = 0, span: Any = 0,
) -> Problem:  # fmt: skip
    """Check every argument of `tilewise.attention`; see there for their meaning and the errors."""
    q, k, v = _tensor("q", q, 4), _tensor("k", k, 4), _tensor("v", v, 4)
    _check_shapes(q, k, v)
    batch, heads, rows, width = *q.shape[:3], v.shape[3]
    causal, window = _flag("causal", causal), _window(window)
    kv_start, kv_len, k_offset = _keys(batch, k.shape[2], kv_start, kv_len, k_offset)
    if sinks is not None:
        sinks = _tensor("sinks", sinks, 1)
        _expect_shape("sinks", sinks, (heads,))
    if out is not None:
        out = _output("out", out, (batch, heads, rows, width), contiguous=True)
    if lse is not None:
        lse = _output("lse", lse, (batch, heads, rows), contiguous=False)
    _check_overlaps({"out": out, "lse": lse}, {"q": q, "k": k, "v": v, "sinks": sinks})
    bc = _size("bc", bc, MAX_BC) or DEFAULT_BC
    return Problem(
        q, k, v, out, lse, _flag("return_lse", return_lse) or lse is not None, sinks,
        scale=_scale(scale, q.shape[3]), causal=causal, window=window,
        q_offset=_query_offset(q_offset, rows, kv_len, k_offset, causal or window is not None),
        kv_start=kv_start, kv_len=kv_len, k_offset=k_offset,
        br=_size("br", br, MAX_POSITION), bc=bc, span=_span(span, bc),
    )  # fmt: skip


def _tensor(name: str, x: Any, rank: int) -> F32Array:
    """An input array: float32, of that rank, its last axis contiguous."""
    if x is None:
        raise InvalidArgument(f"{name} is missing: expected a float32 array of {rank} axes, got None")
    if not isinstance(x, np.ndarray):
        x = _as_array(name, x)
    if x.dtype != np.float32 or not x.dtype.isnative:
        raise TypeError(f"{name} must be float32 in native byte order, got {x.dtype!r}")
    if x.ndim != rank:
        raise ShapeError(f"{name} must have {rank} axes, got shape {x.shape}")
    if x.shape[-1] > 1 and x.size and x.strides[-1] != x.itemsize:
        raise InvalidArgument(
            f"the last axis of {name} must be contiguous (stride {x.itemsize} bytes, got {x.strides[-1]}): "
            f"pass np.ascontiguousarray({name})"
        )
    _check_alignment(name, x)
    return x


def _as_array(name: str, x: Any) -> Any:
    """An object that shares its memory as an array; a list would be copied, so it is refused."""
    if not any(hasattr(x, protocol) for protocol in ("__array__", "__array_interface__", "__array_struct__")):
        raise TypeError(f"{name} must be a float32 NumPy array, got {type(x).__name__}")
    return np.asarray(x)


def _check_alignment(name: str, x: F32Array) -> None:
    if not x.flags.aligned or any(s % x.itemsize for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        raise InvalidArgument(f"{name} is not aligned to its {x.itemsize}-byte elements: pass {name}.copy()")


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


def _expect_shape(name: str, x: F32Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {x.shape}")


def _integer(name: str, x: Any) -> int:
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {x!r}")
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(x).__name__} {x!r}") from None


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {type(x).__name__} {x!r}")
    return bool(x)


def _size(name: str, x: Any, limit: int) -> int:
    size = _integer(name, x)
    if not 0 <= size <= limit:
        raise InvalidArgument(f"{name} must lie in 0 ... {limit} (0 picks the default), got {size}")
    return size


def _span(x: Any, bc: int) -> int:
    span = _size("span", x, MAX_POSITION)
    if span % bc:
        raise InvalidArgument(f"span must be a multiple of bc = {bc}, got {span}")
    return span or max(1, DEFAULT_SPAN // bc) * bc


def _window(x: Any) -> int | None:
    window = None if x is None else _integer("window", x)
    return window if window is not None and 0 < window < MAX_POSITION else None


def _scale(x: Any, D: int) -> float:
    if x is None:
        return float(np.float32(D**-0.5))
    if isinstance(x, (bool, np.bool_, str, bytes)):
        raise TypeError(f"scale must be a number, got {x!r}")
    try:
        scale = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a number, got {type(x).__name__} {x!r}") from None
    if not math.isfinite(scale) or abs(scale) > float(np.finfo(np.float32).max):
        raise InvalidArgument(f"scale must be finite in float32, got {scale}")
    return float(np.float32(scale))


def _per_sequence(name: str, x: Any, batch: int) -> I64Array:
    """An integer for every sequence, from one integer or an array [B]."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        if not isinstance(x, (list, tuple)):
            value = _integer(name, x)
            _check_positions(name, value, value)
            return np.full(batch, value, np.int64)
        x = np.asarray(x, None if len(x) else np.int64)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers [B], got dtype {x.dtype}")
    if x.shape != (batch,):
        raise ShapeError(f"{name} must be an integer or have shape ({batch},), got {x.shape}")
    if batch:
        _check_positions(name, int(x.min()), int(x.max()))
    return x.astype(np.int64)


def _check_positions(name: str, smallest: int, largest: int) -> None:
    if smallest < 0 or largest > MAX_POSITION:
        wrong = smallest if smallest < 0 else largest
        raise InvalidArgument(f"{name} must lie in 0 ... {MAX_POSITION}, got {wrong}")


def _keys(batch: int, Tk: int, kv_start: Any, kv_len: Any, k_offset: Any) -> tuple[I64Array, I64Array, I64Array]:
    start = _per_sequence("kv_start", 0 if kv_start is None else kv_start, batch)
    if (start > Tk).any():
        raise InvalidArgument(f"kv_start must lie in 0 ... Tk = {Tk}, got {start.max()}")
    length = Tk - start if kv_len is None else _per_sequence("kv_len", kv_len, batch)
    if (start + length > Tk).any():
        b = int(np.argmax(start + length))
        raise InvalidArgument(f"kv_start + kv_len must not pass Tk = {Tk}, got {start[b]} + {length[b]} (sequence {b})")
    return start, length, _per_sequence("k_offset", 0 if k_offset is None else k_offset, batch)


def _query_offset(x: Any, rows: int, kv_len: I64Array, k_offset: I64Array, positions_matter: bool) -> I64Array:
    batch = len(kv_len)
    if x is not None:
        return _per_sequence("q_offset", x, batch)
    if positions_matter and ((kv_len != rows) | (k_offset != 0)).any():
        b = int(np.argmax((kv_len != rows) | (k_offset != 0)))
        raise InvalidArgument(
            f"q_offset must be given: sequence {b} has {rows} query rows and {kv_len[b]} keys from position {k_offset[b]}, "
            f"so causal or window needs the position of its first query row. Common answers: q_offset = 0 (top-left: "
            f"rows and keys both start at position 0), q_offset = Tk - Tq (bottom-right: the rows are the last of the keys)"
        )
    return np.zeros(batch, np.int64)


def _output(name: str, x: Any, shape: tuple[int, ...], contiguous: bool) -> F32Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a float32 NumPy array to write into, got {type(x).__name__}")
    array = _tensor(name, x, len(shape)) if contiguous else x
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise TypeError(f"{name} must be float32 in native byte order, got {array.dtype!r}")
    _expect_shape(name, array, shape)
    _check_alignment(name, array)
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only")
    if _overlaps_itself(array):
        raise InvalidArgument(f"{name} overlaps itself: strides {array.strides} for shape {array.shape}")
    return array


def _overlaps_itself(x: F32Array) -> bool:
    """Whether two indices may name one element; exact for views made by slicing, transposing and broadcasting."""
    if not x.size:
        return False
    reach = x.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def _check_overlaps(outputs: dict[str, F32Array | None], inputs: dict[str, F32Array | None]) -> None:
    for name, x in outputs.items():
        if x is None:
            continue
        for other, y in (*inputs.items(), ("lse", outputs["lse"] if name == "out" else None)):
            if y is not None and _share_memory(x, y):
                raise InvalidArgument(f"{name} overlaps {other}")


def _share_memory(x: F32Array, y: F32Array) -> bool:
    if not np.may_share_memory(x, y):
        return False
    try:
        return np.shares_memory(x, y, max_work=_OVERLAP_WORK)
    except Exception:  # numpy.exceptions.TooHardError, at another name before NumPy 1.25
        return True
