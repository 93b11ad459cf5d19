"""The paged cache: memory order, contents, sharing, figures, and a decode step without Python for each sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.serving.caches import (
    DV,
    HKV,
    D,
    assert_holds,
    assert_refused,
    keys_of,
    make,
    put,
    put_batch,
    read,
    sequence,
    state,
    values_of,
)
from tilewise.cache import PagedKVCache
from tilewise.errors import CacheFull


def test_memory_is_head_major_and_aligned() -> None:
    cache = PagedKVCache(5, 16, HKV, 20, 33)
    assert cache.k_pages.shape == (5, 16, HKV, 20)
    assert cache.v_pages.shape == (5, 16, HKV, 33)
    for pages in (cache.k_pages, cache.v_pages):
        assert pages.swapaxes(1, 2).flags.c_contiguous  # the keys of one head in one page are one run
        assert pages.__array_interface__["data"][0] % 64 == 0
        assert pages.flags.writeable
    assert PagedKVCache(1, 1, 1, 7).v_pages.shape == (1, 1, 1, 7)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("before", [0, 1, 3, 4, 7])
def test_append(before: int, n: int) -> None:
    cache = make(pages=10)
    seq, tokens = cache.add(), list(range(1, before + n + 1))
    put(cache, seq, tokens[:before])
    put(cache, seq, tokens[before:])
    assert_holds(cache, seq, tokens)
    used = -(-(before + n) // 4)
    assert cache.block_table([seq]).tolist() == [list(range(used))]
    assert cache.usage().pages_used == used
    assert int(np.isfinite(cache.k_pages).sum()) == (before + n) * HKV * D  # nothing else was written


def test_any_strides() -> None:
    cache, tokens = make(), list(range(1, 10))
    k, v = keys_of(tokens), values_of(tokens)
    backwards = np.asfortranarray(k[::-1])[::-1]
    spread = np.full((9, 2, HKV, 3 * DV), np.nan, np.float32)[:, 0, :, ::3].swapaxes(0, 1)
    spread[...] = v
    assert backwards.strides[-1] != 4
    assert spread.strides[-1] != 4
    seq = cache.add()
    cache.append(seq, backwards, spread)
    assert_holds(cache, seq, tokens)
    whole = np.stack([k, k + 1])  # a sequence of tw.attention's k [B, Hkv, T, D]
    one = cache.add()
    cache.append(one, whole[0, :, 2:5], v[:, 2:5])
    assert_holds(cache, one, tokens[2:5])


def test_append_of_what_the_cache_holds() -> None:
    cache = make()
    seq = sequence(cache, list(range(1, 7)))
    page = cache.block_table([seq])[0, 0]
    cache.append(seq, cache.k_pages[page].swapaxes(0, 1), cache.v_pages[page].swapaxes(0, 1))
    assert_holds(cache, seq, [1, 2, 3, 4, 5, 6, 1, 2, 3, 4])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, [("bfloat16", np.uint16)]])
def test_dtypes(dtype: Any) -> None:
    cache = PagedKVCache(4, 3, 1, 2, dtype=dtype)
    x = np.arange(16, dtype=np.uint16).view(np.float16 if dtype is not np.float32 else np.float32)
    x = (x.view(cache.dtype) if x.dtype.itemsize == cache.dtype.itemsize else x).reshape(1, -1, 2)
    seq = cache.add()
    cache.append(seq, x, x)
    assert cache.k_pages.dtype == cache.dtype == np.dtype(dtype)
    assert read(cache, cache.k_pages, seq).tobytes() == x.tobytes()
    wrong = np.zeros(x.shape, np.float64)
    assert_refused(cache, TypeError, lambda: cache.append(seq, x, wrong), "v must be .* like the cache, got")


def test_fork_shares_until_written() -> None:
    cache = make()
    a = sequence(cache, [1, 2, 3, 4, 5, 6])
    b = cache.fork(a)
    assert a != b
    assert cache.block_table([a]).tolist() == cache.block_table([b]).tolist() == [[0, 1]]
    assert (cache.usage().pages_used, cache.usage().pages_shared, cache.usage().tokens) == (2, 2, 12)
    put(cache, b, [70])
    assert cache.block_table([a, b]).tolist() == [[0, 1], [0, 2]]
    assert cache.usage().pages_shared == 1
    put(cache, a, [7])  # the page is its own again: no copy
    assert cache.block_table([a]).tolist() == [[0, 1]]
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6, 7])
    assert_holds(cache, b, [1, 2, 3, 4, 5, 6, 70])


def test_fork_at_the_end_of_a_page_copies_nothing() -> None:
    cache = make()
    a = sequence(cache, [1, 2, 3, 4])
    b = cache.fork(a)
    put_batch(cache, [b, a], [[50], [5]])
    assert cache.block_table([a, b]).tolist() == [[0, 2], [0, 1]]
    assert_holds(cache, a, [1, 2, 3, 4, 5])
    assert_holds(cache, b, [1, 2, 3, 4, 50])


def test_append_of_nothing_copies_nothing() -> None:
    cache = make()
    a = sequence(cache, [1, 2])
    b = cache.fork(a)
    before = state(cache)
    put(cache, b, [])
    put_batch(cache, [a, b], [[], []])
    cache.append_batch([], np.empty((0, HKV, 1, D), np.float32), np.empty((0, HKV, 1, DV), np.float32))
    assert state(cache) == before


def test_truncated_fork_writes_to_a_page_of_its_own() -> None:
    """The token that it writes over is still the other's."""
    cache = make()
    a = sequence(cache, list(range(1, 9)))
    b = cache.fork(a)
    cache.truncate(b, 6)
    put(cache, b, [70])
    assert_holds(cache, a, list(range(1, 9)))
    assert_holds(cache, b, [1, 2, 3, 4, 5, 6, 70])
    cache.free(a)
    assert_holds(cache, b, [1, 2, 3, 4, 5, 6, 70])
    assert (cache.usage().pages_used, cache.usage().pages_shared) == (2, 0)


