"""benchmarks/compare.py: it times the tree that it is told to, and says which workloads there are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="trees are compared by forked processes")


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/compare.py", *map(str, arguments)]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_tree_that_was_made_slower_is_found_slower(tmp_path: Path) -> None:
    slow = shutil.copytree(SRC, tmp_path / "slow")
    entry = slow / "tilewise" / "attention.py"
    was = "    return run(make_problem, arguments"
    text = entry.read_text()
    assert text.count(was) == 1
    entry.write_text(text.replace(was, "    import time\n    time.sleep(0.002)\n" + was))
    done = compare(SRC, slow, SRC, "-w", "call", "--rounds", 4)
    assert not done.returncode, done.stderr
    ratios = [float(x) for x in re.findall(r"ratio ([\d.]+)", done.stdout)]
    assert len(ratios) == 3
    assert ratios[0] == 1.0
    assert ratios[1] > 10 > ratios[2], done.stdout


def test_unknown_workloads_are_refused_with_the_names_of_all() -> None:
    done = compare(SRC, "-w", "W0")
    assert done.returncode == 2
    assert re.search("W0: choose from .*W7b", done.stderr)
