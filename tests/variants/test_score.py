"""score(s, b, h, i, j): any change of a score that is written with words."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_as_accurate_as_naive, assert_same_bits
from tests.variants.calls import (
    DENSE,
    END,
    OFFSET,
    RNG,
    TK,
    TQ,
    B,
    H,
    assert_invariant,
    assert_rings_agree,
    assert_same_bits_on_threads,
    assert_what_a_row_does_not_see_does_not_count,
    call,
    dense,
    places,
    small,
    with_sinks,
)
from tilewise import hooks

TABLE = RNG.standard_normal((B, H, 2 * END)).astype(np.float32)
BIAS = RNG.standard_normal((B, H, TQ, TK)).astype(np.float32)
SLOPES = RNG.random(H).astype(np.float32)


def by_distance(order: Any) -> dict[str, Any]:
    """A number for each sequence, head and distance, and another factor after a row's own position."""
    return {"score": lambda s, b, h, i, j: np.where(j > i, 0.5 * s, s) + TABLE[order[b], h, j - i + END]}


HOOKED = call().hooked(by_distance)


def test_it_is_invariant() -> None:
    assert_invariant(HOOKED)


def test_rings_agree() -> None:
    assert_rings_agree(small().hooked(by_distance))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(with_sinks(HOOKED))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_accurate(causal: bool) -> None:
    c = with_sinks(HOOKED.change(causal=causal))
    assert_as_accurate_as_naive(c.run(), c)


def test_everything_in_its_order() -> None:
    """Softcap, score, slopes, bias, and all masks: as the reference has them, and as accurate."""

    def both(order: Any) -> dict[str, Any]:
        return {
            "score": lambda s, b, h, i, j: s * (1 + (j + h) % 3) + TABLE[order[b], h, i],
            "keep": lambda b, h, i, j: (i + j) % 7 != order[b],
        }

    c = with_sinks(call(softcap=1.0, alibi_slopes=SLOPES, bias=BIAS, mask=DENSE, window=(90, 4)).hooked(both))
    assert_as_accurate_as_naive(c.run(), c)
    np.testing.assert_allclose(c.run()[0], c.exact()[0], atol=5e-6)
    assert_invariant(c)
    assert_what_a_row_does_not_see_does_not_count(
        c, DENSE & dense(lambda b, h, i, j: ((i + j) % 7 != b) & (i - j <= 90) & (j - i <= 4))
    )


def test_a_score_that_does_nothing_is_none() -> None:
    c = small(causal=True)
    for identity in (
        lambda s, b, h, i, j: s, lambda s, b, h, i, j: s * 1.0, lambda s, b, h, i, j: s - 0.0,
        lambda s, b, h, i, j: np.where(j < 0, 5.0, s), lambda s, *place: hooks.maximum(s, float("-inf")),
    ):  # fmt: skip
        with tw.config(interpret=True):
            assert_same_bits(c.run(), c.run(score=identity))
    assert_same_bits(call().run(), call().run(score=lambda s, b, h, i, j: s))


def test_as_a_bias() -> None:
    """An element for each pair of positions, read through the table."""
    table = RNG.standard_normal((B, H, max(OFFSET) + TQ, END)).astype(np.float32)
    b, h, i, j = places(call())
    bias = table[b, h, i, np.clip(j, 0, END - 1)]
    c = call()
    assert_same_bits(c.run(bias=bias), c.run(score=lambda s, b, h, i, j: s + table[b, h, i, j]))


def test_hidden_scores_do_not_count() -> None:
    """1 / (j - 20) is infinite, log2 of what is negative NaN: of keys that no row sees."""
    c = call(mask=dense(lambda b, h, i, j: j > 20))
    got = c.run(score=lambda s, b, h, i, j: s + 1 / (j - 20) + 0 * hooks.log2(j - 20))
    assert np.isfinite(got[0]).all()
    sentinel = c.run(score=lambda s, b, h, i, j: np.where(j > 20, s + 1 / (j - 20) + 0 * hooks.log2(j - 20), np.nan))
    assert_same_bits(got, sentinel)


def test_a_visible_nan_counts() -> None:
    o, lse = call().run(score=lambda s, b, h, i, j: np.where((i == 132) & (h == 1), np.nan, s))
    assert np.isnan(o[0, 1, 2]).all()
    assert np.isnan(o).sum() == 16
    assert np.isnan(lse).sum() == 1


def test_a_score_of_minus_infinity_is_seen() -> None:
    """Only a mask, a bias or keep hides: here 0 / 0."""
    o, lse = call().run(score=lambda s, b, h, i, j: np.where(h == 2, -np.inf, s))
    assert np.isnan(o[:, 2]).all()
    assert np.isneginf(lse[:, 2]).all()
    assert np.isfinite(o[:, [0, 1, 3]]).all()


def test_a_score_may_be_an_integer_or_a_constant() -> None:
    c = small()
    with tw.config(interpret=True):
        assert_same_bits(c.run(score=lambda s, b, h, i, j: 0.0 * s), c.run(score=lambda s, b, h, i, j: 0))
        assert_same_bits(c.run(score=lambda s, b, h, i, j: 1.0 * (j % 4)), c.run(score=lambda s, b, h, i, j: j % 4))


# ---- captured numbers and arrays
def scaled(factor: Any) -> Any:
    return lambda s, b, h, i, j: s * factor


def test_captured_numbers_are_read_at_every_call() -> None:
    c = call()
    factor = 2.0

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor

    first = c.run(score=score)
    factor = 3.0
    second = c.run(score=score)
    assert_same_bits(c.run(score=scaled(2.0)), first)
    assert_same_bits(c.run(score=scaled(3)), second)
    assert (first[0] != second[0]).any()