def test_family_in_one_batch() -> None:
    """All sequences of a page append at once: each but one needs a copy, and no page more."""
    cache = make(pages=5)
    family = [sequence(cache, [1, 2, 3, 4, 5])]
    family += [cache.fork(family[0]) for _ in range(3)]
    put_batch(cache, family, [[10 + i] for i in range(4)])
    for i, seq in enumerate(family):
        assert_holds(cache, seq, [1, 2, 3, 4, 5, 10 + i])
    usage = cache.usage()
    assert (usage.pages_used, usage.pages_shared, usage.pages_free) == (5, 1, 0)
    assert_refused(cache, CacheFull, lambda: put(cache, family[0], [1, 2, 3]), "1 pages of 4, 0 of 5 are free")


def test_two_families_interleaved_in_one_batch() -> None:
    """The later family first, so that its pages come before those of the earlier one."""
    cache = make(pages=8)
    a, b = sequence(cache, [1, 2]), sequence(cache, [3, 4, 5])
    order = [b, a, cache.fork(b), cache.fork(a), cache.fork(b), cache.fork(a)]
    put_batch(cache, order, [[10 + i] for i in range(6)])
    for i, seq in enumerate(order):
        assert_holds(cache, seq, [*([1, 2], [3, 4, 5])[i % 2 == 0], 10 + i])
    assert (cache.usage().pages_used, cache.usage().pages_shared) == (6, 0)


def test_freed_pages_are_handed_out_in_their_order() -> None:
    """A sequence that follows one of its kind has its pages, one behind the other in memory."""
    cache = make()
    seq = sequence(cache, list(range(30)))
    table = cache.block_table([seq]).tolist()
    assert table == [list(range(8))]
    cache.free(seq)
    assert cache.block_table([sequence(cache, list(range(30)))]).tolist() == table


