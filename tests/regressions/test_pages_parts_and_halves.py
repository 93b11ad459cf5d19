"""Mistakes that sequences of one length, one page, one part or float32 would hide: mutants t90 and on make them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import Case, assert_same_bits, case, inputs
from tilewise.arguments import BFLOAT16

RINGS: dict[str, dict[str, Any]] = {
    "native": {"check": 0}, "checked": {"check": 2}, "interpreted": {"interpret": True}
}  # fmt: skip
GARBAGE = 1 << 40  # no page


def in_pages(x: Any, page_size: int, order: list[int]) -> Any:
    """The keys [1, Hkv, Tk, D] as pages [pages, page_size, Hkv, D], page i of them at order[i]; NaN in empty slots."""
    pages = np.full((max(order) + 1, page_size, x.shape[1], x.shape[3]), np.nan, np.float32)
    for j in range(x.shape[2]):
        pages[order[j // page_size], j % page_size] = x[0, :, j]
    return pages


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("Tq", [1, 9])
@pytest.mark.parametrize("page_size", [1, 5, 16, 47])
def test_pages_are_the_keys_in_a_row(page_size: int, Tq: int, ring: str) -> None:
    """Few rows and many; tiles that begin before the first key and end behind the last; tables with no spare entry."""
    c = case(1, 4, 2, Tq, 47, 17, 9, causal=True, q_offset=50 - Tq, k_offset=3, bc=16, span=32)
    pages = -(-47 // page_size)
    order = [(7 * i + 2) % pages if pages % 7 else pages - 1 - i for i in range(pages)]
    table = np.array([order])
    with tw.config(**RINGS[ring]):
        got = tw.attention_paged(
            c.q, in_pages(c.k, page_size, order), in_pages(c.v, page_size, order), block_table=table, kv_len=47,
            return_lse=True, pool=1, **c.options,
        )  # fmt: skip
    assert_same_bits(tuple(got), c.run(pool=1))


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("Tq", [1, 9])
def test_keys_next_to_nothing(Tq: int, ring: str) -> None:
    """Keys in a row, the first and the last of them at the ends of their arrays: nothing is read beside them."""
    c = case(1, 2, 1, Tq, 21, 5, 3, k_offset=6, bc=16)
    with tw.config(**RINGS[ring]):
        got = c.run(pool=1)
    assert_same_bits(got, c.run(pool=1))


def ragged(rows: list[int], keys: list[int], threads: int) -> tuple[Any, list[Case]]:
    """The (o, lse) of a ragged batch, and its sequences one by one."""
    alone = [
        case(1, 4, 2, n, m, 16, 16, seed=i, causal=True, q_offset=m - n, bc=16, span=32, pool=1)
        for i, (n, m) in enumerate(zip(rows, keys, strict=True))
    ]
    q, k, v = (np.concatenate([getattr(c, name)[0].swapaxes(0, 1) for c in alone]) for name in "qkv")
    starts = [np.cumsum([0, *counts]) for counts in (rows, keys)]
    with tw.config(check=2):  # a sequence that is taken for a longer one is an error then, not a crash
        result = tw.attention_varlen(
            q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], causal=True, br=2, bc=16, span=32,
            return_lse=True, q_offset=np.subtract(keys, rows), pool=threads,
        )  # fmt: skip
    return result, alone


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        ([1, 9, 2, 40], [70, 30, 5, 40]),  # both kinds of kernels
        ([9, 17, 40], [10, 50, 300]),  # the last has the most work, and goes first
        ([1, 2, 4], [10, 50, 300]),
        ([4, 0, 1], [300, 7, 1]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("eager_workers")
def test_each_sequence_is_as_alone(rows: list[int], keys: list[int], threads: int) -> None:
    (o, lse), alone = ragged(rows, keys, threads)
    start = 0
    for c, n in zip(alone, rows, strict=True):
        expected = c.run()
        assert_same_bits(o[start : start + n].swapaxes(0, 1)[None], expected[0])
        assert_same_bits(np.ascontiguousarray(lse[None, :, start : start + n]), expected[1])
        start += n


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "q_offset"])
def test_a_remembered_call_is_one_of_the_same_numbers(name: str) -> None:
    """Arrays of one shape and dtype, and other contents; and the same array, changed in place."""
    q, k, v = (x[0].swapaxes(0, 1) for x in inputs(1, 2, 1, 12, 12, 8, 5))
    given = {"cu_seqlens_q": [0, 4, 12], "cu_seqlens_k": [0, 5, 12], "q_offset": [3, 0]}
    arrays = {key: np.array(x) for key, x in given.items()}
    changed = {**arrays, name: arrays[name] + np.array({"q_offset": [4, 1]}.get(name, [0, 2, 0]))}
    expected = {}
    for what, chosen in (("first", arrays), ("changed", changed)):
        lists = {key: x.tolist() for key, x in chosen.items()}  # which are never remembered
        expected[what] = tw.attention_varlen(q, k, v, causal=True, **lists)
    assert not np.array_equal(expected["first"], expected["changed"])
    for _ in range(2):
        assert_same_bits(tw.attention_varlen(q, k, v, causal=True, **arrays), expected["first"])
        assert_same_bits(tw.attention_varlen(q, k, v, causal=True, **changed), expected["changed"])
    arrays[name][...] = changed[name]
    assert_same_bits(tw.attention_varlen(q, k, v, causal=True, **arrays), expected["changed"])


def test_the_block_table_of_a_remembered_call_is_read_anew() -> None:
    """And checked anew, though a call like it was good."""
    c = case(1, 2, 1, 1, 20, 8, 5, q_offset=19)
    table = np.array([[2, 0, 1, 4, GARBAGE]])
    k, v = in_pages(c.k, 5, [2, 0, 1, 4]), in_pages(c.v, 5, [2, 0, 1, 4])
    for order in ([2, 0, 1, 4], [1, 0, 2, 4], [2, 0, 1, 4]):
        table[0, :4] = order
        keys = [np.concatenate([x[i] for i in order]).swapaxes(0, 1)[None] for x in (k, v)]
        got = tw.attention_paged(c.q, k, v, block_table=table, kv_len=20, q_offset=19)
        assert_same_bits(got, tw.attention(c.q, *keys, q_offset=19))
    table[0, 3] = 5
    with pytest.raises(tw.InvalidArgument, match=r"^block_table names page 5 at \[0, 3\], but k_pages has 5 pages$"):
        tw.attention_paged(c.q, k, v, block_table=table, kv_len=20, q_offset=19)


@pytest.mark.parametrize("sinks", [None, np.array([1.5, -2, 0, 3], np.float32)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("Tq", [1, 20])
def test_parts_are_merged_in_order(Tq: int, sinks: Any) -> None:
    """Four parts of several spans each, the later ones with larger scores: every other order has other bits."""
    c = case(2, 4, 2, Tq, 250, 16, 19, causal=True, q_offset=250 - Tq, bc=16, span=32, sinks=sinks)
    options = {name: x for name, x in c.options.items() if name != "sinks"}
    cuts = [0, 64, 96, 192, 250]
    parts = [
        tw.attention_partial(c.q, c.k[:, :, lo:hi], c.v[:, :, lo:hi], k_offset=lo, **options)
        for lo, hi in itertools.pairwise(cuts)
    ]
    assert_same_bits(tw.merge(parts, sinks=sinks).finish(), c.run())
    with pytest.raises(tw.InvalidArgument, match="must follow one another"):
        tw.merge(parts[::-1])


def nearest_bfloat16(x: Any) -> Any:
    """The bits of the nearest bfloat16, by distance; of two as near, the even one."""
    below = x.view(np.uint32) >> 16

    def value(bits: Any) -> Any:
        return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)

    near, far = np.abs(x - value(below)), np.abs(value(below + 1) - x)
    up = (far < near) | ((far == near) & (below % 2 == 1))
    return (below + up).astype(np.uint16)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("Tq", [1, 20])
@pytest.mark.parametrize("D", [16, 32, 45])
def test_half_types_are_read_exactly(D: int, Tq: int, ring: str) -> None:
    """The bits of the float32 numbers that they are: random halves, so both of a pair have all their digits."""
    c = case(1, 4, 2, Tq, 40, D, 37, causal=True, q_offset=40 - Tq, bc=16, span=32, pool=1)
    for name in ("float16", "bfloat16"):
        wide, half = [], []
        for x in (c.q, c.k, c.v):
            if name == "float16":
                half.append(x.astype(np.float16))
                wide.append(half[-1].astype(np.float32))
            else:
                bits = x.view(np.uint32) >> 16
                half.append(bits.astype(np.uint16).view(BFLOAT16))
                wide.append((bits << 16).astype(np.uint32).view(np.float32))
        out = np.zeros((1, 4, Tq, 37), np.float32)
        with tw.config(**RINGS[ring]):
            got = tw.attention(*half, out=out, return_lse=True, **c.options)
        assert_same_bits(tuple(got), Case(wide[0], wide[1], wide[2], c.options).run(), name)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("Dv", [16, 21])
def test_half_types_are_rounded_to_the_nearest(Dv: int, ring: str) -> None:
    """Of values that lie between two of them, some in the middle; a row of one key gives its value."""
    bits = 0x3F80_0000 + np.arange(9 * Dv, dtype=np.uint32) * 0x800  # quarters of the last place of a float16
    bits[1::3] |= 0x8000_0000
    v = bits.view(np.float32).reshape(1, 1, 9, Dv)
    q = np.zeros((1, 1, 9, 8), np.float32)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        out = np.zeros((1, 1, 9, Dv), dtype)
        with tw.config(**RINGS[ring]):
            tw.attention(q, q, v, causal=True, window=1, out=out, pool=1)
        expected = nearest_bfloat16(v) if dtype == BFLOAT16 else v.astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(out.view(np.uint16), expected)
