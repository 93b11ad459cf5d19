"""The nine contract tests of the specification, under its names, on the native and on the interpreted ring.

Each one alone must notice the pitfalls that the specification assigns to it; sizes are small where a kernel is
interpreted, and never so small that a pitfall could hide (several tiles, several spans, several rows a query tile).
"""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import (
    assert_as_accurate_as_naive,
    assert_same_bits,
    assert_written,
    case,
    in_chunks,
    inputs,
    poisoned,
    sinks_for,
)

HAND_Q, HAND_K, HAND_V = (
    np.array(x, np.float32)[None, None] for x in ([[1, 0]], [[1, 0], [0, 1], [1, 1]], [[1, 2], [3, 4], [5, 6]])
)
# The worked values have 8 digits; 1e-6 is 2 to 4 ULP of them.
CLOSE = {"rtol": 0, "atol": 1e-6}


def test_hand_example(ring: str) -> None:
    for tiles in ({"bc": 2}, {"bc": 2, "span": 2}, {"bc": 1}, {}):
        o, lse = tw.attention(HAND_Q, HAND_K, HAND_V, scale=1.0, return_lse=True, **tiles)
        np.testing.assert_allclose(o, [[[[3, 4]]]], **CLOSE)
        np.testing.assert_allclose(lse, [[[1.8619948]]], **CLOSE)
        o, lse = tw.attention(HAND_Q, HAND_K, HAND_V, scale=1.0, causal=True, q_offset=1, return_lse=True, **tiles)
        np.testing.assert_allclose(o, [[[[1.5378828, 2.5378828]]]], **CLOSE)
        np.testing.assert_allclose(lse, [[[1 + math.log(1.3678794)]]], **CLOSE)


MASKS: dict[str, dict[str, Any]] = {
    "causal prefill": {"causal": True},
    "chunk at 24": {"causal": True, "q_offset": 24, "Tq": 13},
    "window 6": {"causal": True, "window": 6},
    "window without causal": {"window": 6},
    "plain": {},
    "plain decode": {"Tq": 1},
    "decode": {"causal": True, "q_offset": 36, "Tq": 1},
    "window 1": {"causal": True, "window": 1},
}


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (6, 6)], ids=["6:2", "6:1", "6:6"])
@pytest.mark.parametrize("mask", MASKS)
def test_gqa_causal_window_match_naive(ring: str, mask: str, heads: tuple[int, int]) -> None:
    options = {"Tq": 37, "scale": 0.7, **MASKS[mask]}
    tilings: list[dict[str, int]] = [{"bc": 5, "span": 10}, {"bc": 7}, {}]
    if ring == "interpreted":
        tilings = tilings[:1]
        options["Tq"] = min(options["Tq"], 5)
    keys = 37 if ring == "native" or "q_offset" in options else 13
    for tiling in tilings:
        c = case(2 if ring == "native" else 1, *heads, Tk=keys, D=8, Dv=5, **options, **tiling)
        assert_as_accurate_as_naive(c.run(), c)


def test_sinks_join_the_denominator(ring: str) -> None:
    ones = np.ones((1, 1, 2, 4), np.float32)
    o, lse = tw.attention(ones[:, :, :1] * 0, ones, ones, sinks=np.zeros(1, np.float32), return_lse=True)
    np.testing.assert_allclose(o, np.full((1, 1, 1, 4), 2 / 3), **CLOSE)  # two keys and a sink of equal weight
    np.testing.assert_allclose(lse, [[[math.log(3)]]], **CLOSE)

    for tiling in ({"bc": 5, "span": 10}, {"bc": 7})[: 2 if ring == "native" else 1]:
        c = case(2, 6, 2, Tq=9 if ring == "native" else 3, Tk=23, D=8, Dv=5, causal=True, q_offset=[14, 0], **tiling)
        without = c.run()
        with_sinks = c.change(sinks=sinks_for(6))  # another one for each head of a group
        result = with_sinks.run()
        assert_as_accurate_as_naive(result, with_sinks)
        assert (result[1] > without[1]).all(), "a sink adds to every denominator"
        # a sink far below is none; one far above takes all the weight and is the log-sum-exp
        assert_same_bits(c.run(sinks=np.full(6, -np.inf, np.float32)), without, "sink -inf")
        o, lse = c.run(sinks=np.full(6, 300, np.float32))
        assert not o.any()
        np.testing.assert_allclose(lse, 300, rtol=2e-7)


