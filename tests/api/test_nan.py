"""What is not finite: it acts where it is seen, as in the formulas, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support import Case, assert_same_bits, case

NAN_BITS = 0x7FC00000  # the one NaN that comes out, whatever the machine makes


def problem(Tq: int = 20, **options: object) -> Case:
    """Causal rows at 21 to 40 of 41 keys, in tiles of 8 and spans of 16: 4 query heads on 2 KV heads."""
    return case(2, 4, 2, Tq, 41, 8, 5, causal=True, bc=8, span=16, q_offset=41 - Tq, **options)


def changed(x: np.ndarray, index: object, value: float) -> np.ndarray:
    x = x.copy()
    x[index] = value
    return x


def assert_only(c: Case, odd: Case, rows: np.ndarray) -> None:
    """Rows [B, H, Tq] of o and lse are NaN in every element, all others keep their bits."""
    for x, y in zip(odd.run(), c.run(), strict=True):
        assert (x[rows].view(np.uint32) == NAN_BITS).all()
        assert_same_bits(x[~rows], y[~rows])


def rows_of(c: Case) -> np.ndarray:
    return np.zeros(c.q.shape[:3], np.bool_)


@pytest.mark.parametrize("value", [np.nan, -np.nan], ids=["nan", "-nan"])
def test_nan_in_a_query(ring: str, value: float) -> None:
    c = problem(Tq=20 if ring == "native" else 3)
    rows = rows_of(c)
    rows[1, 2, 1] = True
    assert_only(c, replace(c, q=changed(c.q, (1, 2, 1, 3), value)), rows)


def test_nan_payloads_and_signs_make_the_same_nan() -> None:
    c = problem()
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FA00000):
        q = c.q.copy()
        q.view(np.uint32)[0, 1, 7, 2] = bits
        rows = rows_of(c)
        rows[0, 1, 7] = True
        assert_only(c, replace(c, q=q), rows)


@pytest.mark.parametrize("key", [0, 7, 8, 23, 30, 40])
def test_nan_in_a_key(ring: str, key: int) -> None:
    """The rows that see it, of the heads that read it: no other."""
    c = problem(Tq=20 if ring == "native" else 2)
    rows = rows_of(c)
    rows[1, 2:4] = c.visible()[1, :, key]
    assert_only(c, replace(c, k=changed(c.k, (1, 1, key, 7), np.nan)), rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", [0, 7, 8, 23, 30, 40])
def test_not_finite_in_a_value(ring: str, key: int, value: float) -> None:
    """Only its own column, of the rows that see it; every other column, and every lse, keeps its bits."""
    c = problem(Tq=20 if ring == "native" else 2, scale=0.1)  # no weight underflows
    seen = c.visible()[1, :, key]
    (o, lse), (o_before, lse_before) = replace(c, v=changed(c.v, (1, 1, key, 3), value)).run(), c.run()
    assert_same_bits(lse, lse_before)
    touched = np.zeros(o.shape, np.bool_)
    touched[1, 2:4, :, 3] = seen
    assert_same_bits(o[~touched], o_before[~touched])
    expected = np.full(int(touched.sum()), value, np.float32)
    if np.isnan(value):
        assert (o[touched].view(np.uint32) == NAN_BITS).all()
    else:
        assert_same_bits(o[touched], expected)


def test_sums_that_overflow(ring: str) -> None:
    """Finite values whose weighted sum is not: as infinite for rows computed together as for each alone."""
    c = problem(Tq=20 if ring == "native" else 3, scale=0.0)
    v = c.v.copy()
    v[0, 0, 2:7, 1], v[1, 1, 9:, 4] = 3e38, -3e38
    c = replace(c, v=v)
    o, lse = c.run()
    assert (o[0, :2, :, 1] == np.inf).all()
    assert (o[1, 2:4, :, 4] == -np.inf).all()
    for row in range(c.q.shape[2]):
        assert_same_bits((o[:, :, row : row + 1], lse[:, :, row : row + 1]), c.rows(row, row + 1).run())


def test_infinities_of_both_signs_in_a_column(ring: str) -> None:
    c = problem(Tq=2, scale=0.1)
    v = c.v.copy()
    v[0, 0, 3, 2], v[0, 0, 20, 2] = np.inf, -np.inf
    o, _ = replace(c, v=v).run()
    nan = np.isnan(o)
    assert nan[0, :2, :, 2].all()
    assert nan.sum() == 4


def test_scores_of_minus_infinity_everywhere(ring: str) -> None:
    """A distribution over nothing: 0 / 0. Unlike a row that sees no key, whose output is 0."""
    c = problem(Tq=20 if ring == "native" else 2)
    q, k = np.abs(c.q) + 1, c.k.copy()
    k[1, 1] = -np.inf
    o, lse = replace(c, q=q, k=k).run()
    for x, expected in ((o, np.nan), (lse, -np.inf)):
        assert_same_bits(x[1, 2:4], np.full_like(x[1, 2:4], expected))
        assert np.isfinite(x[0]).all()
        assert np.isfinite(x[1, :2]).all()
    # with a sink there is a distribution: all of it is the sink's
    sinks = np.arange(4, dtype=np.float32)
    o, lse = replace(c, q=q, k=k).run(sinks=sinks)
    assert_same_bits(o[1, 2:4], np.zeros_like(o[1, 2:4]))
    np.testing.assert_allclose(lse[1, 2:4], np.broadcast_to(sinks[2:4, None], lse[1, 2:4].shape), rtol=3e-7)


def with_masked_keys(c: Case, keys: list[int]) -> Case:
    """A user's own mask: keys whose scores are -inf for every row."""
    k = c.k.copy()
    k[:, :, keys] = -np.inf
    return replace(c, q=np.abs(c.q) + 1, k=k)


