"""Attention of PyTorch's CPU tensors: `import tilewise.torch as tt`, then `tt.attention(q, k, v, causal=True)`."""

from tilewise.frontends.flex import create_block_mask, flex_attention
from tilewise.frontends.sdpa import scaled_dot_product_attention
from tilewise.frontends.torch import attention, attention_by_token, attention_paged, attention_varlen

__all__ = [
    "attention", "attention_by_token", "attention_paged", "attention_varlen", "create_block_mask", "flex_attention",
    "scaled_dot_product_attention",
]  # fmt: skip
