"""Five to eight rows on a KV head: one block of a register tile where registers are many, two where they are few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import F32, HALVES
from tests.support import RUNNABLE, Case, assert_same_bits, case
from tilewise.plan import make_plan
from tilewise.problem import make_problem
from tilewise.simd.target import TARGETS

FEW = [name for name in RUNNABLE if TARGETS[name].register_tile(8)[0] < 8]
SIZES: list[dict[str, Any]] = [
    {"H": 8, "Tk": 150, "D": 24, "Dv": 40},
    {"H": 7, "Tk": 90, "D": 19, "Dv": 33, "bc": 33, "span": 66},
    {"H": 2, "Tq": 3, "Tk": 70, "D": 8, "Dv": 7, "causal": True, "q_offset": 67},
    {"H": 5, "Tk": 70, "D": 16, "Dv": 16, "window": 30, "q_offset": 69},
    {"H": 8, "Tk": 3, "D": 130, "Dv": 144},
]
pytestmark = pytest.mark.skipif(not FEW, reason=f"all of {RUNNABLE} hold the sums of 8 rows")


def alone(c: Case, **changes: Any) -> Any:
    """Every head by itself: one row a register tile."""
    parts = [Case(c.q[:, h : h + 1], c.k, c.v, c.options).run(**changes) for h in range(c.q.shape[1])]
    return tuple(np.concatenate(x, axis=1) for x in zip(*parts, strict=True))


@pytest.mark.parametrize("target", FEW)
def test_there_are_several_blocks(target: str) -> None:
    c = case(**SIZES[0])
    problem, _ = make_problem(c.q, c.k, c.v, **c.options)
    shape = make_plan(problem, TARGETS[target], 1).shape
    assert shape.streamed
    assert shape.mr < shape.panel == 8


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of", [F32, *HALVES], ids=lambda of: of.name)
@pytest.mark.parametrize("target", FEW)
def test_the_bits_of_each_row_alone(target: str, of: Any, size: dict[str, Any]) -> None:
    c = case(**size)
    c = Case(of.rounded(c.q), of.rounded(c.k), of.rounded(c.v), c.options)
    with tw.config(target=target):
        assert_same_bits(c.run(), alone(c))
    with tw.config(target=target, check=2):
        assert_same_bits(c.run(), alone(c))


@pytest.mark.parametrize("what", ["infinite value", "nan value", "sum that overflows in some rows", "infinite score"])
@pytest.mark.parametrize("target", FEW)
def test_what_is_not_finite(target: str, what: str) -> None:
    """One block of rows may meet an infinity that another one does not."""
    c = case(H=8, Tk=100, D=24, Dv=40)
    if what == "infinite score":
        c.k[0, 0, 50, 3] = np.inf
    elif what == "sum that overflows in some rows":
        c.v[0, 0, :, 20] = 3e38
        c.q[:] = 0
        c.q[0, :5, 0, 0] = c.k[0, 0, 40, 0] = (
            20  # five heads see one key; the others 100 of weight 1 before the division
        )
    else:
        c.v[0, 0, 50, 20] = np.inf if what == "infinite value" else np.nan
    with tw.config(target=target):
        assert_same_bits(c.run(), alone(c))


@pytest.mark.parametrize("target", FEW)
def test_a_window_hides_what_is_not_finite(target: str) -> None:
    c = case(H=4, Tq=2, Tk=100, D=24, Dv=40, causal=True, window=20, q_offset=98)
    wanted = c.run()
    c.v[0, 0, :79] = np.inf
    c.v[0, 0, 79] = np.nan  # which the first of two rows sees
    with tw.config(target=target):
        (o, lse), (o_wanted, lse_wanted) = c.run(), wanted
    assert_same_bits(lse, lse_wanted)
    assert np.isnan(o[:, :, 0]).all()
    assert_same_bits(o[:, :, 1], o_wanted[:, :, 1])
