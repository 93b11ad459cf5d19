"""The golden bits of half types, met by every ring, target and path. tests/golden has those of float32."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import BF16_BITS, F16
from tests.support import Case
from tilewise.verify.bits import PROBLEMS, Problem, expected, sum_of

HALF = [problem for problem in PROBLEMS if set(problem.types) != {"f32"}]
every_problem = pytest.mark.parametrize("problem", HALF, ids=lambda problem: problem.name)
INTERPRETED = 150_000  # multiplications


def case_of(problem: Problem) -> Case:
    (q, k, v), options = problem.operands()
    return Case(q, k, v, options)


def assert_golden(problem: Problem, result: Any, what: object = "") -> None:
    sums = expected()[problem.name]
    for name, x in zip(("o", "lse"), result, strict=True):
        assert sum_of(x) == sums[name], f"{problem.name}: the bits of {name} are not the golden ones {what}"


def test_there_are_problems_of_every_type() -> None:
    assert {type for problem in HALF for type in problem.types} == {"f32", "f16", "bf16"}
    assert [problem.number for problem in HALF] == list(range(len(PROBLEMS) - len(HALF), len(PROBLEMS)))


@every_problem
def test_inputs(problem: Problem) -> None:
    """Rounded to their types by the definition, from the floats of the problem without types."""
    c = case_of(problem)
    plain = {name: x for name, x in problem.options.items() if name != "types"}
    floats, _ = Problem(problem.number, problem.name, problem.sizes, plain, problem.changes).operands()
    for x, wide, type in zip((c.q, c.k, c.v), floats, problem.types, strict=True):
        assert wide.dtype == np.float32
        if type == "f32":
            assert x.tobytes() == wide.tobytes()
        else:
            assert x.tobytes() == {"f16": F16, "bf16": BF16_BITS}[type].rounded(wide).tobytes()
    sinks = [c.options["sinks"]] if "sinks" in c.options else []
    assert sum_of(c.q, c.k, c.v, *sinks) == expected()[problem.name]["inputs"]


@every_problem
def test_native(problem: Problem, target: str) -> None:
    assert_golden(problem, case_of(problem).run(pool=1), target)


@pytest.mark.parametrize(
    "problem", [p for p in HALF if np.prod(p.sizes[:2] + p.sizes[3:6]) < INTERPRETED], ids=lambda p: p.name
)
def test_interpreted(problem: Problem) -> None:
    with tw.config(interpret=True):
        assert_golden(problem, case_of(problem).run(pool=1))


@every_problem
@pytest.mark.usefixtures("eager_workers")
def test_threads_and_query_tiles(problem: Problem) -> None:
    for br in (0, 3, 16):
        assert_golden(problem, case_of(problem).run(pool=3, br=br), br)


@every_problem
def test_chunks(problem: Problem) -> None:
    c = case_of(problem)
    for size in (1, 7):
        parts = [c.rows(i, min(i + size, c.q.shape[2])).run() for i in range(0, c.q.shape[2], size)]
        assert_golden(problem, tuple(np.concatenate(x, 2) for x in zip(*parts, strict=True)), size)


@every_problem
def test_pages(problem: Problem) -> None:
    """The same keys in pages of 7, backwards in memory."""
    c = case_of(problem)
    B, _, Tk, _ = c.k.shape
    pages = -(-Tk // 7)
    rooms = []
    for x in (c.k, c.v):
        room = np.zeros((B * pages, 7, x.shape[1], x.shape[3]), x.dtype)
        for b, (i, j) in ((b, span) for b in range(B) for span in pairwise([*range(0, Tk, 7), Tk])):
            room[B * pages - 1 - b * pages - i // 7, : j - i] = x[b, :, i:j].swapaxes(0, 1)
        rooms.append(room)
    table = np.arange(B * pages)[::-1].reshape(B, pages)
    options = {name: x for name, x in c.options.items() if name != "kv_start"}
    assert_golden(problem, tw.attention_paged(c.q, *rooms, block_table=table, kv_len=Tk, return_lse=True, **options))


@every_problem
def test_parts(problem: Problem) -> None:
    c = case_of(problem)
    options = {name: x for name, x in c.options.items() if name != "sinks"}
    span = options.get("span", 1024)
    parts = [
        tw.attention_partial(c.q, c.k[:, :, i:j], c.v[:, :, i:j], k_offset=i, **options)
        for i, j in pairwise([*range(0, c.k.shape[2], span), c.k.shape[2]])
    ]
    assert_golden(problem, tw.merge(parts, sinks=c.options.get("sinks")).finish())
