"""Chunked prefill over a paged cache: the bits of one call, and what happens where a chunk cannot be done.

The caches are full of NaN where no token was written, and their pages are handed out in no order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.serving.caches import assert_refused, state
from tests.support import Case, Result, assert_same_bits, case, sinks_for
from tilewise.arguments import BFLOAT16
from tilewise.cache import PagedKVCache
from tilewise.errors import ArenaExhausted, CacheFull, InvalidArgument, ShapeError
from tilewise.prefill import prefill_chunks

T = 133
PAGE_SIZES = [1, 7, 16, 64]
SMALL_TILES = {"bc": 16, "span": 32}  # so that rows cross tiles and spans
# D, Dv: (16, 8) for all, so that few kernels are compiled
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "default tiles": {"causal": True, "bc": 0, "span": 0},
    "window": {"causal": True, "window": 21},
    "sinks": {"causal": True, "sinks": sinks_for(6)},
    "window, sinks, scale": {"causal": True, "window": 50, "sinks": sinks_for(6), "scale": 0.4},
    "not causal": {"causal": False},
    "window on both sides": {"causal": False, "window": 9, "sinks": sinks_for(6)},
}


def build(name: str, tokens: int = T, seed: int = 0) -> Case:
    return case(1, 6, 2, tokens, tokens, 16, 8, seed=seed, **{**SMALL_TILES, **CASES[name]})


def cache_for(pages: int, page_size: int) -> PagedKVCache:
    """A cache full of NaN with its free pages shuffled: every other page is freed before the rest."""
    cache = PagedKVCache(pages, page_size, 2, 16, 8)
    cache.k_pages[...] = cache.v_pages[...] = np.nan
    seqs = [cache.add() for _ in range(pages)]
    k, v = np.full((2, 1, 16), np.nan, np.float32), np.full((2, 1, 8), np.nan, np.float32)
    for seq in seqs:
        cache.append(seq, k, v)
    for seq in [*seqs[1::2], *seqs[::2]]:
        cache.free(seq)
    return cache


def prefill(
    c: Case, cache: PagedKVCache, seq: int, chunks: Any, lo: int = 0, hi: int | None = None, **more: Any
) -> Any:
    """The iterator over rows and tokens [lo, hi) of the case."""
    options = {"return_lse": True, **c.options, **more}
    del options["q_offset"]
    q, k, v = (x[0, :, lo:hi] for x in (c.q, c.k, c.v))
    return prefill_chunks(q, k, v, cache=cache, seq=seq, chunks=chunks, **options)


def upper_halves(x: Any) -> Any:
    """float32 cut to bfloat16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


