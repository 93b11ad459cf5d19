"""tilewise: exact FlashAttention on the CPU, the same bits every time."""

from tilewise.attention import attention, scratch_bytes
from tilewise.config import config
from tilewise.errors import ArenaExhausted, InvalidArgument, KernelError, ShapeError, TargetError
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool

__version__ = "0.1.0"
__all__ = [
    "Arena", "ArenaExhausted", "InvalidArgument", "KernelError", "Pool", "ShapeError", "TargetError",
    "attention", "config", "scratch_bytes",
]  # fmt: skip
