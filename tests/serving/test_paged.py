"""Keys in pages give the bits of keys in one piece: any page size, layout, order of pages, company, threads, target.

Every slot and page without a key is NaN, and every entry of the block table past a sequence's end is garbage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.serving.batches import (
    LAYOUTS,
    OPTIONS,
    PAGE_SIZES,
    Batch,
    Pages,
    Sequence,
    assert_same,
    assert_written,
    mixed,
    poisoned,
    sequence,
    untouched,
)

every_mask = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
every_page_size = pytest.mark.parametrize("size", PAGE_SIZES)


def dense(batch: Batch, pages: Pages, **changes: Any) -> Any:
    """`attention_paged` with q [B, H, Tq, D], for sequences of as many rows: each sequence's own (o, lse)."""
    q = np.stack([s.q for s in batch.sequences])
    given = {
        "block_table": pages.table, "kv_len": batch.each("keys"), "q_offset": batch.each("q_offset"),
        "k_offset": batch.each("k_offset"), **batch.options, **changes,
    }  # fmt: skip
    return list(zip(*tw.attention_paged(q, pages.k, pages.v, return_lse=True, **given), strict=True))


@every_mask
@every_page_size
def test_ragged_rows(options: dict[str, Any], size: int) -> None:
    """dense == varlen == paged, in each layout of pages."""
    batch = mixed(options)
    expected = batch.alone()
    assert_same(batch.varlen(), expected, "varlen")
    for layout in LAYOUTS:
        assert_same(batch.paged(batch.pages(size, layout)), expected, layout)


def same_rows(options: dict[str, Any], rows: int, heads: tuple[int, int] = (6, 2)) -> Batch:
    rng = np.random.default_rng(rows)
    kinds = ((700, 0), (rows, 0), (129, 37), (1025, 0), (max(0, rows - 1), 5))
    sequences = [sequence(rng, rows, keys, heads, (17, 24), k_offset=first) for keys, first in kinds]
    if options.get("sinks"):
        options = {**options, "sinks": np.linspace(-2, 4, heads[0], dtype=np.float32)}
    return Batch(sequences, options)


@every_mask
@every_page_size
@pytest.mark.parametrize("rows", [1, 33])
def test_dense_rows(options: dict[str, Any], size: int, rows: int) -> None:
    """Decode steps and chunks of a batch."""
    batch = same_rows(options, rows)
    layout = LAYOUTS[size % len(LAYOUTS)]
    assert_same(dense(batch, batch.pages(size, layout, seed=1)), batch.alone())


