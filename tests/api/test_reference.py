"""The specification is checked against itself worked by hand and against a triple loop in pure Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewise.reference import ROWS, attention32, attention64, online_softmax, softmax

BOTH = pytest.mark.parametrize("attention", [attention64, attention32])
INF, NAN = math.inf, math.nan


def random_qkv(B: int, H: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng([B, H, Hkv, Tq, Tk, D, Dv])
    shapes = (B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def triple_loop(
    q: Any, k: Any, v: Any, *, causal=False, window=0, scale=1.0, sinks=None, descriptors
) -> tuple[Any, Any]:
    """Attention in Python's own floats. descriptors: (q_offset, kv_start, kv_len, k_offset) of each sequence."""
    (B, H, Tq, D), (Hkv, Dv) = q.shape, (k.shape[1], v.shape[3])
    o, lse = np.zeros((B, H, Tq, Dv)), np.full((B, H, Tq), -INF)
    for b, h, i in itertools.product(range(B), range(H), range(Tq)):
        q_offset, kv_start, kv_len, k_offset = descriptors[b]
        p, g = q_offset + i, h // (H // Hkv)
        scores = {}
        for j in range(kv_len):
            c, row = k_offset + j, kv_start + j
            if (not causal or c <= p) and (window <= 0 or c > p - window):
                scores[row] = scale * math.fsum(float(q[b, h, i, d]) * float(k[b, g, row, d]) for d in range(D))
        logits = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
        if not logits:
            continue
        m = max(logits)
        l = math.fsum(math.exp(s - m) for s in logits)
        lse[b, h, i] = m + math.log(l)
        for d in range(Dv):
            o[b, h, i, d] = math.fsum(math.exp(s - m) * float(v[b, g, j, d]) for j, s in scores.items()) / l
    return o, lse


def hand_example() -> list[NDArray[np.float64]]:
    return [np.array(x, float)[None, None] for x in ([[1, 0]], [[1, 0], [0, 1], [1, 1]], [[1, 2], [3, 4], [5, 6]])]


@BOTH
def test_hand_example(attention) -> None:
    o, lse = attention(*hand_example(), scale=1.0)
    np.testing.assert_allclose(o, [[[[3, 4]]]], rtol=1e-6)
    np.testing.assert_allclose(lse, [[[1.8619948]]], rtol=1e-6)


@BOTH
def test_hand_example_causal_at_offset_1(attention) -> None:
    o, lse = attention(*hand_example(), scale=1.0, causal=True, q_offset=1)
    np.testing.assert_allclose(o, [[[[1.5378828, 2.5378828]]]], rtol=1e-6)
    np.testing.assert_allclose(lse, [[[1 + math.log(1.3678794)]]], rtol=1e-6)


@BOTH
def test_sink_takes_its_share(attention) -> None:
    """Two keys of score 0 and a sink of logit 0: the sink has 1/3, so values of one give 2/3."""
    q, k, v = np.zeros((1, 1, 1, 4)), np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 3))
    o, lse = attention(q, k, v, sinks=[0.0])
    np.testing.assert_allclose(o, np.full((1, 1, 1, 3), 2 / 3), rtol=1e-6)
    np.testing.assert_allclose(lse, [[[math.log(3)]]], rtol=1e-6)


def test_results_have_the_dtype_and_shape_that_they_say() -> None:
    q, k, v = random_qkv(2, 4, 2, 3, 5, 6, 7)
    for attention, dtype in ((attention64, np.float64), (attention32, np.float32)):
        for sinks in (None, [1.0, 2.0, 3.0, 4.0]):
            o, lse = attention(q, k, v, causal=True, sinks=sinks, q_offset=-1)
            assert (o.shape, lse.shape, o.dtype, lse.dtype) == ((2, 4, 3, 7), (2, 4, 3), dtype, dtype)
    assert np.isneginf(attention64(q, k, v, causal=True, q_offset=-1)[1][:, :, 0]).all()


