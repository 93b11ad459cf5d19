"""A ragged batch gives each sequence the bits that it has alone: whatever its company, layout, threads and target."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.serving.batches import (
    OPTIONS,
    Batch,
    Sequence,
    assert_same,
    assert_written,
    mixed,
    poisoned,
    sequence,
    untouched,
)

every_mask = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


@every_mask
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
def test_each_sequence_as_if_alone(options: dict[str, Any], heads: tuple[int, int]) -> None:
    batch = mixed(options, heads)
    assert_same(batch.varlen(), batch.alone())


@pytest.mark.parametrize("name", ["window", "small tiles"])
def test_targets(name: str, target: str) -> None:
    batch = mixed(OPTIONS[name])
    got = batch.varlen()
    with tw.config(target=None):
        assert_same(got, batch.alone(), target)


@every_mask
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads(options: dict[str, Any], threads: int) -> None:
    """With and without spans that are work items of their own: one sequence is split, a batch of many is not."""
    batch = mixed(options)
    expected = batch.alone()
    assert_same(batch.varlen(pool=threads), expected)
    for index in (0, 1, 9):
        assert_same(
            batch.of(batch.sequences[index : index + 1]).varlen(pool=threads), expected[index : index + 1], index
        )


def test_checked() -> None:
    batch = mixed(OPTIONS["small tiles"])
    with tw.config(check=2):
        got = batch.varlen()
    assert_same(got, batch.alone())


def small(options: dict[str, Any]) -> Batch:
    """Little enough to be interpreted."""
    rng = np.random.default_rng(4)
    kinds = ((1, 19), (3, 7), (0, 2), (2, 0), (2, 12))
    return Batch([sequence(rng, rows, keys, (2, 1), (9, 5)) for rows, keys in kinds], options)


@pytest.mark.parametrize("options", [{}, {"causal": True, "bc": 5, "span": 10}, {"window": 4, "bc": 16, "span": 16}])
def test_interpreted(options: dict[str, Any]) -> None:
    batch = small(options)
    with tw.config(interpret=True):
        got = batch.varlen()
    assert_same(got, batch.alone())


@every_mask
def test_order_and_company(options: dict[str, Any]) -> None:
    batch = mixed(options)
    expected, rng = batch.alone(), np.random.default_rng(0)
    for size in (1, 2, len(expected)):
        order = rng.permutation(len(expected))[:size]
        got = batch.of([batch.sequences[i] for i in order]).varlen()
        assert_same(got, [expected[i] for i in order], order)


@every_mask
@pytest.mark.parametrize("size", [1, 3, 17])
def test_chunks_and_decode(options: dict[str, Any], size: int) -> None:
    """Chunks of one prefill as the sequences of one call, each with the keys up to its last row: decode rows for 1."""
    whole = mixed({**options, "causal": True}).sequences[1]
    first, parts = whole.q_offset, []
    for lo, hi in pairwise([*range(0, whole.rows, size), whole.rows]):
        seen = slice(0, first + hi)
        parts.append(Sequence(whole.q[:, lo:hi], whole.k[:, seen], whole.v[:, seen], first + lo))
    batch = Batch(parts, mixed({**options, "causal": True}).options)
    (o, lse), got = batch.of([whole]).alone()[0], batch.varlen()
    assert_same((np.concatenate([x for x, _ in got], 1), np.concatenate([x for _, x in got], 1)), (o, lse))


def transposed(x: Any) -> Any:
    """The same numbers as a view of [heads, total, D] memory, rows backwards, with NaN behind each."""
    memory = np.full((x.shape[1], x.shape[0], x.shape[2] + 3), np.nan, x.dtype)
    view = memory.swapaxes(0, 1)[::-1, :, : x.shape[2]]
    view[...] = x
    return view


@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint16, list, tuple])
def test_layouts_and_integers(index: Any) -> None:
    batch = mixed(OPTIONS["sinks"])
    q_starts, k_starts = (batch.starts(what) for what in ("rows", "keys"))
    convert = (lambda x: index(x.tolist())) if index in (list, tuple) else (lambda x: x.astype(index))
    got = batch.varlen(transposed, cu_seqlens_q=convert(q_starts), cu_seqlens_k=convert(k_starts))
    assert_same(got, batch.alone())


def test_written_in_place() -> None:
    """All of out and lse, in any layout, and nothing beside them."""
    batch = mixed(OPTIONS["window"])
    o_shape, lse_shape = batch.shapes()
    memory, beside = poisoned((o_shape[1], o_shape[0], o_shape[2] + 5)), poisoned((lse_shape[1] * 2, lse_shape[0]))
    out, lse = memory.swapaxes(0, 1)[:, :, 2:-3], beside[::2].T
    q, k, v = (batch.packed(name) for name in "qkv")
    given = {"cu_seqlens_q": batch.starts("rows"), "cu_seqlens_k": batch.starts("keys")}
    result = tw.attention_varlen(
        q, k, v, **given, q_offset=batch.each("q_offset"), k_offset=batch.each("k_offset"), out=out, lse=lse,
        **batch.options,
    )  # fmt: skip
    assert result[0] is out
    assert result[1] is lse
    assert_written(out)
    assert_written(lse)
    assert_same(batch.split((out, lse)), batch.alone())
    assert all(map(untouched, (memory[:, :, :2], memory[:, :, -3:], beside[1::2])))


def test_query_tiles_and_arena() -> None:
    batch, arena = mixed(OPTIONS["odd tiles"]), tw.Arena()
    arena.alloc(10)
    used, expected = arena.used, batch.alone()
    for br in (1, 3, 16, 100):
        assert_same(batch.varlen(br=br, arena=arena), expected, br)
        assert arena.used == used
    assert arena.high_water > used


def test_no_sequences_and_no_rows() -> None:
    q, k, v = (np.zeros((0, heads, 8), np.float32) for heads in (4, 2, 2))
    for starts in ([0], [0, 0], [0, 0, 0]):
        o, lse = tw.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True)
        assert o.shape == (0, 4, 8)
        assert lse.shape == (4, 0)


def test_offset_of_whole_sequences_is_found() -> None:
    """As many rows as keys in every sequence: q_offset may be left out. Without lse the same o."""
    rng = np.random.default_rng(5)
    batch = Batch([sequence(rng, n, n) for n in (3, 0, 70)], {"causal": True})
    assert_same(batch.varlen(q_offset=None, k_offset=None), batch.alone())
    starts = batch.starts("rows")
    q, k, v = (batch.packed(name) for name in "qkv")
    o = tw.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    assert_same(o[:3].swapaxes(0, 1), batch.alone()[0][0])


def test_lengths_that_change_between_calls() -> None:
    """What is remembered of a call is of its lengths: others, in arrays of the same layout, are another call."""
    rng = np.random.default_rng(6)
    one = Batch([sequence(rng, rows, keys) for rows, keys in ((1, 60), (4, 40))], {"causal": True})
    for rows, keys in (((2, 3), (50, 50)), ((5, 0), (100, 0)), ((1, 4), (60, 40)), ((0, 5), (0, 100))):
        q, k, v = (one.packed(name).swapaxes(0, 1) for name in "qkv")
        q_at, k_at = np.cumsum([0, *rows]), np.cumsum([0, *keys])
        again = one.of(
            [
                Sequence(q[:, i:j], k[:, x:y], v[:, x:y], max(0, y - x - j + i))
                for (i, j), (x, y) in zip(pairwise(q_at), pairwise(k_at), strict=True)
            ]
        )
        for _ in range(2):
            assert_same(again.varlen(), again.alone(), rows)


def test_garbage_of_a_neighbour() -> None:
    """NaN and infinities of one sequence are nobody else's."""
    batch = mixed(OPTIONS["plain"])
    expected = batch.alone()
    for value in (np.nan, np.inf):
        odd = [
            Sequence(np.full_like(s.q, value), np.full_like(s.k, value), np.full_like(s.v, value), s.q_offset)
            if i in (1, 5, 7)
            else s
            for i, s in enumerate(batch.sequences)
        ]
        got = batch.of(odd).varlen()
        assert np.isnan(got[1][0]).all()
        for i in set(range(len(expected))) - {1, 5, 7}:
            assert_same(got[i], expected[i], i)