@pytest.mark.parametrize("tiles", [[0, 1], [1], [2, 3], [0, 2, 4]], ids=str)
def test_scores_of_minus_infinity_beside_finite_ones(ring: str, tiles: list[int]) -> None:
    """A tile (or a span) of them only is skipped: it weighs nothing, whatever its values are."""
    c = problem(Tq=20 if ring == "native" else 2)
    keys = [j for t in tiles for j in range(8 * t, 8 * t + 8)]
    masked = with_masked_keys(c, keys)
    expected = masked.run()
    assert np.isfinite(expected[0]).all()
    assert np.isfinite(expected[1]).all()
    # weighing nothing: what the formulas give for the other keys alone
    exact, _ = replace(masked, v=changed(masked.v, (slice(None), slice(None), keys), 0)).exact()
    np.testing.assert_allclose(expected[0], exact, rtol=0, atol=1e-5)
    assert_same_bits(replace(masked, v=changed(masked.v, (slice(None), slice(None), keys), np.nan)).run(), expected)


def test_part_of_a_tile_of_minus_infinity(ring: str) -> None:
    """Beside finite scores in its tile, a score of -inf has weight 0, and 0 times a finite value is nothing."""
    c = problem(Tq=20 if ring == "native" else 2)
    keys = [1, 2, 17, 20]
    masked = with_masked_keys(c, keys)
    expected = masked.run()
    assert np.isfinite(expected[0]).all()
    assert_same_bits(replace(masked, v=changed(masked.v, (slice(None), slice(None), keys), -3e38)).run(), expected)
    # the value enters the arithmetic of a tile that is not skipped: 0 * NaN
    o, lse = replace(masked, v=changed(masked.v, (0, 0, 17, 1), np.nan)).run()
    assert_same_bits(lse, expected[1])
    assert np.isnan(o[0, :2, :, 1]).all()
    touched = np.zeros(o.shape, np.bool_)
    touched[0, :2, :, 1] = True
    assert_same_bits(o[~touched], expected[0][~touched])


def test_score_of_plus_infinity(ring: str) -> None:
    """inf - inf: NaN for the rows that see it, as in the formulas."""
    c = problem(Tq=20 if ring == "native" else 2)
    c = replace(c, q=np.abs(c.q) + 1)
    rows = rows_of(c)
    rows[0, :2] = c.visible()[0, :, 30]
    assert_only(c, replace(c, k=changed(c.k, (0, 0, 30), np.inf)), rows)


@pytest.mark.parametrize("z", [np.nan, np.inf], ids=["nan", "inf"])
def test_sinks_that_are_not_finite(ring: str, z: float) -> None:
    c = problem(Tq=20 if ring == "native" else 2, sinks=np.zeros(4, np.float32))
    rows = rows_of(c)
    rows[:, 1] = True
    assert_only(c, c.change(sinks=np.array([0, z, 0, 0], np.float32)), rows)


def test_the_reference_agrees_on_what_is_not_finite() -> None:
    """Where o and lse are NaN, inf or -inf is the same in float64."""
    c = problem()
    q, k, v = c.q.copy(), c.k.copy(), c.v.copy()
    q[0, 0, 3, 1], k[0, 1, 25, 0], v[1, 0, 5, 2], v[1, 1, 33, 4] = np.nan, np.nan, np.inf, np.nan
    k[1, 1, 38] = -np.inf
    q[1, 3] = np.abs(q[1, 3]) + 1
    odd = replace(c, q=q, k=k, v=v).change(scale=0.1)
    for got, exact in zip(odd.run(), odd.exact(), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
        np.testing.assert_array_equal(got[np.isinf(exact)], exact[np.isinf(exact)])
        assert np.isinf(got).sum() == np.isinf(exact).sum()
