"""The first promise: the bits of a row never move. o and lse, compared in every bit.

The cases cross tiles and spans, with every mask, Dv different from D, groups, sinks and per-sequence descriptors. What
a row's bits may depend on is its own query, the keys and values that it sees, its position, bc and span: so a change of
anything else must change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import (
    RUNNABLE,
    Case,
    F32Array,
    assert_same_bits,
    case,
    flushing_subnormals,
    in_chunks,
    poisoned,
    sinks_for,
)

# Three kernels' constants (D, Dv, bc) for all cases, so that few kernels are compiled. Rows lie across a border of
# spans where the default span is used: 4000 + 133 > 4096.
CASES: dict[str, Callable[[], Case]] = {
    "causal 5000 keys": lambda: case(1, 4, 2, 133, 5000, 24, 40, causal=True, q_offset=4000),
    "window 1500": lambda: case(1, 4, 2, 133, 5000, 24, 40, causal=True, window=1500, q_offset=4000),
    "window 70 without causal": lambda: case(1, 3, 1, 133, 400, 24, 40, window=70, q_offset=200, sinks=sinks_for(3)),
    "plain, sinks": lambda: case(2, 6, 2, 133, 1500, 24, 40, sinks=sinks_for(6)),
    "ragged": lambda: case(
        3, 4, 2, 133, 700, 16, 16, causal=True, window=333, sinks=sinks_for(4), bc=7, span=70,
        q_offset=[500, 0, 77], kv_start=[0, 100, 13], kv_len=[700, 133, 200], k_offset=[0, 0, 5],
    ),
    "ragged, plain": lambda: case(
        3, 4, 1, 133, 500, 16, 16, bc=7, span=7, kv_start=[400, 0, 13], kv_len=[100, 0, 487], k_offset=[0, 3, 4099],
    ),
    "narrow": lambda: case(2, 5, 5, 133, 133, 5, 3, causal=True, bc=16, span=32),
}  # fmt: skip
SMALL: dict[str, Callable[[], Case]] = {
    "causal": lambda: case(1, 4, 2, 5, 21, 5, 3, causal=True, q_offset=13, bc=4, span=8),
    "window, sinks": lambda: case(1, 2, 1, 9, 9, 5, 3, causal=True, window=4, bc=16, sinks=sinks_for(2)),
    "window without causal": lambda: case(1, 2, 1, 3, 40, 18, 3, window=6, q_offset=20, bc=16, span=16),
    "ragged": lambda: case(
        2, 2, 1, 3, 20, 5, 17, causal=True, bc=4, span=8,
        q_offset=[7, 3], kv_start=[0, 6], kv_len=[20, 8], k_offset=[0, 2],
    ),
    "default tile": lambda: case(1, 2, 2, 2, 150, 5, 3, causal=True, q_offset=148),
    "nothing visible": lambda: case(1, 2, 2, 4, 9, 5, 3, window=3, q_offset=7, bc=4),
    "extreme scores": lambda: case(1, 2, 2, 4, 19, 5, 3, scale=90.0, bc=4, span=8),
}  # fmt: skip


@functools.cache
def build(name: str) -> Case:
    return CASES[name]()


@functools.cache
def one_call(name: str) -> tuple[F32Array, F32Array]:
    """The bits that everything is compared with: one call, serial."""
    return build(name).run(pool=1)


every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("size", [1, 3, 5, 16, 64, 100])
def test_chunks(name: str, size: int) -> None:
    """Chunks of 1 row are decode steps: each row of the prefill comes out of a call with Tq = 1."""
    assert_same_bits(in_chunks(build(name), size), one_call(name))


@every_case
def test_uneven_chunks(name: str) -> None:
    c, start = build(name), 0
    for stop in (2, 19, 20, 52, 53, 133):
        result = c.rows(start, stop).run()
        assert_same_bits(result, tuple(x[:, :, start:stop] for x in one_call(name)), f"rows {start} to {stop}")
        start = stop


@every_case
@pytest.mark.parametrize("row", [0, 1, 63, 95, 96, 97, 132])
def test_decode_step_against_prefill(name: str, row: int) -> None:
    """A decode step sees a cache that ends with its own key; the prefill's later keys are not there yet."""
    c = build(name)
    step = c.rows(row, row + 1)
    if c.options.get("causal"):
        B = c.q.shape[0]
        present = [
            min(c.of_sequence("kv_len", b), max(0, step.of_sequence("q_offset", b) + 1 - c.of_sequence("k_offset", b)))
            for b in range(B)
        ]
        step = step.change(kv_len=present)
    assert_same_bits(step.run(), tuple(x[:, :, row : row + 1] for x in one_call(name)))


