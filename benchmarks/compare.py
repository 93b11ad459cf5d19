#!/usr/bin/env python3
"""Which of several source trees is faster, and by how much: for an experiment, or before and after a change.

    taskset -c 0 python benchmarks/compare.py ../before/src src [-w W2n,W4,W7] [--rounds 40]

One process makes the inputs and forks one for each tree, which imports tilewise from there. So all read the same pages:
with arrays of their own they would differ by up to 5 % where keys come from the last-level cache. In every round each
has a turn of at least 5 ms, in random order, and its fastest call counts. Reported is the median of the ratios to the
first tree's in the same round: of all rounds, of the half in which the first tree was quicker, and of the other half.
Name a tree twice to see what the machine's noise is worth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

TURN = 0.005  # seconds
FORK = multiprocessing.get_context("fork")
Answer = Callable[[], Any]


class Tree:
    """A process with a tree's tilewise: `make` gives what it does whenever it is asked."""

    def __init__(self, path: str, make: Callable[..., Answer], *arguments: Any) -> None:
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=self._serve, args=(path, make, arguments, other), daemon=True)
        self._process.start()
        other.close()

    def _serve(self, path: str, make: Callable[..., Answer], arguments: tuple[Any, ...], pipe: Connection) -> None:
        sys.path.insert(0, path)
        answer = make(*arguments)
        while pipe.recv():
            pipe.send(answer())

    def ask(self) -> Any:
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def workloads() -> Answer:
    """Shapes and further arguments of every dense float32 workload, by name; their definitions are a tree's."""
    from tilewise.bench.table import WORKLOADS
    from tilewise.bench.workloads import Workload

    return lambda: {
        name: (w.shapes, w.arguments) for name, w in WORKLOADS.items() if type(w) is Workload and w.type == "f32"
    }


def attention(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Answer:
    """The seconds of the fastest call in a turn."""
    import tilewise as tw

    out = np.empty_like(q)

    def turn() -> float:
        fastest, end = float("inf"), time.perf_counter() + TURN
        while True:
            begin = time.perf_counter()
            tw.attention(q, k, v, out=out, pool=1, **arguments)
            now = time.perf_counter()
            fastest = min(fastest, now - begin)
            if now > end:
                return fastest

    turn()
    return turn


def compare(paths: list[str], name: str, shapes: Any, arguments: dict[str, Any], rounds: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    trees = [Tree(path, attention, q, k, v, arguments) for path in paths]
    seconds: list[list[float]] = [[] for _ in trees]
    for _ in range(rounds):
        for i in random.sample(range(len(trees)), len(trees)):
            seconds[i].append(trees[i].ask())
    for tree in trees:
        tree.close()
    for path, times in zip(paths, seconds, strict=True):
        ratios = [own / first for first, own in sorted(zip(seconds[0], times, strict=True))]  # the quicker rounds first
        parts = ratios, ratios[: (rounds + 1) // 2], ratios[rounds // 2 :]
        typical, quicker, slower = map(statistics.median, parts)
        print(
            f"{name:5} {path[-40:]:40} best {min(times) * 1e3:9.3f} ms, median {statistics.median(times) * 1e3:9.3f}; "
            f"ratio {typical:.3f}, quicker half {quicker:.3f}, slower half {slower:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare source trees.")
    parser.add_argument("trees", nargs="+", help="folders that hold the package tilewise; the first is compared with")
    parser.add_argument("-w", "--workloads", default="W2n,W3,W4,W4b,W7,W8", help="of tilewise bench, float32")
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    tree = Tree(chosen.trees[0], workloads)
    known, names = tree.ask(), chosen.workloads.split(",")
    tree.close()
    if unknown := set(names) - set(known):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    for name in names:
        compare(chosen.trees, name, *known[name], chosen.rounds)


if __name__ == "__main__":
    main()
