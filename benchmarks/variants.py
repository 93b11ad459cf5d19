#!/usr/bin/env python3
"""Variants of attention beside PyTorch's compiled FlexAttention and its scaled_dot_product_attention, on one core.

    taskset -c 1 python benchmarks/variants.py --json variants.json

Everybody gets the same inputs, must agree with ours before anything is timed, and takes one turn in each round; a
figure is the median over the rounds, a ratio theirs to ours by the same signature. What is compiled, and every mask and
block mask, is made before. FlexAttention needs a C++ compiler; without one it is left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

import tilewise
import tilewise.torch as tt

LARGEST_ERROR = 2e-5  # between two float32 results on standard normal inputs
CAP, DOCUMENTS, KEPT = 30.0, 8, 0.7  # of softcap; in a packed sequence; share of a dense mask that is seen
PEERS = ("flex", "sdpa")
sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass
class Case:
    """A variant at one shape: who takes part, and the seconds of every turn."""

    name: str
    shape: str
    calls: dict[str, Callable[[], Any]]
    first: float = 0.0  # seconds of our first call
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        """Let all compile what they need; who differs from ours does not take part."""
        start = time.perf_counter()
        expected = next(iter(self.calls.values()))()
        self.first = time.perf_counter() - start
        for name, call in list(self.calls.items()):
            error = float((call() - expected).abs().max())
            if not error <= LARGEST_ERROR:
                self.wrong[name] = error
                del self.calls[name]
        self.seconds = {name: [] for name in self.calls}

    def turn(self) -> None:
        """One call of everybody."""
        for name, call in self.calls.items():
            start = time.perf_counter()
            call()
            self.seconds[name].append(time.perf_counter() - start)

    def result(self) -> dict[str, Any]:
        median = {name: statistics.median(x) for name, x in self.seconds.items()}
        best = {name: min(x) for name, x in self.seconds.items()}
        return {
            "variant": self.name, "shape": self.shape, "first": self.first, "wrong": self.wrong,
            "seconds": self.seconds, "median": median, "ratio": ratios(median), "best": best,
            "ratio_of_best": ratios(best),
        }  # fmt: skip


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """The time of each of PyTorch's functions by that of ours with its signature."""
    return {name: seconds[name] / seconds[f"ours as {name}"] for name in PEERS if name in seconds}


def cases(T: int, H: int, Hkv: int, D: int) -> list[Case]:
    """PyTorch's two, ours by their signatures with the same functions and masks, and ours by arguments of its own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, T, D, generator=generator) for heads in (H, Hkv, Hkv))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    slopes, document = torch.linspace(0.01, 0.5, H), torch.arange(T) // -(-T // DOCUMENTS)
    dense = torch.rand(T, T, generator=generator) < KEPT
    dense.fill_diagonal_(True)
    triangle = i >= j
    bias = (-slopes[:, None, None] * (i - j).abs()).masked_fill(~triangle, -torch.inf)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CAP * torch.tanh(s / CAP)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j).abs()

    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return document[i] == document[j]

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return dense[i, j]

    def case(name: str, score: Any, keep: Any, dense: dict[str, Any] | None, **options: Any) -> Case:
        grouped = Hkv != H
        calls: dict[str, Callable[[], Any]] = {"ours as flex": _ours_as_flex(q, k, v, score, keep)}
        if shutil.which("g++") or shutil.which("clang++"):
            calls["flex"] = _flex(q, k, v, score, keep)
        if dense is not None:
            calls["ours as sdpa"] = lambda: tt.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **dense)
            calls["sdpa"] = lambda: sdpa(q, k, v, enable_gqa=grouped, **dense)
        calls["ours by arguments"] = lambda: tt.attention(q, k, v, **options)
        return Case(name, f"T={T} H={H} Hkv={Hkv} D={D}", calls)

    documents = document[:, None] == document
    return [
        case("causal", None, causal, {"is_causal": True}, causal=True),
        case("softcap", capped, causal, None, causal=True, softcap=CAP),
        case("alibi", alibi, causal, {"attn_mask": bias}, causal=True, alibi_slopes=slopes),
        case("document", None, same_document, {"attn_mask": documents}, mask=documents),
        case("dense", None, seen, {"attn_mask": dense}, mask=dense),
    ]


def _ours_as_flex(q: Any, k: Any, v: Any, score: Any, keep: Any) -> Callable[[], Any]:
    block_mask = tt.create_block_mask(keep, 1, None, q.shape[2], k.shape[2])
    return lambda: tt.flex_attention(q, k, v, score, block_mask, enable_gqa=q.shape[1] != k.shape[1])


def _flex(q: Any, k: Any, v: Any, score: Any, keep: Any) -> Callable[[], Any]:
    block_mask = flex.create_block_mask(keep, 1, None, q.shape[2], k.shape[2], device="cpu")
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score, block_mask, enable_gqa=q.shape[1] != k.shape[1])


def measure(found: list[Case], rounds: int, warm: int = 1) -> None:
    """Time all cases, round by round."""
    for case in found:
        for _ in range(warm):
            case.turn()
        case.seconds = {name: [] for name in case.calls}
    for _ in range(rounds):
        for case in found:
            case.turn()


def show(result: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {1e3 * x:.1f}" for name, x in result["median"].items())
    shown = ", ".join(f"{x:.2f} ({result['ratio_of_best'][name]:.2f}) {name}" for name, x in result["ratio"].items())
    wrong = "".join(f"; {name} differs by {x:.1g}, not timed" for name, x in result["wrong"].items())
    return f"{result['shape']} {result['variant']}: {times} ms; ratio of medians (of best) {shown}{wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="where to write all that was measured")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    results = []
    with tilewise.config(threads=arguments.threads), torch.no_grad():
        for Hkv in arguments.kv_heads:
            for D in arguments.dims:
                torch.compiler.reset()
                found = cases(arguments.tokens, arguments.heads, Hkv, D)
                for case in found:
                    case.prepare()
                measure(found, arguments.rounds)
                for case in found:
                    results.append(case.result())
                    print(show(results[-1]), flush=True)
    if arguments.json:
        versions = {"tilewise": tilewise.__version__, "torch": torch.__version__}
        with open(arguments.json, "w") as file:
            json.dump({"format": 1, "versions": versions, "threads": arguments.threads, "results": results}, file)


if __name__ == "__main__":
    main()
