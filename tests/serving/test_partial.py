"""Partial results merged in order give the bits of one call; bytes carry them; whatever does not fit is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.serving.batches import assert_same
from tests.support import RUNNABLE, Case, case, sinks_for
from tilewise.visibility import bounds, visible_range

# (B, H, Hkv, Tq, Tk, D, Dv), options; bc and span odd and even, masks, offsets, rows that see nothing
PROBLEMS: dict[str, Case] = {
    "plain": case(2, 2, 1, 5, 131, 17, 24, bc=16, span=32),
    "decode": case(3, 6, 2, 1, 200, 17, 24, bc=16, span=48, causal=True, q_offset=[199, 150, 17]),
    "causal": case(1, 4, 2, 70, 150, 17, 24, bc=33, span=33, causal=True, q_offset=80),
    "window": case(2, 6, 2, 40, 130, 17, 24, bc=5, span=15, causal=True, window=50, q_offset=[90, 200]),
    "both sides": case(1, 2, 2, 30, 100, 17, 24, bc=5, span=15, window=9, q_offset=20),
    "sinks": case(1, 4, 1, 20, 90, 17, 24, bc=16, span=16, causal=True, q_offset=60, sinks=sinks_for(4)),
    "default tile and span": case(1, 4, 2, 3, 2100, 17, 24, causal=True, q_offset=2097),
}
every_problem = pytest.mark.parametrize("c", PROBLEMS.values(), ids=list(PROBLEMS))


def span_of(c: Case) -> int:
    return c.options.get("span") or 1024


def part(c: Case, lo: int, hi: int, first: int = 0, **changes: Any) -> tw.Partial:
    """Of the keys [lo, hi) of the case, whose first is at position `first`."""
    given = {name: x for name, x in {**c.options, **changes}.items() if name != "sinks"}
    return tw.attention_partial(c.q, c.k[:, :, lo:hi], c.v[:, :, lo:hi], k_offset=first + lo, **given)


def parts(c: Case, cuts: Iterable[int], **changes: Any) -> list[tw.Partial]:
    return [part(c, lo, hi, **changes) for lo, hi in pairwise([0, *cuts, c.k.shape[2]])]


def finished(partials: list[tw.Partial], c: Case) -> Any:
    return tw.merge(partials, sinks=c.options.get("sinks")).finish()


def same(a: tw.Partial, b: tw.Partial) -> None:
    """Equal in every field."""
    for field in fields(tw.Partial):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            assert x.shape == y.shape, field.name
            assert x.tobytes() == y.tobytes(), field.name
        else:
            assert x == y, field.name


@every_problem
def test_cut_at_every_span(c: Case) -> None:
    """In two at each boundary, in all spans at once, and not at all: the bits of one call."""
    expected, borders = c.run(pool=1), range(span_of(c), c.k.shape[2], span_of(c))
    assert len(borders) >= 2
    for border in borders:
        assert_same(finished(parts(c, [border]), c), expected, border)
    assert_same(finished(parts(c, borders), c), expected, "every span alone")
    assert_same(finished(parts(c, []), c), expected, "one part")


@every_problem
def test_any_grouping(c: Case) -> None:
    """Merging is associative: merged parts are parts. A generator will do."""
    every = parts(c, range(span_of(c), c.k.shape[2], span_of(c)))
    whole = tw.merge(every)
    for i in range(1, len(every)):
        same(tw.merge([tw.merge(every[:i]), tw.merge(every[i:])]), whole)
    same(tw.merge(p for p in every), whole)
    same(tw.merge([whole]), whole)


@every_problem
def test_states_are_what_the_parts_add(c: Case) -> None:
    """m, l and a of each span in float64, by the definition: of the spans that a row does not see (-inf, 0, 0)."""
    p, span, group = part(c, 0, c.k.shape[2]), span_of(c), c.q.shape[1] // c.k.shape[1]
    assert p.a.shape == (c.q.shape[0], -(-c.k.shape[2] // span), *c.q.shape[1:3], c.v.shape[3])
    visible, scale = c.visible(), float(np.float32(c.q.shape[3] ** -0.5))
    q, k, v = (x.astype(np.float64) for x in (c.q, c.k.repeat(group, 1), c.v.repeat(group, 1)))
    for s in range(p.a.shape[1]):
        keys = slice(s * span, (s + 1) * span)
        y = np.einsum("bhid,bhjd->bhij", q, k[:, :, keys]) * scale * np.log2(np.e)
        y[~np.broadcast_to(visible[:, None, :, keys], y.shape)] = -np.inf
        m = y.max(-1, initial=-np.inf)
        weights = np.exp2(y - np.where(np.isinf(m), 0, m)[..., None])
        np.testing.assert_allclose(p.stats[:, s, ..., 0], m, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(p.stats[:, s, ..., 1], weights.sum(-1), rtol=1e-4)
        np.testing.assert_allclose(p.a[:, s], weights @ v[:, :, keys], rtol=1e-3, atol=1e-3)
        unseen = np.isinf(m)
        assert (p.a[:, s][unseen].view(np.uint32) == 0).all()
        assert (p.stats[:, s, ..., 1][unseen].view(np.uint32) == 0).all()


@every_problem
@pytest.mark.parametrize("spans", [1, 5])
def test_keys_further_on(c: Case, spans: int) -> None:
    """A context whose first key is not at position 0."""
    first, n = spans * span_of(c), c.k.shape[2]
    offset = {"q_offset": [c.of_sequence("q_offset", b) + first for b in range(c.q.shape[0])]}
    border = span_of(c)
    moved = [part(c, 0, border, first, **offset), part(c, border, n, first, **offset)]
    assert_same(finished(moved, c), c.run(k_offset=first, **offset))


@pytest.mark.parametrize("name", ["decode", "causal", "sinks"])
def test_targets(name: str, target: str) -> None:
    c = PROBLEMS[name]
    got = finished(parts(c, [span_of(c)]), c)
    with tw.config(target=None):
        assert_same(got, c.run(), target)


@pytest.mark.parametrize("name", ["decode", "causal"])
def test_parts_of_different_machines(name: str) -> None:
    """Each part by another target, threads and query tile, checked or not, through bytes."""
    c, every = PROBLEMS[name], []
    borders = list(range(span_of(c), c.k.shape[2], span_of(c)))
    settings = itertools.cycle([{"check": 2}, *({"target": name} for name in RUNNABLE)])
    for i, (lo, hi) in enumerate(pairwise([0, *borders[:4], c.k.shape[2]])):
        with tw.config(**next(settings)):
            every.append(tw.Partial.from_bytes(part(c, lo, hi, br=i * 3, pool=1 + i % 2).to_bytes()))
    assert_same(finished(every, c), c.run())


@every_problem
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads(c: Case, threads: int) -> None:
    for br in (0, 8):
        assert_same(finished(parts(c, [span_of(c)], pool=threads, br=br), c), c.run(pool=1), br)


def test_checked() -> None:
    c, arena = PROBLEMS["decode"], tw.Arena()
    with tw.config(check=2):
        got = finished(parts(c, [48, 144], arena=arena), c)
    assert_same(got, c.run())
    assert arena.used == 0 < arena.high_water


def test_a_fault_of_the_merge_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel returns the address of an access out of bounds."""
    p = part(PROBLEMS["sinks"], 0, 90)
    monkeypatch.setattr("tilewise.runtime.launch.executable", lambda kernel: lambda table, worker: 0xBAD)
    with pytest.raises(tw.KernelError, match="0xbad"):
        p.finish()


