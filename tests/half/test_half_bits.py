"""Half types in and out: the bits are those of recipe 1 on the same numbers in float32, rounded once, everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import BF16, BF16_BITS, F16, F32, HALVES, MIXED, SAME, HalfCase, halved, ml_dtypes, name_of
from tests.serving.batches import LAYOUTS, Batch, Sequence, assert_same, assert_written, bits, in_pages, poisoned
from tests.support import Case, case, flushing_subnormals, inputs, sinks_for
from tilewise.arguments import BFLOAT16

every_half = pytest.mark.parametrize("half", HALVES, ids=lambda t: t.name)

# rows on keys: one (streamed), a few, many (packed); tails in D and Dv, tiles and spans odd
CASES: dict[str, Case] = {
    "decode": case(2, 4, 2, 1, 150, 17, 24, causal=True, q_offset=[149, 60], bc=16, span=48),
    "few": case(1, 2, 1, 3, 70, 17, 24, bc=16, span=16, sinks=sinks_for(2)),
    "prefill": case(1, 6, 2, 40, 90, 17, 24, causal=True, window=50, q_offset=50, bc=16, span=48),
}  # fmt: skip
every_case = pytest.mark.parametrize("c", CASES.values(), ids=list(CASES))


# ---- the types of the tests themselves


@every_half
def test_meaning_and_rounding_are_those_of_the_libraries(half: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    if half.dtype == BFLOAT16:
        wanted = (every.astype(np.uint32) << 16).view(np.float32)
    else:
        wanted = every.view(half.dtype).astype(np.float32)
    np.testing.assert_array_equal(half.values(every.view(half.dtype)), wanted)
    x = dense_set(half)
    if half.dtype != BFLOAT16:
        number = ~np.isnan(x)  # of NaN each library makes its own
        with np.errstate(over="ignore", invalid="ignore"):
            assert (bits(x.astype(half.dtype)) == bits(half.rounded(x)))[number].all()


# ---- every path


@every_case
@pytest.mark.parametrize("types", SAME, ids=name_of)
def test_native(c: Case, types: Any, target: str) -> None:
    h = halved(c, types)
    out = poisoned((*c.q.shape[:3], c.v.shape[3]), types[3].dtype)
    got = h.run(out=out)
    assert got[0] is out
    assert got[1].dtype == np.float32
    assert_written(out)
    with tw.config(target=None):
        assert_same(got, h.expected(), target)


@every_case
@pytest.mark.parametrize("types", MIXED, ids=name_of)
def test_mixed_types(c: Case, types: Any) -> None:
    h = halved(c, types)
    assert_same(h.run(), h.expected())


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("D", [33, 72])
def test_pairs_of_bfloat16(rows: int, D: int) -> None:
    """Widths around 32, where two numbers of 16 bits are read as one of 32; rows at odd multiples of two bytes."""
    h = halved(case(1, 2, 1, rows, 50, D, 72 - D + 33, causal=True, q_offset=50 - rows, bc=16, span=16), (BF16,) * 4)
    strange = Case(*map(memory_with_gaps, (h.half.q, h.half.k, h.half.v)), h.half.options)
    assert_same(h.run(), h.expected())
    assert_same(strange.run(), h.expected())


@pytest.mark.parametrize("types", [*SAME, MIXED[0], MIXED[2]], ids=name_of)
def test_interpreted(types: Any) -> None:
    h = halved(case(1, 2, 1, 3, 25, 9, 5, causal=True, q_offset=20, bc=5, span=10, sinks=sinks_for(2)), types)
    with tw.config(interpret=True):
        got = h.run()
    assert_same(got, h.expected())


def test_checked() -> None:
    h = halved(CASES["decode"], (BF16, F16, F32, F16))
    with tw.config(check=2):
        got = h.run()
    assert_same(got, h.expected())


@every_case
@every_half
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_and_query_tiles(c: Case, half: Any, threads: int) -> None:
    h = halved(c, (half,) * 4)
    for br in (0, 1, 8):
        assert_same(h.run(pool=threads, br=br), h.expected(), br)


@every_half
def test_chunks_and_decode(half: Any) -> None:
    h = halved(CASES["prefill"], (half,) * 4)
    for size in (1, 7):
        chunks = [h.half.rows(i, min(i + size, 40)).run() for i in range(0, 40, size)]
        assert_same(tuple(np.concatenate(x, 2) for x in zip(*chunks, strict=True)), h.expected(), size)


def memory_with_gaps(x: Any) -> Any:
    """A view of [T, H, B, D] memory with NaN behind each row, heads backwards."""
    room = np.full((*x.shape[2::-1], x.shape[3] + 3), 0x7FFF, np.uint16).view(x.dtype)
    view = room[:, ::-1, :, : x.shape[3]].transpose(2, 1, 0, 3)
    view[...] = x
    return view


@every_half
def test_layouts(half: Any) -> None:
    h = halved(CASES["prefill"], (half,) * 4)
    strange = Case(*map(memory_with_gaps, (h.half.q, h.half.k, h.half.v)), h.half.options)
    out = memory_with_gaps(poisoned((1, 6, 40, 24), half.dtype))
    got = strange.run(out=out)
    assert got[0] is out
    assert_same(got, h.expected())


def batch_of(types: Any, options: dict[str, Any]) -> tuple[Batch, Batch]:
    """Ragged sequences of these types, and the same in float32."""
    kinds = ((1, 130), (20, 60), (0, 4), (3, 0), (9, 9))
    half, single = [], []
    for seed, (rows, keys) in enumerate(kinds):
        q, k, v = (x[0] for x in inputs(1, 4, 2, rows, keys, 17, 24, seed))
        arrays = [t.rounded(x) for t, x in zip(types, (q, k, v), strict=False)]
        exact = [t.values(x).reshape(x.shape) for t, x in zip(types, arrays, strict=False)]
        half.append(Sequence(*arrays, max(0, keys - rows)))
        single.append(Sequence(*exact, max(0, keys - rows)))
    return Batch(half, options), Batch(single, options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 20, "bc": 16, "span": 48}], ids=str)
@pytest.mark.parametrize("types", [*SAME, MIXED[0]], ids=name_of)
def test_ragged_and_paged(types: Any, options: dict[str, Any]) -> None:
    half, single = batch_of(types, options)
    expected = [(types[0].rounded(o), lse) for o, lse in single.alone()]
    assert_same(half.varlen(), expected, "varlen")
    for size in (1, 7, 16, 100):
        pages = in_pages(half.sequences, size, LAYOUTS[size % 3])
        assert_same(half.paged(pages), expected, size)
    out = poisoned(half.shapes()[0], types[3].dtype)
    half.varlen(out=out)
    other = [(types[3].rounded(o), lse) for o, lse in single.alone()]
    assert_same([o for o, _ in half.split((out, np.zeros(half.shapes()[1])))], [o for o, _ in other], "out")


@every_case
@pytest.mark.parametrize("types", [*SAME, MIXED[1]], ids=name_of)
def test_partial(c: Case, types: Any) -> None:
    """States are float32; o is of q's type, rounded once, at the end; bytes carry the type."""
    h = halved(c, (*types[:3], types[0]))
    given = {name: x for name, x in c.options.items() if name != "sinks"}
    cuts = [0, c.options["span"], c.k.shape[2]]
    every = [
        tw.attention_partial(h.half.q, h.half.k[:, :, i:j], h.half.v[:, :, i:j], k_offset=i, **given)
        for i, j in pairwise(cuts)
    ]
    assert all(p.a.dtype == p.stats.dtype == np.float32 for p in every)
    assert_same(tw.merge(every, sinks=c.options.get("sinks")).finish(), h.expected())
    through = [tw.Partial.from_bytes(p.to_bytes()) for p in every]
    o, lse = tw.merge(through, sinks=c.options.get("sinks")).finish()
    assert_same((o.view(types[0].dtype), lse), h.expected())
    floats = tw.attention_partial(h.single.q, h.single.k, h.single.v, k_offset=0, **given)
    assert_same(tw.merge(every).a, floats.a)


