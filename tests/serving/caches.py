"""Small paged caches whose tokens are integers: keys and values that no two tokens, heads or columns share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tilewise.cache import PagedKVCache

Array = NDArray[Any]
HKV, D, DV = 2, 3, 4
STATE = ("k_pages", "v_pages", "_references", "_free", "_ids", "_lengths", "_tables")


def make(pages: int = 8, page_size: int = 4, dtype: Any = np.float32) -> PagedKVCache:
    """A cache full of NaN, so that what was not written shows."""
    cache = PagedKVCache(pages, page_size, HKV, D, DV, dtype=dtype)
    cache.k_pages[...] = cache.v_pages[...] = np.nan
    return cache


def keys_of(tokens: list[int], dim: int = D) -> Array:
    """[Hkv, n, dim]: numbers that no two tokens, heads or columns share."""
    heads, columns = np.arange(HKV)[:, None, None], np.arange(dim)
    return (np.array(tokens, np.float32).reshape(1, -1, 1) * 64 + heads * 16 + columns).astype(np.float32)


def values_of(tokens: list[int]) -> Array:
    return -keys_of(tokens, DV)


def put(cache: PagedKVCache, seq: int, tokens: list[int]) -> None:
    cache.append(seq, keys_of(tokens), values_of(tokens))


def put_batch(cache: PagedKVCache, seqs: list[int], tokens: list[list[int]]) -> None:
    cache.append_batch(seqs, np.stack([keys_of(t) for t in tokens]), np.stack([values_of(t) for t in tokens]))


def sequence(cache: PagedKVCache, tokens: list[int]) -> int:
    seq = cache.add()
    put(cache, seq, tokens)
    return seq


def read(cache: PagedKVCache, pages: Array, seq: int) -> Array:
    """[Hkv, n, dim] of a sequence, through its block table alone."""
    table, length = cache.block_table([seq])[0], int(cache.lengths([seq])[0])
    rows = [pages[table[i // cache.page_size], i % cache.page_size] for i in range(length)]
    return np.array(rows, pages.dtype).reshape(length, *pages.shape[2:]).swapaxes(0, 1)


def assert_holds(cache: PagedKVCache, seq: int, tokens: list[int]) -> None:
    assert cache.lengths([seq]).tolist() == [len(tokens)]
    np.testing.assert_array_equal(read(cache, cache.k_pages, seq), keys_of(tokens))
    np.testing.assert_array_equal(read(cache, cache.v_pages, seq), values_of(tokens))


def state(cache: PagedKVCache) -> list[Any]:
    """All that a cache is, its pages' bytes included."""
    return [getattr(cache, name).tobytes() for name in STATE] + [cache._free_count, list(cache._vacant)]


def assert_refused(
    cache: PagedKVCache, error: type[Exception], call: Callable[[], Any], message: str | None = None
) -> None:
    before = state(cache)
    with pytest.raises(error, match=message):
        call()
    assert state(cache) == before
