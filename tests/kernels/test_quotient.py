"""o = a / l without the divider: the quotient is correctly rounded wherever the shortcut is taken, and elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simd.support import INTERPRETED, RINGS, SPECIAL, floats, random_bits, run
from tilewise.config import config
from tilewise.kernels.softmax import LARGEST_DIVISOR, quotient
from tilewise.simd.builder import LANES, Builder, Ptr
from tilewise.simd.math import NAN


def divide(ring: str, a: Any, l: Any) -> Any:
    """The quotients of whole vectors, l and 1 / l as `finalize` leaves them: the same in every lane."""
    result = np.zeros((len(l), LANES), np.float32)

    def body(b: Builder, dividends: Ptr, divisors: Ptr, quotients: Ptr) -> None:
        for j in b.loop(0, len(l)):
            divisor = b.broadcast(divisors + j)
            common = (b.vec(1.0) <= divisor) & (divisor <= b.vec(LARGEST_DIVISOR))
            inverse = b.where(common, b.vec(1.0) / divisor, b.vec(NAN))
            b.store(quotients + j * LANES, quotient(b, b.load(dividends + j * LANES), divisor, inverse))

    with config(cache="off"):
        assert run(body, ring, a, l, result) == 0
    return result


def assert_correctly_rounded(ring: str, a: Any, l: Any) -> None:
    """NumPy's float32 division is the machine's, rounded once."""
    a, l = np.ascontiguousarray(a, np.float32).reshape(-1, LANES), np.ascontiguousarray(l, np.float32)
    if ring == INTERPRETED:
        a, l = a[:: max(1, len(a) // 300)], l[:: max(1, len(l) // 300)]
        a, l = np.ascontiguousarray(a), np.ascontiguousarray(l)
    got = divide(ring, a, l)
    with np.errstate(all="ignore"):
        expected = a / l[:, None]
    wrong = (got.view(np.int32) != expected.view(np.int32)) & ~(np.isnan(got) & np.isnan(expected))
    assert not wrong.any(), [
        (x.hex(), y.hex()) for x, y in zip(a[wrong][:3].tolist(), got[wrong][:3].tolist(), strict=True)
    ]
    assert (got.view(np.uint32)[np.isnan(got)] == 0x7FC00000).all()


def divisors(rng: np.random.Generator, count: int) -> Any:
    """From 1 to 2^24, evenly over the exponents; every eighth with the largest fraction, the hardest one."""
    l = floats(rng.integers(0x3F800000, 0x4B800000, count, np.uint32))
    l[::8] = floats(l[::8].view(np.uint32) | 0x007FFFFF)
    return np.minimum(l, np.float32(LARGEST_DIVISOR))


@pytest.mark.parametrize("ring", RINGS)
def test_random_quotients(ring: str) -> None:
    rng = np.random.default_rng(31)
    l = divisors(rng, 60_000)
    assert_correctly_rounded(ring, rng.standard_normal((len(l), LANES)) * l[:, None], l)
    assert_correctly_rounded(ring, floats(rng.integers(0, 1 << 32, (len(l), LANES), np.uint32)), l)


@pytest.mark.parametrize("ring", RINGS)
def test_quotients_next_to_a_midpoint(ring: str) -> None:
    """The quotients that are hardest to round: as near to a midpoint between two float32 as a quotient can be.

    With l = L 2^i and the midpoint M / 2 ulp, M odd of 25 bits, a = (M L - d) / 2^25 is a float32 where M is d / L
    modulo 2^25; a / l misses the midpoint by d / L half ulp.
    """
    rng = np.random.default_rng(37)
    L = rng.integers(1 << 22, 1 << 23, 4000) * 2 + 1
    d = 2 * np.arange(LANES) - (LANES - 1)  # odd, on both sides
    inverse = np.array([pow(int(x), -1, 1 << 25) for x in L])
    M = inverse[:, None] * d % (1 << 25)
    M += (M < 1 << 24) * ((1 << 25) - 2 * M)  # of 25 bits: the mirror image, whose d has the other sign
    a = np.rint(M * L[:, None] / 2.0**25)
    assert (np.abs(M * L[:, None] - (a * 2.0**25).astype(np.int64)) <= LANES).all()
    scale = 2.0 ** rng.integers(-60, 30, (len(L), 1))
    assert_correctly_rounded(ring, a * scale, L * 2.0 ** -rng.integers(0, 24, len(L)))


@pytest.mark.parametrize("ring", RINGS)
def test_edges_of_the_shortcut(ring: str) -> None:
    """One extreme lane, or an extreme l: zeros, subnormals, infinities, NaN, quotients at both bounds."""
    values = floats([*SPECIAL, *random_bits(200, 41)])
    l = floats(
        [
            0,
            1,
            0x3F7FFFFF,
            0x3F800000,
            0x3F800001,
            0x4B7FFFFF,
            0x4B800000,
            0x4B800001,
            0x7F7FFFFF,
            0x7F800000,
            0x7FC00000,
        ]
    )
    l = np.repeat(l, len(values))
    a = np.ones((len(l), LANES), np.float32)
    a[np.arange(len(l)), np.arange(len(l)) % LANES] = np.tile(values, len(l) // len(values))
    assert_correctly_rounded(ring, a, l)
    exponents = np.repeat(np.arange(-70, 71, dtype=np.float64), 8)
    l = divisors(np.random.default_rng(43), len(exponents))
    a = (np.random.default_rng(47).uniform(1, 2, (len(l), LANES)) * 2.0 ** exponents[:, None] * l[:, None]).astype(
        np.float32
    )
    assert_correctly_rounded(ring, a, l)
