"""Checks of single arguments. What is wrong is said in the terms of the caller: which argument, what came, what was
expected."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidArgument, ShapeError

F32Array = NDArray[np.float32]
I64Array = NDArray[np.int64]

MAX_POSITION = 1 << 56  # far from where 64-bit arithmetic on positions could overflow
_INFINITY = 0x7F800000  # bits of a float32
_OVERLAP_WORK = 10_000  # effort spent to prove that two interleaved arrays share no element


def tensor(name: str, x: Any, rank: int) -> F32Array:
    """An input array: float32, of that rank, its last axis contiguous."""
    if x is None:
        raise InvalidArgument(f"{name} is missing: expected a float32 array of {rank} axes, got None")
    if type(x) is not np.ndarray:
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
    checked: F32Array = x
    return checked


def _as_array(name: str, x: Any) -> Any:
    """A plain array over the memory of an object or a subclass; a list would be copied, so it is refused."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored: pass {name}.filled(...) or a window")
    if not any(hasattr(x, protocol) for protocol in ("__array__", "__array_interface__", "__array_struct__")):
        raise TypeError(f"{name} must be a float32 NumPy array, got {type(x).__name__}")
    try:
        return np.asarray(x)
    except (ValueError, TypeError) as failure:  # of NumPy; what the object raises itself is its own affair
        raise TypeError(
            f"{name} must be a float32 NumPy array, got {type(x).__name__}, of which none can be made"
        ) from failure


def _check_alignment(name: str, x: F32Array) -> None:
    if not x.flags.aligned or any(s % x.itemsize for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        raise InvalidArgument(f"{name} is not aligned to its {x.itemsize}-byte elements: pass {name}.copy()")


def expect_shape(name: str, x: F32Array, shape: tuple[int, ...]) -> None:
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


def window(x: Any) -> int | None:
    window = None if x is None else integer("window", x)
    return window if window is not None and 0 < window < MAX_POSITION else None


def scale(x: Any, D: int) -> float:
    if x is None:
        return float(np.float32(D**-0.5))
    if isinstance(x, (bool, np.bool_, str, bytes)):
        raise TypeError(f"scale must be a number, got {x!r}")
    try:
        scale = float(x)
    except OverflowError:
        scale = math.inf  # an integer beyond float64
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a number, got {type(x).__name__} {x!r}") from None
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


def per_sequence(name: str, x: Any, batch: int) -> I64Array:
    """An integer for every sequence, from one integer or an array [B]."""
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


def output(name: str, x: Any, shape: tuple[int, ...], contiguous: bool) -> F32Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a float32 NumPy array to write into, got {type(x).__name__}")
    array = tensor(name, x, len(shape)) if contiguous else _as_array(name, x)
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise TypeError(f"{name} must be float32 in native byte order, got {array.dtype!r}")
    expect_shape(name, array, shape)
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


def share_memory(x: F32Array, y: F32Array) -> bool:
    if not np.may_share_memory(x, y):
        return False
    try:
        return bool(np.shares_memory(x, y, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except Exception:  # numpy.exceptions.TooHardError, at another name before NumPy 1.25
        return True