@pytest.mark.parametrize("sinks", [False, True])
def test_interpreted(sinks: bool) -> None:
    c = case(1, 2, 1, 3, 25, 9, 5, bc=5, span=10, causal=True, q_offset=20, sinks=sinks_for(2) if sinks else None)
    with tw.config(interpret=True):
        interpreted = finished(parts(c, [10]), c)
    assert_same(interpreted, c.run())


def test_layouts() -> None:
    c = PROBLEMS["causal"]
    strange = Case(*(np.repeat(x, 2, 2)[:, ::-1, ::2][:, ::-1] for x in (c.q, c.k, c.v)), c.options)
    assert_same(finished(parts(strange, [33]), strange), c.run())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(value: float) -> None:
    """It acts as in one call: seen or not, in a key or in a value."""
    for name, index in (("k", (0, 0, 40)), ("k", (0, 1, 149, 3)), ("v", (0, 0, 10)), ("v", (0, 1, 149, 2))):
        c = PROBLEMS["causal"]
        x = getattr(c, name).copy()
        x[index] = value
        odd = Case(*(x if n == name else getattr(c, n) for n in "qkv"), c.options)
        assert_same(finished(parts(odd, [33, 66]), odd), odd.run(), (name, index))


def test_invisible_garbage() -> None:
    """No row sees the last span, nor the first: they may hold NaN, and their parts are the identity."""
    c = case(1, 2, 1, 4, 96, 17, 24, bc=16, span=16, causal=True, window=20, q_offset=40)
    k, v = c.k.copy(), c.v.copy()
    hidden = ~c.visible().any(1)[0]
    assert hidden[:16].all()
    assert hidden[-16:].all()
    k[:, :, hidden] = v[:, :, hidden] = np.nan
    dirty = Case(c.q, k, v, c.options)
    assert_same(finished(parts(dirty, range(16, 96, 16)), dirty), c.run())


# ---- the identity


