#!/usr/bin/env python3
"""The vector operations of a call, counted: the share of the peak that two vector ports leave to the products.

    python benchmarks/operations.py

A multiply-add peak is that of two ports which take every vector operation. So a kernel reaches at most the share of its
operations that are multiply-adds of visible pairs; what else it does, and what it computes for nothing, is the rest.
The interpreter runs the kernel, word by word, and counts; loads and stores have ports of their own. A `where` is not
counted: it is a mask on the operation before it. Vectors are of 16 lanes, as those of AVX-512.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tilewise as tw
from tilewise.bench.workloads import Workload, inputs
from tilewise.simd.builder import LANES
from tilewise.simd.interp import NumpyBuilder

OPERATIONS = {
    "fma": "fma", "shuffle": "shuffle", "max": "max", "add": "other", "sub": "other", "mul": "other", "div": "other",
    "lt": "other", "le": "other", "eq": "other", "shl": "other", "shr": "other", "nadd": "other", "nsub": "other",
    "nand": "other", "between": "other", "to_float": "other", "fraction": "other", "ldexp": "other",
}  # fmt: skip
INSTRUCTIONS = {"ldexp": 2}  # more than one of AVX-512: the exponent, and the product
SHAPES = (
    Workload("W1, W3", "", 1, 4, 1, 512, 512, 128, causal=True),
    Workload("W2, W6", "", 1, 1, 1, 512, 512, 64, causal=True),
    Workload("W2n", "", 1, 1, 1, 512, 512, 64),
    Workload("W5", "", 1, 4, 1, 128, 640, 64, causal=True, window=512, q_offset=512),
    Workload("W8", "", 1, 1, 1, 512, 512, 32),
)


def count(w: Workload) -> Counter[str]:
    """The operations of one call, by kind."""
    counted: Counter[str] = Counter()
    word = NumpyBuilder.word

    def counting(self: NumpyBuilder, name: str, *operands: Any, **static: Any) -> Any:
        kind = OPERATIONS.get(name)
        if kind:
            counted[kind] += INSTRUCTIONS.get(name, 1)
        return word(self, name, *operands, **static)

    NumpyBuilder.word = counting  # type: ignore[method-assign]
    try:
        with tw.config(interpret=True, target="x86-64-v4", threads=1):
            tw.attention(*inputs(w), **w.arguments)
    finally:
        NumpyBuilder.word = word  # type: ignore[method-assign]
    return counted


def main() -> None:
    print("| like | shape | fma of visible pairs | all fma | maxima | shuffles | others | ports allow |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for w in SHAPES:
        found, sixteen = count(w), w.pairs / LANES
        numbers = [2 * w.D, *(found[kind] / sixteen for kind in ("fma", "max", "shuffle", "other"))]
        cells = [w.name, w.shape, *(f"{x:.1f}" for x in numbers), f"{numbers[0] / sum(numbers[1:]):.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