@every_case
def test_alone_and_in_a_batch(name: str) -> None:
    c, (o, lse) = build(name), one_call(name)
    B = c.q.shape[0]
    for b in range(B):
        assert_same_bits(c.sequences([b]).run(), (o[b : b + 1], lse[b : b + 1]), f"sequence {b} alone")
    order = [*reversed(range(B)), 0, 0]  # another order, and one sequence three times
    assert_same_bits(c.sequences(order).run(), (o[order], lse[order]), f"batch of {order}")


@every_case
def test_heads_alone(name: str) -> None:
    """Each query head by itself, so that the group and the rows a work item change."""
    c, (o, lse) = build(name), one_call(name)
    group = c.q.shape[1] // c.k.shape[1]
    for h in range(c.q.shape[1]):
        own, kv = slice(h, h + 1), slice(h // group, h // group + 1)
        z = c.options.get("sinks")
        alone = Case(c.q[:, own], c.k[:, kv], c.v[:, kv], {**c.options, "sinks": None if z is None else z[own]})
        assert_same_bits(alone.run(), (o[:, own], lse[:, own]), f"head {h} alone")


@every_case
def test_query_tiles(name: str) -> None:
    for br in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128):
        assert_same_bits(build(name).run(br=br), one_call(name), f"br {br}")


@every_case
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads(name: str, threads: int) -> None:
    c, whole = build(name), one_call(name)
    for br in (0, 8):
        result = c.run(pool=threads, br=br, out=poisoned(whole[0].shape), lse=poisoned(whole[1].shape))
        assert_same_bits(result, whole, f"br {br}")


@every_case
@pytest.mark.skipif(len(RUNNABLE) < 2, reason=f"this machine runs one target only: {RUNNABLE}")
@pytest.mark.parametrize("rows", [133, 5, 3, 1])
def test_targets(name: str, rows: int) -> None:
    """Few rows are other panels, with another register tile on each target."""
    c, whole = build(name).rows(0, rows), one_call(name)
    for other in RUNNABLE:
        with tw.config(target=other):
            assert_same_bits(c.run(), tuple(x[:, :, :rows] for x in whole), other)


@pytest.mark.parametrize("name", SMALL)
def test_native_against_interpreted(name: str, target: str) -> None:
    c = SMALL[name]()
    with tw.config(interpret=True):
        interpreted = c.run()
    assert_same_bits(c.run(), interpreted)


def test_native_against_interpreted_with_what_is_not_finite(target: str) -> None:
    c = SMALL["causal"]()
    k, v = c.k.copy(), c.v.copy()
    v[0, 0, 2, 1], v[0, 0, 15, 0], v[0, 1, 3, 2] = np.nan, np.inf, -np.inf
    k[0, 1, 14, 3], k[0, 0, 5] = np.nan, 1e30
    odd = replace(c, k=k, v=v)
    with tw.config(interpret=True):
        interpreted = odd.run()
    assert np.isnan(interpreted[0]).any()
    assert_same_bits(odd.run(), interpreted)


@every_case
def test_checked_kernels(name: str) -> None:
    """Native code with bounds checks and scratch full of NaN: nothing is read that was not written, nor beyond."""
    expected = one_call(name)  # unchecked, or a NaN from scratch would be compared with itself
    with tw.config(check=2):
        assert_same_bits(build(name).run(), expected)


# ---- what a row cannot see


GARBAGE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38, "zero": -0.0}


def with_garbage(c: Case, hidden: Any, value: float) -> Case:
    """k and v with garbage at the positions hidden[b, j]."""
    k, v = c.k.copy(), c.v.copy()
    for x in (k, v):
        x[np.broadcast_to(hidden[:, None], x.shape[:3])] = value
    return replace(c, k=k, v=v)