@pytest.mark.skipif(ml_dtypes is None, reason="needs ml_dtypes")
def test_one_bfloat16_in_two_dtypes() -> None:
    """The bits under their own name, and the dtype of ml_dtypes: the same bits in any mixture."""
    c = CASES["few"]
    expected = bits(halved(c, (BF16,) * 4).run()[0])
    for types in ((BF16_BITS,) * 4, (BF16, BF16_BITS, BF16, BF16_BITS), (BF16_BITS, BF16, BF16_BITS, BF16)):
        o = halved(c, types).run()[0]
        assert o.dtype == types[3].dtype
        assert (bits(o) == expected).all()


@every_half
def test_types_of_results(half: Any) -> None:
    """o is of q's type unless out says otherwise; lse float32."""
    c = CASES["few"]
    for types in ((half, F32, F32), (half, half, half)):
        h = halved(c, (*types, types[0]))
        o, lse = tw.attention(h.half.q, h.half.k, h.half.v, return_lse=True)
        assert o.dtype == types[0].dtype
        assert lse.dtype == np.float32
        assert tw.scratch_bytes(h.half.q, h.half.k, h.half.v) == tw.scratch_bytes(c.q, c.k, c.v)


def test_without_ml_dtypes() -> None:
    """The structured dtype needs nothing else; and importing tilewise imports no ml_dtypes."""
    code = """if True:
        import sys
        sys.modules["ml_dtypes"] = None  # an import of it fails
        import numpy as np, tilewise as tw
        from tilewise.arguments import BFLOAT16
        x = (np.linspace(-1, 2, 2 * 5 * 8, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        x = x.view(BFLOAT16).reshape(1, 2, 5, 8)
        o = tw.attention(x, x, x, bc=16, span=16)
        p = tw.Partial.from_bytes(tw.attention_partial(x, x, x, k_offset=0, bc=16, span=16).to_bytes())
        assert o.dtype == p.dtype == BFLOAT16
        assert p.finish()[0].tobytes() == o.tobytes()
        f = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        wide = tw.attention(f, f, f, bc=16, span=16).view(np.uint32)
        assert (o.view(np.uint16) == (wide + 0x7FFF + (wide >> 16 & 1)) >> 16).all()
        """
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- every bit pattern