def test_full_cache_says_what_is_missing() -> None:
    cache = make(pages=3)
    a, b = sequence(cache, [1, 2, 3, 4, 5]), cache.add()
    assert_refused(cache, CacheFull, lambda: put(cache, b, list(range(5))), "5 more .* 2 pages of 4, 1 of 3 are free")
    assert_refused(cache, MemoryError, lambda: put_batch(cache, [a, b], [[0] * 4] * 2), "need 2 pages")
    c = cache.fork(a)
    put(cache, c, [6])  # the last page goes to the copy
    assert_refused(cache, CacheFull, lambda: put(cache, b, [1]), "1 pages")
    cache.free(c)
    put(cache, b, [1])
    assert_holds(cache, b, [1])
    assert_holds(cache, a, [1, 2, 3, 4, 5])


def test_ids_are_never_used_again() -> None:
    cache, seen = make(), set()
    for _ in range(50):
        seq = cache.add()
        assert seq not in seen
        assert type(seq) is int
        seen.add(seq)
        if len(seen) % 3:
            cache.free(seq)
    assert cache.usage().sequences == 50 - 34


def test_tables_grow() -> None:
    """Past the first rows and columns, in a batch of rows old and new."""
    cache = make(pages=200, page_size=1)
    seqs = [sequence(cache, [i] * (i + 1)) for i in range(9)]
    long = sequence(cache, list(range(60)))
    seqs += [cache.add() for _ in range(30)]
    put_batch(cache, [*seqs, long], [[99]] * 40)
    for i, seq in enumerate(seqs):
        assert_holds(cache, seq, [i] * (i + 1) * (i < 9) + [99])
    assert_holds(cache, long, [*range(60), 99])
    assert cache.block_table([seqs[-1]]).shape == (1, 1)
    assert cache.block_table([seqs[-1], long]).shape == (2, 61)


def test_lookups_are_copies_of_the_right_kind() -> None:
    cache = make()
    seqs = np.array([sequence(cache, list(range(n))) for n in (9, 0, 4)])
    table, lengths = cache.block_table(seqs), cache.lengths(seqs)
    assert (table.dtype, table.shape, table.flags.c_contiguous) == (np.int32, (3, 3), True)
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [9, 0, 4])
    assert table.tolist() == [[0, 1, 2], [0, 0, 0], [3, 0, 0]]
    assert cache.lengths(seqs[::-1].astype(np.uint8)).tolist() == [4, 0, 9]
    assert cache.lengths(tuple(seqs)).tolist() == [9, 0, 4]
    before = state(cache)
    table[...], lengths[...] = 77, 77
    assert state(cache) == before
    assert cache.block_table([]).shape == (0, 0)
    assert cache.block_table([seqs[1]]).shape == (1, 0)
    assert cache.lengths([]).tolist() == []


def test_usage_by_hand() -> None:
    cache = make(pages=6)
    a = sequence(cache, [1, 2, 3, 4, 5])
    cache.fork(a)
    page = 4 * HKV * (D + DV) * 4
    assert cache.usage() == (2, 10, 2, 4, 2, 6 * page, 2 * page)
    assert cache.usage()._fields[2:5] == ("pages_used", "pages_free", "pages_shared")
    assert "pages=6, page_size=4" in repr(cache)


def events(call: Callable[[], Any]) -> int:
    """How many lines of Python and calls into C it runs."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    call()  # whatever is done once
    sys.settrace(trace)
    sys.setprofile(lambda *_: trace() and None)
    try:
        call()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return count


def test_decode_step_runs_no_python_for_each_sequence() -> None:
    def count(B: int) -> list[int]:
        cache = make(pages=600, page_size=16)
        seqs = np.array([sequence(cache, list(range(i % 40))) for i in range(B)])
        k, v = np.zeros((B, HKV, 1, D), np.float32), np.zeros((B, HKV, 1, DV), np.float32)
        cache.append_batch(seqs, k, v)
        return [
            events(lambda: cache.append_batch(seqs, k, v)),
            events(lambda: cache.block_table(seqs)),
            events(lambda: cache.lengths(seqs)),
        ]

    assert count(64) == count(2)
