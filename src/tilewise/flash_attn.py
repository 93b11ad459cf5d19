"""FlashAttention 2's functions on the CPU: import them from `tilewise.flash_attn` instead of from `flash_attn`."""

from tilewise.frontends.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]  # fmt: skip
