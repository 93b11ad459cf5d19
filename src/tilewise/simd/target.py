"""The table of targets: what a machine must have, and the register tile that fits it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm

from tilewise.config import current
from tilewise.errors import TargetError
from tilewise.simd.builder import LANES

VECTOR_BITS = 32 * LANES
TALLEST_TILE = 8  # more rows save no more loads, and cost code
CHAINS = 10  # accumulating registers that keep two units busy which take 4 or 5 cycles
PRODUCT = 4  # vectors: the width of scores of 64 keys, and of V at D = 64; others are mostly a multiple


@dataclass(frozen=True)
class Target:
    """An instruction set. `cpu` is LLVM's name; `features` are what the running machine must have."""

    name: str
    architecture: str
    cpu: str
    vector_bits: int
    registers: int
    features: tuple[str, ...]

    @property
    def triple(self) -> str:
        """LLVM's name of the platform: this process's own, or Linux on another architecture."""
        if self.architecture == host_architecture():
            return str(llvm.get_process_triple())
        return f"{self.architecture}-unknown-linux-gnu"

    @property
    def registers_per_vector(self) -> int:
        """Registers that hold one vector of 16 float32 lanes."""
        return VECTOR_BITS // self.vector_bits

    def register_tile(self, rows: int) -> tuple[int, int]:
        """(mr, nr): accumulators of mr <= rows rows by nr vectors that stay in registers.

        A step of the micro-kernel holds mr * nr accumulators, nr vectors and one broadcast. Among the tiles with enough
        accumulators the one with the fewest loads a product wins, over the blocks of nearly equal height and width
        that `rows` and PRODUCT are cut into; among equals the one that holds more, and the taller one. Where all rows
        fit into one block, they are one.
        """
        tiles = [(mr, nr) for mr in range(1, min(rows, TALLEST_TILE) + 1) for nr in range(1, TALLEST_TILE + 1)]
        fitting = [(mr, nr) for mr, nr in tiles if self._registers_of(mr, nr) <= self.registers]
        fitting = [tile for tile in fitting if tile[0] == rows] or fitting

        def preference(tile: tuple[int, int]) -> tuple[float, ...]:
            height, width = (size / -(-size // most) for size, most in zip((rows, PRODUCT), tile, strict=True))
            held, registers = height * tile[1], self.registers_per_vector
            loads = (height + width * registers) / (height * width * registers)
            return min(CHAINS, held * registers), -loads, held, tile[0]

        return max(fitting, key=preference)

    def _registers_of(self, mr: int, nr: int) -> int:
        return (mr * nr + nr + 1) * self.registers_per_vector


_X86_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            "x86-64-v4", "x86_64", "x86-64-v4", 512, 32,
            (*_X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ),
        Target("x86-64-v3", "x86_64", "x86-64-v3", 256, 16, _X86_V3),
        Target("aarch64", "aarch64", "generic", 128, 32, ("neon",)),
    )
}  # fmt: skip


@functools.cache
def host_architecture() -> str:
    """x86_64 or aarch64, the first part of the triple of this process."""
    architecture = llvm.get_process_triple().split("-")[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, str(architecture))


@functools.cache
def host_features() -> frozenset[str]:
    """The processor features that LLVM sees on this machine (the operating system's support included)."""
    found = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if host_architecture() == "aarch64":
        found.add("neon")  # part of the architecture's base
    return frozenset(found)


def missing_features(target: Target) -> list[str]:
    """What this machine lacks for a target; empty when its code can run here."""
    if target.architecture != host_architecture():
        return [target.architecture]
    return [feature for feature in target.features if feature not in host_features()]


@functools.cache
def find_target(name: str | None) -> Target:
    """The target of that name, or the best one that this machine can run.

    Raises TargetError for an unknown name, and where this machine lacks what the target needs.
    """
    if name is None:
        for target in TARGETS.values():
            if not missing_features(target):
                return target
        lacking = "; ".join(f"{t.name} needs {', '.join(missing_features(t))}" for t in TARGETS.values())
        raise TargetError(f"tilewise needs fused multiply-add and 256-bit or NEON vectors: {lacking}")
    if name not in TARGETS:
        raise TargetError(f"unknown target {name!r}; expected one of {', '.join(TARGETS)}")
    if missing := missing_features(TARGETS[name]):
        raise TargetError(f"target {name} cannot run on this machine: it lacks {', '.join(missing)}")
    return TARGETS[name]


def current_target() -> Target:
    """The target that the configuration asks for (TILEWISE_TARGET), else the best one here."""
    return find_target(current().target)