def dense_set(half: Any) -> Any:
    """float32 on, between and beside all numbers of the type, both signs; NaN, infinities, and random bits."""
    between = ((half.magnitudes[:-1] + half.magnitudes[1:]) / 2).astype(np.float32)
    size = np.concatenate([half.magnitudes[:-1].astype(np.float32), between]).view(np.uint32)
    near = np.concatenate([size, size + 1, np.maximum(size, 1) - 1]).view(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    special = np.array([np.inf, np.nan, 3.4e38, 1e-45, 65519.996, 65520], np.float32)
    return np.concatenate([near, -near, special, -special, random])


def one_key(v: Any, rows: int, out: Any) -> Any:
    """o of `rows` rows that see one key of weight 1: v itself, through load (or pack) and store; 16 values a head."""
    heads = v.reshape(1, -1, 1, 16)
    q, k = np.ones((1, heads.shape[1], rows, 1), np.float32), np.ones((1, heads.shape[1], 1, 1), np.float32)
    o = tw.attention(q, k, heads, bc=16, span=16, out=np.empty((1, heads.shape[1], rows, 16), out))
    assert (bits(o[:, :, :1]) == bits(o)).all()
    return o[0, :, 0].reshape(-1)


@every_half
@pytest.mark.parametrize("rows", [1, 20])
def test_every_bit_pattern_through_a_value(half: Any, rows: int, target: str) -> None:
    """To float32, and back to itself: but -0 becomes +0, and NaN the one NaN."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = half.values(every) + np.float32(0)
    values[np.isnan(values)] = np.nan
    assert_same(one_key(every.view(half.dtype), rows, np.float32), values)
    assert_same(one_key(every.view(half.dtype), rows, half.dtype), half.rounded(values))


@every_half
@pytest.mark.parametrize("rows", [1, 20])
def test_rounding_of_results(half: Any, rows: int, target: str) -> None:
    """To nearest, ties to even, subnormals kept, infinity past the largest: for all borders of the type."""
    x = dense_set(half)
    x = np.concatenate([x, x[: -len(x) % 16]])
    with np.errstate(invalid="ignore"):  # NumPy reports signalling NaN
        expected = half.rounded(x + np.float32(0))
    assert_same(one_key(x, rows, half.dtype), expected)


@every_half
@pytest.mark.parametrize("rows", [1, 20])
def test_every_bit_pattern_through_query_and_key(half: Any, rows: int) -> None:
    """lse of one key is its score: the bits of the same number in float32."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(half.dtype).reshape(1, -1, 1, 1)
    one = half.rounded(np.ones((1, 1 << 16, 1, 1), np.float32))
    wide, ones = half.values(every).reshape(every.shape), np.ones((1, 1 << 16, 1, 1), np.float32)
    for q, k, wide_q, wide_k in ((every, one, wide, ones), (one, every, ones, wide)):
        got = tw.attention(np.repeat(q, rows, 2), k, one, bc=16, span=16, return_lse=True)
        expected = tw.attention(np.repeat(wide_q, rows, 2), wide_k, ones, bc=16, span=16, return_lse=True)
        assert_same(got, (half.rounded(expected[0]), expected[1]))


# ---- where numbers are extreme


@every_half
@every_case
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-6, 3e38])
def test_special_inputs(half: Any, c: Case, name: str, value: float) -> None:
    x = getattr(c, name).copy()
    x[:, -1, -1, 3] = x[:, 0, :1] = value
    h = halved(replace(c, **{name: x}), (half,) * 4)
    assert_same(h.run(), h.expected())


