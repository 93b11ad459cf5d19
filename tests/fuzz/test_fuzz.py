"""Bad input never crashes, never writes outside out: a clear error, or the right answer. In processes of their own."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tests.fuzz import trial as module
from tests.fuzz.__main__ import trial_of
from tests.fuzz.trial import Failure, make, run

ROOT = Path(__file__).parents[2]
CASES = 3000


def child(*arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


def test_spoiled_calls() -> None:
    done = child("-m", "tests.fuzz", "--cases", str(CASES), "--seed", "1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_spoiled_calls_drawn_by_hypothesis() -> None:
    done = child("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fuzz/drawn.py")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# ---- what the fuzzer found; each is short enough to wait for


def test_offsets_in_a_ragged_list() -> None:
    q = np.zeros((2, 1, 1, 16), np.float32)
    with pytest.raises((TypeError, tw.ShapeError, tw.InvalidArgument), match="q_offset"):
        tw.attention(q, q, q, q_offset=[[0], [0, 1]])


def test_object_that_makes_no_array() -> None:
    class Makes:
        def __array__(self, dtype: object = None, copy: object = None) -> int:
            return 3

    q = np.zeros((1, 1, 1, 16), np.float32)
    with pytest.raises((TypeError, tw.InvalidArgument), match=r"\bq\b"):
        tw.attention(Makes(), q, q)


@pytest.mark.parametrize("threads", [1 << 45, 1 << 58, 1 << 63, 1 << 90])
def test_more_threads_than_memory(threads: int) -> None:
    """Scratch is a slice a thread; NumPy has three errors for a size that is too much."""
    q = np.zeros((1, 1, 1, 16), np.float32)
    with pytest.raises((MemoryError, tw.InvalidArgument)):
        tw.attention(q, q, q, pool=threads)


@pytest.mark.parametrize("rows", [1 << 45, 1 << 53, 1 << 56])
def test_more_rows_than_memory(rows: int) -> None:
    """The output is what cannot be had, not a number of the plan."""
    q = np.broadcast_to(np.zeros((1, 1, 1, 16), np.float32), (1, 1, rows, 16))
    with pytest.raises(MemoryError):
        tw.attention(q, q[:, :, :0], q[:, :, :0])


def test_many_keys_of_which_few_are_seen() -> None:
    """2^45 keys of stride 0, four of them visible: no work item for each of 2^35 spans that nobody sees."""
    program = """
import numpy as np, tilewise as tw
q = np.ones((1, 1, 1, 16), np.float32)
k = np.broadcast_to(q, (1, 1, 1 << 45, 16))
print(tw.attention(q, k, k, causal=True, q_offset=3, pool=2)[0, 0, 0, 0])
"""
    done = child("-c", program, seconds=20)
    assert done.stdout.strip() == "1.0", done.stderr


# ---- the fuzzer itself must be able to fail


def trials(count: int) -> list[module.Trial]:
    return [make(random.Random(n)) for n in range(count)]


def test_the_same_seed_is_the_same_call() -> None:
    for n in range(50):
        first, second = (trial_of(random.Random(f"7 {n}")) for _ in range(2))
        assert first.what == second.what
        assert first.sizes == second.sizes
        assert [why for why, _ in first.wrong] == [why for why, _ in second.wrong]


def test_notices_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tw.attention, []

    def attention(*operands: object, **options: object) -> object:
        result = real(*operands, **options)
        calls.append(1)
        if len(calls) % 2:  # the call under test, not the one that it is compared with
            o = result[0] if isinstance(result, tuple) else result
            o.view(np.uint32)[..., -1] ^= 1
        return result

    monkeypatch.setattr(tw, "attention", attention)
    trial = next(t for t in trials(99) if t.given["q"].size and t.given["k"].size)
    with pytest.raises(Failure, match="differ in bits"):
        run(trial)


def test_notices_a_write_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = next(t for t in trials(99) if t.rooms and t.rooms[0][0] == "out")
    real, room = tw.attention, trial.rooms[0][1]

    def attention(*operands: object, **options: object) -> object:
        room[0, 0, 0, 0] = 1
        return real(*operands, **options)

    monkeypatch.setattr(tw, "attention", attention)
    with pytest.raises(Failure, match="outside out"):
        run(trial)


@pytest.mark.parametrize("error", [ValueError("q"), RuntimeError("q"), AttributeError("q"), RuntimeWarning("q")])
def test_notices_an_error_of_another_class(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def attention(*operands: object, **options: object) -> object:
        raise error

    monkeypatch.setattr(tw, "attention", attention)
    for trial in trials(3):
        with pytest.raises(Failure, match="expected an answer"):
            run(trial)


def test_notices_what_is_not_refused() -> None:
    trial = trials(1)[0]
    trial.refuse("no reason", TypeError)
    with pytest.raises(Failure, match=r"not refused: .*no reason"):
        run(trial)


@pytest.mark.parametrize(("code", "ended"), [("import os; os.abort()", "-6"), ("import sys; sys.exit(3)", "3")])
def test_notices_a_crash(code: str, ended: str) -> None:
    """In the middle of a run: that call is a failure, and the calls behind it are made."""
    program = f"""
import sys
from tests.fuzz import __main__ as fuzz
real = fuzz.one
def one(seed, number):
    if number == 3:
        {code}
    return real(seed, number)
fuzz.one = one
sys.argv = ["fuzz", *sys.argv[1:]]
fuzz.main()
"""
    wrapper = f"""
import subprocess, sys
from tests.fuzz import __main__ as fuzz
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__([command[0], "-c", {program!r}, *command[3:]], **options)
fuzz.subprocess.Popen = Popen
sys.argv = ["fuzz", "--cases", "6"]
sys.exit(fuzz.main())
"""
    done = child("-c", wrapper)
    assert done.returncode == 1, done.stderr
    assert f"call 3: the process ended with {ended}" in done.stdout
    assert "6 calls" in done.stdout
    assert "1 CRASH" in done.stdout
