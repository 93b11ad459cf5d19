"""The table of targets: sane rows, register tiles that fit, and a clear refusal of what cannot run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest

from tests.simd.support import NATIVE_TARGETS
from tilewise.config import config
from tilewise.errors import TargetError
from tilewise.kernels.microkernel import widths
from tilewise.simd import target as module
from tilewise.simd.builder import LANES, Builder, Int, Kernel
from tilewise.simd.jit import assembly
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS, Target, current_target, find_target, host_architecture, missing_features

PANELS = (1, 2, 4, 8, 16)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Pretend to be another machine; what the module remembers of this one is forgotten before and after."""
    find_target.cache_clear()
    yield monkeypatch
    find_target.cache_clear()


def pretend(machine: pytest.MonkeyPatch, architecture: str, features: set[str]) -> None:
    machine.setattr(module, "host_architecture", lambda: architecture)
    machine.setattr(module, "host_features", lambda: frozenset(features))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_row_is_sane(target: Target) -> None:
    assert TARGETS[target.name] is target
    assert target.vector_bits in (128, 256, 512)
    assert target.registers in (16, 32)
    assert target.registers_per_vector * target.vector_bits == 32 * LANES
    assert len(set(target.features)) == len(target.features) > 0
    assert ("fma" in target.features) == (target.architecture == "x86_64")  # part of NEON
    assert target.triple.split("-")[0].replace("arm64", "aarch64").replace("amd64", "x86_64") == target.architecture


def test_better_targets_come_first() -> None:
    """The first that can run is taken, so of each architecture the widest vectors come first."""
    for architecture in {t.architecture for t in TARGETS.values()}:
        rows = [t for t in TARGETS.values() if t.architecture == architecture]
        assert rows == sorted(rows, key=lambda t: (-t.vector_bits, -len(t.features)))
        for better, worse in itertools.pairwise(rows):
            assert set(worse.features) < set(better.features)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_register_tile_fits(target: Target, panel: int) -> None:
    mr, nr = target.register_tile(panel)
    assert 1 <= mr <= panel
    assert nr >= 1

    def fits(m: int, n: int) -> bool:
        """Accumulators, the vectors of a step and one broadcast are in registers."""
        return (m * n + n + 1) * target.registers_per_vector <= target.registers

    def chains(m: int, n: int) -> float:
        """Accumulating registers on average, where the panel is cut into blocks of at most m rows; 10 are enough."""
        return min(10, Fraction(panel, -(-panel // m)) * n * target.registers_per_vector)

    def loads(m: int, n: int) -> int:
        """Of one step over the panel by 4 vectors: a register for each broadcast, and those of the vectors."""
        blocks = [(h, w) for h in widths(panel, m) for w in widths(4, n)]
        return sum(h + w * target.registers_per_vector for h, w in blocks)

    assert fits(mr, nr)
    others = [(m, n) for m in range(1, min(panel, 8) + 1) for n in range(1, 9) if fits(m, n)]
    if any(m == panel for m, _ in others):  # few rows stay together
        assert mr == panel
        others = [(m, n) for m, n in others if m == panel]
    most = max(chains(m, n) for m, n in others)
    assert chains(mr, nr) == most
    assert loads(mr, nr) == min(loads(m, n) for m, n in others if chains(m, n) == most)


def test_register_tiles() -> None:
    """What was measured to be fast (docs/explanation/performance.md)."""
    assert [TARGETS["x86-64-v4"].register_tile(rows) for rows in (1, 2, 4, 8, 16)] == [
        (1, 8), (2, 8), (4, 6), (8, 3), (6, 4)
    ]  # fmt: skip
    assert [TARGETS["x86-64-v3"].register_tile(rows) for rows in (1, 4, 8, 16)] == [(1, 3), (4, 1), (6, 1), (6, 1)]


@pytest.mark.parametrize("name", NATIVE_TARGETS)
def test_target_can_be_forced(name: str) -> None:
    assert find_target(name) is TARGETS[name]
    with config(target=name):
        assert current_target() is TARGETS[name]


def test_best_target_is_the_default() -> None:
    assert find_target(None) is TARGETS[NATIVE_TARGETS[0]]
    with config(target=None):
        assert current_target() is TARGETS[NATIVE_TARGETS[0]]


def test_unknown_target_is_refused_with_the_choices() -> None:
    with config(target="x86-64-v9"), pytest.raises(TargetError) as caught:
        current_target()
    assert "'x86-64-v9'" in str(caught.value)
    assert all(name in str(caught.value) for name in TARGETS)


def test_target_of_another_architecture_is_refused() -> None:
    other = "aarch64" if host_architecture() == "x86_64" else "x86-64-v3"
    with config(target=other), pytest.raises(TargetError, match=other) as caught:
        current_target()
    assert TARGETS[other].architecture in str(caught.value)
    assert missing_features(TARGETS[other]) == [TARGETS[other].architecture]


def test_missing_feature_is_named(machine: pytest.MonkeyPatch) -> None:
    pretend(machine, "x86_64", set(TARGETS["x86-64-v3"].features) | {"avx512f"})
    assert find_target(None) is TARGETS["x86-64-v3"]
    with pytest.raises(TargetError, match="avx512bw, avx512cd, avx512dq, avx512vl") as caught:
        find_target("x86-64-v4")
    assert "avx512f" not in str(caught.value)


def test_machine_without_fma_is_refused(machine: pytest.MonkeyPatch) -> None:
    pretend(machine, "x86_64", set(TARGETS["x86-64-v4"].features) - {"fma"})
    with pytest.raises(TargetError, match="fused multiply-add") as caught:
        find_target(None)
    for name in ("x86-64-v3", "x86-64-v4"):
        assert f"{name} needs fma" in str(caught.value)
    with pytest.raises(TargetError, match="lacks fma"):
        find_target("x86-64-v3")


def test_machine_of_a_third_architecture_is_refused(machine: pytest.MonkeyPatch) -> None:
    pretend(machine, "riscv64", {"v"})
    with pytest.raises(TargetError, match="fused multiply-add"):
        find_target(None)


def test_arm_has_its_target(machine: pytest.MonkeyPatch) -> None:
    pretend(machine, "aarch64", {"neon"})
    assert find_target(None) is TARGETS["aarch64"]


def sample(b: Builder, table: Int, worker: Int) -> None:
    p = b.pointer(table, table, table + 64)
    b.store(p, b.fma(b.load(p), b.load(p), b.vec(1.0)))


@pytest.mark.parametrize(
    ("name", "register", "instructions"),
    [("x86-64-v4", "%zmm", 1), ("x86-64-v3", "%ymm", 2), ("aarch64", "v", 4)],
)
def test_assembly_has_the_width_of_the_target(name: str, register: str, instructions: int) -> None:
    """One fma of 16 lanes in registers of that width, also for a machine that is not here; no call of fmaf."""
    text = assembly(llvm_ir(Kernel("sample", sample), TARGETS[name]), TARGETS[name])
    fused = [line for line in text.splitlines() if "vfmadd" in line or "fmla" in line]
    assert len(fused) == instructions
    assert all(register in line for line in fused)
    assert "fmaf" not in text
    assert ("%zmm" in text) == (name == "x86-64-v4")
