"""The constants of a variant: what may happen to a score before its row's softmax (softcap, a score function, ALiBi, a
bias), and which keys a row sees beyond its range (a mask, a bias that is not -inf, a keep function). All of it is
folded away where a call has none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.kernels.hooks import Hook

# What a block mask says of a panel of rows and a tile of keys, a byte: one of these, and, where the tile has no more
# groups of 16 keys than fit, 4 times the first group that some row sees, and 32 times the last.
SKIP, PARTIAL, FULL = 0, 1, 2
KINDS, GROUPS = 4, 8


@dataclass(frozen=True)
class Operand:
    """A mask or bias [.., row, key] of a call: its element, and whether it has one for all keys."""

    type: str  # u8, f32, f16 or bf16
    spread: bool


@dataclass(frozen=True)
class Variant:
    """The constants of a variant that a kernel is specialised for."""

    softcap: bool = False
    score: Hook | None = None
    alibi: bool = False
    bias: Operand | None = None
    mask: Operand | None = None
    keep: Hook | None = None  # a block mask says which tiles need a look at their elements

    @property
    def name(self) -> str:
        """A part of the kernel's name; nothing where there is no variant."""
        parts = [name for name in ("softcap", "alibi") if getattr(self, name)]
        parts += [f"{hook.kind}_{hook.digest}" for hook in (self.score, self.keep) if hook]
        for name in ("bias", "mask"):
            operand = getattr(self, name)
            if operand:
                parts.append(f"{name}_{operand.type}" + "_spread" * operand.spread)
        return "".join(f"_{part}" for part in parts)

    @property
    def plain(self) -> bool:
        return not self.name

    @property
    def changes(self) -> bool:
        """Whether scores are changed before the softmax."""
        return bool(self.softcap or self.score or self.alibi or self.bias)

    @property
    def elements(self) -> bool:
        """Whether what a row sees is more than a range."""
        return self.arrays or self.keep is not None

    @property
    def arrays(self) -> bool:
        """Whether arrays tell what a row sees: the kernel looks at each tile of them."""
        return bool(self.bias or self.mask)

    @property
    def hooks(self) -> list[Hook]:
        return [hook for hook in (self.score, self.keep) if hook]


PLAIN = Variant()
