"""keep(b, h, i, j): a mask of positions, decided tile by tile before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_as_accurate_as_naive, assert_same_bits, inputs
from tests.variants.calls import (
    END,
    HKV,
    RNG,
    TK,
    TQ,
    B,
    H,
    assert_invariant,
    assert_rings_agree,
    assert_same_bits_on_threads,
    assert_what_a_row_does_not_see_does_not_count,
    assert_what_is_hidden_does_not_count,
    call,
    dense,
    small,
    with_sinks,
)
from tilewise import hooks

DOCUMENTS = np.sort(RNG.integers(0, 4, (B, END)), axis=1)
ALLOWED = RNG.random((H, END, END)) < 0.5


def by_document(order: Any) -> dict[str, Any]:
    return {"keep": lambda b, h, i, j: (DOCUMENTS[order[b], i] == DOCUMENTS[order[b], j]) | (j % 9 == h)}


def by_table(order: Any) -> dict[str, Any]:
    return {"keep": lambda b, h, i, j: ALLOWED[h, i, j]}


# what is skipped, seen in part or wholly, by groups of 16 keys within a tile, per head, per sequence
KEEPS: dict[str, Any] = {
    "a tile": lambda b, h, i, j: j // 64 != 1,
    "groups": lambda b, h, i, j: (j // 16 % 4 == 1) | (j // 16 % 4 == 2),
    "a head": lambda b, h, i, j: j // 64 % 4 == h,
    "the last head": lambda b, h, i, j: (h == 3) | (j < 80),
    "a sequence": lambda b, h, i, j: (j // 64 + b) % 2 == 0,
    "a row": lambda b, h, i, j: (i % 8 == 3) | (j < 80),
    "a key": lambda b, h, i, j: j == 77,
    "before": lambda b, h, i, j: j <= i - 33,
    "nothing": lambda b, h, i, j: j < -5,
    "everything": lambda b, h, i, j: j > -5,
}


@pytest.mark.parametrize("make", [by_document, by_table])
def test_it_is_invariant(make: Any) -> None:
    assert_invariant(call(causal=True).hooked(make))


def test_rings_agree() -> None:
    assert_rings_agree(small().hooked(by_document))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(with_sinks(call().hooked(by_document)))


def test_it_is_accurate() -> None:
    c = with_sinks(call(causal=True).hooked(by_document))
    assert_as_accurate_as_naive(c.run(), c)


@pytest.mark.parametrize("name", KEEPS)
def test_as_a_mask(name: str) -> None:
    """For 18 rows of each KV head, and for 2, that go through another kernel; with tiles of more groups than a byte of
    a block mask has room for, and of a number of keys that is odd."""
    keep = KEEPS[name]
    mask = dense(keep)
    other_sizes = [{"bc": 160, "span": 160}, {"bc": 33, "span": 66}] if name in ("groups", "a head") else []
    for sizes in ({}, *other_sizes):
        c = call(**sizes)
        assert_same_bits(c.change(mask=mask).run(), c.run(keep=keep), f"{sizes}")
        assert_same_bits(c.change(mask=mask).rows(3, 4).run(), c.rows(3, 4).run(keep=keep), f"a row, {sizes}")


def test_groups_of_one_kv_head() -> None:
    """All query heads share one KV head: a tile is skipped only if no head sees it."""
    q, k, v = inputs(1, 4, 1, 20, 256, 16, 16)
    heads = np.arange(4)[:, None, None]
    mask = np.arange(256) // 64 == heads
    expected = tw.attention(q, k, v, mask=np.broadcast_to(mask, (4, 20, 256)), q_offset=0, return_lse=True)
    got = tw.attention(q, k, v, keep=lambda b, h, i, j: j // 64 == h, q_offset=0, return_lse=True)
    assert_same_bits(expected, got)


@pytest.mark.parametrize("br", [1, 2, 3, 4, 8])
def test_query_tiles(br: int) -> None:
    """Rows see other tiles than their neighbours, and query tiles begin at any of them."""
    q, k, v = inputs(1, 2, 1, 50, 400, 16, 16)
    i, j = np.arange(50)[:, None], np.arange(400)
    mask = np.asarray(j // 64 == i // 4 % 7)
    expected = tw.attention(q, k, v, mask=mask, q_offset=0, return_lse=True)
    got = tw.attention(q, k, v, keep=lambda b, h, i, j: j // 64 == i // 4 % 7, q_offset=0, br=br, return_lse=True)
    assert_same_bits(expected, got)


def test_keep_that_hides_nothing_is_none() -> None:
    plain = call(causal=True).run()
    for keep in (lambda b, h, i, j: True, lambda b, h, i, j: np.True_, hooks.not_(hooks.or_())):
        assert_same_bits(plain, call(causal=True).run(keep=keep))
    o, lse = call().run(keep=lambda b, h, i, j: False)
    assert (o == 0).all()
    assert np.isneginf(lse).all()


def test_hidden_keys_do_not_count() -> None:
    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j // 16 + b) % 3 != h // 2

    assert_what_is_hidden_does_not_count(call().hooked(lambda order: {"keep": keep}), dense(keep))

    def by_row(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 3 != 1

    c = call().hooked(lambda order: {"keep": by_row})
    assert_what_a_row_does_not_see_does_not_count(c, dense(by_row))
    assert_what_a_row_does_not_see_does_not_count(c.rows(2, 5).rows(0, 3), dense(by_row)[:, :, 2:5])


def test_score_and_keep_have_their_own_arrays() -> None:
    weights, documents = RNG.random(END).astype(np.float32), np.arange(END) // 23

    def both(order: Any) -> dict[str, Any]:
        return {
            "score": lambda s, b, h, i, j: s * weights[j],
            "keep": lambda b, h, i, j: documents[i] >= documents[j],
        }

    c = call().hooked(both)
    assert_invariant(c)
    mask = dense(lambda b, h, i, j: documents[np.clip(i, 0, END - 1)] >= documents[np.clip(j, 0, END - 1)])
    expected = call(mask=mask).run(score=lambda s, b, h, i, j: s * weights[j])
    assert_same_bits(expected, c.run())
    assert_same_bits(expected, c.run(score=lambda s, b, h, i, j: s * weights[j]))


def test_captured_arrays_are_read_at_every_call() -> None:
    documents = DOCUMENTS[0].copy()

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        return documents[i] == documents[j]

    first = call().run(keep=keep)
    documents[:] = 0
    assert_same_bits(call().run(), call().run(keep=keep))
    documents[:] = DOCUMENTS[0]
    assert_same_bits(first, call().run(keep=keep))


WORDS: dict[str, Any] = {
    "sums": lambda b, h, i, j: i + j + 1 < 200 + b,
    "differences": lambda b, h, i, j: (i - j < 30) & (j - i > -60) & (5 - j < -20),
    "products": lambda b, h, i, j: (i * j) % 7 < 4,
    "quotients": lambda b, h, i, j: (i - j) // 10 % 2 == 0,
    "negative dividends": lambda b, h, i, j: ((j - i) // 7 == -9) | ((j - i) % 5 == 3),
    "negative divisors": lambda b, h, i, j: ((i - j) // -7 == -9) | ((i - j) % -5 == -3),
    "quotients of numbers": lambda b, h, i, j: (1000 // (j + 1) + 1000 % (j + 1)) % 2 == 0,
    "reals": lambda b, h, i, j: i / (j + 1) > 1.7,
    "negation": lambda b, h, i, j: -j + abs(j - i) - (-h) > 5,
    "squares": lambda b, h, i, j: (i - j) ** 2 > 900,
    "comparisons": lambda b, h, i, j: (i > j) & (j >= 20) & (i != 132) & (j <= 150) & (h < 3) | (i == j),
    "of unlike kinds": lambda b, h, i, j: (j < 100.5) & (j + 0.5 < i),
    "truth": lambda b, h, i, j: (i < j) ^ (j % 2 == 0) ^ True,
    "equal truths": lambda b, h, i, j: (j % 2 == 0) == (i % 3 == 0),
    "where": lambda b, h, i, j: np.where(i % 2 == 0, j % 3, j % 5) == 1,
    "where of truths": lambda b, h, i, j: np.where(h == 1, j < 40, j >= 40),
    "minimum": lambda b, h, i, j: np.minimum(i, j + 40) - np.maximum(j, 30) > 25,
    "ufuncs": lambda b, h, i, j: np.logical_not(np.logical_or(np.less(j, 20), np.equal(np.remainder(j, 7), 0))),
    "bits": lambda b, h, i, j: (j & 12) == 4,
    "numbers of NumPy": lambda b, h, i, j: np.int64(100) - j < np.float32(3.5) * np.int8(2),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_mean_what_numpy_means(name: str) -> None:
    """The same function of NumPy's arrays gives the mask. Interpreted, for that compiles nothing."""
    keep, c = WORDS[name], small()
    mask = dense(keep, c)
    assert mask.any()
    assert not mask.all()
    with tw.config(interpret=True):
        assert_same_bits(c.run(mask=mask), c.run(keep=keep))


