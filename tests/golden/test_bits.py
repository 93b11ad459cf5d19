"""The golden bits of recipe 1, met by every ring, target and path. bits.json here is the file that users verify with.

What fails here has moved the bits of users' rows. The file is never written anew for that: see regenerate.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.api.test_recipe_document import assert_document_gives_the_bits
from tests.golden.regenerate import main as regenerate
from tests.support import (
    Case,
    Result,
    assert_as_accurate_as_naive,
    assert_within_error_bound,
    assert_written,
    in_chunks,
    poisoned,
)
from tilewise.verify.bits import PROBLEMS, RECIPE, Problem, check_bits, expected, integers, sum_of

FILE = Path(__file__).with_name("bits.json")
INTERPRETED = 30_000  # multiplications: a second of the interpreter
BY_DOCUMENT = 4_000  # and of the program in plain Python


def case_of(problem: Problem) -> Case:
    (q, k, v), options = problem.operands()
    return Case(q, k, v, options)


def assert_golden(problem: Problem, result: Result, what: str = "") -> None:
    sums = expected()[problem.name]
    for name, x in zip(("o", "lse"), result, strict=True):
        assert sum_of(x) == sums[name], f"{problem.name}: the bits of {name} are not those of recipe {RECIPE} {what}"


def cost(problem: Problem) -> int:
    B, H, _, Tq, Tk, D, Dv = problem.sizes
    return B * H * Tq * Tk * (D + Dv)


# Those of half types are met in tests/half/test_half_golden.py.
SINGLE = [problem for problem in PROBLEMS if set(problem.types) == {"f32"}]
every_problem = pytest.mark.parametrize("problem", SINGLE, ids=lambda problem: problem.name)


def test_the_file_is_of_this_recipe_and_of_these_problems() -> None:
    file = json.loads(FILE.read_text())
    assert file["recipe"] == RECIPE == 1
    assert list(file["problems"]) == [problem.name for problem in PROBLEMS]
    assert file["problems"] == expected()
    sums = [x for one in expected().values() for x in one.values()]
    assert all(len(x) == 64 and set(x) <= set("0123456789abcdef") for x in sums)
    assert len({one["inputs"] for one in expected().values()}) == len(PROBLEMS)


def test_the_integers_are_those_of_splitmix64() -> None:
    """The generator by Python's own integers, and the first outputs that are published for the seed 1234567."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    outputs = [mix((1234567 + i * 0x9E3779B97F4A7C15) % 2**64) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for stream in (0, 7, 4 * len(PROBLEMS), 1234567):
        ours = [(mix((stream + i * 0x9E3779B97F4A7C15) % 2**64) >> 44) - 2**19 for i in range(1, 200)]
        assert integers(stream, 199).tolist() == ours


