"""What the paged cache refuses: which error, which message, and nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.serving.caches import (
    assert_refused,
    keys_of,
    make,
    put,
    put_batch,
    sequence,
    values_of,
)
from tilewise.cache import PagedKVCache
from tilewise.errors import InvalidArgument, ShapeError

K, V = keys_of([1, 2]), values_of([1, 2])
BAD_APPENDS: dict[str, tuple[type[Exception], Any, Any, str]] = {
    "no keys": (ValueError, None, V, "k is missing: expected an array of float32"),
    "no values": (InvalidArgument, K, None, "v is missing"),
    "a list": (TypeError, K.tolist(), V, "k must be a float32 NumPy array, got list"),
    "float64": (TypeError, K.astype(np.float64), V, "k must be float32 like the cache"),
    "integers": (TypeError, K, V.astype(np.int32), "v must be float32 like the cache"),
    "big endian": (TypeError, K.astype(">f4"), V, "k must be float32 like the cache"),
    "masked": (TypeError, np.ma.masked_array(K), V, "k is a masked array"),
    "other lengths": (ShapeError, K, V[:, :1], r"\(2, n, 3\) and \(2, n, 4\), got \(2, 2, 3\) and \(2, 1, 4\)"),
    "a head too few": (ShapeError, K[:1], V[:1], r"got \(1, 2, 3\)"),
    "another head dimension": (ShapeError, K[..., :2], V, r"got \(2, 2, 2\)"),
    "k for v": (ShapeError, K, K, r"and \(2, 2, 3\)"),
    "a batch": (ShapeError, K[None], V[None], "must have shapes"),
    "one axis": (ShapeError, K[0, 0], V, r"got \(3,\)"),
    "no axis": (ShapeError, K[0, 0, 0], V, "must have shapes"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_bad_tokens(name: str) -> None:
    error, k, v, message = BAD_APPENDS[name]
    cache = make()
    seq = sequence(cache, [1, 2, 3])
    assert_refused(cache, error, lambda: cache.append(seq, k, v), message)
    batched = [x[None] if isinstance(x, np.ndarray) else x for x in (k, v)]
    assert_refused(cache, error, lambda: cache.append_batch([seq], *batched))


BAD_IDS: dict[str, tuple[type[Exception], Any]] = {
    "True": (TypeError, True),
    "NumPy's True": (TypeError, np.True_),
    "1.0": (TypeError, 1.0),
    "text": (TypeError, "1"),
    "None": (TypeError, None),
    "negative": (InvalidArgument, -1),
    "the next one's": (InvalidArgument, 2),
    "far": (InvalidArgument, 1 << 40),
    "farther": (InvalidArgument, 1 << 62),
    "not of this row": (InvalidArgument, 1 + (1 << 24)),
    **{f"~{i}": (InvalidArgument, ~i) for i in (2, 6, 7, 8)},
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids(name: str) -> None:
    error, seq = BAD_IDS[name]
    cache = make()
    good = [sequence(cache, [1, 2, 3]), sequence(cache, [4])]
    for one in (lambda: put(cache, seq, [1]), *(lambda f=f: f(seq) for f in (cache.fork, cache.free))):
        assert_refused(cache, error, one, "seq must be")
    assert_refused(cache, error, lambda: cache.truncate(seq, 0), "seq must be")
    for seqs in ([good[1], seq], (seq, good[0])):
        for call in (cache.block_table, cache.lengths, lambda s: put_batch(cache, s, [[1], [2]])):
            assert_refused(cache, error, lambda call=call, seqs=seqs: call(seqs), "seqs must be")


@pytest.mark.parametrize(
    ("error", "seqs"),
    [
        (TypeError, 0),
        (TypeError, {0, 1}),
        (TypeError, np.array([0.0, 1.0])),
        (TypeError, np.array([False, True])),
        (TypeError, [[0], [0, 1]]),
        (TypeError, [1 << 70]),
        (ShapeError, np.zeros((1, 1), int)),
        (ShapeError, np.array(0)),
        (InvalidArgument, np.array([2**64 - 1], np.uint64)),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_lists_of_ids(error: type[Exception], seqs: Any) -> None:
    cache = make()
    sequence(cache, [1])
    for call in (cache.block_table, cache.lengths, lambda s: put_batch(cache, s, [[1]])):
        assert_refused(cache, error, lambda call=call: call(seqs), "seqs must be")


def test_the_same_sequence_twice() -> None:
    cache = make()
    a, b = sequence(cache, [1]), sequence(cache, [2])
    assert_refused(cache, InvalidArgument, lambda: put_batch(cache, [a, b, a], [[1]] * 3), "different sequences")
    assert cache.lengths([a, b, a]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "length"),
    [(InvalidArgument, -1), (InvalidArgument, 4), (TypeError, True), (TypeError, 1.0), (TypeError, None)],
)
def test_bad_lengths(error: type[Exception], length: Any) -> None:
    cache = make()
    seq = sequence(cache, [1, 2, 3])
    assert_refused(cache, error, lambda: cache.truncate(seq, length), "length must")


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize(
    ("error", "size"),
    [(InvalidArgument, 0), (InvalidArgument, -3), (InvalidArgument, 1 << 31), (TypeError, True), (TypeError, 2.0)],
)
def test_bad_sizes(position: int, error: type[Exception], size: Any) -> None:
    name = ("pages", "page_size", "kv_heads", "head_dim", "v_head_dim")[position]
    sizes = [4, 4, 1, 8, 8]
    sizes[position] = size
    with pytest.raises(error, match=f"^{name} must"):
        PagedKVCache(*sizes)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ">f4", bool, "nonsense", None, object])
def test_bad_dtypes(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16"):
        PagedKVCache(1, 1, 1, 1, dtype=dtype)


def test_more_pages_than_memory() -> None:
    with pytest.raises(MemoryError):
        PagedKVCache((1 << 31) - 1, (1 << 31) - 1, 1000, 1024)
