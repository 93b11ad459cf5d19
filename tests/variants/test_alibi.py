"""alibi_slopes: s - slope * |i - j|, of absolute positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_as_accurate_as_naive, assert_same_bits
from tests.variants.calls import (
    RNG,
    B,
    H,
    assert_invariant,
    assert_rings_agree,
    assert_same_bits_on_threads,
    call,
    small,
    with_sinks,
)
from tilewise import hooks

SLOPES = (2.0 ** -np.arange(1.0, H + 1)).astype(np.float32)
EACH = RNG.random((B, H)).astype(np.float32) - np.float32(0.1)
BOTH = pytest.mark.parametrize("slopes", [SLOPES, EACH], ids=["[H]", "[B, H]"])


@BOTH
def test_it_is_invariant(slopes: Any) -> None:
    assert_invariant(call(alibi_slopes=slopes, causal=True))


def test_rings_agree() -> None:
    assert_rings_agree(small(alibi_slopes=SLOPES))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(with_sinks(call(alibi_slopes=EACH)))


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_accurate(slopes: Any, causal: bool) -> None:
    c = with_sinks(call(alibi_slopes=slopes, causal=causal))
    assert_as_accurate_as_naive(c.run(), c)


@BOTH
def test_as_a_score_function(slopes: Any) -> None:
    c = call(causal=True)
    assert_same_bits(c.run(alibi_slopes=slopes), c.run(score=hooks.alibi(slopes)))


def test_as_a_bias() -> None:
    """One key at distance 3 before, one 5 after, slope 1/4: biases -3/4 and -5/4, exactly."""
    c = call(k_offset=[127, 173], kv_start=[0, 0], kv_len=[9, 9], span=64, bc=64).rows(0, 1)
    slopes = np.full(H, 0.25, np.float32)
    bias = (-0.25 * np.abs(np.arange(9) - 3)).astype(np.float32)
    assert_same_bits(c.run(alibi_slopes=slopes), c.run(bias=np.pad(bias, (0, c.k.shape[2] - 9))))


def test_the_document_gives_the_bits() -> None:
    """Scores that are the keys themselves; a bias of the document's s - slope * distance less s would round again."""
    k = RNG.standard_normal((1, 1, 100, 1)).astype(np.float32)
    v, slope, one = RNG.standard_normal((1, 1, 100, 3)).astype(np.float32), np.float32(0.3), np.ones((1, 1, 1, 1), "f4")
    moved = k - (slope * np.abs(np.float32(60) - np.arange(100, dtype=np.float32)))[:, None]
    expected = tw.attention(one, moved, v, scale=1.0, return_lse=True)
    got = tw.attention(one, k, v, scale=1.0, alibi_slopes=np.array([slope]), q_offset=60, return_lse=True)
    assert_same_bits(expected, got)


def test_zero_slopes_are_none() -> None:
    for zero in (0.0, -0.0):
        assert_same_bits(call().run(), call(alibi_slopes=np.full(H, zero, np.float32)).run())


def test_positions_count_not_indices() -> None:
    """All positions moved by a whole span: nothing moves."""
    c = call(alibi_slopes=SLOPES, causal=True)
    moved = {name: [x + 128 for x in c.options[name]] for name in ("q_offset", "k_offset")}
    assert_same_bits(c.run(), c.run(**moved))
    assert (c.run(q_offset=[x + 1 for x in c.options["q_offset"]])[0] != c.run()[0]).any()


def test_strides_of_slopes() -> None:
    c = call()
    wide = np.ascontiguousarray(np.repeat(EACH, 3, axis=0))
    assert_same_bits(c.run(alibi_slopes=EACH), c.run(alibi_slopes=wide[::3]))
    assert_same_bits(c.run(alibi_slopes=EACH), c.run(alibi_slopes=EACH[::-1].copy()[::-1]))
    assert_same_bits(c.run(alibi_slopes=SLOPES), c.run(alibi_slopes=np.broadcast_to(SLOPES, (B, H))))


def test_contents_are_read_at_every_call() -> None:
    slopes = SLOPES.copy()
    c = call(alibi_slopes=slopes)
    first = c.run()
    slopes[:] = 0
    assert_same_bits(call().run(), c.run())
    slopes[:] = SLOPES
    assert_same_bits(first, c.run())


def test_layouts_in_turn() -> None:
    """[H] after [B, H] and back, where a prepared call is at hand for each."""
    c = call()
    one, each = c.run(alibi_slopes=SLOPES), c.run(alibi_slopes=EACH)
    for _ in range(2):
        assert_same_bits(one, c.run(alibi_slopes=SLOPES))
        assert_same_bits(each, c.run(alibi_slopes=EACH))


def test_infinite_slopes_hide_nothing() -> None:
    """A score of -inf is seen: a row for which all are -inf is 0 / 0, and inf * 0 is NaN."""
    c = call(alibi_slopes=np.full(H, np.inf, np.float32))
    o, _ = c.run()  # no key lies at a row's own position but in causal reach of it
    assert np.isnan(o).all()
    o, _ = call(alibi_slopes=np.full(H, np.inf, np.float32), k_offset=[0, 0], q_offset=[1000, 1000]).run()
    assert np.isnan(o).all()


def test_far_positions_are_right_or_refused() -> None:
    q, k, v = (np.ones((1, 1, n, 4), np.float32) for n in (1, 2, 2))
    try:
        _, lse = tw.attention(q, k, v, alibi_slopes=np.full(1, 2.0**-30, np.float32), q_offset=1 << 33, return_lse=True)
    except tw.InvalidArgument:
        return
    np.testing.assert_allclose(lse, 2 + np.log(2) - 8, rtol=1e-5)


def test_an_unclear_q_offset_is_refused() -> None:
    q, k, v = (np.ones((1, 1, n, 4), np.float32) for n in (1, 20, 20))
    with pytest.raises(tw.InvalidArgument, match="q_offset must be given"):
        tw.attention(q, k, v, alibi_slopes=np.ones(1, np.float32))
