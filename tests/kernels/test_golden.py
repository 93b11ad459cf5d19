"""The text of a few kernels, word by word: a refactoring leaves every byte as it is.

A change that is meant is accepted by `pytest tests/kernels --update-golden`, and its diff is read before it is
committed. The kernels are the smallest that between them hold every part: tails of D, Dv and Bc and a short panel in
the one, no tail and a panel of 16 rows in the other; half types, and states written instead of o and lse, in a third.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tilewise.kernels.forward import forward_kernel
from tilewise.kernels.merge import merge_kernel, merge_shape
from tilewise.kernels.roof import fma_kernel, product_kernel, read_kernel
from tilewise.kernels.tables import Shape
from tilewise.simd.builder import Kernel

FOLDER = Path(__file__).parents[1] / "golden" / "kernels"
UPDATE = "pytest tests/kernels --update-golden"
KERNELS = {
    kernel.name: kernel
    for kernel in (
        forward_kernel(Shape(20, 33, 33, 4, 4, 4)),
        forward_kernel(Shape(16, 16, 16, 16, 2, 1)),
        forward_kernel(Shape(16, 1, 16, 1, 1, 1, ("f16", "bf16", "f16", "f32"), partial=True)),
        merge_kernel(merge_shape(17, "bf16")),
        fma_kernel(2, 2),
        product_kernel(2, 2),
        read_kernel(),
    )
}


def difference(expected: str, got: str) -> str:
    lines = list(difflib.unified_diff(expected.splitlines(), got.splitlines(), "golden", "now", lineterm="", n=1))
    more = f"\n... and {len(lines) - 40} more lines" if len(lines) > 40 else ""
    return "\n".join(lines[:40]) + more


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_golden(name: str, update_golden: bool) -> None:
    path, text = FOLDER / f"{name}.txt", str(KERNELS[name])
    if update_golden:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert path.exists(), f"no golden text of {name}: {UPDATE}"
    expected = path.read_bytes()
    if text.encode() != expected:
        pytest.fail(f"{name} has changed; if it was meant to: {UPDATE}\n{difference(expected.decode(), text)}")


def test_no_golden_file_is_left_over(update_golden: bool) -> None:
    left = {path.name for path in FOLDER.iterdir()} - {f"{name}.txt" for name in KERNELS}
    if update_golden:
        for name in left:
            (FOLDER / name).unlink()
    else:
        assert not left, f"golden texts of no kernel: {', '.join(sorted(left))}; to drop them: {UPDATE}"


def test_text_is_the_same_every_time() -> None:
    for name, kernel in KERNELS.items():
        assert isinstance(kernel, Kernel)
        assert str(kernel) == str(kernel)
        assert str(kernel).startswith(f"def {name}(table, worker):\n")
