"""mask and bias: any broadcastable shape, stride 0, half types; the same mask said in four ways; what is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_as_accurate_as_naive, assert_same_bits, inputs, poisoned, sinks_for
from tests.variants.calls import (
    DENSE,
    RNG,
    TK,
    TQ,
    B,
    H,
    assert_invariant,
    assert_rings_agree,
    assert_same_bits_on_threads,
    assert_what_a_row_does_not_see_does_not_count,
    assert_what_is_hidden_does_not_count,
    call,
    dense,
    small,
    with_sinks,
)
from tilewise.arguments import BFLOAT16
from tilewise.simd import interp

BIAS = RNG.standard_normal((B, H, TQ, TK)).astype(np.float32)
HIDING = np.where(DENSE, BIAS, -np.inf).astype(np.float32)
SHAPES = [(), (1,), (TK,), (TQ, 1), (TQ, TK), (H, 1, TK), (H, TQ, TK), (B, 1, 1, 1), (B, 1, 1, TK), (B, H, TQ, TK)]


def part(x: Any, shape: tuple[int, ...]) -> Any:
    """A part of x [B, H, Tq, Tk] of a shape that can be broadcast to it."""
    return x[tuple(slice(n) for n in (1,) * (4 - len(shape)) + shape)].reshape(shape)


@pytest.mark.parametrize("options", [{"mask": DENSE}, {"mask": DENSE, "bias": HIDING}], ids="-".join)
def test_it_is_invariant(options: Any) -> None:
    assert_invariant(call(causal=True, **options))


def test_rings_agree() -> None:
    assert_rings_agree(small(mask=DENSE, bias=HIDING))
    assert_rings_agree(small(mask=DENSE[..., :1], bias=BIAS[..., :1].astype(np.float16)))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(with_sinks(call(mask=DENSE, bias=HIDING)))


@pytest.mark.parametrize("options", [{"mask": DENSE}, {"bias": HIDING}], ids="-".join)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_accurate(options: Any, causal: bool) -> None:
    c = with_sinks(call(causal=causal, **options))
    assert_as_accurate_as_naive(c.run(), c)


def test_what_does_nothing_is_nothing() -> None:
    plain = call().run()
    for options in ({"mask": np.ones((TQ, TK), np.bool_)}, {"bias": np.zeros((TQ, TK), np.float32)}):
        assert_same_bits(plain, call(**options).run())
    for options in (
        {"mask": np.array(True)},
        {"bias": np.zeros((1,), np.float32)},
        {"bias": np.array(np.float32(-0.0))},
    ):
        assert_same_bits(plain, call(**options).run())


# ---- one mask, four ways
@pytest.mark.parametrize(
    ("range_of", "keep"),
    [
        ({"causal": True}, lambda b, h, i, j: j <= i),
        ({"window": (20, 5)}, lambda b, h, i, j: (i - j <= 20) & (j - i <= 5)),
        ({"causal": True, "window": 30}, lambda b, h, i, j: (j <= i) & (j > i - 30)),
    ],
    ids=["causal", "window", "both"],
)
@pytest.mark.parametrize("sizes", [{}, {"bc": 33, "span": 66}, {"bc": 160, "span": 160}], ids=["64", "33", "160"])
def test_a_range_a_mask_a_bias_and_a_function(range_of: Any, keep: Any, sizes: Any) -> None:
    expected = call(**range_of, **sizes).run()
    elements = dense(keep)
    c = call(**sizes)
    assert_same_bits(expected, c.run(mask=elements), "mask")
    assert_same_bits(expected, c.run(bias=np.where(elements, 0, -np.inf).astype(np.float32)), "bias")
    assert_same_bits(expected, c.run(keep=keep), "keep")


def test_masks_meet() -> None:
    """A range, a mask, a bias and a function at once hide what any of them hides."""
    other = RNG.random((B, H, TQ, TK)) < 0.8
    together = DENSE & other & dense(lambda b, h, i, j: (j <= i) & (i - j <= 60) & (j % 5 != 2))
    bias = np.where(other, BIAS, -np.inf).astype(np.float32)
    got = call(mask=DENSE, bias=bias, causal=True, window=(60, 3)).run(keep=lambda b, h, i, j: j % 5 != 2)
    assert_same_bits(call(mask=together, bias=BIAS).run(), got)


# ---- shapes, strides, types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_are_broadcast(shape: tuple[int, ...]) -> None:
    mask, bias = part(DENSE, shape), part(BIAS, shape)
    full = (B, H, TQ, TK)
    c = call()
    assert_same_bits(c.run(mask=np.broadcast_to(mask, full).copy()), c.run(mask=mask), "mask")
    assert_same_bits(c.run(bias=np.broadcast_to(bias, full).copy()), c.run(bias=bias), "bias")
    assert_same_bits(
        c.run(mask=mask, bias=bias), c.run(mask=np.broadcast_to(mask, full), bias=np.broadcast_to(bias, full))
    )


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_strides(name: str) -> None:
    x = {"mask": DENSE, "bias": HIDING}[name]
    c, expected = call(), call(**{name: x}).run()
    wide = np.zeros((TQ, B, 2 * H, TK + 5), x.dtype)
    view = wide[:, :, 1::2, 3 : 3 + TK].transpose(1, 2, 0, 3)
    view[:] = x
    assert_same_bits(expected, c.run(**{name: view}), "a view")
    backwards = x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]
    assert_same_bits(expected, c.run(**{name: backwards}), "negative strides")
    assert_same_bits(expected, call(**{name: view}).sequences([1, 0]).sequences([1, 0]).run(), "as a batch")


def test_rows_without_a_stride() -> None:
    x = np.broadcast_to(DENSE[:, :, :1], DENSE.shape)
    assert_same_bits(call(mask=x).run(), call(mask=np.ascontiguousarray(x)).run())


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_half_types_are_read_exactly(dtype: Any) -> None:
    small_bits = (HIDING.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # a bfloat16 holds it
    if dtype == np.float16:
        half = HIDING.astype(np.float16)
        full = half.astype(np.float32)
    else:
        half = (small_bits.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
        full = small_bits
    c = call()
    assert_same_bits(c.run(bias=full), c.run(bias=half))
    assert_same_bits(c.run(bias=full[..., :1]), c.run(bias=np.broadcast_to(half[..., :1], half.shape)))
    with tw.config(check=2):
        assert_same_bits(c.run(bias=full), c.run(bias=half))


# ---- what a row does not see
def test_hidden_keys_do_not_count() -> None:
    by_group = np.repeat(DENSE[:, ::2, :1], 2, axis=1) & np.ones((TQ, 1), np.bool_)
    assert_what_is_hidden_does_not_count(call(mask=by_group), by_group)
    assert_what_is_hidden_does_not_count(call(bias=np.where(by_group, BIAS, -np.inf).astype(np.float32)), by_group)
    assert_what_a_row_does_not_see_does_not_count(call(mask=DENSE), DENSE)
    assert_what_a_row_does_not_see_does_not_count(call(bias=HIDING), DENSE)


def test_a_bias_of_what_is_hidden_does_not_count() -> None:
    bias = np.where(DENSE, BIAS, np.nan).astype(np.float32)
    assert_same_bits(call(mask=DENSE, bias=BIAS).run(), call(mask=DENSE, bias=bias).run())
    bias[~DENSE] = np.inf
    assert_same_bits(call(mask=DENSE, bias=BIAS).run(), call(mask=DENSE, bias=bias).run())


def test_a_visible_nan_in_a_bias_counts() -> None:
    bias = BIAS.copy()
    bias[0, 1, 2, 50] = np.nan
    o, lse = call(bias=bias).run()
    assert np.isnan(o[0, 1, 2]).all()
    assert np.isnan(lse[0, 1, 2])
    assert np.isnan(o).sum() == o.shape[-1]
    assert np.isnan(lse).sum() == 1


def test_elements_outside_of_the_keys_are_not_read() -> None:
    """kv_start and kv_len leave out the first and last: NaN there is nothing."""
    inside = dense(lambda b, h, i, j: (j >= np.array([5, 70])[b]) & (j < np.array([145, 190])[b]))
    assert_same_bits(call(bias=BIAS).run(), call(bias=np.where(inside, BIAS, np.nan).astype(np.float32)).run())


@pytest.mark.parametrize("form", ["mask", "bias", "keep"])
@pytest.mark.parametrize("sinks", [None, sinks_for(H)], ids=["no sinks", "sinks"])
def test_rows_that_see_nothing(form: str, sinks: Any) -> None:
    """0, and -inf or the sink; NaN in all that they do not see."""
    c = call(sinks=sinks)
    k, v = c.k.copy(), c.v.copy()
    k[:], v[:] = np.nan, np.inf
    forms: dict[str, Any] = {
        "mask": np.zeros((TQ, 1), np.bool_), "bias": np.full((1, TK), -np.inf, np.float32),
        "keep": lambda b, h, i, j: j < 0,
    }  # fmt: skip
    out, lse = poisoned((B, H, TQ, 16)), poisoned((B, H, TQ))
    tw.attention(c.q, k, v, **c.arguments(**{form: forms[form]}, out=out, lse=lse))
    assert (out.view(np.uint32) == 0).all()
    expected = np.full(H, -np.inf, np.float32) if sinks is None else sinks
    assert_same_bits(np.broadcast_to(expected[:, None], (B, H, TQ)).copy(), lse)


def test_visible_scores_of_minus_infinity_are_not_nothing() -> None:
    """As without a variant: 0 / 0, and lse -inf."""
    q, k, v = (np.ones((1, 1, n, 1), np.float32) for n in (1, 2, 2))
    k[:] = -np.inf
    o, lse = tw.attention(q, k, v, mask=np.array([True, False]), return_lse=True)
    assert np.isnan(o).all()
    assert np.isneginf(lse).all()


# ---- what is remembered between calls
def test_contents_are_read_at_every_call() -> None:
    mask, bias = DENSE.copy(), BIAS.copy()
    c = call(mask=mask, bias=bias)
    first = c.run()
    mask[:], bias[:] = True, 0
    assert_same_bits(call().run(), c.run())
    mask[:], bias[:] = DENSE, BIAS
    assert_same_bits(first, c.run())


def test_layouts_in_turn() -> None:
    """Other types, shapes and strides of the same bias: no call uses what another one prepared."""
    c = call()
    half = BIAS.astype(np.float16)
    positive = abs(half)  # of the same bits as a bfloat16
    layouts = [
        BIAS, half, half.astype(np.float32), positive, positive.view(BFLOAT16), BIAS[:, :, :1], BIAS[..., :1], BIAS[0],
        np.asfortranarray(BIAS[..., :1]), np.broadcast_to(BIAS[:1], BIAS.shape), BIAS[:, ::-1],
    ]  # fmt: skip
    results = [c.run(bias=x) for x in layouts]
    assert_same_bits(results[1], results[2])
    assert (results[3][0] != results[4][0]).any()
    plain = c.run()
    for _ in range(2):
        for x, expected in zip(layouts, results, strict=True):
            assert_same_bits(expected, c.run(bias=x))
            assert_same_bits(plain, c.run(bias=None))


def test_a_mask_of_the_same_layout_is_not_a_bias() -> None:
    c = call()
    assert (c.run(mask=DENSE)[0] != c.run(bias=BIAS)[0]).any()
    assert_same_bits(c.run(mask=DENSE, bias=BIAS), c.run(bias=BIAS, mask=DENSE))


# ---- batches
def test_sequences_of_few_and_of_many_rows() -> None:
    """They run in two kernels; each finds its own rows of mask and bias."""
    rng = np.random.default_rng(3)
    rows, keys = [1, 30, 0, 2], [50, 33, 7, 20]
    q, k, v = (rng.standard_normal((sum(n), 2, 16), np.float32) for n in (rows, keys, keys))
    mask = rng.random((2, sum(rows), 50)) < 0.7
    bias = rng.standard_normal((sum(rows), 52)).astype(np.float32)
    slopes = rng.random((4, 2)).astype(np.float32)
    ends_q, ends_k = np.cumsum([0, *rows]), np.cumsum([0, *keys])
    o, lse = tw.attention_varlen(
        q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, q_offset=9, mask=mask, bias=bias, alibi_slopes=slopes,
        return_lse=True,
    )  # fmt: skip
    for b, n in enumerate(rows):
        own, of = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        dense_q, dense_k, dense_v = (x.transpose(1, 0, 2)[None] for x in (q[own], k[of], v[of]))
        alone = tw.attention(
            dense_q, dense_k, dense_v, q_offset=9, mask=mask[:, own, : keys[b]], bias=bias[own, : keys[b]],
            alibi_slopes=slopes[b], return_lse=True,
        )  # fmt: skip
        assert alone[0].shape[2] == n
        together = o[own].transpose(1, 0, 2)[None], lse[None, :, own]
        assert_same_bits(alone, together, f"sequence {b}")


@pytest.mark.parametrize(("Tq", "Tk", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_nothing_to_do(Tq: int, Tk: int, batch: int) -> None:
    q, k, v = (np.ones((batch, 2, n, 4), np.float32) for n in (Tq, Tk, Tk))
    for options in (
        {"mask": np.ones((Tq, Tk), np.bool_), "bias": np.zeros((1, Tk), np.float32)},
        {"mask": np.ones(1, np.bool_), "bias": np.zeros((Tq, 1), np.float16)},
        {"keep": lambda b, h, i, j: (b == 1) | (j < i + h)},
        {"keep": lambda b, h, i, j: j < i},
    ):
        o, lse = tw.attention(q, k, v, q_offset=0, return_lse=True, **options)
        assert o.shape == (batch, 2, Tq, 4)
        assert lse.shape == (batch, 2, Tq)
        assert (o == 0).all()
        assert np.isneginf(lse).all()


# ---- whole tiles
def blocky(pieces: list[list[int]], rows: int = 4, keys: int = 16) -> Any:
    """A mask of TQ rows and TK keys in pieces of rows x keys: 0 hidden, 1 seen, 2 every third key, 3 all but one."""
    shown = [np.zeros(keys, bool), np.ones(keys, bool), np.arange(keys) % 3 == 1, np.arange(keys) != 5]
    whole = np.concatenate([np.tile(np.concatenate([shown[x] for x in row]), (rows, 1)) for row in pieces])
    return whole[:TQ, :TK]


PIECES = [  # groups of 16 keys for rows 0 to 3, 4 to 7 and 8
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 0],
    [0, 2, 1, 0, 1, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 1, 3, 1, 1, 0, 0],
]
BLOCKY = blocky(PIECES)
NOT_BLOCKY = np.where(BLOCKY, 0, -np.inf).astype(np.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"mask": BLOCKY}, {"bias": NOT_BLOCKY}, {"mask": BLOCKY, "bias": HIDING}, {"mask": ~BLOCKY}],
    ids="-".join,
)
def test_tiles_hidden_wholly_and_not_at_all(options: Any, causal: bool) -> None:
    """With and without others: no tile's kind moves a bit of a row, or is the wrong one."""
    for c in (call(causal=causal, **options), call(causal=causal, bc=16, span=32, **options)):
        assert_invariant(c)
        assert_as_accurate_as_naive(c.run(), c)


