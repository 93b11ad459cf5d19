"""What a layer finds of the layer before it: only tensors that are alike in all that matters may take its way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

frontend = importlib.import_module("tilewise.frontends.transformers")
hf_launch = importlib.import_module("tilewise.frontends.hf_launch")
range_mask = importlib.import_module("tilewise.frontends.hf_masks").range_mask
B, H, N, D = 2, 4, 40, 16


class Layer:
    is_causal = True


class Sub(torch.Tensor):
    pass


def random(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def qkv(seed: int) -> list[Any]:
    return [random(B, heads, N, D, seed=seed + i) for i, heads in enumerate((H, 2, 2))]


def attend(tensors: list[Any], mask: Any, **options: Any) -> Any:
    return frontend.attention(Layer, *tensors, mask, **{"scaling": 0.3, **options})[0]


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    real = hf_launch._looked_up
    monkeypatch.setattr(hf_launch, "_looked_up", lambda calls, layer: seen.append(layer) or real(calls, layer))
    return seen


def test_alike_layers_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, mask = looked_up(monkeypatch), range_mask(B, N, N)
    with torch.no_grad():
        got = [attend(qkv(seed), mask) for seed in (1, 2, 3)]
        assert len(seen) == 1
        assert all(
            torch.equal(o, attend(qkv(seed), range_mask(B, N, N))) for o, seed in zip(got, (1, 2, 3), strict=True)
        )


OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "strides": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), {}),
    "negated": (torch._neg_view, {}),
    "type": (lambda x: x.as_subclass(Sub), {}),
    "dtype": (lambda x: x.bfloat16(), {}),
    "scale": (lambda x: x, {"scaling": 0.2}),
    "softcap": (lambda x: x, {"softcap": 5.0}),
    "sinks": (lambda x: x, {"s_aux": random(H, seed=9)}),
    "bias": (lambda x: x, {"position_bias": random(1, H, N, N, seed=8)}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_other_layers_have_their_own_way(name: str, which: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what they give with a mask of their own, or are refused as they are there."""
    change, options = OTHERS[name]
    seen, mask = looked_up(monkeypatch), range_mask(B, N, N)
    tensors = [change(x) if i in which else x for i, x in enumerate(qkv(5))]
    with torch.no_grad():
        attend(qkv(1), mask)
        outcomes = []
        for each in (mask, range_mask(B, N, N)):
            try:
                outcomes.append(attend(tensors, each, **options).float().numpy().tobytes())
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        assert outcomes[0] == outcomes[1]
        assert len(seen) == 3
        attend(qkv(2), mask)


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_refused_after_layers_without(which: int) -> None:
    mask, tensors = range_mask(B, N, N), qkv(1)
    attend(tensors, mask)
    tensors[which].requires_grad_(True)
    with pytest.raises(Exception, match="grad"):
        attend(tensors, mask)
    with torch.no_grad():
        assert torch.isfinite(attend(tensors, mask)).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("which", range(3))
def test_tangents_are_refused_after_layers_without(which: int) -> None:
    forward_ad, mask, tensors = torch.autograd.forward_ad, range_mask(B, N, N), qkv(1)
    with torch.no_grad(), forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == which else x for i, x in enumerate(tensors)]
        with pytest.raises(NotImplementedError) as alone:
            attend(dual, range_mask(B, N, N))
    with torch.no_grad():
        attend(tensors, mask)
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == which else x for i, x in enumerate(tensors)]
            with pytest.raises(type(alone.value)) as after:
                attend(dual, mask)
    assert str(after.value) == str(alone.value)


def test_without_the_guard_every_layer_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, mask = looked_up(monkeypatch), range_mask(B, N, N)
    monkeypatch.setattr(hf_launch, "TensorGuards", None)
    with torch.no_grad():
        a = [attend(qkv(seed), mask) for seed in (1, 1)]
    assert torch.equal(*a)
    assert len(seen) == 2


def test_keys_that_are_values() -> None:
    mask, (q, k, _) = range_mask(B, N, N), qkv(1)
    with torch.no_grad():
        a, b = (attend([q, k, k], mask) for _ in range(2))
        assert torch.equal(a, b)
        assert torch.equal(a, attend([q, k, k.clone()], mask))


@pytest.mark.parametrize("which", range(3))
def test_what_is_no_tensor_is_refused_as_ever(which: int) -> None:
    mask, tensors = range_mask(B, N, N), qkv(1)
    others = [x.numpy() if i == which else x for i, x in enumerate(tensors)]
    with torch.no_grad():
        with pytest.raises(TypeError) as alone:
            attend(others, range_mask(B, N, N))
        attend(tensors, mask)
        with pytest.raises(TypeError) as after:
            attend(others, mask)
    assert str(after.value) == str(alone.value)
