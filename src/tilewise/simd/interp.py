"""Words to NumPy: a kernel executed word by word, every access checked against its pointer's extent.

The same text as the native kernel, so breakpoints work and run-time loops really loop; equal to native code bit for
bit. Slow: for small problems only.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import KernelError
from tilewise.simd.builder import LANES, WORDS, Bool, Builder, Element, Int, IntLike, Kernel, Ptr, Value

F32Array = NDArray[np.float32]
_IOTA = np.arange(LANES)
EXPONENTS = 1000  # by a power of two beyond, every float32 is 0 or inf
_atomic = threading.Lock()


def fma32(x: F32Array, y: F32Array, z: F32Array) -> F32Array:
    """x * y + z in float32 with one rounding.

    The product is exact in float64. Its sum with z is made exact as s + e (Knuth's two-sum) and rounded to odd: where
    e is not zero and the last bit of s is even, s moves one step towards e. A value rounded to odd at 53 bits rounds
    to the nearest float32 as the exact one does (Boldo and Melquiond, 2008).
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    s = product + addend
    part = s - product
    e = (product - (s - part)) + (addend - part)
    inexact = np.isfinite(s) & np.isfinite(e) & (e != 0) & (s.view(np.int64) & 1 == 0)
    s = np.where(inexact, np.nextafter(s, np.copysign(np.inf, e)), s)
    return s.astype(np.float32)


class NumpyBuilder(Builder):
    """Runs a kernel while its text is read: each word computes at once."""

    def word(self, word: str, *operands: Any, **static: Any) -> Any:
        return _MEANING[word](*operands, **static)

    def constant(self, kind: str, x: float) -> Any:
        if kind == "i":
            return int(x)
        return np.full(LANES, x, np.int32 if kind == "n" else np.float32)

    def advance(self, pointer: int, count: int, element: Element) -> int:
        return pointer + count * element.size

    def address_to_pointer(self, address: int) -> int:
        return address

    def new_slot(self, initial: Value) -> Any:
        return [initial.raw]

    def read_slot(self, slot: Any) -> Any:
        return slot[0]

    def write_slot(self, slot: Any, raw: Any) -> None:
        slot[0] = raw

    def loop(self, lo: IntLike, hi: IntLike, step: IntLike = 1) -> Iterator[Int]:
        for index in range(self.integer(lo).raw, self.integer(hi).raw, self.integer(step).raw):
            yield Int(self, index)

    def when(self, condition: Bool) -> Iterator[None]:
        if condition.raw:
            yield

    def repeat(self, condition: Callable[[], Bool]) -> Iterator[None]:
        while condition().raw:
            yield


def _ldexp(x: F32Array, y: F32Array) -> F32Array:
    n = np.clip(np.nan_to_num(np.rint(y)), -EXPONENTS, EXPONENTS)
    power: F32Array = np.ldexp(x, n.astype(np.int32))
    return power


def _memory(p: Ptr, count: int, kind: Any) -> Any:
    """The `count` elements at p, as an array over that memory."""
    size = count * p.element.size
    if not (p.lo <= p.raw and p.raw + size <= p.hi):
        raise KernelError(f"access of {size} bytes at {p.raw:#x} outside its extent [{p.lo:#x}, {p.hi:#x})")
    memory: Any = (ctypes.c_char * size).from_address(p.raw)
    return np.frombuffer(memory, kind)


def _clip(count: int) -> int:
    return max(0, min(count, LANES))


def _read(p: Ptr, count: int) -> F32Array:
    """`count` elements as float32: exact. A bfloat16 is the upper half of a float32."""
    if p.element.name == "bf16":
        bits: NDArray[np.uint32] = _memory(p, count, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    kind = np.float16 if p.element.name == "f16" else np.float32
    return np.asarray(_memory(p, count, kind), np.float32).copy()


def _write(p: Ptr, x: F32Array) -> None:
    """Store float32s, rounded to the element's type: to nearest, ties to even."""
    if p.element.name == "bf16":
        bits = x.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        _memory(p, len(x), np.uint16)[:] = np.where(np.isnan(x), np.uint32(0x7FC0), rounded)
    else:
        _memory(p, len(x), np.float16 if p.element.name == "f16" else np.float32)[:] = x


def _store_part(p: Ptr, x: F32Array, count: int) -> None:
    if _clip(count):
        _write(p, x[: _clip(count)])


def _store_lane(p: Ptr, x: F32Array, lane: int) -> None:
    _write(p, x[lane : lane + 1])


def _store_int(p: Ptr, x: int) -> None:
    _memory(p, 1, _INTEGER[p.element.name])[0] = x


_INTEGER = {"i64": np.int64, "i32": np.int32, "u8": np.uint8}


def _load_lanes(p: Ptr, lo: int, hi: int, read: Callable[[Ptr, int], Any], kind: Any) -> Any:
    lanes = np.zeros(LANES, kind)
    lo, hi = _clip(lo), _clip(hi)
    if lo < hi:
        lanes[lo:hi] = read(Ptr(p.b, p.raw + lo * p.element.size, p.lo, p.hi, p.element), hi - lo)
    return lanes


def _gather(p: Ptr, index: NDArray[np.int32], kind: Any) -> Any:
    at = (Ptr(p.b, p.raw + int(i) * p.element.size, p.lo, p.hi, p.element) for i in index)
    return np.array([_memory(one, 1, kind)[0] for one in at], kind)


def _divide(x: NDArray[np.int32], y: NDArray[np.int32], remainder: bool) -> NDArray[np.int32]:
    """Towards zero, 0 where y is 0; in 64 bits, where the least integer by -1 has a place."""
    wide, safe = x.astype(np.int64), np.where(y == 0, 1, y).astype(np.int64)
    quotient = np.abs(wide) // np.abs(safe) * np.sign(wide) * np.sign(safe)
    result = wide - quotient * safe if remainder else quotient
    return np.where(y == 0, 0, result).astype(np.int32)


def _fetch_add(p: Ptr, x: int) -> int:
    with _atomic:
        cell = _memory(p, 1, np.int64)
        before = int(cell[0])
        cell[0] = before + x
    return before


def _shr(x: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    return (x.view(np.uint32) >> np.uint32(count)).view(np.int32)


_MEANING: dict[str, Callable[..., Any]] = {
    "iadd": lambda x, y: x + y,
    "isub": lambda x, y: x - y,
    "imul": lambda x, y: x * y,
    "idiv": lambda x, y: x // y,
    "irem": lambda x, y: x % y,
    "imin": min,
    "imax": max,
    "ilt": lambda x, y: x < y,
    "ile": lambda x, y: x <= y,
    "ieq": lambda x, y: x == y,
    "both": lambda x, y: x and y,
    "either": lambda x, y: x or y,
    "negate": lambda x: not x,
    "choose": lambda c, x, y: x if c else y,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": fma32,
    "max": lambda x, y: np.where(x > y, x, y),
    "fraction": lambda x: x - np.rint(x),
    "ldexp": _ldexp,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "where": np.where,
    "shuffle": lambda x, y, lanes: np.concatenate([x, y])[list(lanes)],
    "bits": lambda x: x.view(np.int32),
    "floats": lambda x: x.view(np.float32),
    "to_float": lambda x: x.astype(np.float32),
    "nadd": np.add,
    "nsub": np.subtract,
    "nand": np.bitwise_and,
    "shl": lambda x, count: x << np.int32(count),
    "shr": _shr,
    "splat": lambda x: np.full(LANES, np.array(x & 0xFFFFFFFF, np.uint32).view(np.int32)),
    "iota": lambda: _IOTA.astype(np.int32),
    "nmul": np.multiply,
    "ndiv": lambda x, y: _divide(x, y, remainder=False),
    "nrem": lambda x, y: _divide(x, y, remainder=True),
    "nlt": np.less,
    "neq": np.equal,
    "nwhere": np.where,
    "between": lambda lo, hi: (lo <= _IOTA) & (hi > _IOTA),
    "mand": np.logical_and,
    "mor": np.logical_or,
    "mnot": np.logical_not,
    "any": lambda m: bool(m.any()),
    "all": lambda m: bool(m.all()),
    "load": lambda p: _read(p, LANES),
    "load_halves": lambda p, q: np.concatenate([_read(x, LANES // 2) for x in (p, q)]),
    "load_part": lambda p, count: _load_lanes(p, 0, count, _read, np.float32),
    "broadcast": lambda p: np.full(LANES, _read(p, 1)[0]),
    "load_int": lambda p: int(_memory(p, 1, _INTEGER[p.element.name])[0]),
    "load_ints": lambda p: _memory(p, LANES, np.int32).copy(),
    "load_lanes": lambda p, lo, hi: _load_lanes(p, lo, hi, _read, np.float32),
    "load_mask_lanes": lambda p, lo, hi: _load_lanes(p, lo, hi, lambda q, n: _memory(q, n, np.uint8) != 0, np.bool_),
    "gather": lambda p, index: _gather(p, index, np.float32),
    "gather_ints": lambda p, index: _gather(p, index, np.int32),
    "prefetch": lambda p, locality: None,
    "store": _write,
    "store_part": _store_part,
    "store_lane": _store_lane,
    "store_int": _store_int,
    "fetch_add": _fetch_add,
    "load_acquire": lambda p: int(_memory(p, 1, np.int64)[0]),
    "store_release": _store_int,
    "pause": lambda: time.sleep(0),
}
assert _MEANING.keys() == WORDS.keys()


def interpret(kernel: Kernel, table: int, worker: int) -> int:
    """Run a kernel word by word on the table at that address; raises KernelError for an access out of bounds."""
    b = NumpyBuilder()
    with np.errstate(all="ignore"):
        kernel.body(b, Int(b, table), Int(b, worker))
    return 0
