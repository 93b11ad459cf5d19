"""Ragged batches, pages, parts and half types, drawn at random: every row has the bits that it has alone in float32."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.half.halves import F32, HALVES
from tests.serving.batches import LAYOUTS, PAGE_SIZES, Batch, Sequence, assert_same, assert_written, in_pages, poisoned

# each type, with 5 sizes of panels, is a kernel to compile, so there are few; tails in D, in Dv and in bc
D, DV, BC = 17, 24, 20
TYPES = [(F32, F32, F32), (HALVES[0],) * 3, (HALVES[1], HALVES[0], F32)]


@st.composite
def batches(draw: st.DrawFn, types: Any = (F32, F32, F32), rows: int = 24) -> tuple[Batch, Batch]:
    """Sequences of these types, and the same numbers in float32; keys that no row sees are NaN."""
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(-1, 40)),
        "scale": draw(st.none() | st.sampled_from([0.0, -0.1])),
        "bc": BC,
        "span": draw(st.sampled_from([0, BC, 2 * BC, 5 * BC])),
    }
    if draw(st.booleans()):
        options["sinks"] = np.linspace(-3, 5, group * Hkv, dtype=np.float32)
    half, single = [], []
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    for _ in range(draw(st.integers(1, 5))):
        n, keys = draw(st.integers(0, rows) | st.just(1)), draw(st.integers(0, 90) | st.sampled_from([0, BC, 2 * BC]))
        first = draw(st.sampled_from([0, 0, 1, 3 * BC - 1, 1000]))
        offset = max(0, first + keys - n + draw(st.integers(-30, 30) | st.just(0)))
        q, k, v = (rng.standard_normal(s, np.float32) for s in ((group * Hkv, n, D), (Hkv, keys, D), (Hkv, keys, DV)))
        hidden = ~seen_by_some(options, n, offset, first + np.arange(keys))
        k[:, hidden] = v[:, hidden] = draw(st.sampled_from([1.0, np.nan, np.inf]))
        arrays = [t.rounded(x) for t, x in zip(types, (q, k, v), strict=True)]
        exact = [t.values(x).reshape(x.shape) for t, x in zip(types, arrays, strict=True)]
        half.append(Sequence(*arrays, offset, first))
        single.append(Sequence(*exact, offset, first))
    return Batch(half, options), Batch(single, options)


def seen_by_some(options: dict[str, Any], rows: int, offset: int, keys: Any) -> Any:
    """Which keys some row sees, from the definition."""
    p, window = offset + np.arange(rows)[:, None], options["window"] or 0
    return (((not options["causal"]) | (keys <= p)) & ((window <= 0) | (keys > p - window))).any(0)


@st.composite
def typed(draw: st.DrawFn) -> tuple[Any, Batch, Batch]:
    types = draw(st.sampled_from(TYPES))
    return types, *draw(batches(types))


def expected_of(types: Any, single: Batch) -> list[Any]:
    return [(types[0].rounded(o), lse) for o, lse in single.alone()]


@given(typed(), st.integers(0, 30), st.sampled_from([1, 2]))
def test_varlen(drawn: tuple[Any, Batch, Batch], br: int, threads: int) -> None:
    types, half, single = drawn
    out, lse = (
        poisoned(shape, dtype) for shape, dtype in zip(half.shapes(), (types[0].dtype, np.float32), strict=True)
    )
    got = half.varlen(br=br, pool=threads, out=out, lse=lse)
    assert_written(out)
    assert_written(lse)
    assert_same(got, expected_of(types, single))


@given(typed(), st.sampled_from(PAGE_SIZES) | st.integers(1, 40), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_pages(drawn: tuple[Any, Batch, Batch], size: int, layout: str, seed: int) -> None:
    types, half, single = drawn
    pages = in_pages(half.sequences, size, layout, seed, np.int32 if seed % 2 else np.int64)
    assert_same(half.paged(pages), expected_of(types, single))


@given(drawn=typed(), threads=st.integers(2, 4), size=st.integers(1, 20))
@pytest.mark.usefixtures("eager_workers")
def test_threads(drawn: tuple[Any, Batch, Batch], threads: int, size: int) -> None:
    """A batch, and its first sequence alone, whose spans are then work items of their own."""
    types, half, single = drawn
    expected = expected_of(types, single)
    for batch in (half, half.of(half.sequences[:1])):
        assert_same(batch.varlen(pool=threads), expected[: len(batch.sequences)])
        assert_same(batch.paged(batch.pages(size), pool=threads), expected[: len(batch.sequences)])


@given(batches(), st.randoms(use_true_random=False))
def test_order_and_company(drawn: tuple[Batch, Batch], random: Any) -> None:
    batch, _ = drawn
    whole = batch.varlen()
    order = random.choices(range(len(whole)), k=random.randint(1, 6))
    again = batch.of([batch.sequences[i] for i in order])
    assert_same(again.varlen(), [whole[i] for i in order])


@given(batches(), st.data())
def test_chunks_and_decode_rows_in_one_call(drawn: tuple[Batch, Batch], data: st.DataObject) -> None:
    """Each sequence cut into chunks, all of them sequences of one paged call."""
    batch, _ = drawn
    chunks, cuts_of = [], []
    for s in batch.sequences:
        cuts = sorted({0, s.rows, *data.draw(st.lists(st.integers(0, s.rows), max_size=4), label="cuts")})
        cuts_of.append(cuts)
        chunks += [replace(s, q=s.q[:, i:j], q_offset=s.q_offset + i) for i, j in pairwise(cuts)]
    whole = batch.alone()
    if not chunks:
        return
    got = iter(batch.of(chunks).paged(in_pages(chunks, data.draw(st.integers(1, 20), label="page size"))))
    for cuts, expected in zip(cuts_of, whole, strict=True):
        for i, j in pairwise(cuts):
            assert_same(next(got), tuple(x[:, i:j] for x in expected))


@given(batches(rows=3), st.sampled_from(LAYOUTS), st.integers(1, 20))
def test_rings_agree(drawn: tuple[Batch, Batch], layout: str, size: int) -> None:
    batch = drawn[0].of(drawn[0].sequences[:2])
    batch = batch.of([replace(s, k=s.k[:, :30], v=s.v[:, :30]) for s in batch.sequences])
    pages = in_pages(batch.sequences, size, layout)
    with tw.config(interpret=True):
        interpreted = batch.paged(pages)
    assert_same(interpreted, batch.paged(pages))


@given(typed(), st.data())
def test_parts(drawn: tuple[Any, Batch, Batch], data: st.DataObject) -> None:
    """Each sequence cut at some of its spans, parts merged in any grouping, some through bytes."""
    types, half, single = drawn
    options = {name: x for name, x in half.options.items() if name != "sinks"}
    span = half.options["span"] or 1024 // half.options["bc"] * half.options["bc"]
    for s, expected in zip(half.sequences, expected_of(types, single), strict=True):
        if s.k_offset % span:
            continue
        borders = list(range(span, s.keys, span))
        cuts = [0, *sorted(data.draw(st.sets(st.sampled_from(borders)), label="cuts") if borders else []), s.keys]
        parts = [
            tw.attention_partial(
                s.q[None], s.k[None, :, i:j], s.v[None, :, i:j], k_offset=s.k_offset + i, q_offset=s.q_offset, **options
            )
            for i, j in pairwise(cuts)
        ]
        parts = [tw.Partial.from_bytes(p.to_bytes()) if data.draw(st.booleans(), label="bytes") else p for p in parts]
        at = data.draw(st.integers(0, len(parts)), label="grouping")
        groups = [tw.merge(group) for group in (parts[:at], parts[at:]) if group]
        o, lse = tw.merge(groups, sinks=half.options.get("sinks")).finish()
        assert_same((o[0].view(types[0].dtype), lse[0]), expected)


# ---- bytes that were made to harm

_numbers = st.integers(-3, 70) | st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
_json = st.recursive(
    _numbers, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
_x = np.ones((1, 2, 3, 8), np.float32)
_GOOD = tw.attention_partial(_x, _x, _x, k_offset=0, bc=4, span=4).to_bytes()
_LENGTH = struct.unpack_from("<16sII", _GOOD)[2]
_HEADER = json.loads(_GOOD[24 : 24 + _LENGTH])


def judged(data: bytes) -> None:
    """Refused as it should be; or sound."""
    data += hashlib.sha256(data).digest()
    try:
        p = tw.Partial.from_bytes(data)
    except tw.InvalidArgument:
        return
    assert tw.Partial.from_bytes(p.to_bytes()).to_bytes() == p.to_bytes()
    B, _, H, Tq, Dv = p.a.shape
    if max(p.a.shape) < 1 << 12 and B * H * Tq * Dv < 1 << 16:
        assert p.finish()[0].shape == (B, H, Tq, Dv)


@given(st.dictionaries(st.sampled_from(list(_HEADER)), _json, min_size=1), st.binary(max_size=64) | st.none())
def test_hostile_headers(changes: dict[str, Any], body: bytes | None) -> None:
    text = json.dumps({**_HEADER, **changes}).encode()
    judged(_GOOD[:20] + struct.pack("<I", len(text)) + text + (_GOOD[24 + _LENGTH : -32] if body is None else body))


@given(st.lists(st.integers(0, 1 << 62) | st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 1 << 40))
def test_hostile_shapes_without_keys(shape: list[int], q_offset: int) -> None:
    """Nothing in the body, so nothing vouches for the sizes of the header."""
    shape[1] = 0
    header = {**_HEADER, "shape": shape, "end": 0, "q_offset": [q_offset] * min(shape[0], 4)}
    text = json.dumps(header).encode()
    judged(_GOOD[:20] + struct.pack("<I", len(text)) + text)


@given(st.lists(st.tuples(st.integers(0, len(_GOOD) - 33), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_changed_under_a_good_checksum(changes: list[tuple[int, int]]) -> None:
    data = bytearray(_GOOD[:-32])
    for index, value in changes:
        data[index] = value
    judged(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for start in (b"", b"tilewise partial", _GOOD[:24]):
        with pytest.raises(tw.InvalidArgument):
            tw.Partial.from_bytes(start + data)
