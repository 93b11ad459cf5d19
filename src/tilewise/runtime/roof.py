"""Measure what this machine can do: float32 fma per second, bytes read per second, on one thread or on several."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewise.arguments import F32Array, I64Array
from tilewise.kernels.roof import DEPTH, UNROLL, fma_kernel, product_floats, product_kernel, read_kernel
from tilewise.runtime.pool import pool_for
from tilewise.simd.builder import LANES
from tilewise.simd.jit import native
from tilewise.simd.target import Target

FMA_STEPS = 1_000_000  # about 5 ms
READ_BYTES = 1 << 28  # beyond the caches of one core's share
READ_AHEAD = (0, 64)  # lines; which of the two reads faster is a matter of the machine
REPEATS = 7

_BLOCK = UNROLL * LANES  # floats a step of the read kernel
_LINE = 64  # bytes; a vector load that straddles a line costs
_FACTOR, _ADDEND = 0.999, 0.001  # of x = x * factor + addend: it goes from 0 to 1, and zeros would toggle no wires


@dataclass(frozen=True)
class Roof:
    """The limits of one core: medians over a few repetitions."""

    flops: float  # float32 operations a second, a fused multiply-add counted as two
    read: float  # bytes a second, read in order


def written_floats(*shape: int) -> F32Array:
    """A float32 array of ones that begins on a cache line.

    Every page of it was written: pages that were not are all one page of zeros, and read as fast as a cache.
    """
    count = int(np.prod(shape))
    raw = np.empty(count + _LINE // 4, np.float32)
    start = -raw.__array_interface__["data"][0] % _LINE // 4
    array = raw[start : start + count].reshape(shape)
    array.fill(1.0)
    return array


class RoofProbe:
    """The kernels of the roof over buffers of their own: each method is one pass, on all threads at once."""

    def __init__(self, target: Target, read_bytes: int = READ_BYTES, threads: int = 1, fma_steps: int = 0) -> None:
        mr, nr = target.register_tile(LANES)
        fma_steps = fma_steps or FMA_STEPS
        steps = max(1, read_bytes // (4 * _BLOCK * threads))
        self.flops = 2 * LANES * mr * nr * fma_steps * threads  # of a pass
        self.nbytes = 4 * _BLOCK * steps * threads  # that a pass reads
        self._threads = threads
        self._pool = pool_for(threads)
        self._fma = native(fma_kernel(mr, nr), target)
        self._crowded = native(fma_kernel(mr, nr, target.registers_per_vector), target)
        self._product = native(product_kernel(mr, nr), target)
        self._products = [written_floats(product_floats(mr, nr)) for _ in range(threads)]
        self._product_tables = [_table(x, fma_steps // DEPTH) for x in self._products]
        self.product_flops = 2 * LANES * mr * nr * (fma_steps // DEPTH) * DEPTH * threads
        self._read = {ahead: native(read_kernel(ahead), target) for ahead in READ_AHEAD}
        self._constants = [written_floats(2 * LANES) for _ in range(threads)]
        buffers = [written_floats(steps * _BLOCK) for _ in range(threads)]
        self._fma_tables = [_table(x, fma_steps) for x in self._constants]
        self._read_tables = [_table(x, steps) for x in buffers]
        self._buffers = buffers

    def fma(self) -> None:
        """`flops` operations on values in registers."""
        self._run_fma(self._fma)

    def crowded(self) -> None:
        """The same beside as many other instructions: they fit between, unless another hardware thread, which nothing
        else tells of, takes every second turn to issue some."""
        self._run_fma(self._crowded)

    def product(self) -> None:
        """`product_flops` operations in the loop of the micro-kernel, with its loads from the first-level cache."""
        self._run(self._product, self._product_tables)

    def read(self, ahead: int) -> None:
        """Read `nbytes` in order, asking for lines `ahead` before they are due; 0 leaves it to the processor."""
        self._run(self._read[ahead], self._read_tables)

    def _run_fma(self, entry: Callable[[int, int], int]) -> None:
        for x in self._constants:  # the kernel leaves its sum there
            x[:LANES], x[LANES:] = _FACTOR, _ADDEND
        self._run(entry, self._fma_tables)

    def _run(self, entry: Callable[[int, int], int], tables: list[I64Array]) -> None:
        addresses = [table.__array_interface__["data"][0] for table in tables]
        self._pool.run(self._threads, lambda worker: entry(addresses[worker], worker))


def measure_roof(target: Target, read_bytes: int = READ_BYTES, repeats: int = REPEATS) -> Roof:
    """Run the kernels on the calling thread; about half a second."""
    probe = RoofProbe(target, read_bytes)
    fma = _median_seconds(probe.fma, repeats)
    read = min(_median_seconds(functools.partial(probe.read, ahead), repeats) for ahead in READ_AHEAD)
    return Roof(probe.flops / fma, probe.nbytes / read)


def _table(data: F32Array, steps: int) -> I64Array:
    """The table of `kernels.roof.ROOF`."""
    start = data.__array_interface__["data"][0]
    return np.array([start, start + data.nbytes, steps], np.int64)


def _median_seconds(run: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