def test_no_visible_key_gives_zeros_and_minus_inf(ring: str) -> None:
    # rows at 6 to 13 with a window of 3 on 9 keys: the first five see 3, 3, 3, 2, 1, the last three none
    some = case(2, 4, 2, Tq=8, Tk=9, D=8, Dv=5, window=3, q_offset=6, bc=2, span=4)
    nothing = {
        "beyond the window": case(1, 4, 2, Tq=3, Tk=9, D=8, Dv=5, window=3, q_offset=20, bc=2),
        "keys of the future": case(1, 4, 2, Tq=3, Tk=9, D=8, Dv=5, causal=True, k_offset=5, bc=2),
        "no keys": case(1, 4, 2, Tq=3, Tk=0, D=8, Dv=5, bc=2),
        "no keys of this sequence": case(1, 4, 2, Tq=3, Tk=9, D=8, Dv=5, kv_len=0, kv_start=9, bc=2),
    }
    sinks = sinks_for(4)
    for name, c in {"some rows": some, **nothing}.items():
        empty = ~c.visible().any(axis=2)[:, None].repeat(4, axis=1)  # [B, H, Tq]
        assert empty.any()
        shape = (*empty.shape, 5)
        for z in (None, sinks):
            o, lse = c.run(sinks=z, out=poisoned(shape), lse=poisoned(shape[:3]))
            expected = np.full(4, -np.inf, np.float32) if z is None else z
            assert_same_bits(o[empty], np.zeros_like(o[empty]), name)
            assert_same_bits(lse[empty], np.broadcast_to(expected[:, None], empty.shape)[empty], name)
            assert_as_accurate_as_naive((o, lse), c.change(sinks=z))  # the rows beside them


@pytest.mark.parametrize("mask", [{}, {"window": 6}, {"window": 11}], ids=["causal", "window 6", "window 11"])
def test_chunk_invariant_with_q_offset(ring: str, mask: dict[str, int]) -> None:
    rows = 37 if ring == "native" else 14
    # tiles and spans that a window's first key moves across; then the default tile, with keys before the rows
    shapes: list[dict[str, Any]] = [{"bc": 4, "span": 8}]
    if ring == "native":
        shapes += [{"bc": 7}, {"Tk": 237, "q_offset": 200}, {"Tk": 237, "q_offset": 200, "window": 65}]
    for shape in shapes:
        options = {"Tk": rows, **mask, **shape}
        c = case(1, 4, 2, Tq=rows, D=8, Dv=5, causal=True, **options)
        whole = c.run()
        assert_as_accurate_as_naive(whole, c)
        for size in (1, 3, 5, 16) if ring == "native" or mask.get("window") == 6 else (1, 5):
            assert_same_bits(in_chunks(c, size), whole, f"chunks of {size}, {options}")


def test_query_tile_and_batch_invariant(ring: str) -> None:
    rows = 70 if ring == "native" else 5
    masks: list[dict[str, Any]] = [{"causal": True, "window": 6}, {"causal": True}, {"window": 3}]
    H, Hkv = (4, 2) if ring == "native" else (2, 1)
    for options in masks if ring == "native" else masks[:1]:
        c = case(3, H, Hkv, rows, rows + 9, D=8, Dv=5, q_offset=[0, 9, 4], bc=4, span=8, **options)
        whole = c.run()
        assert_as_accurate_as_naive(whole, c)
        for br in (1, 3, 64):
            assert_same_bits(c.run(br=br), whole, f"br {br}, {options}")
        for b in range(3):
            alone = c.sequences([b]).run()
            assert_same_bits(alone, tuple(x[b : b + 1] for x in whole), f"sequence {b} alone, {options}")


@pytest.mark.parametrize("threads", [1, 4])
def test_arena_rewound_and_scratch_independent_of_tk(ring: str, threads: int) -> None:
    needs, peaks = set(), []
    for Tk in (16, 1000, 20000) if ring == "native" else (16, 1000):
        if ring == "native":
            c = case(1, 4, 2, Tq=24, Tk=Tk, D=8, Dv=5)
        else:  # few of the keys are visible, which saves time, not scratch
            c = case(1, 2, 2, Tq=1, Tk=Tk, D=8, Dv=5, window=9, q_offset=12)
        c.run(pool=threads)  # compile, start the workers
        arena = tw.Arena()
        arena.alloc(100)  # of somebody else, to be left alone
        used = arena.used
        tracemalloc.start()
        c.run(arena=arena, pool=threads)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert arena.used == used, "the arena was not rewound"
        needs.add(arena.high_water - used)
        need = arena.high_water - used
        assert tw.scratch_bytes(c.q, c.k, c.v, **c.options, pool=threads) == need

        # what it takes is enough, one byte less is not; a call that fails gives everything back too
        c.run(arena=tw.Arena(limit=need), pool=threads)
        tight = tw.Arena(limit=need - 1)
        out = poisoned((*c.q.shape[:3], 5))
        with pytest.raises(tw.ArenaExhausted):
            c.run(arena=tight, out=out, pool=threads)
        assert (tight.used, tight.high_water) == (0, 0)
        assert_same_bits(out, poisoned(out.shape), "out after a failure")
    assert len(needs) == 1, f"scratch depends on the number of keys: {sorted(needs)} bytes"
    assert max(peaks) - peaks[0] < 16384, f"memory in a call grows with the number of keys: {peaks} bytes"


