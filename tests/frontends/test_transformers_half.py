"""Models in bfloat16 and float16: no further from float32 than eager attention, and the same bits on every way."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

tiny = importlib.import_module("tests.frontends.tiny_models")
frontend = importlib.import_module("tilewise.frontends.transformers")
IDS, PADDED = tiny.IDS, tiny.PADDED
HALF = [torch.bfloat16, torch.float16]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    frontend.register()
    with torch.no_grad():
        yield


class Watched:
    """The attention function of a model, its calls repeated in float32 from the same q, k and v."""

    def __init__(self, function: Any) -> None:
        self.function, self.same, self.dtypes = function, [], set()

    def __call__(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        out, _ = self.function(module, q, k, v, mask, **options)
        exact, _ = self.function(module, q.float(), k.float(), v.float(), mask, **options)
        self.same.append(torch.equal(out, exact.to(out.dtype)))
        self.dtypes.add(out.dtype)
        return out, None


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_every_layer_is_rounded_once(name: str, dtype: Any) -> None:
    """Prefill with padding, and two steps: a layer's output is its float32 output, rounded."""
    model = tiny.decoder(tiny.CONFIGS[name](), "tilewise", dtype)
    watched = Watched(frontend.attention)
    T.AttentionInterface.register(frontend.NAME, watched)
    try:
        cache = T.DynamicCache(config=model.config)
        for a, b in ((0, 9), (9, 10), (10, 11)):
            logits = model(input_ids=IDS[:, a:b], attention_mask=PADDED[:, :b], cache=cache).logits
    finally:
        frontend.register()
    assert logits.isfinite().all()
    assert watched.dtypes == {dtype}
    assert watched.same == [True] * 6


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_are_as_near_to_float32_as_those_of_eager(name: str, dtype: Any) -> None:
    exact = tiny.decoder(tiny.CONFIGS[name](), "eager")
    eager, ours = (tiny.decoder(tiny.CONFIGS[name](), i, dtype) for i in ("eager", "tilewise"))
    want, theirs, mine = (
        m(input_ids=IDS, attention_mask=PADDED, use_cache=False).logits[PADDED.bool()].float()
        for m in (exact, eager, ours)
    )
    # of the same size: the rest of the model rounds as well, and so differs as chance has it
    assert (mine - want).square().mean().sqrt() <= 1.3 * (theirs - want).square().mean().sqrt()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padding_and_steps_move_no_bit_of_attention(name: str, dtype: Any) -> None:
    heads, n, pad = (4, 2, 2), 90, 11
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 16, generator=generator).to(dtype) for h in heads)
    options: dict[str, Any] = {"scaling": 0.3, "softcap": 2.0 if name == "gemma2" else None}
    if name == "gpt_oss":
        options["s_aux"] = torch.randn(4, generator=generator).to(dtype)
    alone = frontend.attention(None, q, k, v, frontend.range_mask(1, n, n), **options)[0]
    wide = [torch.cat([torch.full_like(x[:, :, :pad], torch.nan), x], 2) for x in (q, k, v)]
    real = torch.ones(1, n + pad, dtype=torch.bool)
    real[:, :pad] = False
    padded = frontend.attention(None, *wide, frontend.range_mask(1, n + pad, n + pad, attention_mask=real), **options)[
        0
    ]
    assert torch.equal(padded[:, pad:], alone)
    for i in (0, 1, 63, 64, 65, n - 1):
        step = frontend.attention(
            None, q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], frontend.range_mask(1, 1, i + 1, i), **options
        )[0]
        assert torch.equal(step[:, 0], alone[:, i])


@pytest.mark.parametrize("dtype", HALF)
def test_generation(dtype: Any) -> None:
    """Tokens do not depend on the cache: the layers have the same bits."""
    model = tiny.decoder(tiny.CONFIGS["gemma2"](), "tilewise", dtype)
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    dynamic, static = (
        model.generate(IDS, attention_mask=PADDED, **greedy, **options)
        for options in ({}, {"cache_implementation": "static"})
    )
    assert torch.equal(dynamic, static)
    assert dynamic.shape == (2, 17)
