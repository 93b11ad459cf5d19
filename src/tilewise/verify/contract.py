"""The nine contract checks, by the names of the specification."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewise as tw
from tilewise.verify.findings import Array, Check, Findings, inputs


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _hand(**arguments: Any) -> Any:
    q, k, v = (
        np.array(x, np.float32)[None, None] for x in ([[1, 0]], [[1, 0], [0, 1], [1, 1]], [[1, 2], [3, 4], [5, 6]])
    )
    return tw.attention(q, k, v, scale=1.0, bc=2, return_lse=True, **arguments)


def _hand_example(found: Findings) -> None:
    o, lse = _hand()
    # the bits of docs/explanation/recipe.md, which works this example by hand
    expected = (
        np.array([_float(0x40400001), _float(0x40800000)], np.float32),
        np.array([_float(0x3FEE55D9)], np.float32),
    )
    found.holds("o is not [3, 4]", np.abs(o - [3, 4]).max() <= 1e-6)
    found.holds("lse is not 1.8619948", abs(float(lse[0, 0, 0]) - 1.8619948) <= 1e-6)
    found.same("recipe 1", (o[0, 0, 0], lse[0, 0]), expected)
    o, _ = _hand(causal=True, q_offset=1)
    found.holds(
        "causal at q_offset 1: o is not [1.5378828, 2.5378828]", np.abs(o - [1.5378828, 2.5378828]).max() <= 1e-6
    )


def _gqa_causal_window(found: Findings) -> None:
    for H, Hkv in ((6, 2), (4, 1)):
        for bc, br in ((7, 5), (0, 0)):
            q, k, v = inputs(1, 2, H, Hkv, 37, 37, 24, 17)
            chunk = q[:, :, 24:]
            for what, rows, masks in (
                ("causal prefill", q, {"causal": True}),
                ("chunk at q_offset 24", chunk, {"causal": True, "q_offset": 24}),
                ("window 6", q, {"causal": True, "window": 6}),
                ("window 6 at q_offset 24", chunk, {"causal": True, "window": 6, "q_offset": 24}),
                ("window without causal", q, {"window": 6}),
                ("plain", q, {}),
            ):
                found.close(f"{what}, {H}:{Hkv}, bc {bc}", rows, k, v, bc=bc, br=br, **masks)
    found.close("causal over tiles and spans", *inputs(2, 1, 4, 2, 67, 2100, 64), causal=True, q_offset=2033)


def _sinks(found: Findings) -> None:
    q, k, v = inputs(3, 2, 6, 2, 19, 150, 24, 17)
    sinks = np.array([30, -4, 7, 0.5, -1, 12], np.float32)  # large, so that one left out shows
    found.close("sinks", q, k, v, sinks=sinks)
    found.close("sinks, causal, window", q, k, v, sinks=sinks, causal=True, window=9, q_offset=131)
    zeros, ones = np.zeros((1, 1, 2, 8), np.float32), np.ones((1, 1, 2, 8), np.float32)
    o, lse = tw.attention(zeros, zeros, ones, sinks=np.zeros(1, np.float32), return_lse=True)
    found.holds("two equal keys and a sink: o is not 2/3", np.abs(o - 2 / 3).max() <= 1e-6)
    found.holds("two equal keys and a sink: lse is not log 3", np.abs(lse - np.log(3)).max() <= 1e-6)


def _no_visible_key(found: Findings) -> None:
    q, k, v = inputs(4, 1, 2, 1, 3, 5, 8)
    sinks = np.array([0.75, -2], np.float32)
    cases: list[tuple[str, tuple[Array, Array], dict[str, Any]]] = [
        ("window past the keys", (k, v), {"causal": True, "window": 2, "q_offset": 40}),
        ("no keys", (k[:, :, :0], v[:, :, :0]), {}),
        ("keys in the future", (k, v), {"causal": True, "q_offset": 0, "k_offset": 9}),
    ]
    for what, keys, arguments in cases:
        o, lse = tw.attention(q, *keys, return_lse=True, **arguments)
        found.same(what, (o, lse), (np.zeros_like(o), np.full_like(lse, -np.inf)))
        o, lse = tw.attention(q, *keys, return_lse=True, sinks=sinks, **arguments)
        found.same(f"{what}, with a sink", (o, lse), (np.zeros_like(o), np.broadcast_to(sinks[:, None], lse.shape)))


def in_chunks(q: Array, k: Array, v: Array, size: int, first: int, **arguments: Any) -> tuple[Array, Array]:
    """Query rows in calls of `size` rows, the first of them at position `first`."""
    parts = [
        tw.attention(q[:, :, i : i + size], k, v, q_offset=first + i, return_lse=True, **arguments)
        for i in range(0, q.shape[2], size)
    ]
    return np.concatenate([o for o, _ in parts], 2), np.concatenate([lse for _, lse in parts], 2)


def _chunk_invariant(found: Findings) -> None:
    q, k, v = inputs(5, 1, 4, 2, 37, 37, 24)
    variants: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "window": 6}, {"window": 6}]
    for masks in variants:
        whole = tw.attention(q, k, v, return_lse=True, q_offset=0, bc=7, span=14, **masks)
        for size in (1, 3, 5, 16):
            found.same(f"chunks of {size}, {masks}", in_chunks(q, k, v, size, 0, bc=7, span=14, **masks), whole)


def _query_tile_and_batch(found: Findings) -> None:
    q, k, v = inputs(6, 3, 4, 2, 70, 130, 24)
    whole = tw.attention(q, k, v, causal=True, q_offset=60, return_lse=True, br=64)
    for br in (1, 3, 64):
        found.same(f"br {br}", tw.attention(q, k, v, causal=True, q_offset=60, return_lse=True, br=br), whole)
    for b in range(3):
        one = slice(b, b + 1)
        alone = tw.attention(q[one], k[one], v[one], causal=True, q_offset=60, return_lse=True)
        found.same(f"sequence {b} alone", alone, (whole[0][one], whole[1][one]))


def _arena(found: Findings) -> None:
    q = inputs(7, 1, 4, 2, 16, 0, 24)[0]
    water, peaks = [], []
    for Tk in (16, 1000, 20000):
        _, k, v = inputs(7, 1, 4, 2, 0, Tk, 24)
        out, lse = np.empty((1, 4, 16, 24), np.float32), np.empty((1, 4, 16), np.float32)
        arguments: dict[str, Any] = {"out": out, "lse": lse, "pool": 1}
        arena = tw.Arena()
        arena.alloc(100)
        used = arena.used
        tw.attention(q, k, v, arena=arena, **arguments)
        found.holds(f"Tk {Tk}: the arena is not back at its mark", arena.used == used)
        taken = arena.high_water - used
        expected = tw.scratch_bytes(q, k, v, **arguments)
        found.holds(f"Tk {Tk}: {taken} bytes taken, scratch_bytes says {expected}", taken == expected)
        water.append(taken)
        tracemalloc.start()
        tw.attention(q, k, v, arena=arena, **arguments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    found.holds(f"high water depends on Tk: {water}", len(set(water)) == 1)
    found.holds(f"a call allocates more with more keys: {peaks} bytes", max(peaks) <= min(peaks) + 4096)
    found.facts.append(f"{water[0]:,} bytes of scratch for Tk 16, 1000 and 20000")


def _pool(found: Findings) -> None:
    q, k, v = inputs(8, 2, 6, 2, 300, 1500, 64)
    serial = tw.attention(q, k, v, causal=True, q_offset=1200, return_lse=True, pool=1)
    with tw.Pool(4) as pool:
        for _ in range(3):
            pooled = tw.attention(q, k, v, causal=True, q_offset=1200, return_lse=True, pool=pool)
            found.same("4 threads", pooled, serial)


def _errors(found: Findings) -> None:
    q, k, v = inputs(9, 1, 6, 2, 3, 3, 8)
    out, lse = np.full((1, 6, 3, 8), 7, np.float32), np.full((1, 6, 3), 7, np.float32)
    arena = tw.Arena()

    def call(*arrays: Any, **arguments: Any) -> Callable[[], Any]:
        return lambda: tw.attention(*arrays, out=out, lse=lse, arena=arena, **arguments)

    four = inputs(9, 1, 1, 4, 3, 3, 8)
    eight = inputs(9, 1, 1, 8, 3, 3, 8)
    double = q.astype(np.float64)
    found.raises("6 heads on 4 KV heads", tw.ShapeError, call(q, four[1], four[2]))
    found.raises("6 heads on 8 KV heads", tw.ShapeError, call(q, eight[1], eight[2]))
    found.raises("k and v of different lengths", tw.ShapeError, call(q, k, v[:, :, :2]))
    found.raises("no k", tw.InvalidArgument, call(q, None, v))
    found.raises("negative q_offset", tw.InvalidArgument, call(q, k, v, q_offset=-1))
    found.raises("negative br", tw.InvalidArgument, call(q, k, v, br=-1))
    found.raises("negative bc", tw.InvalidArgument, call(q, k, v, bc=-1))
    found.raises("NaN scale", tw.InvalidArgument, call(q, k, v, scale=float("nan")))
    found.raises("float64", TypeError, call(double, k, v))
    found.raises(
        "an arena of 64 bytes", tw.ArenaExhausted, lambda: tw.attention(q, k, v, out=out, arena=tw.Arena(limit=64))
    )
    found.holds("an error wrote to out", (out == 7).all())
    found.holds("an error wrote to lse", (lse == 7).all())
    found.holds("an error left the arena in use", arena.used == 0)
    nothing = tw.attention(q, k[:, :, :0], v[:, :, :0])
    found.same("Tk = 0", nothing, np.zeros_like(nothing))
    found.facts.append("10 errors, nothing written by any")


CONTRACT = (
    Check("hand_example", "the worked example: o = [3, 4], lse = 1.8619948, and its bits", _hand_example),
    Check(
        "gqa_causal_window_match_naive", "every mask, 6:2 and 4:1 heads, odd tiles, against float64", _gqa_causal_window
    ),
    Check("sinks_join_the_denominator", "a sink joins the denominator and lse", _sinks),
    Check("no_visible_key_gives_zeros_and_minus_inf", "an empty row is 0 and -inf, or its sink", _no_visible_key),
    Check("chunk_invariant_with_q_offset", "37 rows at once = in chunks of 1, 3, 5, 16", _chunk_invariant),
    Check("query_tile_and_batch_invariant", "br 1, 3, 64; alone = in a batch of 3", _query_tile_and_batch),
    Check("arena_rewound_and_scratch_independent_of_tk", "arena at its mark, memory flat in Tk", _arena),
    Check("pool_result_equals_serial_bitwise", "4 threads = 1 thread", _pool),
    Check("shape_and_argument_errors", "errors come before anything is written", _errors),
)
