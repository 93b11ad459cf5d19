"""Sizes at every boundary b of the code: 0, 1, b - 1, b, b + 1, 2b + 1 and primes; measured against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import (
    assert_as_accurate_as_naive,
    assert_same_bits,
    assert_written,
    case,
    poisoned,
    sinks_for,
)
from tilewise.plan import PANELS, ROWS
from tilewise.problem import DEFAULT_BC, DEFAULT_SPAN, MAX_BC, MAX_HEAD_DIM
from tilewise.simd.builder import LANES


def around(*boundaries: int, limit: int) -> list[int]:
    sizes = {size for b in boundaries for size in (0, 1, b - 1, b, b + 1, 2 * b + 1)}
    return sorted(size for size in sizes if 0 <= size <= limit)


def check(**sizes: Any) -> None:
    """Every element is written, and as accurate as naive float32."""
    c = case(**sizes)
    shape = (*c.q.shape[:3], c.v.shape[3])
    result = c.run(out=poisoned(shape), lse=poisoned(shape[:3]))
    for x in result:
        assert_written(x)
    assert_as_accurate_as_naive(result, c)


# rows of panels, of work items (after group and br), and primes
@pytest.mark.parametrize("Tq", sorted({*around(*PANELS, ROWS, limit=400), 13, 31, 97}))
def test_query_rows(Tq: int) -> None:
    check(H=2, Hkv=2, Tq=Tq, Tk=40, D=16, Dv=16, causal=True, q_offset=20)
    check(H=3, Hkv=1, Tq=Tq, Tk=40, D=16, Dv=16, window=30, q_offset=17)


# One chain over all of D rounds more than a library's blocks: docs/explanation/decisions/accuracy.md.
WIDE = pytest.mark.xfail(reason="a known limit of recipe 1", strict=False)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 191, 193])
def test_query_heads_of_a_group(group: int) -> None:
    """A work item holds whole panels of position * group + head, so a tile may begin in the middle of a position."""
    sinks = sinks_for(2 * group)
    for Tq in (1, 3, 11):
        check(H=2 * group, Hkv=2, Tq=Tq, Tk=40, D=16, Dv=16, causal=True, q_offset=25, sinks=sinks)
        check(H=2 * group, Hkv=2, Tq=Tq, Tk=40, D=16, Dv=16, causal=True, q_offset=25, sinks=sinks, br=2)


@pytest.mark.parametrize("Tk", sorted({*around(LANES, DEFAULT_BC, DEFAULT_SPAN, limit=2049), 97, 499, 1999}))
def test_keys(Tk: int) -> None:
    check(H=4, Hkv=2, Tq=16, Tk=Tk, D=16, Dv=16)
    check(H=4, Hkv=2, Tq=16, Tk=Tk, D=16, Dv=16, causal=True, q_offset=max(0, Tk - 16))


@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025])
def test_first_and_last_visible_key(first: int) -> None:
    """Windows that begin and end at every border of groups, tiles and spans."""
    for window in (1, 15, 16, 17, 63, 64, 65, 1024, 1025):
        check(H=2, Hkv=1, Tq=2, Tk=2080, D=16, Dv=16, causal=True, window=window, q_offset=first + window - 1)


@pytest.mark.parametrize("D", [1, 2, 15, 16, 17, 33, 61, 128, *(pytest.param(D, marks=WIDE) for D in (1023, 1024))])
def test_head_dimension(D: int) -> None:
    check(B=2, H=2, Hkv=1, Tq=8, Tk=40, D=D, Dv=16, causal=True, q_offset=30)


# a register tile holds up to 4 vectors of 16 columns of values; rows of 256 columns are packed 272 apart
@pytest.mark.parametrize("Dv", [1, 2, 15, 17, 32, 33, 47, 49, 63, 64, 65, 97, 129, 256, 512, 1023, 1024])
def test_value_dimension(Dv: int) -> None:
    check(B=2, H=2, Hkv=1, Tq=8, Tk=40, D=16, Dv=Dv, causal=True, q_offset=30)


@pytest.mark.parametrize("bc", [1, 2, 3, 15, 17, 31, 33, 63, 65, 127, 129, 511, 512])
def test_key_tile(bc: int) -> None:
    keys = min(4 * bc + 1, 1200)
    for span in (bc, 2 * bc):
        check(H=2, Hkv=1, Tq=8, Tk=keys, D=16, Dv=16, bc=bc, span=span)
        check(
            H=2, Hkv=1, Tq=8, Tk=keys, D=16, Dv=16, bc=bc, span=span, causal=True, q_offset=max(0, keys - 8 - bc // 2)
        )


def test_limits_are_what_the_interface_promises() -> None:
    assert (MAX_HEAD_DIM, MAX_BC, DEFAULT_BC, DEFAULT_SPAN) == (1024, 512, 64, 1024)


@pytest.mark.parametrize("sizes", [
    {"Tq": 1, "Tk": 1, "D": 1, "Dv": 1, "bc": 1},
    {"Tq": 3, "Tk": 17, "D": 17, "Dv": 1, "bc": 16},
    {"Tq": 2, "Tk": 35, "D": 1, "Dv": 17, "bc": 17, "span": 34},
    {"Tq": 17, "Tk": 5, "D": 2, "Dv": 33, "bc": 3, "span": 3},
    {"Tq": 2, "Tk": 33, "D": 33, "Dv": 15, "bc": 33},
    {"Tq": 9, "Tk": 4, "D": 15, "Dv": 16, "bc": 2, "H": 6, "Hkv": 2},
], ids=str)  # fmt: skip
def test_interpreted(sizes: dict[str, int]) -> None:
    """The interpreter checks every access against the extent of its array."""
    with tw.config(interpret=True):
        check(**sizes, causal=True, q_offset=max(0, sizes["Tk"] - sizes["Tq"]))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Tq": 0}, {"Tk": 0}, {"H": 0, "Hkv": 0}], ids=str)
def test_nothing(ring: str, sizes: dict[str, int]) -> None:
    c = case(**{"B": 2, "H": 2, "Hkv": 1, "Tq": 3, "Tk": 4, "D": 8, "Dv": 5, "causal": True, **sizes})
    o, lse = c.run(arena=tw.Arena())
    assert (o.shape, lse.shape) == ((*c.q.shape[:3], 5), c.q.shape[:3])
    assert_same_bits((o, lse), (np.zeros_like(o), np.full_like(lse, -np.inf)))  # of no elements, or of no keys


def test_keys_without_end() -> None:
    """Only what is visible costs anything: a key cache of 2^50 keys in the memory of one."""
    c = case(1, 2, 1, 3, 1, 16, 16)
    k, v = (np.broadcast_to(x, (1, 1, 1 << 50, 16)) for x in (c.k, c.v))
    for options in ({"q_offset": 100}, {"q_offset": 1 << 49, "window": 100}):
        o = tw.attention(c.q, k, v, causal=True, **options)
        np.testing.assert_allclose(o, np.broadcast_to(c.v, o.shape), rtol=1e-5)  # a mean of equal values


@pytest.mark.parametrize("offset", [(1 << 31) - 3, (1 << 32) - 3, (1 << 53) - 1, 1 << 56])
def test_positions_beyond_32_bits(offset: int) -> None:
    """Positions shift tiles and spans, no more: by a multiple of the span they shift nothing."""
    c = case(1, 2, 1, 5, 40, 16, 16, causal=True, window=20, q_offset=35, bc=7, span=70)
    shift = (offset - 35) // 70 * 70  # so that the limit of a position is not passed
    assert_same_bits(c.run(q_offset=35 + shift, k_offset=shift), c.run())
