"""attn_implementation="tilewise": models of transformers compute what eager attention computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.errors import ShapeError

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

tiny = importlib.import_module("tests.frontends.tiny_models")
frontend = importlib.import_module("tilewise.frontends.transformers")
masks = importlib.import_module("tilewise.frontends.hf_masks")
launching = importlib.import_module("tilewise.frontends.hf_launch")
attention, range_mask = frontend.attention, masks.range_mask
COMMON, CONFIGS, IDS, PADDED = tiny.COMMON, tiny.CONFIGS, tiny.IDS, tiny.PADDED

TOLERANCE = 1e-5
POSITIONS = torch.tensor([[*range(5), *range(6)]])
MIN = torch.finfo(torch.float32).min

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    frontend.register()


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def causal_4d() -> Any:
    mask = torch.zeros(2, 1, 11, 11).masked_fill(torch.ones(11, 11).triu(1).bool(), MIN)
    return mask.masked_fill((PADDED == 0)[:, None, None, :], MIN)


def in_steps(model: Any, cache: Any, steps: list[tuple[int, int]], mask: Any = lambda end: None) -> Any:
    return torch.cat(
        [
            model(input_ids=IDS[:, a:b], attention_mask=mask(b), cache=cache, use_cache=True).logits
            for a, b in steps
        ], 1,
    )  # fmt: skip


def left_padded(model: Any) -> Any:
    logits = model(input_ids=IDS, attention_mask=PADDED, use_cache=False).logits
    return torch.cat([logits[0, 4:], logits[1]])


def right_padded(model: Any) -> Any:
    logits = model(input_ids=IDS, attention_mask=PADDED.flip(1), use_cache=False).logits
    return torch.cat([logits[0, :7], logits[1]])


def own_mask(model: Any) -> Any:
    logits = model(input_ids=IDS, attention_mask=causal_4d(), use_cache=False).logits
    return torch.cat([logits[0, 4:], logits[1]])


def mask_with_holes(model: Any) -> Any:
    mask = causal_4d()
    mask[:, :, 5:, 4] = MIN
    logits = model(input_ids=IDS, attention_mask=mask, use_cache=False).logits
    return torch.cat([logits[0, 5:], logits[1]])


def padding_with_gaps(model: Any) -> Any:
    padding = PADDED.clone()
    padding[0, 6] = padding[1, 3] = padding[1, 8] = 0
    logits = in_steps(
        model, T.DynamicCache(config=model.config), [(0, 9), (9, 10), (10, 11)], lambda end: padding[:, :end]
    )
    return torch.cat([logits[0, 4:6], logits[0, 7:], logits[1]])


def adding_mask(model: Any) -> Any:
    mask = causal_4d() + torch.linspace(-2, 2, 11)[:, None] * torch.linspace(-1, 1, 11)
    logits = model(input_ids=IDS, attention_mask=mask, use_cache=False).logits
    return torch.cat([logits[0, 4:], logits[1]])


SCENARIOS: dict[str, Callable[[Any], Any]] = {
    "prefill": lambda m: m(input_ids=IDS, use_cache=False).logits,
    "left padding": left_padded,
    "right padding": right_padded,
    "decode": lambda m: in_steps(m, T.DynamicCache(config=m.config), [(0, 9), (9, 10), (10, 11)]),
    "chunks": lambda m: in_steps(m, T.DynamicCache(config=m.config), [(0, 5), (5, 8), (8, 11)]),
    "static cache": lambda m: in_steps(m, T.StaticCache(config=m.config, max_cache_len=16), [(0, 8), (8, 9), (9, 11)]),
    "packed": lambda m: m(input_ids=IDS[:1], position_ids=POSITIONS, use_cache=False).logits,
    "4-D mask": own_mask,
    "4-D mask with holes": mask_with_holes,
    "4-D mask that adds": adding_mask,
    "padding with gaps": padding_with_gaps,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_eager(name: str) -> None:
    eager, ours = tiny.both(name)
    for scenario, run in SCENARIOS.items():
        error = (run(ours) - run(eager)).abs().max().item()
        assert error <= TOLERANCE, f"{scenario}: {error:.2e}"


MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_tokens_are_those_of_eager(name: str) -> None:
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    eager, ours = tiny.both(name)
    for mode, options in MODES.items():
        a, b = (m.generate(IDS, attention_mask=PADDED, **greedy, **options) for m in (eager, ours))
        assert torch.equal(a, b), mode
    a, b = (m.generate(IDS[:1], prompt_lookup_num_tokens=3, **greedy) for m in (eager, ours))
    assert torch.equal(a, b), "prompt lookup"


ENCODER = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: T.BertConfig(**ENCODER),
    "windows on both sides": lambda: T.ModernBertConfig(
        **ENCODER, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, reference_compile=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("flip", [False, True])
def test_encoders_see_both_ways(name: str, flip: bool) -> None:
    padding = PADDED.flip(1) if flip else PADDED
    want, got = (
        tiny.fill(T.AutoModel.from_config(ENCODERS[name](), attn_implementation=implementation))(
            input_ids=IDS, attention_mask=padding
        ).last_hidden_state[padding.bool()]
        for implementation in ("eager", "tilewise")
    )
    assert (got - want).abs().max() <= TOLERANCE


def test_cross_attention() -> None:
    config = T.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    models = [
        tiny.fill(T.BartForConditionalGeneration._from_config(config, attn_implementation=i))
        for i in ("eager", "tilewise")
    ]
    a, b = (m(input_ids=IDS, attention_mask=PADDED, decoder_input_ids=IDS[:, :5]).logits for m in models)
    assert (a - b).abs().max() <= TOLERANCE
    a, b = (m.generate(IDS, attention_mask=PADDED, max_new_tokens=6, do_sample=False) for m in models)
    assert torch.equal(a, b)


def t5_config() -> Any:
    return T.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0,
        eos_token_id=1,
    )  # fmt: skip


def test_position_bias() -> None:
    models = [
        tiny.fill(T.T5ForConditionalGeneration._from_config(t5_config(), attn_implementation=i))
        for i in ("eager", "tilewise")
    ]
    for padding in (PADDED, PADDED.flip(1)):
        a, b = (m(input_ids=IDS, attention_mask=padding, decoder_input_ids=IDS[:, :5]).logits for m in models)
        assert (a - b).abs().max() <= TOLERANCE
        for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
            a, b = (
                m.generate(IDS, attention_mask=padding, max_new_tokens=6, do_sample=False, **options) for m in models
            )
            assert torch.equal(a, b)
    bias = models[1].encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    before = models[1].encoder(input_ids=IDS).last_hidden_state
    bias.mul_(-1)
    assert (models[1].encoder(input_ids=IDS).last_hidden_state - before).abs().max() > 0.01  # it counts here


class Layer:
    """What the attention function reads of a module."""

    is_causal = True


def random(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def layer(
    q: Any, k: Any, v: Any, offset: int, kv_offset: int = 0, mask: Any = None, window: int | None = None, **options: Any
) -> Any:
    """One call as a model makes it; -> [B, H, Tq, Dv]."""
    rule = {"mask_function": T.masking_utils.sliding_window_causal_mask_function(window)} if window else {}
    made = range_mask(len(q), q.shape[2], k.shape[2], offset, kv_offset, attention_mask=mask, **rule)
    return attention(Layer, q, k, v, made, scaling=0.3, **options)[0].transpose(1, 2)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_way_to_the_same_row_moves_a_bit(window: int | None, sinks: bool) -> None:
    n, pad, extra = 150, 37, 29
    q, k, v = random(1, 6, n, 16, seed=1), random(1, 2, n, 16, seed=2), random(1, 2, n, 24, seed=3)
    options = {"window": window, "s_aux": random(6, seed=4) if sinks else None}
    alone = layer(q, k, v, 0, **options)

    def padded(x: Any, left: int, right: int) -> Any:
        return torch.cat(
            [torch.full_like(x[:, :, :left], torch.nan), x, torch.full_like(x[:, :, :right], torch.nan)], 2
        )

    left = [torch.cat([padded(x, pad, 0), padded(x, 0, pad)]) for x in (q, k, v)]
    real = torch.ones(2, n + pad, dtype=torch.bool)
    real[0, :pad] = real[1, n:] = False
    batch = layer(*left, 0, mask=real, **options)
    assert torch.equal(batch[:1, :, pad:], alone)
    assert torch.equal(batch[1:, :, :n], alone)
    assert not batch[0, :, :pad].any()

    static = [padded(x, 0, extra) for x in (k, v)]  # a static cache: what is not filled yet is garbage
    for step in (1, 64):
        for cache in ((k, v), static):
            chunks = [layer(q[:, :, i : i + step], *cache, i, **options) for i in range(0, n, step)]
            assert torch.equal(torch.cat(chunks, 2), alone)
    steps = [
        layer(left[0][:1, :, i : i + 1], *(x[:1, :, : i + 1] for x in left[1:]), i, mask=real[:1, : i + 1], **options)
        for i in range(pad, n + pad)
    ]
    assert torch.equal(torch.cat(steps, 2), alone)
    if window:  # a sliding cache keeps the last window - 1 keys
        first = [max(0, i - window + 1) for i in range(n)]
        rows = [
            layer(q[:, :, i : i + 1], k[:, :, a : i + 1], v[:, :, a : i + 1], i, a, **options)
            for i, a in enumerate(first)
        ]
        assert torch.equal(torch.cat(rows, 2), alone)


def test_a_layer_is_prepared_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = launching.prepare
    monkeypatch.setattr(launching, "prepare", lambda *a: made.append(a) or prepare(*a))
    config = T.Olmo3Config(
        **{**COMMON, "num_hidden_layers": 6}, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 3
    )
    model = tiny.decoder(config, "tilewise")
    model(input_ids=IDS, attention_mask=PADDED, use_cache=False)
    assert len(made) == 2  # a mask for each kind of layer
    model(input_ids=IDS, attention_mask=causal_4d(), use_cache=False)
    assert len(made) == 3


def test_the_plan_of_a_decode_step_is_made_once_in_64_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = launching.prepare
    monkeypatch.setattr(launching, "prepare", lambda *a: made.append(a) or prepare(*a))
    launching._steps.clear()
    options = {"s_aux": random(6, seed=4), "softcap": 1.5}
    q, k, v = random(2, 6, 140, 16, seed=1), random(2, 2, 140, 16, seed=2), random(2, 2, 140, 24, seed=3)
    real = torch.ones(2, 140, dtype=torch.bool)
    real[1, :3] = False
    whole = layer(q, k, v, 0, mask=real, **options)
    made.clear()
    for i in [*range(3, 140), 5]:  # the last one is the first step of another text
        cache = [x[:, :, : i + 1].clone() for x in (k, v)]
        assert torch.equal(
            layer(q[:, :, i : i + 1], *cache, i, mask=real[:, : i + 1], **options)[:, :, 0], whole[:, :, i]
        )
    assert len(made) == 3
    with pytest.raises(ShapeError, match="same KV heads and keys"):  # also where a plan is there
        layer(q[:, :, :1], k[:, :, :100].clone(), v[:, :, :99].clone(), 99, mask=real[:, :100], **options)


def test_threads_knobs_and_a_second_caller_at_once() -> None:
    """What a pass keeps for its layers does not outlive a change of knobs, and is not shared by two threads."""
    q, k, v = random(1, 4, 90, 8, seed=1), random(1, 2, 90, 8, seed=2), random(1, 2, 90, 8, seed=3)
    made = range_mask(1, 90, 90)
    want = attention(Layer, q, k, v, made)[0]
    with tw.config(interpret=True):
        assert torch.equal(attention(Layer, q[:, :, :9], k[:, :, :9], v[:, :, :9], range_mask(1, 9, 9))[0], want[:, :9])
    for knobs in ({"check": 2}, {"debug": 1}, {"threads": 2}):
        with tw.config(**knobs):
            assert torch.equal(attention(Layer, q, k, v, made)[0], want)
    several = [random(1, 4, 90, 8, seed=s) for s in range(40)]
    wanted = [attention(Layer, x, k, v, made)[0] for x in several]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: attention(Layer, x, k, v, made)[0], several * 5))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted * 5, strict=True))


def test_bool_masks_and_masks_of_one_sequence_or_one_row() -> None:
    q, k, v = random(2, 4, 11, 8, seed=1), random(2, 2, 11, 8, seed=2), random(2, 2, 11, 8, seed=3)
    mask = causal_4d()
    assert torch.equal(attention(Layer, q, k, v, mask)[0], attention(Layer, q, k, v, mask == 0)[0])
    assert torch.equal(
        attention(Layer, q, k, v, mask)[0],
        attention(Layer, q, k, v, mask.masked_fill(mask < 0, -torch.inf).expand(2, 4, 11, 11))[0],
    )
    one = mask[1:]
    assert torch.equal(attention(Layer, q, k, v, one)[0], attention(Layer, q, k, v, one.repeat(2, 1, 1, 1))[0])
    keys = mask[:, :, -1:]
    assert torch.equal(attention(Layer, q, k, v, keys)[0], attention(Layer, q, k, v, keys.repeat(1, 1, 11, 1))[0])


def test_a_mask_that_was_changed_in_place_is_read_again() -> None:
    q = k = v = random(2, 1, 11, 8)
    mask = causal_4d()
    before = attention(Layer, q, k, v, mask)[0]
    mask[:, :, :, :2] = MIN
    after = attention(Layer, q, k, v, mask)[0]
    assert not torch.equal(before[1], after[1])
    with torch.inference_mode():
        uncounted = causal_4d()
        assert torch.equal(attention(Layer, q, k, v, uncounted)[0], before)
        uncounted[:, :, :, :2] = MIN
        assert torch.equal(attention(Layer, q, k, v, uncounted)[0], after)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the kernel's count of peak memory")
def test_sinks_at_16k_tokens_take_no_memory_but_the_output() -> None:
    n = 16_384
    q, k, v, sinks = random(1, 2, n, 32, seed=1), random(1, 1, n, 32, seed=2), random(1, 1, n, 32, seed=3), random(2)
    layer(q[:, :, :512], k[:, :, :512], v[:, :, :512], 0, s_aux=sinks)  # compiled before it is measured
    before = peak_bytes(reset=True)
    out = layer(q, k, v, 0, s_aux=sinks)
    assert peak_bytes() - before <= out.nbytes + 8_000_000
    row = tw.attention(
        *(x.numpy() for x in (q[:, :, -1:], k, v)), sinks=sinks.numpy(), scale=0.3, causal=True, q_offset=n - 1
    )
    assert np.array_equal(out[:, :, -1:].numpy(), row)


def peak_bytes(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
