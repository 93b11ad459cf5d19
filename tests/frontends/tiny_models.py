"""Tiny models with random weights, one for each way in which decoders of transformers ask for attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaConfig(**COMMON),
    "mistral": lambda: T.MistralConfig(**COMMON, **WINDOW),
    "qwen2": lambda: T.Qwen2Config(**COMMON, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda: T.Qwen3Config(**COMMON, head_dim=16),
    "gpt_oss": lambda: T.GptOssConfig(
        **COMMON, **MIXED, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # a cap that scores of this size feel
    "gemma2": lambda: T.Gemma2Config(
        **COMMON, **MIXED, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: T.Gemma3TextConfig(**COMMON, **MIXED, head_dim=16, query_pre_attn_scalar=16),
    "phi3": lambda: T.Phi3Config(**COMMON, **WINDOW),
    "gpt2": lambda: T.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "olmo3": lambda: T.Olmo3Config(**COMMON, **MIXED),
    "cohere2": lambda: T.Cohere2Config(**COMMON, **MIXED),
    "deepseek_v3": lambda: T.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=2,
    ),
}  # fmt: skip

IDS = torch.arange(3, 3 + 22).view(2, 11) % 97
PADDED = torch.ones_like(IDS)
PADDED[0, :4] = 0


def fill(model: Any) -> Any:
    """Weights that let every layer show, the same for models of one shape."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (1.0 if "sinks" in name else 0.15))
            if "norm" in name:
                weight.add_(1.0)
    return model.eval()


def decoder(config: Any, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    return fill(T.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float()).to(dtype)


def both(name: str) -> tuple[Any, Any]:
    """The same model with eager attention and with tilewise."""
    return decoder(CONFIGS[name](), "eager"), decoder(CONFIGS[name](), "tilewise")