@every_problem
def test_empty_parts_are_the_identity(c: Case) -> None:
    """Anywhere, any number of them, also first, also at another position."""
    empty = part(c, 0, 0)
    assert empty.empty
    assert empty.a.shape[1] == 0
    border = span_of(c)
    later = part(c, border, border)
    every = parts(c, [border])
    expected = c.run()
    for mixed in ([empty, *every], [*every, empty], [every[0], later, every[1]], [later, *every, empty, empty]):
        assert_same(finished(mixed, c), expected)
        same(tw.merge(mixed), tw.merge(every))


def test_nothing_but_empty_parts() -> None:
    c = PROBLEMS["sinks"]
    empty = part(c, 0, 0)
    o, lse = tw.merge([empty, empty]).finish()
    assert (o.view(np.uint32) == 0).all()
    assert np.isneginf(lse).all()
    sinks = c.options["sinks"]
    o, lse = tw.merge([empty], sinks=sinks).finish()
    assert (o == 0).all()
    assert_same(lse, np.broadcast_to(sinks[None, :, None], lse.shape))


def test_a_part_alone_is_attention_over_its_keys() -> None:
    c = PROBLEMS["plain"]
    expected = tw.attention(c.q, c.k[:, :, 32:96], c.v[:, :, 32:96], k_offset=32, return_lse=True, **c.options)
    assert_same(part(c, 32, 96).finish(), expected)


def test_no_rows_or_sequences() -> None:
    x = np.zeros((2, 2, 0, 8), np.float32)
    k = np.zeros((2, 2, 70, 8), np.float32)
    for q in (x, np.zeros((2, 2, 3, 8), np.float32)[:0]):
        B = len(q)
        p = tw.attention_partial(q, k[:B], k[:B], k_offset=0, q_offset=0, bc=16, span=32)
        o, lse = tw.Partial.from_bytes(p.to_bytes()).finish()
        assert o.shape == q.shape
        assert lse.shape == q.shape[:3]


# ---- sinks


def test_sinks_are_given_once() -> None:
    c = PROBLEMS["sinks"]
    sinks, every = c.options["sinks"], parts(c, [16, 48])
    first = tw.merge(every[:2], sinks=sinks)
    assert_same(tw.merge([first, every[2]]).finish(), c.run())
    assert_same(tw.merge([every[0], tw.merge(every[1:], sinks=sinks)]).finish(), c.run())
    with pytest.raises(tw.InvalidArgument, match="sinks are given twice"):
        tw.merge([first, every[2]], sinks=sinks)
    with pytest.raises(tw.InvalidArgument, match="sinks are given twice"):
        tw.merge([tw.merge(every[:1], sinks=sinks), tw.merge(every[1:], sinks=sinks)])
    mine = sinks.copy()
    kept = tw.merge(every, sinks=mine)
    mine[:] = 99
    assert_same(kept.finish(), c.run())


# ---- what is refused


def base(**changes: Any) -> Case:
    return case(2, 4, 2, 3, 64, 17, 24, bc=16, span=16, causal=True, q_offset=61).change(**changes)


def test_order_overlap_and_gaps() -> None:
    c = base()
    a, b, d, e = parts(c, [16, 32, 48])
    for wrong in ([b, a], [a, d], [a, b, b], [a, a], [a, b, e], [a, e, d], [tw.merge([a, b]), b], [d, a, b]):
        with pytest.raises(tw.InvalidArgument, match="follow one another: one ends before position"):
            tw.merge(wrong)
    unfinished = part(c, 0, 20)  # ends inside a span: nothing can follow
    for after in (b, part(c, 32, 64)):
        with pytest.raises(tw.InvalidArgument, match="position 20"):
            tw.merge([unfinished, after])


ALIENS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q_offset": (tw.InvalidArgument, "positions", {"q_offset": 62}),
    "q_offset of one": (tw.InvalidArgument, "positions", {"q_offset": [61, 60]}),
    "causal": (tw.InvalidArgument, "causal", {"causal": False}),
    "window": (tw.InvalidArgument, "window", {"window": 9}),
    "scale": (tw.InvalidArgument, "scale", {"scale": 0.3}),
    "scale, one place": (
        tw.InvalidArgument,
        "scale",
        {"scale": float(np.nextafter(np.float32(17**-0.5), np.float32(1)))},
    ),
    "bc": (tw.InvalidArgument, "bc", {"bc": 8}),
    "span": (tw.InvalidArgument, "span", {"span": 32}),
}


@pytest.mark.parametrize("name", ALIENS)
def test_parts_of_other_problems(name: str) -> None:
    kind, word, changes = ALIENS[name]
    c = base()
    first, second = part(c, 0, 32), part(c, 32, 64)
    tw.merge([first, second])
    alien = part(c, 32, 64, **changes)
    for wrong in ([first, alien], [first, tw.Partial.from_bytes(alien.to_bytes())], [alien, part(c, 64, 64)]):
        with pytest.raises(kind, match=rf"partials\[1\].*{word}"):
            tw.merge(wrong)


