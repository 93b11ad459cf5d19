"""`tilewise verify --bits`: the golden bits on a user's machine, and which recipe they are of."""

from __future__ import annotations

import json

import pytest

from tilewise.cli.app import run
from tilewise.verify.bits import PROBLEMS, RECIPE, expected


def test_verify_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--bits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROBLEMS) + 1
    assert f"all {len(PROBLEMS)} checks hold, the golden bits of recipe {RECIPE}," in lines[-1]


def test_verify_bits_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--bits", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["recipe"], verdict["ok"], len(verdict["checks"])) == (RECIPE, True, len(PROBLEMS))


def test_verify_bits_that_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**expected(), "plain": {**expected()["plain"], "o": "0" * 64}}
    monkeypatch.setattr("tilewise.verify.bits.expected", lambda: wrong)
    assert run(["verify", "--bits"]) == 1
    out = capsys.readouterr().out
    assert "1 of" in out.splitlines()[-1]
    assert "FAIL  plain" in out
