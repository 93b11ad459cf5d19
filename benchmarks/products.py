#!/usr/bin/env python3
"""What a product of matrices reaches on this machine, without any softmax: PyTorch's, beside ours with it.

    taskset -c 0 python benchmarks/products.py [rounds]

Shares of multiply-add in registers, of one thread, float32. `products of W2n` is what PyTorch (that is, MKL or oneDNN)
reaches in the two products of W2n by themselves, the weights written to memory between them. Rounds are parted by what
the loop of our micro-kernel reached in them: beside neighbours, loads are slow in some of them for everybody.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from parts import seconds

import tilewise as tw
from tilewise.bench.table import SPEED
from tilewise.bench.workloads import inputs
from tilewise.runtime.roof import RoofProbe
from tilewise.simd.target import current_target

QUICK = 0.97  # of multiply-add, that the loop of products reaches in a quick round
STEADY = 0.03  # by how much the roof may change within a round that counts


def contenders() -> dict[str, tuple[float, Callable[[], object]]]:
    """Name: (operations, a call)."""
    found: dict[str, tuple[float, Callable[[], object]]] = {}
    for n in (1024, 2048):
        found[f"{n} x {n}"] = 2.0 * n**3, functools.partial(torch.mm, *torch.randn(2, n, n), out=torch.empty(n, n))
    for w in SPEED:
        if w.name not in ("W2n", "W3"):
            continue
        q, k, v = inputs(w)
        ours = functools.partial(tw.attention, q, k, v, out=np.empty_like(q), **w.arguments)
        found[f"ours, {w.name}"] = w.flops, ours
        if w.name == "W2n":
            found["products of W2n"] = w.flops, functools.partial(products, *map(torch.from_numpy, (q[0], k[0], v[0])))
    return found


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """(q k^T) v of every head."""
    for x, y, z in zip(q, k, v, strict=True):
        torch.mm(torch.mm(x, y.T), z)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    probe, calls = RoofProbe(current_target()), contenders()
    quick: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    with tw.config(threads=1):
        for _, run in calls.values():
            run()
        for _ in range(rounds):
            before, loop = probe.flops / seconds(probe.fma), probe.product_flops / seconds(probe.product)
            found = {name: flops / seconds(run) for name, (flops, run) in calls.items()}
            after = probe.flops / seconds(probe.fma)
            if abs(before / after - 1) < STEADY:
                shares = {name: x / before for name, x in ({"loop of our products": loop} | found).items()}
                (quick if loop >= QUICK * before else other).append(shares)
    print("| share of multiply-add, median (best) | " + " | ".join(("loop of our products", *calls)) + " |")
    print("|---" * (len(calls) + 2) + "|")
    for name, kept in (("quick", quick), ("other", other)):
        if kept:
            columns = [[shares[who] for shares in kept] for who in kept[0]]
            cells = [f"{statistics.median(column):.2f} ({max(column):.2f})" for column in columns]
            print(f"| {len(kept)} {name} rounds | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