@every_half
def test_subnormal_inputs_and_results(half: Any) -> None:
    c = CASES["prefill"]
    tiny = np.float32(half.magnitudes[1] * 3)
    h = halved(replace(c, v=c.v * tiny, k=c.k * tiny), (half,) * 4)
    assert 0 < np.abs(h.single.v).max() < half.magnitudes[1 << half.significant]
    o, lse = h.run()
    assert (half.values(o) != 0).any()
    assert_same((o, lse), h.expected())


@every_half
def test_overflow_at_the_store(half: Any) -> None:
    """float32 values beyond the type: infinity, from half a place past the largest on; and no fault."""
    largest = half.magnitudes[half.infinity - 1]
    c = CASES["few"]
    v = np.sign(c.v) * np.float32(largest)
    for factor, infinite in ((1.0, False), (1 + half.spacing(largest) / largest, True)):
        wide = (
            (v * np.float32(factor))
            if half is F16
            else np.clip(v.astype(float) * factor, -3.4e38, 3.4e38).astype(np.float32)
        )
        one = HalfCase(*[Case(c.q[:, :, :, :], c.k[:, :, :1], wide[:, :, :1], {"bc": 16, "span": 16})] * 2, half)
        o, lse = one.run()
        assert np.isinf(half.values(o)).any() == infinite
        assert_same((o, lse), one.expected())


@every_half
def test_caller_that_flushes_subnormals(half: Any) -> None:
    """As after torch.set_flush_denormal(True), with inputs and results that are subnormal in the half type."""
    c = CASES["few"]
    tiny = np.float32(half.magnitudes[1] * 3)
    h = halved(replace(c, v=c.v * tiny), (half,) * 4)
    expected = h.expected()
    given = {"return_lse": True, "pool": 1, **h.half.options}
    part = {name: x for name, x in given.items() if name not in ("return_lse", "sinks")}
    with flushing_subnormals():
        got = tw.attention(h.half.q, h.half.k, h.half.v, **given)
        partial = tw.attention_partial(h.half.q, h.half.k, h.half.v, k_offset=0, **part)
        merged = tw.merge([partial], sinks=c.options["sinks"]).finish()
    assert_same(got, expected)
    assert_same(merged, expected)


@every_half
def test_invisible_garbage(half: Any) -> None:
    c = CASES["prefill"]
    h = halved(c, (half,) * 4)
    hidden = ~c.visible().any(1)[0]
    assert hidden.any()
    k, v = h.half.k.copy(), h.half.v.copy()
    for x in (k, v):
        x.view(np.uint16)[:, :, hidden] = 0x7FFF
    assert_same(replace(h.half, k=k, v=v).run(), h.expected())


def test_half_types_are_halves() -> None:
    assert F16.dtype.itemsize == BF16.dtype.itemsize == 2
    assert (F16.infinity, BF16.infinity) == (0x7C00, 0x7F80)