@every_problem
def test_inputs(problem: Problem) -> None:
    """They are the recorded ones, exactly what the integers say: no rounding took place on the way."""
    c = case_of(problem)
    sinks = c.options.get("sinks")
    assert sum_of(c.q, c.k, c.v, *([] if sinks is None else [sinks])) == expected()[problem.name]["inputs"]
    raw = replace(problem, changes=())
    q, k, _ = raw.operands()[0]
    n = integers(4 * problem.number, q.size).reshape(q.shape)
    assert (np.ldexp(q.astype(np.float64), 19) == n).all()
    Tk = k.shape[2]
    n = integers(4 * problem.number + 1, k.size).reshape(k.shape)
    growth = np.array([8 + 8 * j // Tk for j in range(Tk)], int)[:, None]
    assert (np.ldexp(k.astype(np.float64), 21) == n * growth).all()


# ---- rings


@every_problem
def test_native(problem: Problem, target: str) -> None:
    c = case_of(problem)
    o_shape = (*c.q.shape[:3], c.v.shape[3])
    result = c.run(pool=1, out=poisoned(o_shape), lse=poisoned(o_shape[:3]))
    for x in result:
        assert_written(x)
    assert_golden(problem, result, f"on {target}")


@pytest.mark.parametrize("problem", [p for p in SINGLE if cost(p) <= INTERPRETED], ids=lambda p: p.name)
def test_interpreted(problem: Problem) -> None:
    with tw.config(interpret=True):
        assert_golden(problem, case_of(problem).run(pool=1), "in the interpreter")


@pytest.mark.parametrize("problem", [p for p in SINGLE if cost(p) <= BY_DOCUMENT], ids=lambda p: p.name)
def test_document(problem: Problem) -> None:
    """The program that knows nothing but docs/explanation/recipe.md."""
    c = case_of(problem)
    assert_document_gives_the_bits(c.q, c.k, c.v, **c.options)


# With scores of many thousands, and with sums beyond float32, float32 and float64 are different functions.
BEYOND_FLOAT32 = ("huge_values", "scale_huge", "infinite_values")
# Known limits of recipe 1, one query row and one long tile: docs/explanation/decisions/accuracy.md
LIMITS = ("decode", "decode_of_a_batch", "decode_with_window", "long_plain", "tile_of_512")


@pytest.mark.parametrize("problem", [p for p in SINGLE if p.name not in BEYOND_FLOAT32], ids=lambda p: p.name)
def test_the_bits_are_attention(problem: Problem) -> None:
    """Bits that are wrong could be kept too: these are as near to float64 as can be."""
    c = case_of(problem)
    (assert_within_error_bound if problem.name in LIMITS else assert_as_accurate_as_naive)(c.run(), c)


# ---- paths


@every_problem
@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize("threads", [2, 3])
def test_threads(problem: Problem, threads: int) -> None:
    """Also where spans are work items of their own."""
    for br in (0, 8):
        assert_golden(problem, case_of(problem).run(pool=threads, br=br), f"with {threads} threads, br {br}")


@every_problem
def test_query_tiles(problem: Problem) -> None:
    for br in (1, 3, 5, 16, 33):
        assert_golden(problem, case_of(problem).run(br=br), f"with br {br}")


@every_problem
@pytest.mark.parametrize("size", [1, 4, 17])
def test_chunks(problem: Problem, size: int) -> None:
    """Chunks of one row are decode steps."""
    assert_golden(problem, in_chunks(case_of(problem), size), f"in chunks of {size}")


@every_problem
def test_batch(problem: Problem) -> None:
    """Each sequence alone; and between two strangers."""
    c = case_of(problem)
    B = c.q.shape[0]
    alone = [c.sequences([b]).run() for b in range(B)]
    assert_golden(problem, tuple(np.concatenate([one[i] for one in alone]) for i in (0, 1)), "alone")
    company = c.sequences([B - 1, *range(B), 0]).run()
    assert_golden(problem, tuple(x[1:-1] for x in company), "in company")


def spread(x: Any) -> Any:
    """The same numbers as a view of [T, H, B, D] memory with room behind each row."""
    room = np.full((*x.shape[2::-1], x.shape[3] + 3), np.nan, np.float32)
    view = room[..., : x.shape[3]].transpose(2, 1, 0, 3)
    view[...] = x
    return view


def backwards(x: Any) -> Any:
    """The same numbers, rows stored in the other order."""
    return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


@every_problem
@pytest.mark.parametrize("lay", [spread, backwards])
def test_layout(problem: Problem, lay: Callable[[Any], Any]) -> None:
    c = case_of(problem)
    out = lay(np.empty((*c.q.shape[:3], c.v.shape[3]), np.float32))
    result = Case(lay(c.q), lay(c.k), lay(c.v), c.options).run(out=out)
    assert result[0] is out
    assert_golden(problem, result)


@every_problem
def test_checked(problem: Problem) -> None:
    with tw.config(check=2):
        assert_golden(problem, case_of(problem).run(), "with every access checked")


# ---- what users run


def test_check_bits() -> None:
    results = check_bits()
    assert [result.name for result in results] == [problem.name for problem in PROBLEMS]
    assert [result.detail for result in results if not result.ok] == []


def test_check_bits_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one constant: every result but those without a weight moves."""
    wrong = {name: {**sums, "lse": "0" * 64} for name, sums in expected().items()}
    monkeypatch.setattr("tilewise.verify.bits.expected", lambda: wrong)
    results = check_bits()
    assert not any(result.ok for result in results)
    assert "lse" in results[0].detail


@pytest.mark.parametrize(
    "arguments", [[], ["--really"], ["--recipe", "1"], ["--recipe", "2", "--really"], ["--recipe", "0", "--really"]]
)
def test_the_file_is_not_written_by_accident(arguments: list[str], tmp_path: Path) -> None:
    to = tmp_path / "bits.json"
    assert regenerate([*arguments, "--to", str(to)]) == 2
    assert not to.exists()


@pytest.mark.slow
def test_the_file_written_anew_is_the_same(tmp_path: Path) -> None:
    to = tmp_path / "bits.json"
    assert regenerate(["--recipe", "1", "--really", "--to", str(to)]) == 0
    assert to.read_bytes() == FILE.read_bytes()
