"""The golden bits: SHA-256 sums of o and lse for fixed problems, in data/bits.json, to be met on every machine.

    tilewise verify --bits

An input is made of integers, so that any program can make it again. Element i (in C order, from 0) of input t (q, k, v,
sinks are 0, 1, 2, 3) of problem number s (in the order of `PROBLEMS`, from 0) begins with splitmix64:

    z = (4 s + t) + (i + 1) 0x9E3779B97F4A7C15               all modulo 2^64
    z = (z ^ z >> 30) 0xBF58476D1CE4E5B9,   z = (z ^ z >> 27) 0x94D049BB133111EB,   z = z ^ z >> 31
    n = (z >> 44) - 2^19                                     an integer of 20 bits, -2^19 <= n < 2^19

and is n 2^-19 in q and v, n 2^-17 in sinks, and n (8 + floor(8 j / Tk)) 2^-21 in key j of k, so that later keys are
longer and a row's maximum keeps growing. All are exact in float32. What `PROBLEMS` names after its options (`Change`)
is then done to the inputs, in that order. Where the options name `types`, q, k and v are then rounded to them, to
nearest, ties to even; o is of q's type. A sum is taken of an array's own bits (float32, float16 or bfloat16),
little-endian, in C order; `inputs` is that of q, k, v and, where there are any, sinks, one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

import tilewise as tw
from tilewise.config import config
from tilewise.simd.target import TARGETS, current_target, missing_features
from tilewise.verify import Result, run
from tilewise.verify.findings import Array, Check, Findings
from tilewise.verify.halves import rounded

__all__ = ["PROBLEMS", "RECIPE", "Problem", "check_bits", "checks", "expected", "sum_of"]

RECIPE = 1  # the recipe whose bits these are, see docs/explanation/recipe.md

Sizes = tuple[int, int, int, int, int, int, int]  # B, H, Hkv, Tq, Tk, D, Dv
Change = Callable[[Array, Array, Array], None]  # of q, k, v, in place


def integers(stream: int, count: int) -> Array:
    """int64 [count]: the integers n of a stream, as the module says."""
    i = np.arange(1, count + 1, dtype=np.uint64)
    z = np.uint64(stream) + i * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(44)).astype(np.int64) - (1 << 19)


def sum_of(*arrays: Array) -> str:
    """SHA-256 over the bits of these arrays' elements, little-endian, in C order."""
    digest = hashlib.sha256()
    for x in arrays:
        bits = np.ascontiguousarray(x).view(f"u{x.itemsize}")
        digest.update(bits.astype(bits.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


# ---- changes of the inputs


def tokens(value: float, *where: tuple[int, int, int]) -> Change:
    """k and v of each (sequence, first token, last token) are `value`."""

    def change(q: Array, k: Array, v: Array) -> None:
        for b, first, last in where:
            k[b, :, first : last + 1] = v[b, :, first : last + 1] = value

    return change


def element(name: str, index: tuple[int, ...], value: float) -> Change:
    """One element (or, by a shorter index, a row) of q, k or v is `value`."""

    def change(q: Array, k: Array, v: Array) -> None:
        {"q": q, "k": k, "v": v}[name][index] = value

    return change


def times(name: str, exponent: int) -> Change:
    """All of q, k or v is multiplied by 2 to that power; exact here."""

    def change(q: Array, k: Array, v: Array) -> None:
        x = {"q": q, "k": k, "v": v}[name]
        x[...] = np.ldexp(x, exponent)

    return change


def hopeless(first: int, last: int) -> Change:
    """Every score of tokens first to last is -inf."""

    def change(q: Array, k: Array, v: Array) -> None:
        q[..., 0] = 1
        k[:, :, first : last + 1, 0] = -np.inf

    return change


_F32, _F16, _BF16 = ("f32",) * 3, ("f16",) * 3, ("bf16",) * 3


@dataclass(frozen=True)
class Problem:
    """A fixed problem. The arguments are those of `tilewise.attention`; sinks True: made like the inputs.

    And `types`, of q, k and v: float32 where it is not given.
    """

    number: int
    name: str
    sizes: Sizes
    options: dict[str, Any]
    changes: tuple[Change, ...]

    @property
    def types(self) -> tuple[str, str, str]:
        types: tuple[str, str, str] = self.options.get("types", _F32)
        return types

    def operands(self) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """(q, k, v), and the other arguments."""
        B, H, Hkv, Tq, Tk, D, Dv = self.sizes
        q, k, v = (
            integers(4 * self.number + t, int(np.prod(shape))).reshape(shape)
            for t, shape in enumerate(((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)))
        )
        k = k * (8 + 8 * np.arange(Tk) // max(1, Tk))[:, None]
        q, k, v = (np.ldexp(x.astype(np.float32), e) for x, e in ((q, -19), (k, -21), (v, -19)))
        for change in self.changes:
            change(q, k, v)
        q, k, v = (rounded(x, type) for x, type in zip((q, k, v), self.types, strict=True))
        options = {"q_offset": 0, **self.options}
        options.pop("types", None)
        if options.pop("sinks", False):
            options["sinks"] = np.ldexp(integers(4 * self.number + 3, H).astype(np.float32), -17)
        return (q, k, v), options

    def sums(self, **arguments: Any) -> dict[str, str]:
        """The three sums of this problem, as computed here and now."""
        (q, k, v), options = self.operands()
        o, lse = tw.attention(q, k, v, return_lse=True, **options, **arguments)
        sinks = [options["sinks"]] if "sinks" in options else []
        return {"inputs": sum_of(q, k, v, *sinks), "o": sum_of(o), "lse": sum_of(lse)}


def _numbered(*rows: tuple[Any, ...]) -> tuple[Problem, ...]:
    return tuple(
        Problem(number, name, sizes, options, tuple(changes))
        for number, (name, sizes, options, *changes) in enumerate(rows)
    )


_TILE = {"bc": 16, "span": 48}
_SMALL = {"bc": 4, "span": 8}
_RAGGED = {"q_offset": [97, 0, 30], "kv_start": [0, 40, 13], "kv_len": [100, 13, 60], "k_offset": [0, 0, 5]}
#    name, (B, H, Hkv, Tq, Tk, D, Dv), options, changes. To add one, add it at the end: its number is its stream.
PROBLEMS = _numbered(
    ("plain", (1, 2, 2, 33, 70, 64, 64), {}),
    ("causal", (1, 2, 2, 70, 70, 64, 64), {"causal": True}),
    ("window", (1, 2, 1, 70, 70, 24, 40), {"causal": True, "window": 6}),
    ("window_without_causal", (1, 3, 1, 33, 400, 24, 40), {"window": 70, "q_offset": 200}),
    ("window_1", (1, 1, 1, 9, 9, 8, 5), {"window": 1, **_SMALL}),
    ("sinks", (2, 6, 2, 19, 150, 24, 40), {"sinks": True}),
    ("gqa", (1, 6, 2, 13, 37, 24, 40), {"causal": True, "q_offset": 24}),
    ("mqa", (1, 8, 1, 11, 37, 24, 40), {"causal": True, "q_offset": 26}),
    ("values_wider", (1, 2, 1, 20, 100, 17, 33), {"causal": True, "q_offset": 80, "bc": 33, "span": 66}),
    ("values_narrower", (1, 2, 1, 20, 100, 40, 17), {"bc": 23, "span": 46}),
    ("head_dim_1", (1, 2, 1, 9, 40, 1, 3), {"bc": 7, "span": 14}),
    ("head_dim_128", (1, 2, 1, 40, 300, 128, 128), {"causal": True, "q_offset": 260}),
    ("head_dim_256", (1, 1, 1, 9, 130, 256, 256), {"causal": True, "q_offset": 121}),
    ("tile_of_1", (1, 1, 1, 3, 10, 8, 5), {"bc": 1, "span": 3}),
    ("tile_of_7", (1, 2, 1, 37, 250, 16, 16), {"bc": 7, "span": 70, "causal": True, "q_offset": 213}),
    ("tile_of_512", (1, 1, 1, 5, 1100, 8, 5), {"bc": 512, "span": 512}),
    ("span_of_a_tile", (1, 2, 1, 5, 90, 16, 16), {"bc": 16, "span": 16}),
    ("span_of_48", (1, 2, 1, 21, 200, 16, 16), {**_TILE, "causal": True, "q_offset": 179}),
    ("offsets", (3, 2, 1, 5, 90, 16, 16), {**_TILE, "causal": True, "q_offset": [0, 85, 43]}),
    ("lengths", (3, 2, 1, 5, 113, 16, 16), {**_TILE, "kv_start": [0, 40, 113], "kv_len": [113, 1, 0]}),
    ("ragged", (3, 4, 2, 3, 100, 16, 16), {**_TILE, **_RAGGED, "causal": True, "window": 33, "sinks": True}),
    ("slid_cache", (1, 2, 1, 4, 90, 16, 16), {**_TILE, "k_offset": 1003, "q_offset": 1089, "causal": True}),
    ("decode", (1, 2, 1, 1, 5000, 64, 64), {"causal": True, "q_offset": 4999}),
    ("decode_of_a_batch", (3, 4, 4, 1, 700, 64, 64),
     {"causal": True, "kv_len": [700, 1, 65], "q_offset": [699, 0, 64]}),
    ("decode_with_window", (1, 8, 1, 1, 3000, 64, 64), {"causal": True, "window": 1500, "q_offset": 2999}),
    ("rows_2", (1, 1, 1, 2, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 38}),
    ("rows_4", (1, 1, 1, 4, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 36}),
    ("rows_7", (1, 1, 1, 7, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 33}),
    ("rows_16", (1, 1, 1, 16, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 24}),
    ("rows_17", (1, 1, 1, 17, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 23}),
    ("long_causal", (1, 2, 1, 133, 5000, 24, 40), {"causal": True, "q_offset": 4867}),
    ("long_window", (1, 2, 1, 40, 5000, 24, 40), {"causal": True, "window": 1500, "q_offset": 4000, "sinks": True}),
    ("long_plain", (1, 1, 1, 3, 9001, 64, 64), {}),
    ("unseen_nan", (2, 2, 1, 3, 40, 16, 16), {**_TILE, "causal": True, "kv_start": [3, 20], "kv_len": [30, 8],
     "q_offset": [20, 5]}, tokens(np.nan, (0, 0, 2), (0, 26, 39), (1, 0, 19), (1, 28, 39))),
    ("unseen_inf", (1, 2, 1, 17, 40, 16, 16), {**_TILE, "causal": True, "window": 20, "q_offset": 21},
     tokens(np.inf, (0, 0, 1), (0, 38, 39))),
    ("seen_by_some", (1, 2, 1, 5, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 20},
     element("v", (0, 0, 22), np.nan), element("v", (0, 0, 23, 3), np.inf), element("k", (0, 0, 24), np.nan)),
    ("infinite_values", (1, 2, 1, 3, 40, 16, 16), _TILE,
     element("v", (0, 0, 7, 2), np.inf), element("v", (0, 0, 9, 3), -np.inf),
     element("v", (0, 0, 31, 2), -np.inf)),
    ("subnormal_values", (1, 2, 1, 5, 40, 16, 16), {**_TILE, "causal": True, "q_offset": 30}, times("v", -130)),
    ("subnormal_queries", (1, 2, 1, 5, 40, 16, 16), _TILE, times("q", -130), times("k", 124)),
    ("subnormal_keys", (1, 2, 1, 3, 40, 16, 16), _TILE, times("k", -128), times("q", 127)),
    ("huge_values", (1, 2, 1, 3, 40, 16, 16), _TILE, times("v", 127)),
    ("hopeless_tiles", (1, 2, 1, 5, 70, 16, 16), _TILE, hopeless(0, 15), hopeless(32, 50)),
    ("hopeless_spans", (1, 2, 1, 5, 110, 16, 16), {**_TILE, "sinks": True}, hopeless(48, 109)),
    ("hopeless_rows", (1, 2, 1, 3, 20, 16, 16), _TILE, hopeless(0, 19)),
    ("empty_rows", (1, 2, 1, 9, 20, 16, 16), {**_TILE, "window": 3, "q_offset": 15}),
    ("empty_rows_with_sinks", (1, 2, 1, 9, 20, 16, 16), {**_TILE, "window": 3, "q_offset": 15, "sinks": True}),
    ("no_keys", (1, 2, 1, 3, 0, 16, 16), {**_TILE, "sinks": True}),
    ("scale_90", (1, 2, 1, 5, 70, 16, 16), {**_TILE, "scale": 90.0, "causal": True, "q_offset": 65}),
    ("scale_tiny", (1, 2, 1, 5, 70, 16, 16), {**_TILE, "scale": 2.0**-126}),
    ("scale_negative", (1, 2, 1, 5, 70, 16, 16), {**_TILE, "scale": -0.75, "sinks": True}),
    ("scale_0", (1, 2, 1, 5, 70, 16, 16), {**_TILE, "scale": 0.0}),
    ("scale_huge", (1, 2, 1, 5, 70, 16, 16), {**_TILE, "scale": 2.0**120}),
    ("bf16", (1, 4, 2, 33, 70, 64, 64), {"types": _BF16, "causal": True, "q_offset": 37}),
    ("bf16_decode", (2, 8, 2, 1, 700, 64, 64), {"types": _BF16, "causal": True, "q_offset": [699, 64]}),
    ("bf16_tails", (1, 2, 1, 20, 100, 17, 33),
     {"types": _BF16, "causal": True, "window": 50, "q_offset": 80, "bc": 33, "span": 66, "sinks": True}),
    ("bf16_subnormal_values", (1, 2, 1, 5, 40, 16, 16), {**_TILE, "types": _BF16}, times("v", -130)),
    ("bf16_unseen_nan", (1, 2, 1, 3, 40, 16, 16), {**_TILE, "types": _BF16, "causal": True, "q_offset": 30},
     tokens(np.nan, (0, 33, 39))),
    ("bf16_seen_nan", (1, 2, 1, 3, 40, 16, 16), {**_TILE, "types": _BF16, "causal": True, "q_offset": 30},
     element("v", (0, 0, 31), np.nan)),
    ("f16", (1, 4, 2, 33, 70, 64, 64), {"types": _F16, "causal": True, "q_offset": 37}),
    ("f16_decode", (2, 8, 2, 1, 700, 64, 64), {"types": _F16, "causal": True, "q_offset": [699, 64]}),
    ("f16_tails", (1, 2, 1, 20, 100, 17, 33),
     {"types": _F16, "causal": True, "window": 50, "q_offset": 80, "bc": 33, "span": 66, "sinks": True}),
    ("f16_subnormal_values", (1, 2, 1, 5, 40, 16, 16), {**_TILE, "types": _F16}, times("v", -18)),
    ("f16_of_large_values", (1, 2, 1, 5, 40, 16, 16), {**_TILE, "types": ("f16", "f32", "f32")}, times("v", 18)),
    ("f16_seen_nan", (1, 2, 1, 3, 40, 16, 16), {**_TILE, "types": _F16, "causal": True, "q_offset": 30},
     element("v", (0, 0, 31), np.nan)),
    ("types_f32_bf16_f16", (1, 2, 1, 20, 90, 16, 16), {**_TILE, "types": ("f32", "bf16", "f16")}),
    ("types_bf16_f16_f32", (1, 2, 1, 3, 90, 16, 16), {**_TILE, "types": ("bf16", "f16", "f32")}),
)  # fmt: skip


# ---- what is expected, and the checks


@functools.cache
def expected() -> dict[str, dict[str, str]]:
    """The sums of each problem by its name, from data/bits.json."""
    file = json.loads((resources.files("tilewise") / "data" / "bits.json").read_text())
    if file["recipe"] != RECIPE:
        raise ValueError(f"data/bits.json is of recipe {file['recipe']}, expected {RECIPE}")
    sums: dict[str, dict[str, str]] = file["problems"]
    return sums


def _check(problem: Problem) -> Callable[[Findings], None]:
    def check(found: Findings) -> None:
        names = [name for name, target in TARGETS.items() if not missing_features(target)]
        for name in names:
            for threads in (1, 4):
                with config(target=name):
                    sums = problem.sums(pool=threads)
                for what, digest in expected()[problem.name].items():
                    found.holds(f"{what} on {name} with {threads} threads: SHA-256 {digest}", sums[what] == digest)
        found.facts.append(f"{', '.join(names)}; 1 and 4 threads")

    return check


def checks() -> list[Check]:
    """A check a problem, on each target that this machine can force."""
    current_target()  # an unknown one is refused here
    return [Check(problem.name, f"recipe {RECIPE}", _check(problem)) for problem in PROBLEMS]


def check_bits() -> list[Result]:
    """The verdict of each problem: whether this machine gives the bits of recipe `RECIPE`."""
    return list(run(checks()))