def test_parts_of_other_shapes() -> None:
    first = part(base(), 0, 32)
    for shape in (
        (1, 4, 2, 3, 64, 17, 24),
        (2, 8, 2, 3, 64, 17, 24),
        (2, 4, 2, 2, 64, 17, 24),
        (2, 4, 2, 3, 64, 17, 16),
    ):
        with pytest.raises(tw.ShapeError, match=r"partials\[1\]"):
            tw.merge([first, part(case(*shape, **base().options), 32, 64)])
    half = base()
    other = Case(half.q.astype(np.float16), half.k, half.v, half.options)
    with pytest.raises(tw.InvalidArgument, match="type = f16"):
        tw.merge([first, part(other, 32, 64)])
    for wrong in (None, first.to_bytes(), (first.a, first.stats), first.a):
        with pytest.raises(TypeError, match=r"partials\[1\]"):
            tw.merge([first, wrong])
    with pytest.raises(tw.InvalidArgument, match="no partial"):
        tw.merge([])
    for sinks, kind in (([0.0] * 4, TypeError), (np.zeros(4), TypeError), (np.zeros(2, np.float32), tw.ShapeError)):
        with pytest.raises(kind, match="sinks"):
            tw.merge([first], sinks=sinks)


def test_same_scale_said_in_two_ways() -> None:
    """None and its value, in float64 or float32: what counts is float32."""
    c = case(1, 2, 2, 3, 32, 17, 24, bc=16, span=16)
    default = float(np.float32(17**-0.5))
    for scale in (17**-0.5, default, np.float32(default)):
        assert_same(tw.merge([part(c, 0, 16), part(c, 16, 32, scale=scale)]).finish(), c.run())


WRONG: dict[str, tuple[type[Exception], list[str], dict[str, Any]]] = {
    "k_offset inside a span": (tw.InvalidArgument, ["k_offset", "multiple", "16", "24"], {"k_offset": 24}),
    "k_offset at a tile, not a span": (tw.InvalidArgument, ["k_offset", "32", "16"], {"k_offset": 16, "span": 32}),
    "k_offset negative": (tw.InvalidArgument, ["k_offset", "-16"], {"k_offset": -16}),
    "k_offset None": (TypeError, ["k_offset", "None"], {"k_offset": None}),
    "k_offset True": (TypeError, ["k_offset", "True"], {"k_offset": True}),
    "k_offset float": (TypeError, ["k_offset", "16.0"], {"k_offset": 16.0}),
    "k_offset array": (TypeError, ["k_offset"], {"k_offset": np.array([0, 16])}),
    "k_offset far": (tw.InvalidArgument, ["k_offset", str(1 << 57)], {"k_offset": 1 << 57}),
    "q_offset unclear": (tw.InvalidArgument, ["q_offset", "position 16"], {"k_offset": 16, "q_offset": None}),
    "q_offset negative": (tw.InvalidArgument, ["q_offset", "-1"], {"q_offset": -1}),
    "span no multiple": (tw.InvalidArgument, ["span", "bc = 16"], {"span": 24}),
    "causal 1": (TypeError, ["causal"], {"causal": 1}),
    "arena number": (TypeError, ["arena", "int"], {"arena": 1}),
    "pool 0": (tw.InvalidArgument, ["pool"], {"pool": 0}),
    "sinks": (TypeError, ["sinks"], {"sinks": np.zeros(4, np.float32)}),
    "out": (TypeError, ["out"], {"out": np.zeros((2, 4, 3, 24), np.float32)}),
    "kv_len": (TypeError, ["kv_len"], {"kv_len": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    kind, words, changes = WRONG[name]
    c, arena = base(), tw.Arena()
    given = {**c.options, "k_offset": 0, "arena": arena, **changes}
    with pytest.raises(kind) as error:
        tw.attention_partial(c.q, c.k, c.v, **given)
    assert type(error.value) is kind
    for word in words:
        assert word in str(error.value)
    assert arena.high_water == 0


def test_ranges_of_finish_are_those_of_the_kernel() -> None:
    """Which rows are empty is decided by indices: also far away, and where the window leaves nothing."""
    c = case(2, 2, 1, 9, 20, 17, 24, bc=16, span=16, window=3, q_offset=[15, 1 << 50])
    p = part(c, 0, 20)
    left, right = bounds(False, 3)
    empty = [
        [lo >= hi for lo, hi in (visible_range(q + i, 0, 20, left, right) for i in range(9))]
        for q in p.q_offset.tolist()
    ]
    assert sum(map(sum, empty)) == 2 + 9
    assert_same(p.finish(), c.run())
    assert np.isneginf(p.finish()[1]).all(1).tolist() == empty