@every_case
@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_garbage_that_no_row_sees(name: str, value: float) -> None:
    """Before kv_start, past kv_len, before the window of the first row, after the last row."""
    c = build(name)
    hidden = ~c.visible().any(axis=1)
    assert hidden.any() or name in ("plain, sinks", "narrow")
    assert_same_bits(with_garbage(c, hidden, value).run(), one_call(name))


@every_case
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_garbage_that_other_rows_see(name: str, value: float) -> None:
    """All that one row does not see is garbage, while the rows beside it do see it: they change, this one does not."""
    c, whole = build(name), one_call(name)
    visible = c.visible()
    for row in (0, 1, 15, 16, 64, 95, 96, 131, 132):
        result = with_garbage(c, ~visible[:, row], value).run()
        for b in range(c.q.shape[0]):
            own = tuple(x[b : b + 1, :, row] for x in result)
            assert_same_bits(own, tuple(x[b : b + 1, :, row] for x in whole), f"row {row} of sequence {b}")


@pytest.mark.parametrize("name", ["causal", "window, sinks", "ragged", "window without causal"])
def test_garbage_interpreted(name: str) -> None:
    c = SMALL[name]()
    with tw.config(interpret=True):
        whole = c.run()
        row = c.q.shape[2] - 2
        result = with_garbage(c, ~c.visible()[:, row], np.nan).run()
    assert_same_bits(tuple(x[:, :, row] for x in result), tuple(x[:, :, row] for x in whole))


@every_case
def test_queries_of_other_rows(name: str) -> None:
    """A row's bits do not depend on its neighbours' queries, not even on a NaN there."""
    c, whole = build(name), one_call(name)
    for row in (0, 15, 16, 100):
        q = np.full_like(c.q, np.nan)
        q[:, :, row] = c.q[:, :, row]
        result = replace(c, q=q).run()
        assert_same_bits(tuple(x[:, :, row] for x in result), tuple(x[:, :, row] for x in whole), f"row {row}")


@every_case
@pytest.mark.parametrize("extra", [1, 63, 1000])
def test_keys_appended_beyond_the_length(name: str, extra: int) -> None:
    """A preallocated cache: more room behind the keys, full of garbage."""
    c = build(name)
    length = [c.of_sequence("kv_len", b) for b in range(c.q.shape[0])]
    k, v = (np.concatenate([x, np.full((*x.shape[:2], extra, x.shape[3]), np.nan, np.float32)], 2) for x in (c.k, c.v))
    assert_same_bits(Case(c.q, k, v, {**c.options, "kv_len": length}).run(), one_call(name))


# ---- positions


@pytest.mark.parametrize("dropped", [1, 5, 63, 64, 65, 1000, 1024, 2400])
def test_sliding_cache_keeps_its_bits(dropped: int) -> None:
    """A cache that dropped its oldest keys, which no row sees any more, says so by k_offset."""
    c = build("window 1500")
    assert dropped <= 4000 - 1500 + 1
    for pad in (0, min(3, dropped)):  # what was dropped may still lie in memory, or not
        slid = Case(c.q, c.k[:, :, dropped - pad :], c.v[:, :, dropped - pad :], {**c.options, "k_offset": dropped})
        assert_same_bits(slid.run(kv_start=pad), one_call("window 1500"), f"{pad} of them in memory")
    assert_same_bits(slid.rows(132, 133).run(kv_start=pad), tuple(x[:, :, 132:] for x in one_call("window 1500")))


@every_case
@pytest.mark.parametrize("padding", [1, 7, 64, 1024])
def test_left_padding(name: str, padding: int) -> None:
    """Padding in front, skipped by kv_start, moves no position and so no bit."""
    c = build(name)
    k, v = (np.pad(x, ((0, 0), (0, 0), (padding, 0), (0, 0)), constant_values=np.nan) for x in (c.k, c.v))
    B = c.q.shape[0]
    start = [c.of_sequence("kv_start", b) + padding for b in range(B)]
    length = [c.of_sequence("kv_len", b) for b in range(B)]
    assert_same_bits(Case(c.q, k, v, {**c.options, "kv_start": start, "kv_len": length}).run(), one_call(name))