@pytest.mark.usefixtures("eager_workers")
def test_pool_result_equals_serial_bitwise(ring: str) -> None:
    # work items: 2 sequences x 3 KV heads x query tiles, a number that 4 threads do not divide, and fewer than threads
    problems = [
        case(2, 6, 3, Tq=3, Tk=7, D=8, Dv=5, causal=True, q_offset=4, bc=4, br=2),
        case(1, 3, 3, Tq=2, Tk=7, D=8, Dv=5, bc=4),
    ]
    if ring == "native":
        problems.append(case(2, 6, 3, Tq=11, Tk=21, D=8, Dv=5, causal=True, q_offset=10, bc=4, br=4))
        problems.append(case(2, 6, 3, Tq=300, Tk=300, D=8, Dv=5, causal=True, window=77, br=16))
    for c in problems:
        shape = (*c.q.shape[:3], c.v.shape[3])
        serial = c.run(pool=1, out=poisoned(shape), lse=poisoned(shape[:3]))
        assert_as_accurate_as_naive(serial, c)
        with tw.Pool(4) as pool:
            for workers in (2, 3, pool) if ring == "native" else (pool,):
                # poison, not the right values of the call before: a dropped work item must show
                result = c.run(pool=workers, out=poisoned(shape), lse=poisoned(shape[:3]))
                for x in result:
                    assert_written(x)
                assert_same_bits(result, serial, f"pool {workers}")


def test_shape_and_argument_errors(ring: str) -> None:
    def arrays(H: int, Hkv: int) -> dict[str, Any]:
        return dict(zip("qkv", inputs(1, H, Hkv, 3, 4, 8, 5), strict=True))

    good = arrays(6, 2)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (tw.ShapeError, "H = 6, Hkv = 4", arrays(6, 4)),
        (tw.ShapeError, "H = 2, Hkv = 4", arrays(2, 4)),
        (tw.ShapeError, "H = 2, Hkv = 6", arrays(2, 6)),
        (tw.ShapeError, "v", {"v": good["v"][:, :, 1:]}),
        (tw.ShapeError, "D", {"q": good["q"][..., 1:].copy()}),
        (tw.InvalidArgument, "q_offset", {"q_offset": -1}),
        (tw.InvalidArgument, "q_offset", {"q_offset": [-1]}),
        (tw.InvalidArgument, "q_offset", {"causal": True, "q_offset": None}),
        (tw.InvalidArgument, "br", {"br": -1}),
        (tw.InvalidArgument, "bc", {"bc": -1}),
        (tw.InvalidArgument, "bc", {"bc": 513}),
        (tw.InvalidArgument, "span", {"span": -64}),
        (tw.InvalidArgument, "span", {"bc": 4, "span": 6}),
        (tw.InvalidArgument, "kv_len", {"kv_len": 5}),
        (tw.InvalidArgument, "scale", {"scale": math.nan}),
        *((tw.InvalidArgument, name, {name: None}) for name in "qkv"),
        *((TypeError, name, {name: good[name].astype(np.float64)}) for name in "qkv"),
    ]
    for kind, message, wrong in refused:
        arguments = {**good, "q_offset": 0, **wrong}
        out, lse, arena = poisoned((1, 6, 3, 5)), poisoned((1, 6, 3)), tw.Arena()
        with pytest.raises(kind, match=message):
            tw.attention(**arguments, out=out, lse=lse, arena=arena)
        assert_same_bits((out, lse), (poisoned(out.shape), poisoned(lse.shape)), message)
        assert (arena.used, arena.high_water, arena.capacity) == (0, 0, 0)

    # no keys at all is a problem like any other; it does not need addresses of keys
    c = case(1, 6, 2, Tq=3, Tk=0, D=8, Dv=5)
    o, lse = c.run(out=poisoned((1, 6, 3, 5)), lse=poisoned((1, 6, 3)))
    assert_same_bits(o, np.zeros((1, 6, 3, 5), np.float32))
    assert_same_bits(lse, np.full((1, 6, 3), -np.inf, np.float32))
