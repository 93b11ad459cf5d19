"""The error against float64 on the rounded inputs: half a unit in the last place of the type, and float32's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.half.halves import BF16, F16, F32, HALVES, HalfCase, halved, name_of
from tests.support import FLOOR_ULPS, Case, case, sinks_for

CASES: dict[str, Case] = {
    "prefill": case(1, 4, 2, 60, 300, 64, 64, causal=True, q_offset=240),
    "decode": case(2, 4, 2, 1, 500, 64, 64, causal=True, q_offset=[499, 300]),
    "window and sinks": case(1, 4, 2, 30, 200, 64, 64, causal=True, window=60, q_offset=170, sinks=sinks_for(4)),
}  # fmt: skip
every_case = pytest.mark.parametrize("c", CASES.values(), ids=list(CASES))


def float32_error(h: HalfCase) -> tuple[float, float]:
    """What is allowed to o and lse in float32: twice the largest error of naive float32, or 4 places of the largest."""
    allowed = []
    for exact, naive in zip(h.single.exact(), h.single.naive(), strict=True):
        finite = np.isfinite(exact)
        error = float(np.abs(naive[finite] - exact[finite]).max())
        floor = FLOOR_ULPS * float(np.spacing(np.abs(exact[finite]).max().astype(np.float32)))
        allowed.append(max(2 * error, floor))
    return allowed[0], allowed[1]


@every_case
@pytest.mark.parametrize(
    "types", [*((t,) * 4 for t in HALVES), (F16, BF16, F16, F16), (F32, F16, F16, BF16)], ids=name_of
)
def test_every_element(c: Case, types: Any) -> None:
    """Also where o is small: the unit is that of the element, not of the largest."""
    h = halved(c, types)
    (o, lse), (exact, exact_lse), (own, own_lse) = h.run(), h.single.exact(), float32_error(h)
    got = types[3].values(o).reshape(o.shape).astype(np.float64)
    half_a_place = types[3].spacing(np.abs(exact) + own) / 2
    assert (np.abs(got - exact) <= half_a_place + own).all()
    assert np.abs(lse - exact_lse).max() <= own_lse
    assert np.median(half_a_place) > 10 * own, "float32's error must not hide a rounding too many"


@pytest.mark.parametrize("half", HALVES, ids=lambda t: t.name)
def test_rounding_has_no_bias(half: Any) -> None:
    """To nearest: errors of either sign are as frequent, and a quarter of a place on average."""
    h = halved(CASES["prefill"], (half,) * 4)
    o, exact = h.run()[0], h.single.exact()[0]
    places = (half.values(o).reshape(o.shape) - exact) / half.spacing(exact)
    assert abs(places.mean()) < 0.02
    assert abs(np.abs(places).mean() - 0.25) < 0.02