def test_a_batch_padded_on_the_left() -> None:
    """Decode steps of three sequences of different lengths, their caches padded to one length: as each one alone."""
    lengths = [100, 1, 77]
    alone = [case(1, 4, 2, 1, n, 16, 16, seed=n, causal=True, q_offset=n - 1, bc=7, span=70) for n in lengths]
    k, v = (np.full((3, 2, 100, 16), np.nan, np.float32) for _ in range(2))
    for b, c in enumerate(alone):
        k[b, :, 100 - lengths[b] :], v[b, :, 100 - lengths[b] :] = c.k[0], c.v[0]
    q = np.concatenate([c.q for c in alone])
    batch = Case(q, k, v, {"causal": True, "bc": 7, "span": 70, "q_offset": [n - 1 for n in lengths]})
    o, lse = batch.run(kv_start=[100 - n for n in lengths])
    for b, c in enumerate(alone):
        assert_same_bits((o[b : b + 1], lse[b : b + 1]), c.run(), f"sequence {b}")


def test_numbers_of_all_sequences_as_int_list_and_array() -> None:
    c = build("ragged, plain").change(kv_start=3, kv_len=400, k_offset=9)
    for form in (lambda x: [x] * 3, lambda x: np.full(3, x), lambda x: np.full(3, x, np.uint16), np.int32, np.array):
        forms = {name: form(c.options[name]) for name in ("q_offset", "kv_start", "kv_len", "k_offset")}
        assert_same_bits(c.run(**forms), c.run())


@every_case
def test_out_and_lse_given_or_not(name: str) -> None:
    c, (o, lse) = build(name), one_call(name)
    assert_same_bits(tw.attention(c.q, c.k, c.v, **c.options), o, "without lse")
    out, logsumexp = np.empty_like(o), np.empty_like(lse)
    result = tw.attention(c.q, c.k, c.v, **c.options, out=out, lse=logsumexp)
    assert result[0] is out
    assert result[1] is logsumexp
    assert_same_bits(result, (o, lse))


# ---- the caller's floating-point environment


def subnormal_cases() -> dict[str, Case]:
    """Problems whose bits a flush of subnormals to zero would change: as inputs, as products, as results."""
    tiny = case(1, 4, 2, 20, 90, 16, 16, causal=True, q_offset=70, bc=7, span=70)
    x = {name: getattr(tiny, name).copy() for name in "qkv"}
    return {
        "values": replace(tiny, v=x["v"] * np.float32(1e-39)),
        "queries": replace(tiny, q=x["q"] * np.float32(5e-39), k=x["k"] * np.float32(2e37)),
        "keys": replace(tiny, k=x["k"] * np.float32(5e-39), q=x["q"] * np.float32(2e37)),
        "products": replace(tiny, k=x["k"] * np.float32(1e-20), q=x["q"] * np.float32(1e-20)).change(scale=1e38),
        "scale": replace(tiny, k=x["k"] * np.float32(2e18), q=x["q"] * np.float32(2e18)).change(scale=1e-38),
    }


# flushed to 0; and the call prepared so is remembered, for calls outside that environment as well.
@pytest.mark.parametrize("name", ["values", "queries", "keys", "products", "scale"])
def test_flush_to_zero_set_by_the_caller(name: str, target: str) -> None:
    c = subnormal_cases()[name]
    flushed = {
        "values": replace(c, v=c.v * 0),
        "queries": replace(c, q=c.q * 0),
        "keys": replace(c, k=c.k * 0),
        "products": replace(c, k=c.k * 0),
        "scale": c.change(scale=0.0),
    }[name]
    with flushing_subnormals():  # first of all: nothing may be remembered from a call outside the block
        serial = c.run(pool=1)
        decode = c.rows(19, 20).run(pool=1)
        threads = c.run(pool=2)
    expected = c.run(out=np.empty_like(serial[0]))  # with an out nothing is remembered from the block either
    assert np.isfinite(expected[0]).all()
    assert (expected[0] != flushed.run()[0]).mean() > 0.9, "a flush would hardly change this problem"
    assert_same_bits(serial, expected)
    assert_same_bits(threads, expected, "2 threads")
    assert_same_bits(decode, tuple(x[:, :, 19:] for x in expected), "decode")