def joined(parts: list[tuple[int, Any, Any]]) -> Result:
    """o [1, H, T, Dv] and lse [1, H, T] of chunks that lie one behind the other."""
    position = 0
    for start, o, lse in parts:
        assert start == position
        assert o.shape[1] == lse.shape[1]
        position += o.shape[1]
    _, o, lse = zip(*parts, strict=True)
    return np.concatenate(o, axis=1)[None], np.concatenate(lse, axis=1)[None]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_bits_of_one_call(name: str, page_size: int) -> None:
    c = build(name)
    for chunks in (1 if page_size == 7 else 16, 50, T, 10 * T, [1, 2, 61, 5, 64], iter([132, 1]), np.array([67, 66])):
        cache = cache_for(-(-T // page_size) + 1, page_size)
        assert_same_bits(joined(list(prefill(c, cache, cache.add(), chunks))), c.run(), f"chunks of {chunks}")


@given(
    name=st.sampled_from(list(CASES)), tokens=st.integers(1, 90), page_size=st.integers(1, 70),
    threads=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_any_chunks(name: str, tokens: int, page_size: int, threads: int, data: st.DataObject) -> None:
    c, sizes = build(name, tokens), []
    while sum(sizes) < tokens:
        sizes.append(data.draw(st.integers(1, tokens - sum(sizes))))
    cache = cache_for(-(-tokens // page_size), page_size)
    assert_same_bits(joined(list(prefill(c, cache, cache.add(), sizes, pool=threads))), c.run(), f"chunks {sizes}")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_forked_caches(page_size: int) -> None:
    """Prompts that share a prefix: it is prefilled once; both then go on, in turns, and one of them forks again."""
    prefix, cache = 61, cache_for(300 // page_size + 6, page_size)
    cases = [build("window, sinks, scale", seed=seed) for seed in range(3)]
    for other in cases[1:]:
        for x, y in zip((cases[0].q, cases[0].k, cases[0].v), (other.q, other.k, other.v), strict=True):
            y[:, :, :prefix] = x[:, :, :prefix]
    expected = [c.run() for c in cases]
    seqs = [cache.add()]
    first = list(prefill(cases[0], cache, seqs[0], 20, hi=prefix))
    assert_same_bits(joined(first), tuple(x[:, :, :prefix] for x in expected[0]), "prefix")
    seqs += [cache.fork(seqs[0])]
    seqs += [cache.fork(seqs[1])]
    work = [prefill(c, cache, seq, 13, lo=prefix) for c, seq in zip(cases, seqs, strict=True)]
    parts = list(zip(*work, strict=True))
    for i, whole in enumerate(expected):
        assert_same_bits(joined([p[i] for p in parts]), tuple(x[:, :, prefix:] for x in whole), f"fork {i}")
    assert cache.usage().pages_shared == prefix // page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_steps_and_chunks_in_one_call(page_size: int) -> None:
    """A step of an engine: sequences that decode and one that prefills are ragged rows of one paged call."""
    cases = [build("window, sinks, scale", seed=seed) for seed in range(4)]
    cache = cache_for(4 * (T // page_size + 1), page_size)
    seqs = np.array([cache.add() for _ in cases])
    lengths = [0, 30, 64, 100]
    for c, seq, n in zip(cases, seqs.tolist(), lengths, strict=True):
        cache.append(seq, c.k[0, :, :n], c.v[0, :, :n])
    options = {name: x for name, x in cases[0].options.items() if name != "q_offset"}
    for _ in range(5):
        rows = [9, 1, 1, 1]
        ends = [n + r for n, r in zip(lengths, rows, strict=True)]
        spans = list(zip(cases, lengths, ends, strict=True))
        cache.append(int(seqs[0]), cases[0].k[0, :, lengths[0] : ends[0]], cases[0].v[0, :, lengths[0] : ends[0]])
        k, v = (np.concatenate([getattr(c, x)[:, :, lo:hi] for c, lo, hi in spans[1:]]) for x in "kv")
        cache.append_batch(seqs[1:], k, v)
        q = np.concatenate([c.q[0, :, lo:hi].swapaxes(0, 1) for c, lo, hi in spans])
        o, lse = tw.attention_paged(
            q, cache.k_pages, cache.v_pages, block_table=cache.block_table(seqs), kv_len=cache.lengths(seqs),
            cu_seqlens_q=np.array([0, *itertools.accumulate(rows)]), return_lse=True, **options,
        )  # fmt: skip
        position = 0
        for c, lo, hi in spans:
            own = o[position : position + hi - lo].swapaxes(0, 1)[None], lse[None, :, position : position + hi - lo]
            assert_same_bits(own, tuple(x[:, :, lo:hi] for x in c.run()), f"rows {lo} to {hi}")
            position += hi - lo
        lengths = ends


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_half_precision(dtype: Any) -> None:
    c = build("causal")
    q, k, v = (x[0].astype(dtype) if dtype is np.float16 else upper_halves(x[0]) for x in (c.q, c.k, c.v))
    o, lse = tw.attention(q[None], k[None], v[None], causal=True, return_lse=True)
    cache = PagedKVCache(20, 7, 2, 16, 8, dtype=dtype)
    parts = list(prefill_chunks(q, k, v, cache=cache, seq=cache.add(), chunks=50, return_lse=True))
    own_o, own_lse = joined(parts)
    assert own_o.dtype == o.dtype == np.dtype(dtype)
    assert own_o.tobytes() == o.tobytes()
    assert_same_bits(own_lse, lse)
    assert_refused(
        cache,
        TypeError,
        lambda: prefill_chunks(c.q[0], c.k[0], c.v[0], cache=cache, seq=0, chunks=50),
        "like the cache",
    )


def test_speculation_leaves_no_trace() -> None:
    """Tokens that were appended and truncated again, over a page's end and in a fork, move no bit."""
    c, cache = build("causal"), cache_for(40, 7)
    seq = cache.add()
    parts = list(prefill(c, cache, seq, 40, hi=80))
    other = cache.fork(seq)
    for guess in (seq, other):
        cache.append(guess, c.k[0, :, :9] + 1, c.v[0, :, :9])
        cache.truncate(guess, 80)
    cache.free(other)
    parts += [(80 + start, o, lse) for start, o, lse in prefill(c, cache, seq, 40, lo=80)]
    assert_same_bits(joined(parts), c.run())


def test_without_lse_and_without_tokens() -> None:
    c, cache = build("causal"), cache_for(40, 7)
    parts = list(prefill(c, cache, cache.add(), 100, return_lse=False))
    assert [start for start, _ in parts] == [0, 100]
    assert_same_bits(np.concatenate([o for _, o in parts], axis=1)[None], c.run()[0])
    before = state(cache)
    for chunks in (5, []):
        assert list(prefill(c, cache, cache.add(), chunks, hi=0)) == []
    assert state(cache)[:4] == before[:4]


@pytest.mark.parametrize("causal", [True, False])
def test_each_chunk_is_appended_when_it_is_due(causal: bool) -> None:
    c, cache = build("causal" if causal else "not causal"), cache_for(40, 7)
    seq, lengths = cache.add(), []
    chunks = prefill(c, cache, seq, [33, 50, 50])
    assert cache.lengths([seq]) == [0]
    for _ in chunks:
        lengths.append(int(cache.lengths([seq])[0]))
    assert lengths == ([33, 83, 133] if causal else [133, 133, 133])
    with pytest.raises(StopIteration):
        next(chunks)


def test_full_cache_is_tried_again() -> None:
    c, cache = build("sinks"), cache_for(20, 7)
    hog = cache.add()
    cache.append(hog, c.k[0, :, :60], c.v[0, :, :60])
    chunks = prefill(c, cache, cache.add(), 50)
    parts = [next(chunks)]
    for _ in range(2):
        assert_refused(cache, CacheFull, lambda: next(chunks), "50 more tokens")
    cache.free(hog)
    assert_same_bits(joined(parts + list(chunks)), c.run())


def test_chunk_whose_attention_fails_is_taken_back() -> None:
    c, cache, arena = build("causal"), cache_for(20, 7), tw.Arena(limit=1 << 20)
    seq = cache.add()
    chunks = prefill(c, cache, seq, 50, arena=arena)
    mark = arena.mark()
    arena.alloc(1 << 20)  # somebody else has it all for a while
    for _ in range(2):
        with pytest.raises(ArenaExhausted):
            next(chunks)
        assert cache.lengths([seq]) == [0]
        assert cache.usage().pages_used == 0
    arena.rewind(mark)
    assert_same_bits(joined(list(chunks)), c.run())


def test_sequence_changed_between_chunks() -> None:
    c, cache = build("causal"), cache_for(20, 7)
    seq = cache.add()
    chunks = prefill(c, cache, seq, 50)
    next(chunks)
    cache.truncate(seq, 49)
    assert_refused(cache, InvalidArgument, lambda: next(chunks), "was changed .*: it has 49 tokens, expected 50")
    cache.free(seq)
    assert_refused(cache, InvalidArgument, lambda: next(chunks), "seq must be an id")


BAD: dict[str, tuple[type[Exception], Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "cache": (TypeError, lambda a: {"cache": None}, "cache must be a tilewise.PagedKVCache, got NoneType"),
    "seq": (InvalidArgument, lambda a: {"seq": 10**6}, "seq must be an id"),
    "seq of bool": (TypeError, lambda a: {"seq": False}, "seq must be an integer"),
    "q missing": (InvalidArgument, lambda a: {"q": None}, "q is missing"),
    "q with a batch": (ShapeError, lambda a: {"q": a["q"][None]}, "q must have 3 axes"),
    "q shorter": (ShapeError, lambda a: {"q": a["q"][:, 1:]}, "same tokens on axis 1"),
    "q of other D": (ShapeError, lambda a: {"q": a["q"][..., :8]}, "same head dimension D"),
    "heads": (ShapeError, lambda a: {"q": a["q"][:5]}, "multiple of the KV heads"),
    "k of other heads": (ShapeError, lambda a: {"k": a["k"][:1]}, "k and v must have shapes"),
    "v shorter": (ShapeError, lambda a: {"v": a["v"][:, 1:]}, "k and v must have shapes"),
    "k and v shorter": (ShapeError, lambda a: {"k": a["k"][:, 1:], "v": a["v"][:, 1:]}, "same tokens on axis 1"),
    "k of float64": (TypeError, lambda a: {"k": a["k"].astype(float)}, "k must be float32 like the cache"),
    "no chunk": (InvalidArgument, lambda a: {"chunks": 0}, "chunks must be 1 or more rows"),
    "negative chunk": (InvalidArgument, lambda a: {"chunks": -4}, "chunks must be 1 or more rows"),
    "half a chunk": (TypeError, lambda a: {"chunks": 1.5}, "chunks must be an integer"),
    "chunks True": (TypeError, lambda a: {"chunks": True}, "chunks must be an integer"),
    "chunks None": (TypeError, lambda a: {"chunks": None}, "chunks must be an integer"),
    "chunks of None": (TypeError, lambda a: {"chunks": [133, None]}, "chunks must be an integer"),
    "an empty chunk": (InvalidArgument, lambda a: {"chunks": [100, 0, 33]}, "1 or more rows each, got 0"),
    "chunks too short": (InvalidArgument, lambda a: {"chunks": [100, 32]}, "add up to the 133 tokens of k, got 132"),
    "chunks too long": (InvalidArgument, lambda a: {"chunks": [100, 34]}, "add up to the 133 tokens of k, got 134"),
    "chunks without end": (InvalidArgument, lambda a: {"chunks": itertools.repeat(3)}, "add up to .*, got 135"),
    "causal": (TypeError, lambda a: {"causal": 1}, "causal must be True or False"),
    "window": (TypeError, lambda a: {"window": 2.5}, "window must be an integer"),
    "scale": (InvalidArgument, lambda a: {"scale": float("nan")}, "scale must be finite"),
    "sinks": (ShapeError, lambda a: {"sinks": sinks_for(5)}, "sinks must have shape"),
    "return_lse": (TypeError, lambda a: {"return_lse": None}, "return_lse must be True or False"),
    "span": (InvalidArgument, lambda a: {"bc": 16, "span": 24}, "span must be a multiple"),
    "arena": (TypeError, lambda a: {"arena": 1000}, "arena must be"),
    "pool": (TypeError, lambda a: {"pool": 1.0}, "pool"),
    "too long": (CacheFull, lambda a: {"seq": a["cache"]._long}, "143 tokens need 21 pages, the cache has 20"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_before_the_first_token(name: str) -> None:
    error, spoil, message = BAD[name]
    c, cache = build("causal"), cache_for(20, 7)
    cache._long = cache.add()  # a sequence of 10 tokens
    cache.append(cache._long, c.k[0, :, :10], c.v[0, :, :10])
    good = {"q": c.q[0], "k": c.k[0], "v": c.v[0], "cache": cache, "seq": cache.add(), "chunks": 50}
    prefill_chunks(**good)
    assert_refused(cache, error, lambda: prefill_chunks(**{**good, **spoil(good)}), message)
