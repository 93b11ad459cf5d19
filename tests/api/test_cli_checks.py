"""`tilewise verify` and `tilewise parity`: the catalogue passes here, and notices what it is there to notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise import verify
from tilewise.cli.app import run
from tilewise.cli.checks import GRID

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        return code, *capsys.readouterr()

    return call


def test_the_catalogue_holds_the_names_of_the_specification() -> None:
    names = [check.name for check in verify.catalogue()]
    assert names[:9] == [
        "hand_example", "gqa_causal_window_match_naive", "sinks_join_the_denominator",
        "no_visible_key_gives_zeros_and_minus_inf", "chunk_invariant_with_q_offset",
        "query_tile_and_batch_invariant", "arena_rewound_and_scratch_independent_of_tk",
        "pool_result_equals_serial_bitwise", "shape_and_argument_errors",
    ]  # fmt: skip
    assert len(set(names)) == len(names)


# products in recipe step 4 rounds more than the blocks of a matrix product (gqa_causal_window_match_naive).
def test_verify_passes_here(command: Command) -> None:
    code, text, err = command("verify")
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert (code, err) == (0, "")
    assert len(lines) == len(verify.catalogue()) + 1
    assert f"all {len(lines) - 1} checks hold" in lines[-1]


def test_verify_reports_a_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit(found: verify.Findings) -> None:
        x = np.ones(5, np.float32)
        y = x.copy()
        y.view(np.uint32)[3] ^= 1
        found.same("a bit", y, x)

    def broken(found: verify.Findings) -> None:
        raise RuntimeError("broken on purpose")

    checks = [verify.Check("bit", "claim", one_bit), verify.Check("broken", "claim", broken)]
    checks.append(verify.Check("sound", "claim", lambda found: found.same("x", np.zeros(2), np.zeros(2))))
    monkeypatch.setattr("tilewise.verify.catalogue", lambda: checks)
    code, text, _ = command("verify")
    assert code == 1
    lines = text.splitlines()
    assert lines[0].startswith("FAIL  bit")
    assert "1 bits differ: a bit: 1 of 5 values differ" in lines[0]
    assert "RuntimeError: broken on purpose" in lines[1]
    assert lines[2].startswith("ok    sound")
    assert "2 of 3 checks failed" in lines[3]
    code, text, _ = command("verify", "--json")
    document = json.loads(text)
    assert (code, document["ok"]) == (1, False)
    assert [(x["name"], x["ok"], x["bits"]) for x in document["checks"]] == [
        ("bit", False, 1), ("broken", False, 0), ("sound", True, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["chunks", "threads", "decode", "br", "batch", "pool_result_equals_serial_bitwise"])
def test_invariance_checks_notice_bits_that_depend_on_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in whose bits depend on the shape of the call, on br and on the pool fails each of them."""
    real = tw.attention

    def moved(q: Any, *arrays: Any, **arguments: Any) -> Any:
        o, lse = real(q, *arrays, **arguments)
        moves = q.shape[0] + q.shape[2] + arguments.get("br", 0)
        if arguments.get("pool") not in (None, 1):
            moves += 1000
        return o * np.float32(1 + moves * 2.0**-20), lse

    monkeypatch.setattr(tw, "attention", moved)
    (check,) = (check for check in verify.catalogue() if check.name == name)
    (result,) = verify.run([check])
    assert not result.ok
    assert result.bits > 0


@pytest.mark.parametrize("wrong", ["o", "lse"])
@pytest.mark.parametrize("name", ["hand_example", "gqa_causal_window_match_naive", "sinks_join_the_denominator"])
def test_contract_checks_notice_errors(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tw.attention

    def off(*arrays: Any, **arguments: Any) -> Any:
        result = real(*arrays, **arguments)
        if not arguments.get("return_lse"):
            return result * np.float32(1.0001)
        o, lse = result
        return (o * np.float32(1.0001), lse) if wrong == "o" else (o, lse + np.float32(1e-4))

    monkeypatch.setattr(tw, "attention", off)
    (check,) = (check for check in verify.catalogue() if check.name == name)
    (result,) = verify.run([check])
    assert not result.ok


def test_accuracy_takes_no_finite_number_for_nan() -> None:
    truth = np.array([1.0, np.nan, -np.inf])
    good = truth.astype(np.float32)
    assert verify.accuracy(good, good, truth).ok
    for wrong in ([1, 0, -np.inf], [1, np.nan, np.inf], [np.nan, np.nan, -np.inf], [1.001, np.nan, -np.inf]):
        assert not verify.accuracy(np.array(wrong, np.float32), good, truth).ok


def test_parity_passes_here(command: Command) -> None:
    code, text, _ = command("parity")
    assert "FAIL" not in text, text
    assert code == 0


def test_parity_fails_where_the_error_is_too_large(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tw.attention
    monkeypatch.setattr("tilewise.cli.checks.GRID", GRID[:3])
    assert command("parity")[0] == 0
    monkeypatch.setattr(tw, "attention", lambda *a, **b: tuple(x + np.float32(1e-3) for x in real(*a, **b)))
    code, text, _ = command("parity")
    assert code == 1
    assert text.count("FAIL") == 4
