"""softcap: cap * tanh(s / cap), before anything else happens to a score."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import tilewise as tw
from tests.api.test_recipe_document import (
    DOCUMENT,
    ROUND,
    add,
    bits_of,
    div,
    float_of,
    fma,
    horner,
    mul,
    rounded,
    sub,
)  # fmt: skip
from tests.support import assert_as_accurate_as_naive, assert_same_bits
from tests.variants.calls import (
    RNG,
    assert_invariant,
    assert_rings_agree,
    assert_same_bits_on_threads,
    call,
    small,
    with_sinks,
)
from tilewise import hooks

CAPPED = call(softcap=1.5, causal=True)


def test_it_is_invariant() -> None:
    assert_invariant(CAPPED)


def test_rings_agree() -> None:
    assert_rings_agree(small(softcap=1.5))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(with_sinks(CAPPED))


@pytest.mark.parametrize("cap", [0.25, 1.5, 30.0, 1e4])
def test_it_is_accurate(cap: float) -> None:
    c = CAPPED.change(softcap=cap)
    assert_as_accurate_as_naive(c.run(), c)
    longer = c.change(scale=None)
    assert_as_accurate_as_naive(with_sinks(longer).run(), with_sinks(longer))


def test_it_is_not_ignored() -> None:
    assert np.abs(CAPPED.run()[0] - CAPPED.change(softcap=None).run()[0]).max() > 0.01


@pytest.mark.parametrize("cap", [0.25, 1.5, 3, 1e-30, 1e30])
def test_as_a_score_function(cap: float) -> None:
    assert_same_bits(
        CAPPED.change(softcap=cap).run(),
        CAPPED.change(softcap=None).hooked(lambda order: {"score": hooks.softcap(cap)}).run(),
    )


def test_an_infinite_score_is_the_cap() -> None:
    """Scores of inf, -inf and 0, capped at 2: weights e^2, e^-2 and 1."""
    q = np.full((1, 1, 1, 2), 1e30, np.float32)
    k = np.array([[[[1e30, 0], [-1e30, 0], [0, 0]]]], np.float32)
    v = np.eye(3, dtype=np.float32)[None, None]
    o, lse = tw.attention(q, k, v, softcap=2.0, return_lse=True, q_offset=0)
    weights = np.exp([2.0, -2.0, 0.0])
    np.testing.assert_allclose(o[0, 0, 0], weights / weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], np.log(weights.sum()), rtol=1e-6)


def tanh_of_the_recipe(x: float) -> float:
    """Section 9 of docs/explanation/recipe.md, with its constants."""
    constant = {n: float_of(int(b, 16)) for n, b in re.findall(r"^    (\w+) +(0x\w{8}) ", DOCUMENT, re.M)}
    a = min(abs(x), constant["LIMIT"])
    r = fma(a, constant["STEPS"], ROUND)
    e = fma(sub(r, ROUND), constant["MINUS_HALF_LN2"], a)
    t = float_of(bits_of(r) << 23)
    M = sub(horner([1.0, constant["t0"], constant["t1"]], mul(e, e)), e)
    N = fma(fma(t, 0.5, -0.5), M, mul(t, e))
    return math.copysign(div(N, add(N, M)), x)


@pytest.mark.parametrize("cap", [0.3, 7.0, 50.0])
def test_the_document_gives_the_bits(cap: float) -> None:
    """Scores that are the keys themselves, and keys that were capped by the document's formulas."""
    x = np.concatenate([RNG.normal(0, size, 40) for size in (1e-3, 1, 10, 100)]).astype(np.float32)
    x[:4] = [0.0, -0.0, 1e30, -1e-30]
    inverse = rounded(1 / cap)
    capped = np.array([mul(rounded(cap), tanh_of_the_recipe(mul(float(s), inverse))) for s in x], np.float32)
    q, v = np.ones((1, 1, 1, 1), np.float32), RNG.standard_normal((1, 1, len(x), 3)).astype(np.float32)
    keys, expected = (tw.attention(q, k[None, None, :, None], v, scale=1.0, return_lse=True, **options)
                      for k, options in ((x, {"softcap": cap}), (capped, {})))  # fmt: skip
    assert_same_bits(expected, keys)


def test_a_nan_score_stays_nan() -> None:
    c = CAPPED
    k = c.k.copy()
    k[0, 0, 20, 3] = np.nan
    o, lse = tw.attention(c.q, k, c.v, **c.arguments())
    assert np.isnan(o[0, :2]).all()
    assert np.isnan(lse[0, :2]).all()
    assert_same_bits(CAPPED.run()[0][1], o[1])


def test_caps_share_a_kernel_but_not_a_prepared_call() -> None:
    first = CAPPED.run(softcap=2.0)
    assert (CAPPED.run(softcap=3.0)[0] != first[0]).any()
    assert_same_bits(first, CAPPED.run(softcap=2))
    assert_same_bits(first, CAPPED.run(softcap=np.float32(2)))
    assert_same_bits(first, CAPPED.run(softcap=np.array(2.0)))
