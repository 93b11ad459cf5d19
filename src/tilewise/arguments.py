"""Checks of single arguments. What is wrong is said in the terms of the caller: which argument, what came, what was
expected."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidArgument, ShapeError

Array = NDArray[Any]
Window = int | tuple[int | None, int | None] | None
F32Array = NDArray[np.float32]
I64Array = NDArray[np.int64]

# bfloat16 in NumPy is the dtype of ml_dtypes, or, where that is not installed, its bits under this name
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
_FLOATS = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", BFLOAT16: "bf16"}
FLOATS = "float32, float16 or bfloat16"
SIZE = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of an element

MAX_POSITION = 1 << 56  # far from where 64-bit arithmetic on positions could overflow
_INFINITY = 0x7F800000  # bits of a float32
_OVERLAP_WORK = 10_000  # effort spent to prove that two interleaved arrays share no element


def float_type(dtype: np.dtype[Any]) -> str | None:
    """f32, f16 or bf16; None for a dtype that is none of them, or not in native byte order."""
    return _FLOATS.get(dtype) or ("bf16" if dtype.name == "bfloat16" and dtype.isnative else None)


def tensor(name: str, x: Any, rank: int, expected: str = FLOATS) -> Array:
    """An input array: of a float type, of that rank, its last axis contiguous."""
    if x is None:
        raise InvalidArgument(f"{name} is missing: expected a {expected} array of {rank} axes, got None")
    if type(x) is not np.ndarray:
        x = _as_array(name, x, expected)
    _check_dtype(name, x, expected)
    if x.ndim != rank:
        raise ShapeError(f"{name} must have {rank} axes, got shape {x.shape}")
    if x.shape[-1] > 1 and x.size and x.strides[-1] != x.itemsize:
        raise InvalidArgument(
            f"the last axis of {name} must be contiguous (stride {x.itemsize} bytes, got {x.strides[-1]}): "
            f"pass np.ascontiguousarray({name})"
        )
    _check_alignment(name, x)
    checked: Array = x
    return checked


def _check_dtype(name: str, x: Array, expected: str) -> None:
    found = float_type(x.dtype)
    if found is None or (found != "f32" and expected == "float32"):
        raise TypeError(f"{name} must be {expected} in native byte order, got {x.dtype!r}")


def _as_array(name: str, x: Any, expected: str) -> Any:
    """A plain array over the memory of an object or a subclass; a list would be copied, so it is refused."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored: pass {name}.filled(...) or a window")
    if not any(hasattr(x, protocol) for protocol in ("__array__", "__array_interface__", "__array_struct__")):
        raise TypeError(f"{name} must be a {expected} NumPy array, got {type(x).__name__}")
    try:
        return np.asarray(x)
    except (ValueError, TypeError) as failure:  # of NumPy; what the object raises itself is its own affair
        raise TypeError(
            f"{name} must be a {expected} NumPy array, got {type(x).__name__}, of which none can be made"
        ) from failure


def _check_alignment(name: str, x: Array) -> None:
    if not is_aligned(x) or any(s % x.itemsize for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        raise InvalidArgument(f"{name} is not aligned to its {x.itemsize}-byte elements: pass {name}.copy()")


def is_aligned(x: Array) -> bool:
    """Whether the first element lies where its type wants it; NumPy knows no such place for a BFLOAT16."""
    if x.dtype == BFLOAT16:
        return bool(x.__array_interface__["data"][0] % x.itemsize == 0)
    return x.flags.aligned


def expect_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {x.shape}")


def integer(name: str, x: Any) -> int:
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {x!r}")
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(x).__name__} {x!r}") from None


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {type(x).__name__} {x!r}")
    return bool(x)


def size(name: str, x: Any, limit: int) -> int:
    size = integer(name, x)
    if not 0 <= size <= limit:
        raise InvalidArgument(f"{name} must lie in 0 ... {limit} (0 picks the default), got {size}")
    return size