@pytest.mark.parametrize("window", [None, -1, 0, 1, 2, 3, 6, 7, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_offset", [0, 2, 6, 20])
def test_masks_match_triple_loop(causal: bool, window: int | None, q_offset: int) -> None:
    q, k, v = random_qkv(1, 2, 1, 5, 7, 3, 2)
    how: dict[str, Any] = {"causal": causal, "scale": 0.7, "sinks": [0.5, -1.5] if q_offset == 2 else None}
    expected = triple_loop(q, k, v, window=window or 0, descriptors=[(q_offset, 0, 7, 0)], **how)
    for got, want in zip(attention64(q, k, v, window=window, q_offset=q_offset, **how), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)
    for got, want in zip(attention32(q, k, v, window=window, q_offset=q_offset, **how), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (3, 3), (6, 2), (4, 1), (6, 3)])
def test_head_groups_share_a_kv_head(H: int, Hkv: int) -> None:
    q, k, v = random_qkv(2, H, Hkv, 3, 4, 5, 2)
    expected = triple_loop(q, k, v, scale=5**-0.5, descriptors=[(0, 0, 4, 0)] * 2)
    for got, want in zip(attention64(q, k, v), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)
    repeated = attention64(q, k.repeat(H // Hkv, axis=1), v.repeat(H // Hkv, axis=1))
    np.testing.assert_array_equal(attention64(q, k, v)[0], repeated[0])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_descriptors_match_triple_loop(data: st.DataObject) -> None:
    """Every sequence has its own offsets and lengths, given as arrays."""

    def integers(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    B, Hkv, group, Tq, Tk = integers(1, 3), integers(1, 2), integers(1, 2), integers(0, 4), integers(0, 9)
    descriptors = []
    for _ in range(B):
        kv_start = integers(0, Tk)
        descriptors.append((integers(0, 12), kv_start, integers(0, Tk - kv_start), integers(0, 5)))
    how: dict[str, Any] = {"causal": data.draw(st.booleans()), "window": integers(0, 6), "scale": 0.4}
    how["sinks"] = np.linspace(-1, 1, Hkv * group) if data.draw(st.booleans()) else None
    q, k, v = random_qkv(B, Hkv * group, Hkv, Tq, Tk, 2, 3)
    q_offset, kv_start, kv_len, k_offset = np.array(descriptors).T
    got = attention64(q, k, v, q_offset=q_offset, kv_start=kv_start, kv_len=kv_len, k_offset=k_offset, **how)
    for one, want in zip(got, triple_loop(q, k, v, descriptors=descriptors, **how), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-12, atol=1e-15)


@BOTH
def test_kv_start_alone_means_the_rest(attention) -> None:
    q, k, v = random_qkv(1, 1, 1, 2, 9, 4, 4)
    for got, want in zip(attention(q, k, v, kv_start=3), attention(q, k[:, :, 3:], v[:, :, 3:]), strict=True):
        np.testing.assert_array_equal(got, want)


@BOTH
def test_dropped_old_keys_and_k_offset(attention) -> None:
    """A cache that holds only the window's keys, and says where they start, gives what the whole cache gives."""
    q, k, v = random_qkv(1, 2, 1, 4, 12, 4, 4)
    whole = attention(q, k, v, causal=True, window=5, q_offset=8)
    slid = attention(q, k[:, :, 4:], v[:, :, 4:], causal=True, window=5, q_offset=8, k_offset=4)
    for got, want in zip(slid, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("sinks", [None, [0.3, -2.0]])
def test_no_visible_key(attention, sinks: list[float] | None) -> None:
    """Causal at negative positions, a window past the end and no keys at all: zeros, and -inf or the sink."""
    q, k, v = random_qkv(1, 2, 2, 3, 4, 5, 6)
    none: list[dict[str, Any]] = [{"causal": True, "q_offset": -3}, {"window": 2, "q_offset": 9}, {"kv_len": 0}]
    for how in none:
        o, lse = attention(q, k, v, sinks=sinks, **how)
        assert (o == 0).all()
        want = [-INF, -INF] if sinks is None else np.asarray(sinks, lse.dtype)
        np.testing.assert_array_equal(lse, np.broadcast_to(np.array(want)[:, None], (1, 2, 3)))


@BOTH
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
def test_invisible_garbage_changes_no_bit(attention, garbage: float) -> None:
    q, k, v = random_qkv(2, 4, 2, 6, 11, 4, 3)
    how: dict[str, Any] = {"causal": True, "q_offset": [5, 1], "kv_start": [1, 0], "kv_len": [8, 9], "window": 3}
    # Sequence 0: outside kv_start and kv_len, before the first row's window. Sequence 1: past the last row, outside.
    hidden = {0: [0, 9, 10, 1, 2, 3], 1: [7, 8, 9, 10]}
    clean = attention(q, k, v, **how)
    for b, keys in hidden.items():
        k[b, :, keys] = v[b, :, keys] = garbage
    for got, want in zip(attention(q, k, v, **how), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@BOTH
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("which", ["k", "v"])
def test_garbage_reaches_only_the_rows_that_see_it(attention, which: str, poison: float) -> None:
    """Key 4 is seen by rows 4, 5 and 6 (causal, window 3) of a square problem; the other rows keep their bits."""
    q, k, v = random_qkv(1, 2, 1, 9, 9, 4, 3)
    clean = attention(q, k, v, causal=True, window=3)
    {"k": k, "v": v}[which][:, :, 4] = poison
    o, lse = attention(q, k, v, causal=True, window=3)
    sees = np.isin(np.arange(9), [4, 5, 6])
    np.testing.assert_array_equal(o[:, :, ~sees], clean[0][:, :, ~sees])
    np.testing.assert_array_equal(lse[:, :, ~sees], clean[1][:, :, ~sees])
    if math.isnan(poison) or which == "v":
        assert not np.isfinite(o[:, :, sees]).any()
    if math.isnan(poison) and which == "k":
        assert np.isnan(lse[:, :, sees]).all()


@BOTH
def test_visible_scores_of_minus_infinity(attention) -> None:
    """Weights that are all zero are 0 / 0; beside a finite score, or a sink, they are just zero."""
    q, k, v = np.ones((1, 1, 1, 1)), np.full((1, 1, 3, 1), -INF), np.ones((1, 1, 3, 2))
    o, lse = attention(q, k, v)
    assert np.isnan(o).all()
    assert np.isneginf(lse).all()
    o, lse = attention(q, k, v, sinks=[0.25])
    assert (o == 0).all()
    assert (lse == 0.25).all()
    k[0, 0, 1] = 2
    o, lse = attention(q, k, v)
    assert (o == 1).all()
    assert (lse == 2).all()


@BOTH
def test_rows_across_blocks(attention) -> None:
    """Every row of a call longer than one block of rows agrees with the same row alone."""
    T = ROWS + 3
    q, k, v = random_qkv(1, 1, 1, T, T, 4, 4)
    o, lse = attention(q, k, v, causal=True)
    for i in (0, 1, ROWS - 1, ROWS, T - 1):
        alone = attention(q[:, :, i : i + 1], k, v, causal=True, q_offset=i)
        np.testing.assert_allclose(o[:, :, i : i + 1], alone[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[:, :, i : i + 1], alone[1], rtol=1e-5)


def test_float32_is_close_to_float64() -> None:
    q, k, v = random_qkv(1, 2, 1, 33, 70, 32, 16)
    wide, narrow = attention64(q, k, v, causal=True, q_offset=37), attention32(q, k, v, causal=True, q_offset=37)
    for x, y in zip(wide, narrow, strict=True):
        assert 0 < np.abs(x - y).max() < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 16), (4, 37)])
@pytest.mark.parametrize("tile", [1, 2, 5, 16, 17, 64])
def test_online_softmax_equals_softmax(dtype: type, shape: tuple[int, ...], tile: int) -> None:
    x = (np.random.default_rng(tile).standard_normal(shape) * 30).astype(dtype)
    got, want = online_softmax(x, tile), softmax(x)
    assert (got.dtype, got.shape) == (want.dtype, want.shape) == (dtype, shape)
    np.testing.assert_allclose(got, want, rtol=20 * np.finfo(dtype).eps)
    np.testing.assert_allclose(want.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("tile", [1, 2, 3])
def test_softmax_with_infinities_and_large_values(tile: int) -> None:
    x = np.array([[-INF, -INF, 0.0, 0.0], [1e30, -INF, 0.0, 1e30], [-1e30, -1e30, -INF, -INF], [NAN, 0, 1, 2]])
    want = [[0, 0, 0.5, 0.5], [0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [NAN] * 4]
    np.testing.assert_array_equal(softmax(x), want)
    np.testing.assert_array_equal(online_softmax(x, tile), want)
    assert np.isnan(softmax(np.full(4, -INF))).all()
    assert np.isnan(online_softmax(np.full(4, -INF), tile)).all()
