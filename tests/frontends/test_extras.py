"""What is imported, and what is said where PyTorch is not there. Runs without it as well."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Modules that an import of None stands for are not there.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import "


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_core_imports_neither_torch_nor_transformers() -> None:
    done = run("import tilewise, sys; print([x for x in ('torch', 'transformers') if x in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("module", ["tilewise.torch", "tilewise.flash_attn"])
def test_without_torch_the_extra_is_named(module: str) -> None:
    done = run(WITHOUT_TORCH + module)
    assert done.returncode != 0
    assert "this module needs PyTorch, which is not installed: pip install 'tilewise[torch]'" in done.stderr


def test_the_core_works_without_torch() -> None:
    assert run(WITHOUT_TORCH + "tilewise").returncode == 0
