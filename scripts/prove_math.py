#!/usr/bin/env python3
"""How exact are exp2, log2 and tanh of tilewise.simd.math? Every float32 is tried; see docs/explanation/math.md.

    python scripts/prove_math.py               # all of it: minutes on one core
    python scripts/prove_math.py --every 1009  # a sample, seconds

Prints a line for each range: the largest error and where it is, or that every result is the one promised. Exits with 1
where an error is above its bound or a result is not the promised one.

An error is |result - true| in units of the spacing of float32 at the float32 nearest to the true value. The true value
is NumPy's in float64: the argument is exact there, and the difference of two floats so near each other is exact
(Sterbenz), so the float64 function's own error is all that is added: 2^-29 ULP of float32 for each ULP of float64.
It is measured too, against 50 decimal digits, at sampled points and where the error is largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from tilewise.simd.builder import I64, LANES, Builder, Int, Kernel, Vec
from tilewise.simd.jit import native
from tilewise.simd.math import TANH_ONE, exp2, log2, tanh
from tilewise.simd.target import current_target

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
Map = Callable[[F32Array], F32Array]

CHUNK = 1 << 17  # values at a time: they stay in the second-level cache
DIGITS = 50
SMALLEST_DIGITS = 45  # the smallest float32 is 1.4e-45
SAMPLES = 2000  # points of a range at which the float64 reference is compared with decimal digits
EXPONENT_ONE = 0x3F800000  # the bits of 1.0
SIGN = 0x80000000
INF = 0x7F800000
LARGEST_NAN = 0x7FFFFFFF
# The largest errors that this proof found, in ULP, rounded up
EXP2_BOUND, LOG2_BOUND, TANH_BOUND = 0.7997, 1.6606, 1.9535
# l is 0, or from 1 to about the number of keys, which is at most 2^56: see docs/explanation/math.md
L_BITS = 57


@dataclass(frozen=True)
class Range:
    """Consecutive bit patterns, and what is promised there: an error bound in ULP, or one exact result."""

    title: str
    function: str
    first: int
    last: int
    bound: float | None = None
    result: float = 0.0  # where there is no bound; NaN: any NaN

    def count(self, every: int) -> int:
        return (self.last - self.first) // every + 1


RANGES = (
    Range("exp2, x in [-126, -0]", "exp2", SIGN, 0xC2FC0000, bound=EXP2_BOUND),
    Range("log2, x in [1, 2^57)", "log2", EXPONENT_ONE, EXPONENT_ONE + (L_BITS << 23) - 1, bound=LOG2_BOUND),
    Range("exp2, x in [+0, 127.5)", "exp2", 0, 0x42FEFFFF, bound=EXP2_BOUND),
    Range("exp2, x in [-inf, -126): +0", "exp2", 0xC2FC0001, SIGN | INF, result=0.0),
    Range("exp2, x in [127.5, inf]: inf", "exp2", 0x42FF0000, INF, result=np.inf),
    Range("exp2, every NaN: NaN", "exp2", INF + 1, LARGEST_NAN, result=np.nan),
    Range("exp2, every negative NaN: NaN", "exp2", (SIGN | INF) + 1, SIGN | LARGEST_NAN, result=np.nan),
    Range("log2, every normal x in (0, 1)", "log2", 0x00800000, EXPONENT_ONE - 1, bound=LOG2_BOUND),
    Range("log2, every finite x >= 2^57", "log2", EXPONENT_ONE + (L_BITS << 23), INF - 1, bound=LOG2_BOUND),
    Range("log2, +0: -inf", "log2", 0, 0, result=-np.inf),
    Range("log2, -0: -inf", "log2", SIGN, SIGN, result=-np.inf),
    Range("log2, inf: inf", "log2", INF, INF, result=np.inf),
    Range("log2, every x < 0: NaN", "log2", SIGN + 1, SIGN | INF, result=np.nan),
    Range("log2, every NaN: NaN", "log2", INF + 1, LARGEST_NAN, result=np.nan),
    Range("log2, every negative NaN: NaN", "log2", (SIGN | INF) + 1, SIGN | LARGEST_NAN, result=np.nan),
)

TANH_ONE_BITS = int(np.float32(TANH_ONE).view(np.uint32))
TANH_RANGES = (
    Range("tanh, x in (0, 9.02)", "tanh", 1, TANH_ONE_BITS - 1, bound=TANH_BOUND),
    Range("tanh, x in (-9.02, 0)", "tanh", SIGN | 1, SIGN | (TANH_ONE_BITS - 1), bound=TANH_BOUND),
    Range("tanh, x in [9.02, inf]: 1", "tanh", TANH_ONE_BITS, INF, result=1.0),
    Range("tanh, x in [-inf, -9.02]: -1", "tanh", SIGN | TANH_ONE_BITS, SIGN | INF, result=-1.0),
    Range("tanh, +0: +0", "tanh", 0, 0, result=0.0),
    Range("tanh, -0: -0", "tanh", SIGN, SIGN, result=-0.0),
    Range("tanh, every NaN: NaN", "tanh", INF + 1, LARGEST_NAN, result=np.nan),
    Range("tanh, every negative NaN: NaN", "tanh", (SIGN | INF) + 1, SIGN | LARGEST_NAN, result=np.nan),
)


def map_kernel(name: str, function: Callable[[Builder, Vec], Vec]) -> Kernel:
    """A kernel that applies a function to every float32 of an array. Table: the array, the result, the end of each."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        x, y, x_end, y_end = (b.load_int(b.pointer(table + 8 * i, table, table + 32, I64)) for i in range(4))
        source, result = b.pointer(x, x, x_end), b.pointer(y, y, y_end)
        for i in b.loop(0, (x_end - x) // 4, LANES):
            rest = (x_end - x) // 4 - i
            b.store_part(result + i, function(b, b.load_part(source + i, rest)), rest)

    return Kernel(f"map_{name}", body)


def native_map(name: str, function: Callable[[Builder, Vec], Vec]) -> Map:
    """The function, compiled for the current target, over contiguous arrays of float32."""
    entry = native(map_kernel(name, function), current_target())

    def apply(x: F32Array) -> F32Array:
        y = np.empty_like(x)
        table = np.array([x.ctypes.data, y.ctypes.data, x.ctypes.data + x.nbytes, y.ctypes.data + y.nbytes], np.int64)
        entry(table.ctypes.data, 0)
        return y

    return apply


def ulp_error(result: F32Array, true: F64Array) -> F64Array:
    """|result - true| in units of the spacing of float32 at the float32 nearest to `true`; 0 / 0 counts as 0."""
    nearest = true.astype(np.float32)
    unit = np.abs(np.spacing(nearest)).astype(np.float64)
    unit[true == 0] = np.float64(2.0**-149)
    error: F64Array = np.abs(result.astype(np.float64) - true) / unit
    return error


def true_decimal(function: str, x: float) -> Decimal:
    """exp2, log2 or tanh to 50 digits."""
    with localcontext() as context:
        context.prec = DIGITS
        value = Decimal(x)
        if function == "tanh":
            context.prec += SMALLEST_DIGITS  # that e^2x - 1 loses
            power = (2 * value).exp()
            return (power - 1) / (power + 1)
        return (value * Decimal(2).ln()).exp() if function == "exp2" else value.ln() / Decimal(2).ln()


def ulp_error_decimal(function: str, x: float, result: float) -> float:
    """`ulp_error` of one result, the true value known to 50 digits."""
    true = true_decimal(function, x)
    unit = abs(float(np.spacing(np.float32(float(true))))) or 2.0**-149
    with localcontext() as context:
        context.prec = DIGITS
        return float(abs(Decimal(result) - true) / Decimal(unit))


def reference_error(work: Range) -> float:
    """The largest error of the float64 reference at sampled points of a range, in ULP of float64."""
    rng = np.random.default_rng(work.first)
    bits = rng.integers(work.first, work.last + 1, SAMPLES, np.uint32)
    worst = 0.0
    x = bits.view(np.float32).astype(np.float64)
    for value, true in zip(x, getattr(np, work.function)(x), strict=True):
        exact = true_decimal(work.function, float(value))
        if exact:
            with localcontext() as context:
                context.prec = DIGITS
                worst = max(worst, float(abs(Decimal(float(true)) - exact) / Decimal(abs(float(np.spacing(true))))))
    return worst


def chunks(work: Range, every: int) -> Iterator[F32Array]:
    """The values of a range, in order, a chunk at a time."""
    for start in range(work.first, work.last + 1, CHUNK * every):
        stop = min(work.last + 1, start + CHUNK * every)
        yield np.arange(start, stop, every, dtype=np.uint64).astype(np.uint32).view(np.float32)


def prove(work: Range, apply: Map, every: int, advance: Callable[[int], None]) -> tuple[bool, str]:
    """Try a range: whether it keeps its promise, and what was found, as text."""
    worst, where, largest, wrong = -1.0, np.float32(0), -np.inf, 0
    for x in chunks(work, every):
        y = apply(x)
        if work.bound is None:
            right = np.isnan(y) if np.isnan(work.result) else y.view(np.int32) == np.float32(work.result).view(np.int32)
            wrong += int(np.count_nonzero(~right))
        else:
            error = ulp_error(y, getattr(np, work.function)(x.astype(np.float64)))
            at = int(np.nanargmax(np.where(np.isnan(error), np.inf, error)))
            largest = max(largest, float(y.max()))
            if not error[at] <= worst:
                worst, where = float(error[at]), x[at]
        advance(len(x))
    if work.bound is None:
        return wrong == 0, f"{wrong} wrong results"
    y = apply(np.array([where]))[0]
    exact = ulp_error_decimal(work.function, float(where), float(y))
    text = f"max {worst:.6f} ULP (by {DIGITS} digits {exact:.6f}) at x = {where!s} = {float(where).hex()}, result {y!s}"
    return worst <= work.bound, f"{text}; largest result {largest:.9g}"


def show_progress(total: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A progress bar on a terminal where rich is installed, else nothing: (advance by, stop)."""
    try:
        from rich.progress import Progress
    except ImportError:
        return lambda count: None, lambda: None
    bar = Progress(disable=not sys.stderr.isatty())
    task = bar.add_task("float32 values", total=total)
    bar.start()
    return lambda count: bar.advance(task, count), bar.stop


def main() -> int:
    parser = argparse.ArgumentParser(description="Try exp2, log2 and tanh on every float32.")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th value only")
    every = max(1, parser.parse_args().every)
    maps = {name: native_map(name, function) for name, function in (("exp2", exp2), ("log2", log2), ("tanh", tanh))}
    which = "every value" if every == 1 else f"one value in {every}"
    print(f"target {current_target().name}, NumPy {np.__version__}, {which} of each range", flush=True)
    advance, stop = show_progress(sum(work.count(every) for work in RANGES + TANH_RANGES))
    kept = True
    with np.errstate(all="ignore"):
        for work in RANGES + TANH_RANGES:
            good, text = prove(work, maps[work.function], every, advance)
            if work.bound is not None:
                text += f"; float64 itself: {reference_error(work):.3f} ULP of float64"
            print(f"{'ok ' if good else 'BAD'} {work.title}: {work.count(every)} values, {text}", flush=True)
            kept = kept and good
    stop()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
