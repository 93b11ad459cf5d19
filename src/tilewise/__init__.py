"""tilewise: exact FlashAttention on the CPU, the same bits every time."""

from tilewise.attention import attention, scratch_bytes
from tilewise.blockmask import BlockMask, block_mask
from tilewise.cache import PagedKVCache
from tilewise.config import config
from tilewise.errors import ArenaExhausted, CacheFull, InvalidArgument, KernelError, ShapeError, TargetError
from tilewise.partial import Partial, attention_partial, merge
from tilewise.prefill import prefill_chunks
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool
from tilewise.serving import attention_paged, attention_varlen

__version__ = "0.1.0"
__all__ = [
    "Arena", "ArenaExhausted", "BlockMask", "CacheFull", "InvalidArgument", "KernelError", "PagedKVCache", "Partial",
    "Pool", "ShapeError", "TargetError",
    "attention", "attention_paged", "attention_partial", "attention_varlen", "block_mask", "config", "merge",
    "prefill_chunks", "scratch_bytes",
]  # fmt: skip
