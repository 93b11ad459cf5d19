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

import numpy as np

import tilewise as tw
from tilewise.simd.builder import LANES
from tilewise.simd.interp import NumpyBuilder

OPERATIONS = {
    "fma": "fma", "shuffle": "shuffle", "max": "max", "add": "other", "sub": "other", "mul": "other", "div": "other",
    "lt": "other", "le": "other", "eq": "other", "shl": "other", "shr": "other", "nadd": "other", "nsub": "other",
    "nand": "other", "between": "other", "to_float": "other",
}  # fmt: skip
SHAPES = (("W1, W3", 4, 1, 512, 128, True), ("W2, W5, W6", 1, 1, 512, 64, True), ("W2n", 1, 1, 512, 64, False),
          ("W8", 1, 1, 512, 32, False))  # fmt: skip


def count(H: int, Hkv: int, T: int, D: int, causal: bool) -> Counter[str]:
    """The operations of one call, by kind."""
    counted: Counter[str] = Counter()
    word = NumpyBuilder.word

    def counting(self: NumpyBuilder, name: str, *operands: Any, **static: Any) -> Any:
        kind = OPERATIONS.get(name)
        if kind:
            counted[kind] += 1
        return word(self, name, *operands, **static)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, T, D), np.float32) for heads in (H, Hkv, Hkv))
    NumpyBuilder.word = counting  # type: ignore[method-assign]
    try:
        with tw.config(interpret=True, target="x86-64-v4", threads=1):
            tw.attention(q, k, v, causal=causal)
    finally:
        NumpyBuilder.word = word  # type: ignore[method-assign]
    return counted


def main() -> None:
    print("| like | heads | keys | D | fma of visible pairs | all fma | maxima | shuffles | others | ports allow |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, H, Hkv, T, D, causal in SHAPES:
        pairs = H * T * (T + 1) // 2 if causal else H * T * T
        found, sixteen = count(H, Hkv, T, D, causal), pairs / LANES
        numbers = [2 * D, *(found[kind] / sixteen for kind in ("fma", "max", "shuffle", "other"))]
        share = numbers[0] / sum(numbers[1:])
        cells = [f"{H} on {Hkv}", T, D, *(f"{x:.1f}" for x in numbers), f"{share:.2f}"]
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
