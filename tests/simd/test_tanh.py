"""tanh: its error bound on a sample, its special values, symmetry and order, one set of bits.

Every float32 was tried once by scripts/prove_math.py; docs/explanation/math.md holds what it found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scripts.prove_math import TANH_RANGES, Range, native_map, prove, ulp_error, ulp_error_decimal
from tests.simd.support import INTERPRETED, NATIVE_TARGETS, RINGS, SIGN, SPECIAL, floats, random_bits, run
from tilewise.config import config
from tilewise.simd.builder import LANES, Builder, Ptr
from tilewise.simd.math import TANH, TANH_ONE, tanh

SAMPLE = 4999  # every 4999th float32 of a range: a prime, so that all low bits occur
WORST = "0x1.7ba4e4p-3", 1.953417  # where the proof over every float32 found the largest error, and that error in ULP
EXACT_TO = 2.0**-12  # up to here the result is x itself
NAN = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FABCDEF, 0x7FC0007F]


def apply(ring: str, x: Any) -> Any:
    """tanh of each element, in a ring."""
    x = np.ascontiguousarray(x, np.float32)
    padded = np.concatenate([x, np.ones(-len(x) % LANES, np.float32)])
    result = np.zeros_like(padded)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(padded), LANES):
            b.store(result + j, tanh(b, b.load(source + j)))

    assert run(body, ring, padded, result) == 0
    return result[: len(x)]


def same_bits(x: Any, y: Any) -> bool:
    return bool((np.float32(x).view(np.int32) == np.float32(y).view(np.int32)).all())


@pytest.fixture(scope="module", params=NATIVE_TARGETS)
def native_tanh(request: pytest.FixtureRequest) -> Any:
    """The function as the proof calls it, for each target."""
    with config(target=request.param, cache="off"):
        return native_map("tanh", tanh)


@pytest.mark.parametrize("work", TANH_RANGES, ids=lambda work: work.title)
def test_sample_of_the_proof(work: Range, native_tanh: Any) -> None:
    """No sample may pass the bound that holds for every value, and every special value is the promised one."""
    with np.errstate(all="ignore"):
        kept, found = prove(work, native_tanh, SAMPLE, lambda count: None)
    assert kept, found


@pytest.mark.parametrize("work", TANH_RANGES, ids=lambda work: work.title)
def test_proof_notices_one_wrong_result(work: Range, native_tanh: Any) -> None:
    """One result that is three ULP up or another number is enough; so is a zero of the wrong sign."""
    up = np.float32(np.inf)
    spoil: list[Callable[[Any], Any]] = [lambda y: np.float32(2.0), lambda y: np.float32(-0.0) if y == 0 else -y]
    if work.bound is not None:
        spoil.append(lambda y: np.nextafter(np.nextafter(np.nextafter(y, up), up), up))
    if np.isnan(work.result):
        spoil = spoil[:1]
    if work.first == SIGN == work.last:
        spoil[1] = lambda y: np.float32(0.0)
    for wrong in spoil:

        def spoiled(x: Any, wrong: Callable[[Any], Any] = wrong) -> Any:
            y = native_tanh(x)
            y[len(y) // 2] = wrong(y[len(y) // 2])
            return y

        with np.errstate(all="ignore"):
            kept, found = prove(work, spoiled, 1 << 20, lambda count: None)
        assert not kept, found


def test_ranges_cover_every_float32_once() -> None:
    ranges = sorted((work.first, work.last) for work in TANH_RANGES)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 0xFFFFFFFF
    assert all(first == last + 1 for (_, last), (first, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ring", RINGS)
def test_largest_error_is_the_one_on_record(ring: str, sign: float) -> None:
    """A change of a coefficient, or of the order of operations, must be proved anew."""
    where, error = sign * float.fromhex(WORST[0]), WORST[1]
    (result,) = apply(ring, [where])
    assert ulp_error_decimal("tanh", where, float(result)) == pytest.approx(error, abs=1e-6)
    (measured,) = ulp_error(np.float32([result]), np.tanh(np.float64([where])))
    assert measured == pytest.approx(error, abs=1e-6)


def test_bound_is_the_one_on_record() -> None:
    bounds = {work.bound for work in TANH_RANGES if work.bound is not None}
    assert len(bounds) == 1
    assert WORST[1] <= bounds.pop() < min(2.0, WORST[1] + 1e-3)


def test_polynomial_is_as_near_as_its_comment_says() -> None:
    """Relative error of the polynomial alone, evaluated in float64 with the coefficients as float32."""
    r = np.linspace(1e-3, 0.2, 100_001)
    error = np.polyval(np.float64(np.float32([1.0, *TANH]))[::-1], r * r) / (r / np.tanh(r)) - 1
    assert -26.75 < np.log2(np.abs(error).max()) < -26.7


@pytest.mark.parametrize("ring", RINGS)
def test_special_values(ring: str) -> None:
    x = np.float32([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, TANH_ONE, -TANH_ONE, 10.0, -88.0])
    assert same_bits(apply(ring, x), [0.0, -0.0, 1, -1, 1, -1, 1, -1, 1, -1])
    assert np.isnan(apply(ring, floats(NAN))).all()


@pytest.mark.parametrize("ring", RINGS)
def test_small_values_are_themselves(ring: str) -> None:
    """Subnormals too: the error of x for tanh(x) is below a last place up to 2^-12."""
    rng = np.random.default_rng(31)
    top = int(np.float32(EXACT_TO).view(np.uint32))
    x = floats(np.concatenate([np.arange(1, 200), [0x007FFFFF, 0x00800000, top], rng.integers(1, top, 4000)]))
    assert same_bits(apply(ring, x), x)
    assert same_bits(apply(ring, -x), -x)


@pytest.mark.parametrize("ring", RINGS)
def test_exactly_odd(ring: str) -> None:
    rng = np.random.default_rng(37)
    x = np.concatenate([rng.standard_normal(4000).astype(np.float32), floats(random_bits(4000, 29))])
    x = x[~np.isnan(x)]
    assert same_bits(apply(ring, -x), -apply(ring, x))


def test_order_near_saturation_and_at_most_one(native_tanh: Any) -> None:
    """From 4 on, where a last place of x is worth little of the result, no result is below the one before."""
    first, last = (int(np.float32(x).view(np.uint32)) for x in (4.0, 9.5))
    y = native_tanh(floats(np.arange(first, last)))
    assert (np.diff(y) >= 0).all()
    assert y[0] < 1
    assert y[-1] == y.max() == 1


@pytest.mark.parametrize("ring", NATIVE_TARGETS)
def test_native_equals_interpreted(ring: str) -> None:
    """In every bit; only where a NaN is passed on may its payload differ."""
    rng = np.random.default_rng(41)
    scores = rng.standard_normal(6000).astype(np.float32) * np.float32(2.0)
    x = np.concatenate([floats(SPECIAL), floats(random_bits(6000, 43)), scores])
    got, expected = apply(ring, x), apply(INTERPRETED, x)
    same = got.view(np.int32) == expected.view(np.int32)
    same |= np.isnan(got) & np.isnan(expected) & np.isnan(x)
    assert same.all(), [float(y).hex() for y in x[~same][:5]]