def test_the_same_said_of_tiles_and_of_elements() -> None:
    keep = tw.block_mask(lambda b, h, i, j: BLOCKY[i, j])
    c = call(q_offset=0, kv_start=0, k_offset=0, kv_len=TK)
    seen = c.run(mask=BLOCKY)
    everything = np.ones(1, np.bool_)
    for said in (
        {"bias": NOT_BLOCKY}, {"keep": keep}, {"keep": keep, "mask": BLOCKY}, {"keep": keep, "mask": everything},
    ):  # fmt: skip
        assert_same_bits(seen, c.run(**said))


@pytest.mark.parametrize("rows", [16, 4], ids=["packed", "streamed"])
@pytest.mark.parametrize("name", ["mask", "bias", "keep"])
def test_hidden_tiles_cost_no_products(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 tiles the second is seen, the third in part: the products are those of a call with these keys alone."""
    q, k, v = inputs(1, 1, 1, rows, 64, 16, 16)
    shown = np.zeros((rows, 64), np.bool_)
    shown[:, 16:32], shown[::2, 32:48] = True, True
    hiding = {"mask": shown, "bias": np.where(shown, 0, -np.inf).astype(np.float32)}
    hiding["keep"] = lambda b, h, i, j: shown[i, j]
    products, fma = [0], interp._MEANING["fma"]

    def counted(*operands: Any) -> Any:
        products[0] += 1
        return fma(*operands)

    monkeypatch.setitem(interp._MEANING, "fma", counted)

    def count(k: Any, v: Any, **options: Any) -> int:
        products[0] = 0
        with tw.config(interpret=True):
            tw.attention(q, k, v, q_offset=0, bc=16, span=64, pool=1, **options)
        return products[0]

    everything, two_tiles = count(k, v), count(k[:, :, 16:48], v[:, :, 16:48])
    assert two_tiles < 0.6 * everything
    assert count(k, v, **{name: hiding[name]}) <= two_tiles
