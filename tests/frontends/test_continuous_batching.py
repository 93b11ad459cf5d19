"""generate_batch of transformers with tilewise inside: the tokens of eager, for requests that come and go."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")
tiny = importlib.import_module("tests.frontends.tiny_models")
frontend = importlib.import_module("tilewise.frontends.transformers")

REQUESTS = [list(range(5, 5 + n)) for n in (5, 3, 11, 7)]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# transformers has no paged cache for keys and values of different head dimensions
NAMES = [name for name in tiny.CONFIGS if name != "deepseek_v3"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    frontend.register()


def batch(model: Any) -> list[list[int]]:
    """What is generated for the requests, 16 tokens a step at most: prompts are cut, and steps mix them with decode."""
    outputs = model.generate_batch(
        inputs=REQUESTS,
        generation_config=T.GenerationConfig(**GREEDY),
        continuous_batching_config=T.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=16),
    )
    return [outputs[name].generated_tokens for name in sorted(outputs)]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = tiny.both(name)
    steps = []
    paged = frontend.paged_attention
    monkeypatch.setattr(frontend, "paged_attention", lambda *a, **o: steps.append(a[1].shape[2]) or paged(*a, **o))
    with frontend.continuous_batching(ours):
        got = batch(ours)
    assert len(steps) > 2 * GREEDY["max_new_tokens"] - 2  # two layers, at least a step a token
    assert max(steps) > len(REQUESTS)  # prompts were in the same steps as tokens
    if name != "gemma2":  # whose soft cap transformers' own paged attention leaves out
        assert got == batch(eager)
    alone = [eager.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in REQUESTS]
    assert got == alone


def test_everything_is_as_before_afterwards() -> None:
    _, ours = tiny.both("llama")
    registry = T.AttentionInterface()
    before = registry["paged|eager"]

    def interrupted() -> None:
        with frontend.continuous_batching(ours):
            assert registry["paged|eager"] is not before
            assert ours.config._attn_implementation == "paged|eager"
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert registry["paged|eager"] is before
    assert ours.config._attn_implementation == "tilewise"


def test_refusals_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = frontend.paged_attention
    asked = {"output_attentions": True}  # as no model of the list asks for what is refused
    monkeypatch.setattr(frontend, "paged_attention", lambda *a, **options: paged(*a, **{**options, **asked}))
    model = tiny.decoder(tiny.CONFIGS["llama"](), "tilewise")
    with (
        pytest.raises(NotImplementedError, match="LlamaAttention needs the attention weights as an output"),
        frontend.continuous_batching(model),
    ):
        batch(model)


@pytest.mark.parametrize("window", [None, 20])
def test_bits_are_those_of_each_request_alone(window: int | None) -> None:
    """A step of three requests: a prompt, the rest of one, a token; a sliding cache keeps the last window - 1 keys."""
    generator = torch.Generator().manual_seed(0)
    whole = [tuple(torch.randn(1, heads, n, 16, generator=generator) for heads in (4, 2, 2)) for n in (30, 50, 70)]
    chunks = [(0, 30), (13, 50), (69, 70)]
    kept = [max(0, first - window + 1) if window else 0 for first, _ in chunks]
    q = torch.cat([x[0][:, :, a:b] for x, (a, b) in zip(whole, chunks, strict=True)], 2)
    k, v = (torch.cat([x[i][:, :, c:b] for x, (_, b), c in zip(whole, chunks, kept, strict=True)], 2) for i in (1, 2))
    rows = torch.tensor([0, *(b - a for a, b in chunks)]).cumsum(0)
    keys = torch.tensor([0, *(b - c for (_, b), c in zip(chunks, kept, strict=True))]).cumsum(0)
    positions = torch.cat([torch.arange(a, b) for a, b in chunks])[None]
    options = {"cu_seq_lens_q": rows, "cu_seq_lens_k": keys, "sliding_window": window, "scaling": 0.3}
    got = frontend.paged_attention(None, q, k, v, None, position_ids=positions, **options)[0]
    function = (
        T.masking_utils.sliding_window_causal_mask_function(window) if window else T.masking_utils.causal_mask_function
    )
    for x, (a, b), row in zip(whole, chunks, rows.tolist(), strict=False):
        mask = frontend.range_mask(1, x[0].shape[2], x[0].shape[2], mask_function=function)
        alone = frontend.attention(None, *x, mask, scaling=0.3)[0]
        assert torch.equal(got[:, row : row + b - a], alone[:, a:b])
    close = frontend.paged_attention(None, q, k, v, None, **options)[0]  # without positions: other tiles, the same keys
    assert (close - got).abs().max() < 1e-6
