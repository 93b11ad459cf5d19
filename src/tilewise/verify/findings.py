"""What a check finds: bits that differ, errors beside naive float32's, facts that do not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tilewise.reference import attention32, attention64

Array = NDArray[Any]
ALLOWED_RATIO = 2.0  # of our error to that of naive float32
# Errors below this count as this much: naive float32 can be right by luck (with one visible key it returns the value
# itself), while a weight, a sum, a quotient and a logarithm round by about one ULP each.
FLOOR_ULPS = 2


class Accuracy(NamedTuple):
    """The largest error of a result, and of naive float32, against float64."""

    error: float
    naive: float
    ratio: float

    @property
    def ok(self) -> bool:
        return self.ratio <= ALLOWED_RATIO


def accuracy(x: Array, naive: Array, truth: Array) -> Accuracy:
    """Largest absolute errors. Where the truth is not finite x must agree, or its error is infinite."""
    finite = np.isfinite(truth)
    if not (np.isfinite(x) == finite).all() or not np.array_equal(x[~finite], truth[~finite], equal_nan=True):
        return Accuracy(np.inf, np.nan, np.inf)
    if not finite.any():
        return Accuracy(0.0, 0.0, 0.0)
    truth, x, naive = truth[finite], x[finite], naive[finite]
    error, other = float(np.abs(x - truth).max()), float(np.abs(naive - truth).max())
    floor = FLOOR_ULPS * float(np.spacing(np.abs(truth).max().astype(np.float32)))
    return Accuracy(error, other, error / max(other, floor) if error else 0.0)


@dataclass
class Findings:
    """What a check has compared so far, and what was wrong."""

    values: int = 0
    bits: int = 0
    worst: float = 0.0
    facts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def same(self, what: str, got: Any, expected: Any) -> None:
        """Both (o, lse) or both arrays: equal to the bit."""
        if isinstance(got, tuple):
            for name, x, y in zip(("o", "lse"), got, expected, strict=True):
                self.same(f"{what}, {name}", x, y)
            return
        if got.shape != expected.shape:
            self.wrong.append(f"{what}: shape {got.shape}, expected {expected.shape}")
            return
        different = np.ascontiguousarray(got).view(np.uint32) ^ np.ascontiguousarray(expected).view(np.uint32)
        bits = int(np.unpackbits(different.view(np.uint8)).sum())
        self.values += got.size
        self.bits += bits
        if bits:
            self.wrong.append(f"{what}: {np.count_nonzero(different)} of {got.size} values differ")

    def close(self, what: str, q: Array, k: Array, v: Array, **arguments: Any) -> None:
        """tw.attention on these inputs: error at most twice that of naive float32."""
        tiles = {name: arguments.pop(name) for name in ("bc", "br", "span") if name in arguments}
        got = tw.attention(q, k, v, return_lse=True, **tiles, **arguments)
        truth, naive = attention64(q, k, v, **arguments), attention32(q, k, v, **arguments)
        for name, x, y, z in zip(("o", "lse"), got, naive, truth, strict=True):
            found = accuracy(x, y, z)
            self.values += x.size
            self.worst = max(self.worst, found.ratio)
            if not found.ok:
                self.wrong.append(f"{what}, {name}: error {found.error:.3g}, naive float32 {found.naive:.3g}")

    def holds(self, what: str, fact: Any) -> None:
        if not fact:
            self.wrong.append(what)

    def raises(self, what: str, error: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
        except error:
            return
        except Exception as other:
            self.wrong.append(f"{what}: {type(other).__name__} instead of {error.__name__}")
        else:
            self.wrong.append(f"{what}: no {error.__name__}")

    def detail(self) -> str:
        if self.wrong:
            return "; ".join(self.wrong[:3]) + (f"; and {len(self.wrong) - 3} more" if len(self.wrong) > 3 else "")
        compared = [f"{self.values:,} values"] if self.values else []
        error = [f"error at most {self.worst:.2f} x naive float32's"] if self.worst else []
        return ", ".join([*compared, *error, *self.facts])


class Check(NamedTuple):
    name: str
    claim: str
    run: Callable[[Findings], None]


def inputs(seed: int, B: int, H: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int | None = None) -> tuple[Array, ...]:
    """q, k and v that no swap of heads, tiles or rows leaves alone: normal numbers, each head with its own spread."""
    rng = np.random.default_rng(seed)
    Dv = D if Dv is None else Dv
    heads, kv_heads = np.linspace(0.5, 2.0, H)[:, None, None], np.linspace(0.7, 1.3, Hkv)[:, None, None]
    q, k, v = (rng.standard_normal(shape) for shape in ((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)))
    return (q * heads).astype(np.float32), (k * kv_heads).astype(np.float32), (v * kv_heads).astype(np.float32)
