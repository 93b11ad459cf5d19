"""The machine's own limits, by kernels in the same language: fused multiply-add, alone and in products; reads."""

from __future__ import annotations

from tilewise.kernels.microkernel import Accumulators, accumulators, outer_products
from tilewise.kernels.tables import Row
from tilewise.simd.builder import F32, LANES, Builder, Int, Kernel, Vec

ROOF = ("data", "end", "steps")  # the table: a float32 array [data, end), steps to take
UNROLL = 8  # loads in flight
DEPTH = 64  # of a product: its operands, some 20 kB, stay in the first-level cache


def fma_kernel(mr: int, nr: int, beside: int = 0) -> Kernel:
    """`steps` times mr * nr independent fma on values in registers: 2 * 16 * mr * nr flops a step.

    Beside each, so many instructions that need nothing that an fma needs but a place in line: prefetches of one line.
    """

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, ROOF)
        data = b.pointer(call["data"], call["data"], call["end"], F32)
        factor, addend = b.load(data), b.load(data + LANES)
        acc = accumulators(b, mr, nr)
        for i, cell in enumerate(cell for row in acc for cell in row):
            cell.value = b.vec(float(i))  # all different, or a compiler might see that they are the same sum
        for _ in b.loop(0, call["steps"]):
            for row in acc:
                for cell in row:
                    cell.value = b.fma(cell.value, factor, addend)
                    for _ in range(beside):
                        b.prefetch(data)
        b.store(data, _sum(b, acc))

    return Kernel(f"roof_fma_{mr}x{nr}" + f"_beside{beside}" * bool(beside), body)


def product_kernel(mr: int, nr: int) -> Kernel:
    """`steps` times the loop of the micro-kernel, 2 * 16 * mr * nr * DEPTH flops: what it is worth with its loads.

    The data: a vector for the sum; `nr` vectors for each of DEPTH; mr rows of DEPTH floats.
    """

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, ROOF)
        data = b.pointer(call["data"], call["data"], call["end"], F32)
        acc, right = accumulators(b, mr, nr), data + LANES
        for _ in b.loop(0, call["steps"]):
            outer_products(b, acc, right + DEPTH * nr * LANES, DEPTH, right, nr * LANES, LANES, 0, DEPTH)
        b.store(data, _sum(b, acc))

    return Kernel(f"roof_product_{mr}x{nr}", body)


def product_floats(mr: int, nr: int) -> int:
    """Floats of the data of a product."""
    return LANES + DEPTH * nr * LANES + DEPTH * mr


def _sum(b: Builder, acc: Accumulators) -> Vec:
    total = b.vec(0.0)
    for row in acc:
        for cell in row:
            total = total + cell.value
    return total


def read_kernel(ahead: int = 0) -> Kernel:
    """Read `steps` times 8 vectors of 16 floats in order, and sum them; prefetch the line `ahead` lines further on.

    A vector is a line of 64 bytes. The last prefetches go past the end, which a prefetch may.
    """

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, ROOF)
        data = b.pointer(call["data"], call["data"], call["end"], F32)
        sums = [b.var(b.vec(0.0)) for _ in range(UNROLL)]
        for i in b.loop(0, call["steps"] * (UNROLL * LANES), UNROLL * LANES):
            for x, part in enumerate(sums):
                if ahead:
                    b.prefetch(data + i + (x + ahead) * LANES)
                part.value = part.value + b.load(data + i + x * LANES)
        total = sums[0].value
        for other in sums[1:]:
            total = total + other.value
        b.store(data, total)

    return Kernel(f"roof_read_ahead{ahead}" if ahead else "roof_read", body)
