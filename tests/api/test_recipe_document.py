"""docs/explanation/recipe.md is enough to reproduce the bits: this program knows nothing but that document.

It computes rows in plain Python, one float at a time, with the constants read from the document's table, and must give
the bits of `tw.attention`. The section numbers below are the document's.
"""

from __future__ import annotations

import math
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw

DOCUMENT = (Path(__file__).parents[2] / "docs" / "explanation" / "recipe.md").read_text()
INF, NAN = math.inf, math.nan
LANES = 16


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


CONSTANT = {name: float_of(int(bits, 16)) for name, bits in re.findall(r"^\| `(\w+)` \| `(0x\w{8})` ", DOCUMENT, re.M)}
EXP2 = [CONSTANT[f"c{i}"] for i in range(7)]
LOG2 = [CONSTANT[f"d{i}"] for i in range(10)]
LOG2E, LN2, ROUND = CONSTANT["LOG2E"], CONSTANT["LN2"], CONSTANT["ROUND"]


# ---- section 1: binary32, each operation rounded once. Rounding the float64 result of + - * / again is exact.
def rounded(x: float) -> float:
    try:
        return float_of(bits_of(x))
    except OverflowError:
        return math.copysign(INF, x)


def add(x: float, y: float) -> float:
    return rounded(x + y)


def sub(x: float, y: float) -> float:
    return rounded(x - y)


def mul(x: float, y: float) -> float:
    return rounded(x * y)


def div(x: float, y: float) -> float:
    if y == 0:
        return NAN if x == 0 or math.isnan(x) else math.copysign(INF, x) * math.copysign(1, y)
    return rounded(x / y)


def fma(x: float, y: float, z: float) -> float:
    if not all(map(math.isfinite, (x, y, z))):
        return rounded(x * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return x * y + z  # float64 is exact here, and gives the zero its sign
    exponent = math.frexp(float(abs(exact)))[
        1
    ]  # 2^(exponent - 1) <= |exact|, up to a rounding of float() at a power of 2
    if abs(exact) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 24, -149)
    return rounded(float(round(exact / unit) * unit))  # round() is to nearest, ties to even


def maximum(x: float, y: float) -> float:
    return x if x > y else y


# ---- section 2
def horner(coefficients: list[float], x: float) -> float:
    y = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        y = fma(y, x, c)
    return y


def exp2(x: float) -> float:
    if x < -126:
        return 0.0
    if math.isnan(x):
        return NAN
    r = add(x, ROUND)
    f = sub(x, sub(r, ROUND))
    return mul(horner(EXP2, f), float_of(bits_of(r) << 23))


def log2(x: float) -> float:
    if not x >= 0:
        return NAN
    if x in (0, INF):
        return -INF if x == 0 else INF
    n = (bits_of(x) - bits_of(CONSTANT["SQRT_HALF"])) >> 23  # arithmetic
    f = sub(float_of(bits_of(x) - (n << 23)), 1.0)
    return fma(f, horner(LOG2, f), float(n))


# ---- sections 3 to 6
State = tuple[float, float, list[float]]


def shift(M: float) -> float:
    return 0.0 if M == -INF else M


def tile(state: State, y: dict[int, float], v: dict[int, list[float]]) -> State:
    """One tile: y and v of its visible keys, by their index in the tile."""
    m, l, a = state
    if all(score == -INF for score in y.values()):
        return state
    M = m
    for j in sorted(y):
        M = maximum(M, y[j])
    alpha = exp2(sub(m, shift(M)))
    p = {j: exp2(sub(y[j], shift(M))) for j in sorted(y)}
    L = [0.0] * LANES
    for j in sorted(p):
        L[j % LANES] = add(L[j % LANES], p[j])
    for half in (8, 4, 2, 1):
        L = [add(L[x], L[x + half]) for x in range(half)]
    l = fma(l, alpha, L[0])
    a = [mul(alpha, x) for x in a]
    for j in sorted(p):
        a = [fma(p[j], v[j][c], a[c]) for c in range(len(a))]
    return M, l, a


def merge(total: State, span: State) -> State:
    (m, l, a), (m_span, l_span, a_span) = total, span
    M = maximum(m, m_span)
    alpha, beta = exp2(sub(m, shift(M))), exp2(sub(m_span, shift(M)))
    l = fma(l, alpha, mul(l_span, beta))
    a = [fma(x, alpha, mul(add(y, 0.0), beta)) for x, y in zip(a, a_span, strict=True)]
    return M, l, a


