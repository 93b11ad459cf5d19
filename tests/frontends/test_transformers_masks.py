"""Dense masks, masks that add, and biases on the scores: what eager's softmax gives, and the bits of ranges."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import tilewise as tw

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

frontend = importlib.import_module("tilewise.frontends.transformers")
masks = importlib.import_module("tilewise.frontends.hf_masks")
attention, range_mask = frontend.attention, masks.range_mask

B, H, HKV, N, D, SCALE = 2, 4, 2, 70, 16, 0.3
MIN = torch.finfo(torch.float32).min


class Layer:
    is_causal = True


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def random(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.fixture
def qkv() -> tuple[Any, Any, Any]:
    return tuple(random(B, heads, N, D, seed=heads + i) for i, heads in enumerate((H, HKV, HKV)))


def ours(qkv: Any, mask: Any, **options: Any) -> Any:
    return attention(Layer, *qkv, mask, scaling=SCALE, **options)[0]


def eager(qkv: Any, *added: Any, softcap: float | None = None) -> Any:
    """Eager attention in float64, the masks added as they are."""
    q, k, v = (x.double() for x in qkv)
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    s = q @ k.mT * SCALE
    s = softcap * torch.tanh(s / softcap) if softcap else s
    for x in added:
        s = s + x.double()
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
HOLES = CAUSAL & (random(B, 1, N, N, seed=9) > -0.5)
HOLES[..., 0] = True  # so that no row sees nothing
HEADS = CAUSAL & (random(1, H, N, N, seed=8) > 0.5)
HEADS[..., 0] = True
LONGER = torch.arange(N).expand(1, H, 1, N) < torch.tensor([20, 30, 50, 70])[None, :, None, None]  # the later heads


@pytest.mark.parametrize(
    "visible", [HOLES, HOLES[:1], HEADS, LONGER, HOLES[:, :, -1:]], ids=["holes", "one", "heads", "longer", "row"]
)
def test_masks_with_holes(qkv: Any, visible: Any) -> None:
    want = eager(qkv, torch.where(visible, 0.0, MIN))
    got = ours(qkv, visible)
    assert (got - want).abs().max() < 2e-6
    for hidden in (MIN, -torch.inf, MIN / 2):
        assert torch.equal(ours(qkv, torch.where(visible, 0.0, hidden)), got)
    if visible.shape[2] == N:
        transposed = visible.transpose(2, 3).contiguous().transpose(2, 3)  # its last axis is not contiguous
        assert torch.equal(ours(qkv, transposed), got)


def test_a_range_given_as_a_dense_mask_has_the_same_bits(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ours(qkv, range_mask(B, N, N))
    assert torch.equal(ours(qkv, CAUSAL[None, None]), want)
    rows = masks._rows
    monkeypatch.setattr(masks, "_rows", lambda slices: (*rows(slices)[:2], False))
    dense = masks._calls_of_tensor(CAUSAL[None, None], (B, N, N))
    assert dense.mask is not None
    monkeypatch.setattr(masks, "calls_of_tensor", lambda *_: dense)
    monkeypatch.setattr(frontend, "calls_of_tensor", lambda *_: dense)
    assert torch.equal(ours(qkv, CAUSAL[None, None]), want)


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_masks_and_biases_that_add(qkv: Any, softcap: float | None) -> None:
    bias = random(1, H, N, N, seed=5) * 3
    causal = torch.where(CAUSAL, 0.0, MIN)[None, None]
    want = eager(qkv, bias, causal, softcap=softcap)
    assert (eager(qkv, causal, softcap=softcap) - want).abs().max() > 0.1  # the bias counts
    by_heads = bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # its last axis is not contiguous, as T5's
    ways = [
        ours(qkv, bias + causal, softcap=softcap),
        ours(qkv, torch.where(CAUSAL, bias, -1e9), softcap=softcap),  # eager's weights are 0 as well
        ours(qkv, range_mask(B, N, N), position_bias=bias, softcap=softcap),
        ours(qkv, CAUSAL[None, None], position_bias=bias, softcap=softcap),
        ours(qkv, None, position_bias=bias, softcap=softcap),
        ours(qkv, range_mask(B, N, N), position_bias=by_heads, softcap=softcap),
        ours(qkv, causal + bias / 2, position_bias=bias / 2, softcap=softcap),
    ]  # fmt: skip
    for got in ways:
        assert (got - want).abs().max() < 2e-6
    assert all(torch.equal(got, ways[2]) for got in ways[3:6])


def test_a_bias_of_zeros_costs_nothing(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = range_mask(B, N, N)
    assert torch.equal(ours(qkv, made, position_bias=torch.zeros(1, H, N, N)), ours(qkv, made))
    assert len(made.calls.made.ready) == 1  # and is no other call


def test_rows_that_see_nothing_are_zero_whatever_hides_their_keys(qkv: Any) -> None:
    visible = HOLES.clone()
    visible[1, :, 3] = visible[1, :, N - 1] = False
    for mask in (visible, torch.where(visible, 0.0, MIN), torch.where(visible, 0.5, -torch.inf)):
        got = ours(qkv, mask)
        assert not got[1, [3, N - 1]].any()
        assert got[0].abs().sum(-1).min() > 0
        assert got.isfinite().all()
    nothing = torch.zeros(B, 1, N, N, dtype=torch.bool)
    assert not ours(qkv, nothing).any()
    nothing[0, 0, 5, 7] = True
    got = ours(qkv, nothing)
    assert torch.equal(got[0, 5, 0], qkv[2][0, 0, 7])
    assert not got[0, :5].any()
    assert not got[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_minimum_is_that_of_the_masks_dtype(qkv: Any, dtype: Any) -> None:
    half = [x.to(dtype) for x in qkv]
    want = ours(half, HOLES)
    assert torch.equal(ours(half, torch.where(HOLES, 0.0, torch.finfo(dtype).min).to(dtype)), want)
    assert torch.equal(ours(half, torch.where(HOLES, 0.0, MIN)), want)
    bias = (random(1, H, N, N, seed=5) * 3).to(dtype)
    added = torch.where(HOLES, bias, torch.finfo(dtype).min)
    exact = eager(half, torch.where(HOLES, bias, torch.tensor(MIN)))
    assert (ours(half, added) - exact).abs().max() < (2e-3 if dtype is torch.float16 else 1.6e-2)


def test_nan_in_a_mask_is_nan_as_in_eager(qkv: Any) -> None:
    mask = torch.where(CAUSAL, 0.0, MIN)[None, None].clone()
    mask[0, 0, 9, 4] = torch.nan
    got = ours(qkv, mask)
    assert got[:, 9].isnan().all()
    assert got[:, [*range(9), *range(10, N)]].isfinite().all()


def test_padding_with_gaps_and_mask_functions_with_holes(qkv: Any) -> None:
    real = torch.ones(B, N, dtype=torch.bool)
    real[0, :5] = real[0, 20:30] = real[1, 50] = False
    made = range_mask(B, N, N, attention_mask=real)
    assert made.calls.mask is not None
    visible = (CAUSAL & real[:, None, None]).expand(B, 1, N, N)
    got = ours(qkv, made)
    want = eager(qkv, torch.where(visible, 0.0, MIN))
    assert (got - want)[0, 5:].abs().max() < 2e-6
    assert (got - want)[1].abs().max() < 2e-6
    assert not got[0, :5].any()
    alone = [torch.cat([x[:1, :, 5:20], x[:1, :, 30:]], 2) for x in qkv]  # other tiles, the same keys
    assert (attention(Layer, *alone, range_mask(1, 55, 55), scaling=SCALE)[0][:, 15:] - got[:1, 30:]).abs().max() < 2e-6

    def strided(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k) % 3 == 0)

    made = range_mask(B, N, N, mask_function=strided)
    i = torch.arange(N)
    visible = CAUSAL & ((i[:, None] - i) % 3 == 0)
    assert (ours(qkv, made) - eager(qkv, torch.where(visible, 0.0, MIN))).abs().max() < 2e-6


def test_left_padding_moves_no_bit_of_a_mask_with_holes(qkv: Any) -> None:
    """The first key that a sequence sees is at position 0, dense or not."""
    pad = 13
    wide = [torch.cat([torch.full_like(x[:, :, :pad], torch.nan), x], 2) for x in qkv]
    visible = torch.zeros(B, 1, N + pad, N + pad, dtype=torch.bool)
    visible[:, :, pad:, pad:] = HOLES
    assert torch.equal(ours(wide, visible)[:, pad:], ours(qkv, HOLES))


@pytest.mark.parametrize("others", range(9))
def test_a_mask_is_read_once_for_all_layers(others: int, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many masks of other models are remembered."""
    remembered = [torch.where(HOLES, 0.0, MIN) for _ in range(others)]
    for mask in remembered:
        ours(qkv, mask)
    read = []
    hides = masks.hides
    monkeypatch.setattr(masks, "hides", lambda x: read.append(x) or hides(x))
    mask, bias = torch.where(HOLES, 0.0, MIN), random(1, H, N, N, seed=5)
    first = ours(qkv, mask, position_bias=bias)
    times = len(read)
    assert times > 0
    assert torch.equal(ours(qkv, mask, position_bias=bias), first)
    assert len(read) == times
    bias.mul_(2)
    assert not torch.equal(ours(qkv, mask, position_bias=bias), first)


def test_it_is_the_cores_attention(qkv: Any) -> None:
    q, k, v = (x.numpy() for x in qkv)
    o = tw.attention(q, k, v, mask=HOLES.numpy(), scale=SCALE, softcap=1.5)
    assert np.array_equal(ours(qkv, HOLES, softcap=1.5).numpy(), o.transpose(0, 2, 1, 3))
