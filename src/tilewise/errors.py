"""The errors that tilewise raises, beyond Python's own TypeError.

Each derives from the built-in error that a caller who has never heard of tilewise would catch.
Every message names the argument, what came and what was expected.
"""

from __future__ import annotations

__all__ = ["ArenaExhausted", "CacheFull", "InvalidArgument", "KernelError", "ShapeError", "TargetError"]


class InvalidArgument(ValueError):
    """An argument, option or environment variable has a value that is refused."""


class ShapeError(ValueError):
    """The axes of the arrays disagree with each other, or with what attention needs."""


class ArenaExhausted(MemoryError):
    """Scratch was asked for beyond the arena's limit, or beyond what the system has."""


class CacheFull(MemoryError):
    """A paged cache has too few free pages for the tokens; nothing was changed."""


class TargetError(RuntimeError):
    """The target is not in the table, or this machine cannot run it (no FMA)."""


class KernelError(RuntimeError):
    """A check of what a kernel read or wrote failed. It is a bug in tilewise, not in its caller."""
