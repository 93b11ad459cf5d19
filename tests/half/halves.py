"""Half types for tests: what their bits mean and how a number rounds to them, from the definition alone.

A type has 2^15 magnitudes, which its bits count in ascending order. The nearest one is found among them all, so nothing
here shares an algorithm with what it tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import Case
from tilewise.arguments import BFLOAT16

try:
    import ml_dtypes
except ImportError:  # an optional extra
    ml_dtypes = None

Array = NDArray[Any]
SIGN = np.uint16(0x8000)


@dataclass(frozen=True)
class Half:
    """A type of 16 bits, as an array's dtype."""

    name: str
    dtype: Any
    significant: int  # bits after the point
    bias: int

    @functools.cached_property
    def infinity(self) -> int:
        """Bits of infinity: as many magnitudes are finite."""
        return (2 * self.bias + 1) << self.significant

    @functools.cached_property
    def magnitudes(self) -> NDArray[np.float64]:
        """All finite ones in ascending order, and what would come next."""
        bits = np.arange(self.infinity + 1)
        exponent, fraction = bits >> self.significant, bits & ((1 << self.significant) - 1)
        normal = exponent > 0
        whole = fraction + (normal << self.significant)
        return np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - self.bias - self.significant)

    def bits_of(self, x: Array) -> NDArray[np.uint16]:
        """The bits of the nearest one to each float32, ties to even; 0x7E00 or 0x7FC0 for NaN."""
        with np.errstate(invalid="ignore"):  # NumPy reports signalling NaN
            size = np.abs(x.astype(np.float64))
        between = (self.magnitudes[:-1] + self.magnitudes[1:]) / 2
        index = np.searchsorted(between, np.where(np.isnan(size), 0, size))
        tie = between[np.minimum(index, len(between) - 1)] == size
        index = np.where(tie & (index < len(between)), index + (index & 1), index)
        bits = np.where(np.isnan(size), self.infinity + (1 << (self.significant - 1)), index).astype(np.uint16)
        return bits | np.where(np.signbit(x) & ~np.isnan(x), SIGN, np.uint16(0))

    def rounded(self, x: Array) -> Array:
        return self.bits_of(x).view(self.dtype)

    def values(self, x: Array) -> NDArray[np.float32]:
        """float32 of what the bits say: exact."""
        bits = np.ascontiguousarray(x).view(np.uint16)
        size = np.concatenate([self.magnitudes[:-1], [np.inf], np.full(0x7FFF - self.infinity, np.nan)])[bits & 0x7FFF]
        return np.where(bits & SIGN, -size, size).astype(np.float32)

    def spacing(self, x: Array) -> NDArray[np.float64]:
        """The distance of neighbours at each |x|."""
        exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, 1 - self.bias)
        return np.ldexp(1.0, exponent - self.significant)


class Single:
    """float32, with the same words."""

    name, dtype = "f32", np.dtype(np.float32)

    def rounded(self, x: Array) -> Array:
        return x.astype(np.float32)

    def values(self, x: Array) -> Array:
        return x


F32 = Single()
F16 = Half("f16", np.dtype(np.float16), 10, 15)
BF16 = Half("bf16", BFLOAT16 if ml_dtypes is None else np.dtype(ml_dtypes.bfloat16), 7, 127)
BF16_BITS = Half("bf16 as bits", BFLOAT16, 7, 127)
HALVES = (F16, BF16) if ml_dtypes is None else (F16, BF16, BF16_BITS)

# of q, k, v and out
SAME = [(t, t, t, t) for t in HALVES]
MIXED = [(F32, BF16, F16, F32), (BF16, F32, F32, F16), (F16, F16, BF16, BF16), (F32, F16, BF16, F16)]


def name_of(types: Any) -> str:
    return "-".join(t.name for t in types)


@dataclass(frozen=True, eq=False)
class HalfCase:
    """A problem whose arrays are of half types; `single` is the same in float32, exactly."""

    half: Case
    single: Case
    out: Any

    def expected(self, **changes: Any) -> tuple[Array, Array]:
        """Recipe 1 on the same numbers in float32, rounded once."""
        o, lse = self.single.run(pool=1, **changes)
        return self.out.rounded(o), lse

    def run(self, **changes: Any) -> tuple[Array, Array]:
        if "out" not in changes and self.half.q.dtype != self.out.dtype:
            changes["out"] = np.empty((*self.half.q.shape[:3], self.half.v.shape[3]), self.out.dtype)
        return self.half.run(**changes)


def halved(c: Case, types: Any) -> HalfCase:
    """The case with its inputs rounded to those types."""
    arrays = [t.rounded(x) for t, x in zip(types, (c.q, c.k, c.v), strict=False)]
    exact = [t.values(x).reshape(x.shape) for t, x in zip(types, arrays, strict=False)]
    return HalfCase(Case(*arrays, c.options), Case(*exact, c.options), types[3])