def window(x: Any) -> Window:
    """An int counts the keys up to a row's own; a pair those before and after it, None without a limit."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"window must be an integer or a pair (left, right), got {x!r}")
        sides = [None if side is None else integer("window", side) for side in x]
        if any(side is not None and side < 0 for side in sides):
            raise InvalidArgument(f"the sides of window must not be negative (None: no limit), got {x!r}")
        left, right = (None if side is None or side >= MAX_POSITION else side for side in sides)
        return None if left is None and right is None else (left, right)
    keys = None if x is None else integer("window", x)
    return keys if keys is not None and 0 < keys < MAX_POSITION else None


def softcap(x: Any) -> float | None:
    """A positive float, or None for none."""
    if x is None:
        return None
    cap = number("softcap", x)
    if not 0 < cap < math.inf or not 0 < float32_bits(cap) < _INFINITY or not 0 < float32_bits(1 / cap) < _INFINITY:
        raise InvalidArgument(f"softcap must be positive and finite in float32, like 1 / softcap, got {x!r}")
    return cap


def number(name: str, x: Any) -> float:
    if isinstance(x, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} must be a number, got {x!r}")
    try:
        return float(x)
    except OverflowError:
        return math.inf  # an integer beyond float64
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {type(x).__name__} {x!r}") from None


def spread(name: str, x: Any, leading: tuple[int, ...], keys: int, exact: bool, boolean: bool) -> Array:
    """A mask or bias as a view of shape (*leading, keys), or of more keys where that need not be exact."""
    expected = "bool" if boolean else FLOATS
    if type(x) is not np.ndarray:
        x = _as_array(name, x, expected)
    if (x.dtype != np.bool_) if boolean else float_type(x.dtype) is None:
        raise TypeError(f"{name} must be {expected}, got {x.dtype!r}")
    width = x.shape[-1] if x.ndim and x.shape[-1] != 1 else keys
    shape = (*leading, width)
    try:
        view: Array = np.broadcast_to(x, shape)
    except ValueError:
        raise ShapeError(f"{name} must be broadcastable to {(*leading, keys)}, got shape {x.shape}") from None
    if width != keys and (exact or width < keys):
        raise ShapeError(f"{name} must have 1 or {keys} keys on its last axis, got shape {x.shape}")
    if view.size and width > 1 and view.strides[-1] not in (0, x.itemsize):
        raise InvalidArgument(
            f"the last axis of {name} must be contiguous (stride {x.itemsize} bytes, or 0, got {view.strides[-1]}): "
            f"pass np.ascontiguousarray({name})"
        )
    _check_alignment(name, view)
    return view


def scale(x: Any, D: int) -> float:
    if x is None:
        return float(np.float32(D**-0.5))
    scale = number("scale", x)
    bits = float32_bits(scale) if math.isfinite(scale) else _INFINITY
    if bits & _INFINITY == _INFINITY:
        raise InvalidArgument(f"scale must be finite in float32, got {x!r}")
    return scale


def float32_bits(x: float) -> int:
    """The bits of x rounded to float32, ties to even; those of an infinity where it is too large.

    In integers, as the caller's floating-point environment may flush what is subnormal in float32.
    """
    _, exponent = math.frexp(x)
    last_place = max(exponent - 24, -149) if x else -149  # what a bit of the mantissa stands for, as a power of two
    mantissa = round(math.ldexp(abs(x), -last_place))
    bits = min(((last_place + 149) << 23) + mantissa, _INFINITY)
    return bits | (math.copysign(1, x) < 0) << 31


def refuse_mask(name: str, x: Any) -> None:
    """A masked array, whose mask would be ignored."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored: pass {name}.filled(...)")


def per_sequence(name: str, x: Any, batch: int) -> I64Array:
    """A position or length for every sequence, from one integer or an array [B]."""
    refuse_mask(name, x)
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        if not isinstance(x, (list, tuple)):
            value = integer(name, x)
            _check_positions(name, value, value)
            return np.full(batch, value, np.int64)
        try:
            x = np.asarray(x, None if len(x) else np.int64)
        except (ValueError, OverflowError):
            raise TypeError(f"{name} must be an integer or a list of integers [B], got {x!r}") from None
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers [B], got dtype {x.dtype}")
    if x.shape != (batch,):
        raise ShapeError(f"{name} must be an integer or have shape ({batch},), got {x.shape}")
    if batch:
        _check_positions(name, int(x.min()), int(x.max()))
    return np.asarray(x.astype(np.int64))


def _check_positions(name: str, smallest: int, largest: int) -> None:
    if smallest < 0 or largest > MAX_POSITION:
        wrong = smallest if smallest < 0 else largest
        raise InvalidArgument(f"{name} must lie in 0 ... {MAX_POSITION}, got {wrong}")


def offsets(name: str, x: Any, total: int) -> I64Array:
    """Where each sequence of a ragged batch begins, and the last one ends: integers [B + 1] from 0 to `total`."""
    if not isinstance(x, (np.ndarray, list, tuple)):
        raise TypeError(f"{name} must be an array of integers [B + 1], got {type(x).__name__}")
    refuse_mask(name, x)
    array = np.asarray(x)
    if array.ndim != 1 or not array.size:
        raise ShapeError(f"{name} must have shape [B + 1], got {array.shape}")
    cumulative = per_sequence(name, array, len(array))
    wrong = np.diff(cumulative) < 0
    if wrong.any():
        b = int(np.argmax(wrong))
        raise InvalidArgument(f"{name} must not decrease, got {cumulative[b]} and then {cumulative[b + 1]}")
    if cumulative[0] != 0 or cumulative[-1] != total:
        raise InvalidArgument(f"{name} must go from 0 to {total}, got {cumulative[0]} to {cumulative[-1]}")
    return cumulative


def output(name: str, x: Any, shape: tuple[int, ...], contiguous: bool, expected: str = FLOATS) -> Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a {expected} NumPy array to write into, got {type(x).__name__}")
    array = tensor(name, x, len(shape), expected) if contiguous else _as_array(name, x, expected)
    _check_dtype(name, array, expected)
    expect_shape(name, array, shape)
    _check_alignment(name, array)
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only")
    if _overlaps_itself(array):
        raise InvalidArgument(f"{name} overlaps itself: strides {array.strides} for shape {array.shape}")
    checked: Array = array
    return checked


def _overlaps_itself(x: Array) -> bool:
    """Whether two indices may name one element; exact for views made by slicing, transposing and broadcasting."""
    if not x.size:
        return False
    reach = x.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def share_memory(x: Array, y: Array) -> bool:
    if not np.may_share_memory(x, y):
        return False
    try:
        return bool(np.shares_memory(x, y, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except Exception:  # numpy.exceptions.TooHardError, at another name before NumPy 1.25
        return True
