"""The examples do what they say, and notice when a bit differs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw

SCHEDULER = Path(__file__).parents[2] / "examples" / "serving_scheduler.py"
REQUEST = re.compile(r"^(\w+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", re.M)


def main(*arguments: str) -> int:
    return runpy.run_path(str(SCHEDULER))["main"]([*arguments])


def test_scheduler_as_a_program() -> None:
    done = subprocess.run([sys.executable, SCHEDULER], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: list(map(int, numbers)) for name, *numbers in REQUEST.findall(done.stdout)}
    assert list(rows) == ["story", "fork", "long", "short", "whole", "brief"]
    assert rows["fork"][:3] == [225, 209, 200]  # tokens, prompt, forked: it took the pages of the shared prompt
    assert all(differ == 0 for *_, differ in rows.values())
    assert all(calls > 1 for *_, calls, _ in rows.values())  # each was prefilled in chunks or decoded, in several steps


@pytest.mark.parametrize("page_size", [1, 7, 64, 512])
@pytest.mark.parametrize("budget", [6, 97])
def test_scheduler_at_other_sizes(page_size: int, budget: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--page-size", str(page_size), "--budget", str(budget)) == 0
    assert len(REQUEST.findall(capsys.readouterr().out)) == 6


@pytest.mark.parametrize("which", ["o", "lse"])
def test_scheduler_notices_one_bit(which: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The lowest bit of one element of one call: of the 20th step, the first row."""
    attention, calls = tw.attention_paged, 0

    def flawed(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        o, lse = attention(*arguments, **options)
        calls += 1
        if calls == 20:
            (o if which == "o" else lse).view(np.uint32)[0, 0, ...].flat[0] ^= 1
        return o, lse

    monkeypatch.setattr(tw, "attention_paged", flawed)
    assert main() == 1
    assert sum(int(numbers[-1]) for _, *numbers in REQUEST.findall(capsys.readouterr().out)) == 1


def test_scheduler_refuses_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--pages", "3"), ("--budget", "1")):
        with pytest.raises(SystemExit):
            main(*arguments)
        assert "must fit the cache" in capsys.readouterr().err