def row(
    q: Any, k: Any, v: Any, position: int, *, scale: Any = None, causal: bool = False, window: int = 0, first: int = 0,
    sink: Any = None, bc: int = 0, span: int = 0,
) -> tuple[list[float], float]:  # fmt: skip
    """o and lse of one query row q [D] on keys k [n, D] and v [n, Dv], the first key at position `first`."""
    sigma = rounded(len(q) ** -0.5 if scale is None else float(scale))
    bc = bc or 64
    span = span or max(1, 1024 // bc) * bc
    lo = max(first, position - window + 1) if window > 0 else first
    hi = min(first + len(k), position + 1) if causal else first + len(k)
    if lo >= hi:
        return [0.0] * v.shape[1], -INF if sink is None else float(sink)
    y = {}
    for c in range(lo, hi):
        d = 0.0
        for x, z in zip(q.tolist(), k[c - first].tolist(), strict=True):
            d = fma(x, z, d)
        y[c] = mul(mul(d, sigma), LOG2E)
    total: State = (-INF, 0.0, [0.0] * v.shape[1])
    if sink is not None:
        total = (mul(float(sink), LOG2E), 1.0, [0.0] * v.shape[1])
    for u in range(lo // span, (hi - 1) // span + 1):
        state: State = (-INF, 0.0, [0.0] * v.shape[1])
        for t in range(u * span // bc, (u + 1) * span // bc):
            own = range(max(lo, t * bc), min(hi, (t + 1) * bc))
            if own:
                state = tile(state, {c - t * bc: y[c] for c in own}, {c - t * bc: v[c - first].tolist() for c in own})
        total = merge(total, state)
    m, l, a = total
    return [div(add(x, 0.0), l) for x in a], mul(add(m, log2(l)), LN2)


def as_float32(x: Any) -> Any:
    """The numbers as an array, each NaN the canonical one."""
    array = np.array(x, np.float32)
    array[np.isnan(array)] = np.uint32(0x7FC00000).view(np.float32)
    return array


def assert_document_gives_the_bits(q: Any, k: Any, v: Any, **arguments: Any) -> None:
    o, lse = tw.attention(q, k, v, return_lse=True, **{"q_offset": 0, **arguments})
    first, offset = arguments.pop("k_offset", 0), arguments.pop("q_offset", 0)
    sinks = arguments.pop("sinks", None)
    group = q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(q.shape[:3]):
        sink = None if sinks is None else sinks[h]
        keys, values = k[b, h // group], v[b, h // group]
        expected = row(q[b, h, i], keys, values, offset + i, first=first, sink=sink, **arguments)
        got = [*o[b, h, i], lse[b, h, i]]
        wanted = as_float32([*expected[0], expected[1]])
        wrong = [c for c, (x, y) in enumerate(zip(got, wanted, strict=True)) if x.tobytes() != y.tobytes()]
        assert not wrong, (
            f"b {b}, h {h}, i {i}: columns {wrong} (the last is lse): "
            f"{[(float(got[c]).hex(), float(wanted[c]).hex()) for c in wrong[:3]]} from tilewise and from the document"
        )


def inputs(H: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng([seed, H, Hkv, Tq, Tk, D, Dv])
    shapes = (1, H, Tq, D), (1, Hkv, Tk, D), (1, Hkv, Tk, Dv)
    return [(rng.standard_normal(shape) + 0.25).astype(np.float32) for shape in shapes]


def test_all_constants_are_in_the_document() -> None:
    named = {"LOG2E", "LN2", "ROUND", "SQRT_HALF"}
    assert CONSTANT.keys() - {"lse"} == named | {f"c{i}" for i in range(7)} | {f"d{i}" for i in range(10)}


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # H, Hkv, Tq, Tk, D, Dv
    "D and Dv with tails, two tiles": ((2, 1, 3, 70, 19, 5), {}),
    "odd Bc, spans of two tiles": ((2, 2, 3, 45, 5, 18), {"bc": 7, "span": 14, "causal": True, "q_offset": 42}),
    "window without causal": ((1, 1, 4, 60, 16, 16), {"bc": 33, "window": 9, "q_offset": 50}),
    "window and causal": ((3, 1, 2, 50, 4, 3), {"bc": 16, "causal": True, "window": 30, "q_offset": 40}),
    "sinks": ((2, 1, 2, 40, 8, 17), {"bc": 5, "span": 10, "sinks": [3, -7]}),
    "k_offset": ((1, 1, 2, 99, 3, 2), {"bc": 16, "span": 32, "k_offset": 13, "q_offset": 90, "causal": True}),
    "weights that vanish": ((1, 1, 2, 90, 24, 4), {"scale": 6, "bc": 16}),
    "default spans": ((1, 1, 1, 1100, 2, 3), {}),
    "default span of Bc 100": ((1, 1, 1, 1010, 1, 1), {"bc": 100}),
    "Bc 1, negative scale": ((1, 1, 3, 20, 2, 3), {"bc": 1, "span": 2, "scale": -1.7}),
    "empty rows": ((1, 1, 3, 6, 4, 4), {"causal": True, "window": 2, "q_offset": 5}),
    "empty rows, sinks": ((2, 1, 3, 6, 4, 4), {"causal": True, "window": 2, "q_offset": 5, "sinks": [0.5, 2]}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("ring")
def test_the_document_gives_the_bits(name: str) -> None:
    sizes, options = CASES[name]
    arguments = {key: np.array(x, np.float32) if key == "sinks" else x for key, x in options.items()}
    assert_document_gives_the_bits(*inputs(*sizes), **arguments)


def special(name: str) -> list[Any]:
    q, k, v = inputs(1, 1, 2, 40, 4, 5, seed=1)
    largest = np.finfo(np.float32).max
    match name:
        case "NaN in a key":
            k[0, 0, 7, 2] = NAN
        case "NaN in a value":
            v[0, 0, 7, 2] = NAN
        case "infinite values":
            v[0, 0, 7, 2], v[0, 0, 30, 3], v[0, 0, 31, 3] = INF, INF, -INF
        case "a score of +inf":
            q[:], k[0, 0, 9] = 1e20, largest
        case "scores of -inf":
            q[:] = 1e20
            k *= np.float32(1e-20)
            k[0, 0, 9:30] = -largest
        case "all scores -inf":
            q[:], k[:] = 1e20, -largest
        case "all scores -inf, a value inf":
            q[:], k[:], v[0, 0, 3] = 1e20, -largest, INF
        case "a value inf of weight 0":
            q[:], k[0, 0, 3], v[0, 0, 3, 1] = np.abs(q) + 1, -200, INF
        case "subnormal values":
            v *= np.float32(1e-39)
        case "zeros of both signs":
            v[:], q[0, 0, 0] = -0.0, -0.0
    return [q, k, v]


SPECIAL = (
    "NaN in a key", "NaN in a value", "infinite values", "a score of +inf", "scores of -inf", "all scores -inf",
    "all scores -inf, a value inf", "a value inf of weight 0", "subnormal values", "zeros of both signs",
)  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("sinks", [None, [0.5], [-INF]], ids=["no sink", "sink", "sink -inf"])
@pytest.mark.usefixtures("ring")
def test_special_values(name: str, sinks: list[float] | None) -> None:
    arguments = {} if sinks is None else {"sinks": np.array(sinks, np.float32)}
    assert_document_gives_the_bits(*special(name), bc=8, span=16, causal=True, q_offset=37, **arguments)


def test_log2_over_its_range() -> None:
    """lse of rows on three keys of one dimension: l lies anywhere from 1 to 3, so every coefficient shows."""
    q, k, v = inputs(1, 1, 300, 3, 1, 1)
    assert_document_gives_the_bits(q * np.float32(2), k, v)


def test_the_smallest_weights() -> None:
    """Weights about 2^-126, at which exp2 ends, show where their values are huge."""
    scores = np.array([0, *np.linspace(-80, -92, 60)], np.float32)
    q, k, v = np.ones((1, 1, 1, 1), np.float32), scores[None, None, :, None], np.full((1, 1, 61, 2), 3e38, np.float32)
    v[0, 0, 0] = 0
    for last in range(2, 62):
        assert_document_gives_the_bits(q, k[:, :, :last], v[:, :, :last], scale=1.0)


# the sake of another row of the work item, would have made +0. The document says (a + 0) / l.
@pytest.mark.usefixtures("ring")
def test_an_output_that_vanishes_has_one_sign() -> None:
    q, k, v = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
    k[0, 0, 1], v[0, 0, 0] = 2, -(2.0**-149)
    assert_document_gives_the_bits(q, k, v, scale=1.0, bc=1, span=1)


def worked_example() -> list[Any]:
    rows: list[Any] = [[[1, 0]], [[1, 0], [0, 1], [1, 1]], [[1, 2], [3, 4], [5, 6]]]
    return [np.array(x, np.float32)[None, None] for x in rows]


@pytest.mark.usefixtures("ring")
def test_worked_example() -> None:
    q, k, v = worked_example()
    found = dict(re.findall(r"^\| `(o\[0\]|o\[1\]|lse)` \| `(0x\w{8})` ", DOCUMENT, re.M))
    o, lse = row(q[0, 0, 0], k[0, 0], v[0, 0], 0, scale=1.0, bc=2)
    assert {"o[0]": bits_of(o[0]), "o[1]": bits_of(o[1]), "lse": bits_of(lse)} == {
        name: int(bits, 16) for name, bits in found.items()
    }
    assert_document_gives_the_bits(q, k, v, scale=1.0, bc=2)


def test_default_scale_is_the_nearest_float32() -> None:
    """Section 4 says nearest to D ** -1/2: no rounding of a libm shows in it."""
    for D in range(1, 1025):
        scale = Fraction(rounded(D**-0.5))
        ulp = Fraction(2) ** (math.frexp(float(scale))[1] - 24)
        low, high = scale - ulp / 2, scale + ulp / 2
        assert low * low * D <= 1 <= high * high * D, D
