"""How the tests of the kernel language run a kernel: in each ring, on arrays, on values where arithmetic is hard."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.simd.builder import F32, I64, Builder, Int, Kernel
from tilewise.simd.interp import interpret
from tilewise.simd.jit import Entry, native
from tilewise.simd.target import TARGETS, missing_features

INTERPRETED = "interpreted"
NATIVE_TARGETS = [name for name, target in TARGETS.items() if not missing_features(target)]
RINGS = [INTERPRETED, *NATIVE_TARGETS]

SIGN, INF, NAN = 0x80000000, 0x7F800000, 0x7FC00000
TINY, SMALLEST_NORMAL, LARGEST, ONE = 0x00000001, 0x00800000, 0x7F7FFFFF, 0x3F800000
# bits of float32: zeros, subnormals, extremes, infinities, quiet and signalling NaN with payloads, ones and neighbours,
# the largest odd integer, the largest with a half, powers of two
SPECIAL = [
    magnitude | sign
    for sign in (0, SIGN)
    for magnitude in (
        0, TINY, 0x00000003, SMALLEST_NORMAL - 1, SMALLEST_NORMAL, SMALLEST_NORMAL + 1, LARGEST - 1, LARGEST, INF, NAN,
        NAN | 0x2BCDE, INF | 1, INF | 0x12345, 0x7FFFFFFF, ONE - 1, ONE, ONE + 1, 0x3FC00000, 0x40000000, 0x40400000,
        0x33800000, 0x34000000, 0x4B000001, 0x4B7FFFFF, 0x4B800000, 0x5F000000, 0x20000000, 0x3EAAAAAB,
    )
]  # fmt: skip
INT32 = [
    0,
    1,
    -1,
    2,
    -2,
    127,
    1 << 23,
    (1 << 24) + 1,
    (1 << 24) + 3,
    -(1 << 24) - 1,
    (1 << 31) - 1,
    -(1 << 31),
    0x3F3504F3,
]
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

_numbers = itertools.count()


def is_nan(bits: int) -> bool:
    return bits & ~SIGN > INF


def random_bits(count: int, seed: int) -> list[int]:
    """Random float32 of every exponent, NaN among them."""
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)]


def floats(bits: Any) -> Any:
    """float32 of those bits."""
    return np.asarray(bits, np.uint32).view(np.float32)


def compiled(body: Callable[..., None], ring: str, checked: bool = False) -> Entry:
    """body(b, table, worker) as a function of (table, worker), under a name of its own: kernels are known by name."""
    kernel = Kernel(f"test_{next(_numbers)}", body)
    if ring == INTERPRETED:
        return lambda table, worker: interpret(kernel, table, worker)
    return native(kernel, TARGETS[ring], checked)


def over_arrays(body: Callable[..., None], arrays: tuple[Any, ...]) -> Callable[[Builder, Int, Int], None]:
    """A kernel's body, over a table of the first and last address of each array: body(b, a pointer for each)."""

    def kernel(b: Builder, table: Int, worker: Int) -> None:
        end = table + 16 * len(arrays)
        cells = [b.load_int(b.pointer(table + 8 * i, table, end, I64)) for i in range(2 * len(arrays))]
        elements = [F32 if x.dtype == np.float32 else I64 for x in arrays]
        extents = zip(cells[::2], cells[1::2], elements, strict=True)
        body(b, *(b.pointer(lo, lo, hi, element) for lo, hi, element in extents))

    return kernel


def table_of(arrays: tuple[Any, ...]) -> Any:
    """The table that `over_arrays` reads: [lo, hi) of each array."""
    starts = [x.__array_interface__["data"][0] for x in arrays]
    ends = [start + x.nbytes for start, x in zip(starts, arrays, strict=True)]
    return np.array(list(zip(starts, ends, strict=True)), np.int64)


def run(body: Callable[..., None], ring: str, *arrays: Any, checked: bool = False) -> int:
    """Run body(b, a pointer for each array) once; what the kernel returns: 0, or the address of a failed check."""
    assert all(x.flags.c_contiguous and x.dtype in (np.float32, np.int64) for x in arrays)
    table = table_of(arrays)
    return compiled(over_arrays(body, arrays), ring, checked)(table.__array_interface__["data"][0], 0)
