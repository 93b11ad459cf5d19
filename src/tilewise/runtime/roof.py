"""Measure what one core of this machine can do: float32 fma per second, bytes read per second."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from tilewise.kernels.roof import UNROLL, fma_kernel, read_kernel
from tilewise.simd.builder import LANES, Kernel
from tilewise.simd.jit import native
from tilewise.simd.target import Target

FMA_STEPS = 200_000
READ_BYTES = 1 << 28  # beyond the caches of one core's share
REPEATS = 7


@dataclass(frozen=True)
class Roof:
    """The limits of one core: medians over a few repetitions."""

    flops: float  # float32 operations a second, a fused multiply-add counted as two
    read: float  # bytes a second, read in order


def measure_roof(target: Target, read_bytes: int = READ_BYTES, repeats: int = REPEATS) -> Roof:
    """Run both kernels on the calling thread; about half a second."""
    mr, nr = target.register_tile(LANES)
    fma = _median_seconds(fma_kernel(mr, nr), target, np.zeros(2 * LANES, np.float32), FMA_STEPS, repeats)
    steps = read_bytes // (4 * LANES * UNROLL)
    read = _median_seconds(read_kernel(), target, np.zeros(steps * UNROLL * LANES, np.float32), steps, repeats)
    return Roof(2 * LANES * mr * nr * FMA_STEPS / fma, steps * UNROLL * LANES * 4 / read)


def _median_seconds(kernel: Kernel, target: Target, data: np.ndarray, steps: int, repeats: int) -> float:
    entry = native(kernel, target)
    data.fill(0.0)  # touch the pages
    start = data.__array_interface__["data"][0]
    table = np.array([start, start + data.nbytes, steps], np.int64)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        entry(table.__array_interface__["data"][0], 0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
