"""scripts/check_structure.py passes on this checkout, and catches what it is there to catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_structure import MAY_IMPORT, problems

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_structure.py"

# A small house that is in order.
SOUND = {
    "__init__.py": "from tilewise.attention import attention\n",
    "attention.py": "from tilewise import problem\nfrom tilewise.plan import Plan\n\n\ndef attention(): ...\n",
    "cli.py": "import click\n\nimport tilewise as tw\nfrom tilewise.reference import attention64\n",
    "config.py": "import os\n",
    "errors.py": "",
    "frontends/torch.py": "def attend():\n    import torch\n\n    from tilewise import attention\n",
    "kernels/forward.py": "import numpy\n\nfrom tilewise.kernels.softmax import init\nfrom ..simd.builder import Vec\n",
    "kernels/softmax.py": "from tilewise.simd import math\n",
    "plan.py": "from tilewise.kernels import forward\nfrom tilewise.runtime.arena import Arena\n",
    "problem.py": "from .errors import ShapeError\nfrom .visibility import visible\n",
    "reference.py": "import math\n\nimport numpy as np\n",
    "runtime/arena.py": "import ctypes\n",
    "simd/builder.py": "from tilewise.config import current\n",
    "simd/jit.py": "import llvmlite.binding as llvm\n\nfrom . import lower\n",
    "simd/lower.py": "from tilewise.simd.builder import Builder\n",
    "simd/math.py": "from .builder import Vec\n",
    "visibility.py": "",
}


def build(root: Path, files: dict[str, str]) -> Path:
    """Writes files, named from src/tilewise, into a tree at root."""
    for name, source in files.items():
        path = root / "src" / "tilewise" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def function(name: str, lines: int) -> str:
    return "\n".join([f"def {name}():", *["    x = 1"] * (lines - 1)]) + "\n"


def test_this_checkout_is_in_order() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sound_tree_passes(tmp_path: Path) -> None:
    assert problems(build(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("simd/builder.py", "from tilewise.kernels import forward", "simd imports kernels"),
        ("simd/builder.py", "from ..problem import Problem", "simd imports problem"),
        ("simd/builder.py", "from .. import visibility", "simd imports visibility"),
        ("kernels/forward.py", "import tilewise.plan", "kernels imports plan"),
        ("kernels/forward.py", "from tilewise.runtime import arena", "kernels imports runtime"),
        ("kernels/forward.py", "import tilewise", "kernels imports __init__"),
        ("plan.py", "def f():\n    from .attention import attention", "plan imports attention"),
        ("runtime/arena.py", "from tilewise import attention", "runtime imports attention"),
        ("runtime/arena.py", "from tilewise import Arena", "runtime imports __init__"),
        ("problem.py", "from tilewise.plan import Plan", "problem imports plan"),
        ("config.py", "from tilewise.simd.target import detect", "config imports simd"),
        ("attention.py", "from tilewise.frontends import torch", "attention imports frontends"),
        ("attention.py", "from tilewise.reference import attention64", "attention imports reference"),
        ("reference.py", "from tilewise.errors import ShapeError", "reference imports errors"),
        ("reference.py", "import scipy", "imports scipy"),
        ("plan.py", "import torch", "imports torch"),
        ("attention.py", "from rich import print", "imports rich"),
        ("kernels/forward.py", "from llvmlite import ir", "imports llvmlite"),
        ("kernels/forward.py", "import torch", "imports torch"),
        ("kernels/forward.py", "import os.path", "imports os"),
        ("kernels/forward.py", "import ctypes", "imports ctypes"),
        ("cli.py", "import llvmlite", "imports llvmlite:"),
        ("simd/builder.py", "import llvmlite.binding", "imports llvmlite:"),
        ("simd/lower.py", "from llvmlite import ir", "imports llvmlite:"),
        ("surprise.py", "", "surprise has no row"),
    ],
)
def test_wrong_import_is_caught(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    found = problems(build(tmp_path, SOUND | {file: source + "\n"}))
    assert len(found) == 1, found
    assert found[0].startswith(f"src/tilewise/{file}:")
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "budget"),
    [("plan.py", 400), ("kernels/forward.py", 400), ("attention.py", 200), ("../../tests/t.py", 400)],
)
def test_file_past_its_budget_is_caught(tmp_path: Path, file: str, budget: int) -> None:
    assert problems(build(tmp_path, {file: "x = 1\n" * budget})) == []
    (found,) = problems(build(tmp_path, {file: "x = 1\n" * (budget + 1)}))
    assert f"{budget + 1} lines, the budget is {budget}" in found


@pytest.mark.parametrize(("file", "budget"), [("plan.py", 60), ("kernels/forward.py", 80), ("simd/builder.py", 60)])
def test_function_past_its_budget_is_caught(tmp_path: Path, file: str, budget: int) -> None:
    assert problems(build(tmp_path, {file: function("f", budget)})) == []
    (found,) = problems(build(tmp_path, {file: "\n" + function("g", budget + 1)}))
    assert found.endswith(f"{file}:2: g has {budget + 1} lines, the budget is {budget}")


def test_exit_code_and_output(tmp_path: Path) -> None:
    run = [sys.executable, SCRIPT, tmp_path]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 2
    build(tmp_path, SOUND | {"simd/math.py": "import tilewise.plan\n"})
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        1,
        "src/tilewise/simd/math.py:1: simd imports plan: imports run one way\n",
    )


def test_every_row_names_known_units() -> None:
    assert set.union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)
