"""exp2 and log2: their error bounds on a sample, their special values, one set of bits; fold and transpose.

Every float32 was tried once by scripts/prove_math.py; docs/explanation/math.md holds what it found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scripts.prove_math import RANGES, Range, native_map, prove, ulp_error, ulp_error_decimal
from tests.simd.support import INTERPRETED, NATIVE_TARGETS, RINGS, SPECIAL, floats, random_bits, run
from tilewise.config import config
from tilewise.simd.builder import LANES, Builder, Ptr, Vec
from tilewise.simd.interp import fma32
from tilewise.simd.math import EXP2, LOG2, exp2, fold, log2, transpose

FUNCTIONS: dict[str, Callable[[Builder, Vec], Vec]] = {"exp2": exp2, "log2": log2}
SAMPLE = 4999  # every 4999th float32 of a range: a prime, so that all low bits occur
# Where the proof over every float32 found the largest error, and that error in ULP
WORST = [
    ("exp2", "-0x1.ff2c82p-2", 0.799612),
    ("exp2", "0x1.01212ep-1", 0.790226),
    ("log2", "0x1.69ec9ap0", 1.660542),
    ("log2", "0x1.fea298p-1", 1.394394),
    ("log2", "0x1.6359d6p57", 0.508234),
]


def apply(name: str, ring: str, x: Any) -> Any:
    """The function of each element, in a ring."""
    x = np.ascontiguousarray(x, np.float32)
    padded = np.concatenate([x, np.ones(-len(x) % LANES, np.float32)])
    result = np.zeros_like(padded)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(padded), LANES):
            b.store(result + j, FUNCTIONS[name](b, b.load(source + j)))

    assert run(body, ring, padded, result) == 0
    return result[: len(x)]


@pytest.fixture(scope="module", params=NATIVE_TARGETS)
def maps(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both functions as the proof calls them, for each target."""
    with config(target=request.param, cache="off"):
        return {name: native_map(name, function) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize("work", RANGES, ids=lambda work: work.title)
def test_sample_of_the_proof(work: Range, maps: dict[str, Any]) -> None:
    """No sample may pass the bound that holds for every value, and every special value is the promised one."""
    with np.errstate(all="ignore"):
        kept, found = prove(work, maps[work.function], SAMPLE, lambda count: None)
    assert kept, found


@pytest.mark.parametrize("work", RANGES, ids=lambda work: work.title)
def test_proof_notices_one_wrong_result(work: Range, maps: dict[str, Any]) -> None:
    """One result that is two ULP up, another number or a NaN where none belongs is enough."""
    up = np.float32(np.inf)
    spoil: list[Callable[[Any], Any]] = [lambda y: np.float32(2.0)]
    if work.bound is not None:
        spoil.append(lambda y: np.nextafter(np.nextafter(y, up), up))
    if not np.isnan(work.result):
        spoil.append(lambda y: np.float32(np.nan))
    for wrong in spoil:

        def spoiled(x: Any, wrong: Callable[[Any], Any] = wrong) -> Any:
            y = maps[work.function](x)
            y[len(y) // 2] = wrong(y[len(y) // 2])
            return y

        with np.errstate(all="ignore"):
            kept, found = prove(work, spoiled, 1 << 20, lambda count: None)
        assert not kept, found


def test_ranges_cover_what_the_functions_promise() -> None:
    """exp2 everywhere; log2 everywhere but for subnormals. No value twice."""
    for function, count in (("exp2", 1 << 32), ("log2", (1 << 32) - (0x00800000 - 1))):
        ranges = sorted((work.first, work.last) for work in RANGES if work.function == function)
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(ranges))
        assert sum(last - first + 1 for first, last in ranges) == count


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(("function", "where", "error"), WORST)
def test_largest_error_is_the_one_on_record(function: str, where: str, error: float, ring: str) -> None:
    """A change of a coefficient, or of the order of operations, must be proved anew."""
    x = float.fromhex(where)
    (result,) = apply(function, ring, [x])
    assert ulp_error_decimal(function, x, float(result)) == pytest.approx(error, abs=1e-6)
    (measured,) = ulp_error(np.float32([result]), getattr(np, function)(np.float64([x])))
    assert measured == pytest.approx(error, abs=1e-6)


def test_bounds_are_those_on_record() -> None:
    bounds = {"exp2": max(e for f, _, e in WORST if f == "exp2"), "log2": max(e for f, _, e in WORST if f == "log2")}
    for work in RANGES:
        assert work.bound is None or bounds[work.function] <= work.bound < bounds[work.function] + 1e-3


def test_polynomials_are_as_near_as_their_comments_say() -> None:
    """Relative error of the polynomials alone, evaluated in float64 with the coefficients as float32."""
    f = np.linspace(-0.5, 0.5, 100_001)
    error = np.polyval(np.float64(np.float32([1.0, *EXP2]))[::-1], f) / np.exp2(f) - 1
    assert -28.35 < np.log2(np.abs(error).max()) < -28.3
    f = np.linspace(2.0**-0.5 - 1, 2.0**0.5 - 1, 100_001)
    f = f[np.abs(f) > 1e-6]
    error = f * np.polyval(np.float64(np.float32(LOG2))[::-1], f) / (np.log1p(f) / np.log(2.0)) - 1
    assert -26.2 < np.log2(np.abs(error).max()) < -26.15


@pytest.mark.parametrize("ring", RINGS)
def test_exp2_special_values(ring: str) -> None:
    def bits(*x: float) -> list[str]:
        return [float(y).hex() for y in apply("exp2", ring, x)]

    assert bits(0.0, -0.0) == [(1.0).hex()] * 2
    whole = [float(-n) for n in range(127)]
    assert bits(*whole) == [float(2.0**x).hex() for x in whole]  # exact, down to 2^-126
    below = np.nextafter(np.float32(-126.0), np.float32(-np.inf))
    assert bits(below, -126.5, -127.0, -149.0, -150.0, -1e30, -3.4e38, -np.inf) == ["0x0.0p+0"] * 8
    assert bits(127.5, 128.0, 128.5, 129.0, 200.0, 384.0, 1e10, 3.4e38, np.inf) == ["inf"] * 9
    nan = floats([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FABCDEF, 0x7FC0007F])
    assert np.isnan(apply("exp2", ring, nan)).all()


@pytest.mark.parametrize("ring", RINGS)
def test_exp2_of_ties(ring: str) -> None:
    """Halfway between whole numbers n and n + 1, either of them gives the same bits: the recipe takes the odd one."""

    def power(f: float, n: Any) -> Any:
        y = np.full(n.shape, EXP2[-1], np.float32)
        for c in (*EXP2[-2::-1], 1.0):
            y = fma32(y, np.full_like(y, f), np.full_like(y, c))
        return np.ldexp(y, n)

    n = np.arange(-126, 127)
    result = apply("exp2", ring, n + 0.5)
    assert result.tobytes() == power(0.5, n).tobytes() == power(-0.5, n + 1).tobytes()


@pytest.mark.parametrize("ring", RINGS)
def test_log2_special_values(ring: str) -> None:
    powers = [2.0**n for n in range(-126, 128)]
    assert apply("log2", ring, powers).tolist() == [float(n) for n in range(-126, 128)]
    (zero,) = apply("log2", ring, [1.0]).view(np.uint32)
    assert zero == 0  # +0
    assert apply("log2", ring, [0.0, -0.0, np.inf]).tolist() == [-np.inf, -np.inf, np.inf]
    nan = [*floats([0x7FC00001, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]), -1.0, -np.inf, -(2.0**-149), -3.4e38]
    assert np.isnan(apply("log2", ring, nan)).all()


def inputs_of(name: str) -> Any:
    """Special values, all magnitudes, and the numbers that softmax gives: exponents to 0, sums from 1 on."""
    rng = np.random.default_rng(3)
    natural = -rng.exponential(8.0, 4000) if name == "exp2" else 1.0 + rng.exponential(100.0, 4000)
    return np.concatenate([floats(SPECIAL), floats(random_bits(6000, 13)), natural.astype(np.float32)])


@pytest.mark.parametrize("ring", NATIVE_TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_native_equals_interpreted(name: str, ring: str) -> None:
    """In every bit; only where exp2 passes a NaN on may its payload differ."""
    x = inputs_of(name)
    got, expected = apply(name, ring, x), apply(name, INTERPRETED, x)
    same = got.view(np.int32) == expected.view(np.int32)
    if name == "exp2":
        same |= np.isnan(got) & np.isnan(expected) & np.isnan(x)
    assert same.all(), [float(y).hex() for y in x[~same][:5]]


def by_halves(rows: Any, operation: str) -> Any:
    """Each row folded by halves: 8, 4, 2, 1."""
    while rows.shape[1] > 1:
        x, y = np.hsplit(rows, 2)
        rows = x + y if operation == "add" else np.where(x > y, x, y)
    return rows[:, 0]


def tiles(count: int) -> Any:
    """16 x 16 tiles of finite numbers of many magnitudes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(17)
    shape = (count, LANES, LANES)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


def through(ring: str, work: Callable[[Builder, list[Vec]], list[Vec]], data: Any, rows: int) -> Any:
    """A kernel's work on each tile of data: `rows` vectors a tile."""
    result = np.zeros((len(data), rows, LANES), np.float32)

    def body(b: Builder, source: Ptr, result: Ptr) -> None:
        for j in b.loop(0, len(data)):
            vectors = work(b, [b.load(source + j * (LANES * LANES) + r * LANES) for r in range(LANES)])
            for r, x in enumerate(vectors):
                b.store(result + (j * rows + r) * LANES, x)

    assert run(body, ring, np.ascontiguousarray(data), result) == 0
    return result


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("operation", ["add", "max"])
def test_fold_is_by_halves(ring: str, operation: str) -> None:
    data = tiles(30)
    got = through(ring, lambda b, rows: [fold(b, rows, operation)], data, 1)[:, 0]
    expected = np.array([by_halves(tile, operation) for tile in data])
    assert got.view(np.int32).tolist() == expected.view(np.int32).tolist()
    if operation == "add":  # another order would show
        in_order = np.add.accumulate(data, axis=2)[:, :, -1]
        neighbours = data
        while neighbours.shape[2] > 1:
            neighbours = neighbours[:, :, ::2] + neighbours[:, :, 1::2]
        assert (in_order != expected).any()
        assert (neighbours[:, :, 0] != expected).any()


@pytest.mark.parametrize("ring", RINGS)
def test_fold_of_special_values(ring: str) -> None:
    """A maximum keeps what `max` keeps at each step: the second where either is NaN; -inf where nothing else is."""
    rng = np.random.default_rng(23)
    data = rng.choice(np.array([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, -2.0], np.float32), (30, LANES, LANES))
    data[0] = -np.inf
    data[1] = np.nan
    for operation in ("add", "max"):
        got = through(ring, lambda b, rows, operation=operation: [fold(b, rows, operation)], data, 1)[:, 0]
        with np.errstate(all="ignore"):
            expected = np.array([by_halves(tile, operation) for tile in data])
        same = (got.view(np.int32) == expected.view(np.int32)) | (np.isnan(got) & np.isnan(expected))
        assert same.all()


@pytest.mark.parametrize("ring", RINGS)
def test_transpose(ring: str) -> None:
    """Bits move, whatever they say."""
    data = floats(random_bits(3 * LANES * LANES, 19)).reshape(3, LANES, LANES)
    got = through(ring, transpose, data, LANES)
    assert got.view(np.int32).tolist() == data.transpose(0, 2, 1).view(np.int32).tolist()


@pytest.mark.parametrize("ring", RINGS)
def test_transpose_of_halves(ring: str) -> None:
    """16 rows of 8: the vectors hold rows 0 and 4, 1 and 5, 2 and 6, 3 and 7, then 8 and 12 and so on."""
    data = floats(random_bits(3 * LANES * LANES, 20)).reshape(3, LANES, LANES)
    got = through(ring, lambda b, rows: transpose(b, rows[:8]), data, 8)
    rows = data[:, :8].reshape(3, 2, 4, 2, 8).transpose(0, 1, 3, 2, 4).reshape(3, LANES, 8)
    assert got.view(np.int32).tolist() == rows.transpose(0, 2, 1).view(np.int32).tolist()


def test_a_weight_is_at_most_one() -> None:
    """exp2 of what is not above 0 is not above 1; where it comes nearest, value by value."""
    x = np.arange(0x80000000, 0xB4000000, 997, dtype=np.uint64).astype(np.uint32).view(np.float32)
    top = -np.arange(0, 1 << 16, dtype=np.float32) * np.float32(2.0**-24)
    for values in (x, top):
        assert apply("exp2", NATIVE_TARGETS[0], values).max() == 1.0


def test_table_is_read_in_order() -> None:
    """The proof's own kernel writes every result in its place, tail included."""
    for count in (1, 15, 16, 17, 100):
        x = np.linspace(-5, 0, count, dtype=np.float32)
        assert native_map("exp2", exp2)(x).tolist() == apply("exp2", INTERPRETED, x).tolist()