def test_close_numbers_are_not_one_kernel() -> None:
    c, one, next_one = call(), np.float32(1.1), np.nextafter(np.float32(1.1), np.float32(2))
    results = [c.run(score=scaled(x)) for x in (one, next_one)]
    assert (results[0][1] != results[1][1]).any()


def test_captured_arrays_are_read_at_every_call() -> None:
    c, table = call(), TABLE[0].copy()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, j]

    first = c.run(score=score)
    table[:] = 0
    assert_same_bits(c.run(), c.run(score=score))
    table[:] = TABLE[0]
    assert_same_bits(first, c.run(score=score))


GLOBAL = TABLE[0, :, :END].copy()


def from_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + GLOBAL[h, j]


def from_default(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any = GLOBAL, *, more: Any = GLOBAL) -> Any:
    return s + (0.5 * table[h, j] + 0.5 * more[h, j])


def from_argument(table: Any, s: Any, b: Any, h: Any, i: Any, j: Any, part: Any) -> Any:
    return s + table[h, j] * part[0]


def from_helper(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    def inner(s: Any) -> Any:
        return s + entry(h, j)

    return inner(s)


def entry(h: Any, j: Any) -> Any:
    return GLOBAL[h, j]


def even(n: int, s: Any) -> Any:
    return s if n == 0 else odd(n - 1, s)


def odd(n: int, s: Any) -> Any:
    return even(n - 1, s + 1.0)


@pytest.mark.parametrize(
    "score",
    [
        from_global, from_default, from_helper,
        functools.partial(from_argument, GLOBAL, part=np.ones(1, np.float32)),
        lambda s, b, h, i, j: s + GLOBAL[h][j],
    ],
    ids=["global", "default", "helper", "partial", "an axis at a time"],
)  # fmt: skip
def test_arrays_are_found_wherever_they_are_captured(score: Any) -> None:
    table = GLOBAL
    c = call()
    assert_same_bits(c.run(score=lambda s, b, h, i, j: s + table[h, j]), c.run(score=score))


def test_functions_that_call_each_other() -> None:
    c = call()
    assert_same_bits(c.run(score=lambda s, *_: s + 1.0 + 1.0), c.run(score=lambda s, *_: even(4, s)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.astype(np.float64), np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x[::-1].copy()[::-1], lambda x: x.astype(">f4"), lambda x: np.ascontiguousarray(x.T).T,
    ],
    ids=["float64", "columns first", "every other", "backwards", "big endian", "transposed"],
)  # fmt: skip
def test_arrays_of_other_layouts(make: Any) -> None:
    table = make(GLOBAL)
    assert_same_bits(call().run(score=from_global), call().run(score=lambda s, b, h, i, j: s + table[h, j]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.bool_])
def test_arrays_of_integers_and_truth_values(dtype: Any) -> None:
    table = (np.arange(END) * 7 % 5).astype(dtype)
    floats = table.astype(np.float32)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = table[j]
        return s + (hooks.where(x, 1.0, 0.0) if dtype is np.bool_ else x)

    assert_same_bits(call().run(score=lambda s, b, h, i, j: s + floats[j]), call().run(score=score))


@pytest.mark.parametrize("far", [3, 16, 17, 1000])
def test_an_index_beyond_an_end_is_the_end(far: int) -> None:
    """A row of keys at once (one load), an index a lane (a gather), one index for all lanes. Compiled for one size."""
    table = GLOBAL[0, :50].copy()
    clipped = np.clip(np.arange(-far, END + far), 0, 49)
    longer = table[clipped]
    c = small()
    with tw.config(interpret=far != 17):
        for shift in (-far, far):
            ahead = c.run(score=lambda s, b, h, i, j, shift=shift: s + longer[j + shift + far])
            assert_same_bits(ahead, c.run(score=lambda s, b, h, i, j, shift=shift: s + table[j + shift]))
            assert_same_bits(ahead, c.run(score=lambda s, b, h, i, j, shift=shift: s + table[(2 * j) // 2 + shift]))
        one = c.run(score=lambda s, b, h, i, j: s + longer[i - 150 + far])
        assert_same_bits(one, c.run(score=lambda s, b, h, i, j: s + table[i - 150]))


def test_arrays_without_axes_are_numbers() -> None:
    factor = np.array(2.0)
    assert_same_bits(call().run(score=scaled(2.0)), call().run(score=lambda s, *_: s * factor))


def test_eight_arrays() -> None:
    tables = [TABLE[0, h % H, n : n + END].copy() for n, h in enumerate(range(8))]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for table in tables:
            s = s + table[j]
        return s

    c = call().hooked(lambda order: {"score": score})
    assert_as_accurate_as_naive(c.run(), c)


def test_hooks_in_both_kinds_of_kernel() -> None:
    """Sequences of few and of many rows: each reads its own b."""
    rng = np.random.default_rng(5)
    rows, keys = [1, 30, 2], [50, 33, 20]
    q, k, v = (rng.standard_normal((sum(n), 2, 16), np.float32) for n in (rows, keys, keys))
    ends_q, ends_k = np.cumsum([0, *rows]), np.cumsum([0, *keys])

    def score(order: Any) -> Any:
        return lambda s, b, h, i, j: s * (1 + order[b]) + TABLE[order[b], h, j]

    o, lse = tw.attention_varlen(
        q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, q_offset=0, score=score(np.arange(3) % 2), return_lse=True
    )
    for b in range(3):
        own, of = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        alone = tw.attention(
            *(x.transpose(1, 0, 2)[None] for x in (q[own], k[of], v[of])), q_offset=0, return_lse=True,
            score=score(np.array([b % 2])),
        )  # fmt: skip
        assert_same_bits(alone, (o[own].transpose(1, 0, 2)[None], lse[None, :, own]))
