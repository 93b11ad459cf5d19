"""What tilewise does not have is refused by the name that the model's user knows; nothing falls back."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tilewise.errors import InvalidArgument, ShapeError

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

tiny = importlib.import_module("tests.frontends.tiny_models")
frontend = importlib.import_module("tilewise.frontends.transformers")
masks = importlib.import_module("tilewise.frontends.hf_masks")
attention, range_mask = frontend.attention, masks.range_mask
COMMON, IDS = tiny.COMMON, tiny.IDS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Layer:
    is_causal = True


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    frontend.register()


@pytest.fixture
def qkv() -> tuple[Any, Any, Any]:
    return tuple(torch.zeros(2, heads, 5, 8) for heads in (4, 2, 2))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("dropout", 0.1, "dropout"),
        ("output_attentions", True, "output_attentions"),
        ("indices", torch.zeros(1), "selected keys"),
        ("block_indices", torch.zeros(1), "selected blocks"),
        ("sinks", torch.zeros(4), "sinks"),
    ],
)
def test_features_are_refused_by_name(qkv: Any, option: str, value: Any, words: str) -> None:
    mask = range_mask(2, 5, 5)
    attention(Layer, *qkv, mask, **{option: False if value is True else None if option != "dropout" else 0.0})
    with pytest.raises(NotImplementedError, match=words):
        attention(Layer, *qkv, mask, **{option: value})


def test_models_are_refused_by_name() -> None:
    ids = {"input_ids": IDS}
    llama = tiny.decoder(T.LlamaConfig(**COMMON, attention_dropout=0.1), "tilewise")
    with pytest.raises(NotImplementedError, match="query requires a gradient"):
        llama(**ids)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"LlamaAttention needs dropout.*model\.eval"):
        llama.train()(**ids)


def mask(*visible: str) -> Any:
    return torch.tensor([[[[c == "1" for c in row] for row in visible]]])


def test_masks_that_no_attention_could_use_are_refused(qkv: Any) -> None:
    q, k, v = (x[:1] for x in qkv)
    with pytest.raises(TypeError, match=r"bool or float, got torch\.int64"):
        attention(Layer, q, k, v, mask("11111").long())
    for wrong in (
        mask("1111"),
        mask("11111", "11111"),
        mask("11111").expand(1, 3, 1, 5),
        mask("11111").expand(2, 1, 1, 5),
    ):
        with pytest.raises(ShapeError, match=r"must have shape \[1, 1 or 4, 5, 5\], got \("):
            attention(Layer, q, k, v, wrong)
    with pytest.raises(ShapeError, match=r"bias must be broadcastable to \(1, 4, 5, 5\)"):
        attention(Layer, q, k, v, None, position_bias=torch.ones(1, 3, 5, 5))
    paged = {"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}
    with pytest.raises(NotImplementedError, match="position_bias"):
        frontend.paged_attention(Layer, q, k, v, None, position_bias=torch.ones(1, 4, 5, 5), **paged)


def test_masks_of_other_shapes_are_refused(qkv: Any) -> None:
    for wrong in (range_mask(1, 5, 5), range_mask(2, 4, 5), range_mask(2, 5, 6)):
        with pytest.raises(ShapeError, match=r"the mask is for \[B, Tq, Tk\]"):
            attention(Layer, *qkv, wrong)


def test_a_model_without_a_mask(qkv: Any) -> None:
    q, k, v = qkv
    assert torch.equal(attention(Layer, q, k, v, None)[0], attention(Layer, q, k, v, range_mask(2, 5, 5))[0])
    both_ways = range_mask(2, 5, 5, mask_function=T.masking_utils.bidirectional_mask_function)
    assert torch.equal(attention(Layer, q, k, v, None, is_causal=False)[0], attention(Layer, q, k, v, both_ways)[0])
    with pytest.raises(InvalidArgument, match="is causal and has 3 query rows for 5 keys"):
        attention(Layer, q[:, :, :3], k, v, None)
    with pytest.raises(NotImplementedError, match="sliding window of 3, but its model made no mask"):
        attention(Layer, q, k, v, None, is_causal=False, sliding_window=3)


def test_packed_sequences_must_be_told_by_position_ids(qkv: Any) -> None:
    q, k, v = (x[:1] for x in qkv)
    with pytest.raises(InvalidArgument, match="pass the position_ids"):
        attention(Layer, q, k, v, range_mask(1, 5, 5), cu_seq_lens_q=torch.tensor([0, 2, 5]))


def test_a_model_may_ask_the_mask_but_not_compute_with_it() -> None:
    made = range_mask(2, 5, 7, 2)
    assert (made.shape, made.ndim, made.dtype, made.device.type) == ((2, 1, 5, 7), 4, torch.bool, "cpu")
    assert made[:, :, :, :7] is made
    assert made.to("cpu") is made
    assert made.stride() == (0, 0, 0, 0)
    for change in (
        lambda m: m[:, :, :, :5],
        lambda m: m[[1, 0]],
        lambda m: ~m,
        lambda m: m.float(),
        lambda m: m + 1.0,
        lambda m: m.tolist(),
    ):
        with pytest.raises(NotImplementedError, match="computes with its attention mask"):
            change(made)


def test_a_whole_model_cannot_be_compiled() -> None:
    model = tiny.decoder(T.LlamaConfig(**COMMON), "tilewise")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="or a compiler, computes with its attention mask"):
        compiled(input_ids=IDS)
    torch._dynamo.reset()