@pytest.mark.parametrize("name", ["window", "small tiles"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_targets(name: str, size: int, target: str) -> None:
    batch = mixed(OPTIONS[name])
    got = batch.paged(batch.pages(size))
    with tw.config(target=None):
        assert_same(got, batch.alone(), target)


@every_mask
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads(options: dict[str, Any], threads: int) -> None:
    batch = mixed(options)
    expected = batch.alone()
    for size in (7, 100):
        assert_same(batch.paged(batch.pages(size), pool=threads), expected, size)
        for index in (0, 1, 9):  # alone they are split at spans
            one = batch.of(batch.sequences[index : index + 1])
            assert_same(one.paged(one.pages(size), pool=threads), expected[index : index + 1], (size, index))


@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("size", [1, 16, 256])
def test_one_long_context_split_between_threads(size: int) -> None:
    rng = np.random.default_rng(1)
    batch = Batch([sequence(rng, 1, 5000, (4, 1)), sequence(rng, 1, 3, (4, 1))], {"causal": True})
    assert_same(dense(batch, batch.pages(size), pool=4), batch.alone())


@pytest.mark.parametrize("size", [1, 7, 100])
def test_checked(size: int) -> None:
    """Every access of the kernel lies inside the pages, the table and the rows, which end where they end."""
    batch = mixed(OPTIONS["small tiles"])
    with tw.config(check=2):
        got = batch.paged(batch.pages(size, LAYOUTS[size % 3]))
    assert_same(got, batch.alone())


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("options", [{"causal": True, "bc": 5, "span": 10}, {"window": 4, "bc": 16, "span": 16}])
def test_interpreted(options: dict[str, Any], size: int) -> None:
    rng = np.random.default_rng(4)
    kinds = ((1, 19), (3, 7), (0, 2), (2, 0), (9, 12))
    batch = Batch([sequence(rng, rows, keys, (2, 1), (9, 5)) for rows, keys in kinds], options)
    with tw.config(interpret=True):
        got = batch.paged(batch.pages(size, LAYOUTS[size % 3]))
    assert_same(got, batch.alone())


@every_mask
@every_page_size
def test_chunks_and_decode(options: dict[str, Any], size: int) -> None:
    """A cache that is filled step by step: after each append, its new rows have the bits of one whole prefill."""
    whole = sequence(np.random.default_rng(2), 150, 150, (6, 2), (17, 24), q_offset=0)
    batch = Batch([whole], {**mixed(options).options, "causal": True})
    pages, expected = batch.pages(size), batch.alone()[0]
    filled = np.full_like(pages.k, np.nan), np.full_like(pages.v, np.nan)
    start, got = 0, []
    for rows in (1, 1, 70, 3, 1, 60, 13, 1):
        for i in range(start, start + rows):
            place = pages.table[0, i // size], i % size
            filled[0][place], filled[1][place] = pages.k[place], pages.v[place]
        chunk = Sequence(whole.q[:, start : start + rows], whole.k, whole.v, start)
        step = replace(batch, sequences=[chunk])
        got += dense(step, Pages(*filled, pages.table), kv_len=start + rows, q_offset=None)
        start += rows
    assert start == whole.rows
    assert_same(tuple(np.concatenate(x, 1) for x in zip(*got, strict=True)), expected)


def test_shared_pages() -> None:
    """Sequences with a common prefix name its pages: one page may even follow itself."""
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((4, 16, 2, 16), np.float32), rng.standard_normal((4, 16, 2, 24), np.float32)
    table = np.array([[2, 0, 3, -9], [2, 0, 1, -9], [1, 1, 1, 1]], np.int32)
    keys = [40, 48, 50]
    sequences = []
    for row, n in zip(table, keys, strict=True):
        own = [x[row[: -(-n // 16)]].reshape(-1, 2, x.shape[3])[:n].swapaxes(0, 1) for x in (k, v)]
        sequences.append(Sequence(rng.standard_normal((4, 3, 16), np.float32), *own, n - 3))
    batch = Batch(sequences, {"causal": True})
    assert_same(dense(batch, Pages(k, v, table)), batch.alone())


# ---- the arguments


def backwards(x: Any) -> Any:
    return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]


def with_gaps(x: Any) -> Any:
    return np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3]


@pytest.mark.parametrize("lay", [np.ascontiguousarray, np.asfortranarray, backwards, with_gaps])
@pytest.mark.parametrize("kind", ["int32", "int64", ">i4", "int16", "uint32", "uint64"])
def test_block_tables(lay: Any, kind: str) -> None:
    batch = same_rows({"causal": True}, 2)
    pages = batch.pages(16)
    table = lay(np.where(pages.table < 0, 1000, pages.table).astype(kind))
    before = table.copy()
    for _ in range(2):  # the second is a remembered call
        assert_same(dense(batch, replace(pages, table=table)), batch.alone())
    np.testing.assert_array_equal(table, before)


def test_entries_past_the_end_may_be_anything() -> None:
    batch = same_rows({"causal": True}, 2)
    pages, expected = batch.pages(16), batch.alone()
    used = -(-batch.each("keys") // 16)
    outside = np.arange(pages.table.shape[1]) >= used[:, None]
    for kind, garbage in (("int64", -(1 << 63)), ("int64", (1 << 63) - 1), ("int32", -1), ("uint64", (1 << 64) - 1)):
        table = pages.table.astype(kind)
        table[outside] = np.array(garbage, kind)
        assert_same(dense(batch, replace(pages, table=table)), expected, garbage)


def test_lengths() -> None:
    """One number for all, a list, a tuple, arrays; rows at the end of the keys by default."""
    rng = np.random.default_rng(5)
    batch = Batch([sequence(rng, 2, 40) for _ in range(3)], {"causal": True})
    pages, expected = batch.pages(7), batch.alone()
    for kv_len in (40, np.int32(40), [40] * 3, (40,) * 3, np.full(3, 40, np.int32), np.full(3, 40, np.uint8)):
        assert_same(dense(batch, pages, kv_len=kv_len, q_offset=None, k_offset=None), expected, repr(kv_len))
    moved = replace(batch, sequences=[replace(s, k_offset=1000, q_offset=1038) for s in batch.sequences])
    assert_same(dense(moved, pages, q_offset=None), moved.alone(), "rows at the end of a cache that dropped its oldest")


def test_what_is_remembered_is_not_the_table() -> None:
    """The same arguments with another table, in the same array or not: other pages, or an error."""
    batch = same_rows({"causal": True}, 1)
    one, other = batch.pages(16, seed=1), batch.pages(16, seed=2)
    assert (one.table != other.table).any()
    for _ in range(2):
        for pages in (one, other):
            assert_same(dense(batch, pages), batch.alone())
    table = one.table.copy()
    pages = replace(one, table=table)
    dense(batch, pages)
    for wrong in (len(one.k), -1):
        table[3, 2] = wrong
        with pytest.raises(tw.InvalidArgument, match=r"block_table.*\[3, 2\]"):
            dense(batch, pages)
    table[...] = other.table
    assert_same(dense(batch, replace(other, table=table)), batch.alone())


def test_no_keys() -> None:
    """No pages, no columns in the table, no sequences: o is 0 and lse -inf, or the sink."""
    q, sinks = np.ones((2, 4, 3, 8), np.float32), np.array([1, 2, 3, 4], np.float32)
    k = np.full((2, 16, 2, 8), np.nan, np.float32)
    for pages, table in ((k, np.full((2, 3), -1)), (k[:0], np.zeros((2, 0), np.int64)), (k[:0], np.full((2, 1), 7))):
        given = {"block_table": table, "kv_len": 0, "q_offset": 0, "return_lse": True}
        o, lse = tw.attention_paged(q, pages, pages, **given)
        assert (o == 0).all()
        assert np.isneginf(lse).all()
        o, lse = tw.attention_paged(q, pages, pages, sinks=sinks, **given)
        assert (o == 0).all()
        assert (lse == sinks[:, None]).all()
    o, lse = tw.attention_paged(q[:0], k, k, block_table=np.zeros((0, 2), int), kv_len=3, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 4, 3, 8), (0, 4, 3))


@pytest.mark.parametrize("ragged", [False, True])
def test_written_in_place(ragged: bool) -> None:
    """All of out and lse and nothing beside them; pages, table and arena as they were."""
    batch, arena = same_rows(OPTIONS["sinks"], 3), tw.Arena()
    pages, expected = batch.pages(7), batch.alone()
    o_shape, lse_shape = batch.shapes() if ragged else ((5, 6, 3, 24), (5, 6, 3))
    memory, beside = poisoned((*o_shape[:-1], o_shape[-1] + 5)), poisoned((2, *lse_shape))
    out, lse = memory[..., 2:-3], beside[1]
    before = [x.tobytes() for x in (pages.k, pages.v, pages.table)]
    got = (batch.paged if ragged else lambda p, **o: dense(batch, p, **o))(pages, out=out, lse=lse, arena=arena)
    assert_same(got, expected)
    assert_written(out)
    assert_written(lse)
    assert all(map(untouched, (memory[..., :2], memory[..., -3:], beside[0])))
    assert [x.tobytes() for x in (pages.k, pages.v, pages.table)] == before
    assert arena.used == 0


def test_scratch_does_not_grow_with_the_keys() -> None:
    water = []
    for keys in (700, 7000):
        batch, arena = Batch([sequence(np.random.default_rng(1), 1, keys)], {"causal": True}), tw.Arena()
        dense(batch, batch.pages(16), arena=arena, pool=2)
        water.append(arena.high_water)
    assert 0 < water[0] == water[1]
