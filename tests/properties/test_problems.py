"""Whole problems, drawn at random: shapes, layouts, masks, per-sequence numbers, garbage in what is invisible.

Every one is within the error bound of its data, and its bits do not move under whatever recipe 1 does not name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.support import Case, F32Array, assert_same_bits, assert_within_error_bound, assert_written, case, poisoned

# (D, Dv, bc): each of them, with 5 sizes of panels, is a kernel to compile, so there are few. They have tails in D, in
# Dv, in both, in neither; tiles of less than a vector, of no whole number of vectors, of several.
CONSTANTS = [(8, 5, 4), (17, 16, 20), (16, 33, 64)]
ORDERS = [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)]  # of batch, heads and positions in memory


@st.composite
def layouts(draw: st.DrawFn) -> Callable[[F32Array], F32Array]:
    """Memory in any order of the outer axes, each forwards or backwards, with a gap after each row."""
    order, gap = draw(st.sampled_from(ORDERS)), draw(st.integers(0, 3))
    steps = draw(st.tuples(*[st.sampled_from([1, -1])] * 3))

    def lay(x: F32Array) -> F32Array:
        room = np.full((*(x.shape[axis] for axis in order), x.shape[3] + gap), np.nan, np.float32)
        view = room.transpose(*np.argsort(order), 3)[tuple(slice(None, None, s) for s in steps)][..., : x.shape[3]]
        view[...] = x
        return view

    return lay


@st.composite
def problems(draw: st.DrawFn, min_batch: int = 1, min_rows: int = 1) -> Case:
    D, Dv, bc = draw(st.sampled_from(CONSTANTS))
    B, Hkv, group = draw(st.integers(min_batch, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    Tq, Tk = draw(st.integers(min_rows, 24)), draw(st.integers(0, 90))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(-1, 40)),
        # Scores of a few units. The roundings of larger ones weigh more than all else, and over a handful of elements
        # it is then luck whether ours or NumPy's come out larger: api/test_accuracy.py measures those over many rows.
        "scale": draw(st.none() | st.sampled_from([0.0, 0.01, -0.1])),
        "bc": bc,
        "span": draw(st.sampled_from([0, bc, 2 * bc, 5 * bc])),
        "br": draw(st.integers(0, 30)),
    }
    starts, lengths, firsts, offsets = [], [], [], []
    for _ in range(B):
        starts.append(draw(st.integers(0, Tk)))
        lengths.append(draw(st.integers(0, Tk - starts[-1])))
        firsts.append(draw(st.sampled_from([0, 1, 3 * bc - 1, 1000])))
        # near the keys, on either side, or anywhere
        offsets.append(max(0, firsts[-1] + lengths[-1] + draw(st.integers(-30, 30))))
    if draw(st.booleans()):
        options |= {"kv_start": starts, "kv_len": lengths, "k_offset": firsts, "q_offset": offsets}
    else:
        options |= {"q_offset": draw(st.integers(0, 100))}
    if draw(st.booleans()):
        options["sinks"] = np.linspace(-3, 5, group * Hkv, dtype=np.float32)
    c = case(B, group * Hkv, Hkv, Tq, Tk, D, Dv, seed=draw(st.integers(0, 1 << 32)), **options)
    garbage = draw(st.sampled_from([None, np.nan, np.inf, 3e38]))
    if garbage is not None:
        hidden = ~c.visible().any(axis=1)[:, None].repeat(Hkv, axis=1)
        c.k[hidden] = c.v[hidden] = garbage
    return Case(*(draw(layouts())(x) for x in (c.q, c.k, c.v)), c.options)


@given(problems())
def test_within_the_error_bound(c: Case) -> None:
    shape = (*c.q.shape[:3], c.v.shape[3])
    result = c.run(out=poisoned(shape), lse=poisoned(shape[:3]))
    for x in result:
        assert_written(x)
    assert_within_error_bound(result, c)


@given(problems(min_rows=2), st.data())
def test_chunks(c: Case, data: st.DataObject) -> None:
    whole, Tq = c.run(), c.q.shape[2]
    cuts = sorted({0, Tq, *data.draw(st.lists(st.integers(1, Tq - 1), max_size=5), label="cuts")})
    for start, stop in pairwise(cuts):
        assert_same_bits(c.rows(start, stop).run(), tuple(x[:, :, start:stop] for x in whole), f"{start}:{stop}")


@given(problems(), st.integers(1, 140))
def test_query_tiles(c: Case, br: int) -> None:
    assert_same_bits(c.run(br=br), c.run())


@given(problems(min_batch=2), st.data())
def test_order_and_company_of_sequences(c: Case, data: st.DataObject) -> None:
    B, (o, lse) = c.q.shape[0], c.run()
    order = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=4), label="order")
    assert_same_bits(c.sequences(order).run(), (o[order], lse[order]))


@given(problems(), st.randoms(use_true_random=False))
def test_order_of_heads(c: Case, random: Any) -> None:
    """KV heads in another order, and the query heads of each group in another order."""
    H, Hkv = c.q.shape[1], c.k.shape[1]
    group, (o, lse) = H // Hkv, c.run()
    kv_order = random.sample(range(Hkv), Hkv)
    order = [kv * group + member for kv in kv_order for member in random.sample(range(group), group)]
    sinks = c.options.get("sinks")
    other = Case(
        c.q[:, order], c.k[:, kv_order], c.v[:, kv_order],
        {**c.options, "sinks": None if sinks is None else sinks[order]},
    )  # fmt: skip
    assert_same_bits(other.run(), (o[:, order], lse[:, order]))


@given(c=problems(), threads=st.integers(2, 4))
@pytest.mark.usefixtures("eager_workers")
def test_threads(c: Case, threads: int) -> None:
    shape = (*c.q.shape[:3], c.v.shape[3])
    result = c.run(pool=threads, out=poisoned(shape), lse=poisoned(shape[:3]))
    assert_same_bits(result, c.run(pool=1))


@given(problems(), st.integers(1, 70), st.sampled_from([np.nan, np.inf, -3e38]))
def test_masked_keys_appended_and_put_in_front(c: Case, extra: int, value: float) -> None:
    B = c.q.shape[0]
    start = [c.of_sequence("kv_start", b) for b in range(B)]
    length = [c.of_sequence("kv_len", b) for b in range(B)]
    rooms = [np.full((*x.shape[:2], extra, x.shape[3]), value, np.float32) for x in (c.k, c.v)]
    behind = [np.concatenate([x, room], axis=2) for x, room in zip((c.k, c.v), rooms, strict=True)]
    in_front = [np.concatenate([room, x], axis=2) for x, room in zip((c.k, c.v), rooms, strict=True)]
    expected = c.run()
    assert_same_bits(Case(c.q, *behind, {**c.options, "kv_start": start, "kv_len": length}).run(), expected, "behind")
    moved = [n + extra for n in start]
    assert_same_bits(Case(c.q, *in_front, {**c.options, "kv_start": moved, "kv_len": length}).run(), expected, "front")


@given(problems(), st.data())
def test_garbage_that_one_row_does_not_see(c: Case, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, c.q.shape[2] - 1), label="row")
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38]), label="garbage")
    hidden = ~c.visible()[:, row][:, None].repeat(c.k.shape[1], axis=1)
    k, v = c.k.copy(), c.v.copy()
    k[hidden] = v[hidden] = value
    result = replace(c, k=k, v=v).run()
    assert_same_bits(tuple(x[:, :, row] for x in result), tuple(x[:, :, row] for x in c.run()))


@given(problems(), st.sampled_from([1, 2, 7]))
def test_whole_spans_further_on(c: Case, spans: int) -> None:
    """Tiles and spans are anchored at position 0: keys and rows moved by whole spans keep their bits."""
    shift = spans * (c.options["span"] or 1024 // c.options["bc"] * c.options["bc"])
    B = c.q.shape[0]
    moved = {name: [c.of_sequence(name, b) + shift for b in range(B)] for name in ("q_offset", "k_offset")}
    assert_same_bits(c.run(**moved), c.run())


@given(problems())
def test_layout(c: Case) -> None:
    plain = Case(*(np.ascontiguousarray(x) for x in (c.q, c.k, c.v)), c.options)
    assert_same_bits(c.run(), plain.run())


def small(c: Case) -> Case:
    """The first rows, sequence and heads: little enough to be interpreted."""
    group = c.q.shape[1] // c.k.shape[1]
    options = {**c.options, "sinks": None if c.options.get("sinks") is None else c.options["sinks"][:group]}
    one = Case(c.q, c.k, c.v, options).sequences([0])
    return Case(one.q[:, :group, :3], one.k[:, :1], one.v[:, :1], one.options)


@given(problems())
def test_rings_agree(c: Case) -> None:
    c = small(c)
    native = c.run()
    with tw.config(interpret=True):
        assert_same_bits(c.run(), native)