def test_words_are_compiled() -> None:
    """All of them in one kernel."""

    def keep(*place: Any) -> Any:
        result = place[3] > place[2]
        for word in WORDS.values():
            result = result ^ word(*place)
        return result

    c = call()
    assert_same_bits(c.run(mask=dense(keep)), c.run(keep=keep))


def test_division_by_zero_is_zero() -> None:
    c = small()
    with tw.config(interpret=True):
        for keep in (lambda b, h, i, j: i // (j - j) == 0, lambda b, h, i, j: i % (j * 0) == 0):
            assert_same_bits(c.run(), c.run(keep=keep))


def test_offsets_up_to_the_largest_position() -> None:
    """A window far away is the window near."""
    near = call(causal=True)
    far = 1 << 29
    moved = {name: [x + far for x in near.options[name]] for name in ("q_offset", "k_offset")}
    keep: Any = lambda b, h, i, j: i - j < 50  # noqa: E731
    assert_same_bits(near.run(keep=keep), near.run(keep=keep, **moved))
    assert near.k.shape[1] == HKV
    assert near.k.shape[2] == TK
    assert near.q.shape[2] == TQ


@pytest.mark.parametrize("score", [None, lambda s, b, h, i, j: s + j])
def test_positions_of_more_than_30_bits_are_refused(score: Any) -> None:
    moved = {"q_offset": [1 << 30] * B, "k_offset": [(1 << 30) - 50] * B}
    keep = None if score else lambda b, h, i, j: j <= i
    with pytest.raises(tw.InvalidArgument, match="1073741824"):
        call().run(keep=keep, score=score, **moved)
