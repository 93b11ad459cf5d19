"""Each word that computes means what plain Python says: every lane, every target that can run here, interpreted too.

The table is keyed by word; words of memory have their own in test_memory.py, and no word is without a test.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.simd import scalar
from tests.simd.support import (
    INT32,
    INT64_MAX,
    INT64_MIN,
    ONE,
    RINGS,
    SIGN,
    SPECIAL,
    TINY,
    floats,
    is_nan,
    random_bits,
    run,
)  # fmt: skip
from tests.simd.test_integer_words import MEMORY_OF_INTEGERS
from tests.simd.test_memory import MEMORY_WORDS
from tilewise.simd.builder import LANES, WORDS, Bool, Builder, Int, IVec, Mask, Ptr, Vec
from tilewise.simd.interp import NumpyBuilder

RNG = np.random.default_rng(20)
LANE_LISTS = [
    tuple(range(LANES)), tuple(range(LANES, 2 * LANES)), tuple(reversed(range(LANES))), (0,) * LANES, (31,) * LANES,
    *(tuple(int(x) for x in RNG.integers(0, 2 * LANES, LANES)) for _ in range(8)),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A word: how a kernel says it, what it means, and on what it is tried.

    `means` is of one lane (or of the whole vectors, for a word that moves lanes): floats as their bits, integers and
    truth values as themselves. `variants` are values of a static operand, given to both as their last argument.
    """

    say: Callable[..., Any]
    means: Callable[..., Any]
    inputs: Callable[[], list[Any]]  # one tuple of operands a lane (of scalars: a row)
    variants: tuple[Any, ...] = ()
    by_lane: bool = True
    exact_nan: bool = True  # words that only move or choose keep a NaN's bits; for arithmetic any NaN will do


def pairs_of_floats() -> list[Any]:
    halfway = [(ONE, 0x33800000), (ONE + 1, 0x33800000), (ONE, 0x33800001), (0x4B7FFFFF, 0x3F000000), (TINY, ONE >> 1)]
    return [
        *itertools.product(SPECIAL, SPECIAL),
        *halfway,
        *zip(random_bits(1500, 1), random_bits(1500, 2), strict=True),
    ]


def close_pairs() -> list[Any]:
    """Numbers next to each other, where a comparison or a difference has little to hold on to."""
    x = [bits for bits in random_bits(300, 3) if not is_nan(bits) and 1 < bits & ~SIGN < 0x7F000000]
    return [*pairs_of_floats(), *((bits, bits + step) for bits in x for step in (-1, 0, 1))]


def triples_of_floats() -> list[Any]:
    """Products that are halfway between two float32, with an addend that tips them or not; cancellation; subnormals."""
    few = [0, SIGN, TINY, 0x00800000, ONE, ONE | SIGN, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC01234, 0x20000000]
    triples: list[Any] = list(itertools.product(few, few, few))
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is halfway; (1 + 2^-12) (1 + 3 2^-12) likewise above an odd last place
    for x, y in ((0x3F800800, 0x3F800800), (0x3F800800, 0x3F801800), (0x3F801800, 0x3F802800)):
        for z in (0, TINY, 0x00800000, 0x0D800000, 0x20000000, 0x33000000, 0x33800000, 0x34000000, 0x3F800000):
            triples += [(x, y, z), (x, y, z | SIGN), (x | SIGN, y, z), (x | SIGN, y, z | SIGN)]
    # halfway between subnormals: (2 k + 1) 2^-150, and the largest that is not yet infinite
    for k, z in itertools.product((0, 1, 2, 5), (0, TINY, TINY | SIGN)):
        triples.append((int(np.float32((2 * k + 1) * 2.0**-75).view(np.uint32)), 0x1A000000, z))
    triples += [(0x7F7FFFFF, ONE, 0x73000000), (0x7F7FFFFF, ONE, 0x72FFFFFF), (0x7F000000, 0x40000000, 0xFF7FFFFF)]
    x, y = random_bits(1500, 4), random_bits(1500, 5)
    small = [(0x3F800000 | bits & 0x00FFFFFF) for bits in x]  # in [1, 4): products that meet their addend
    near = [scalar.mul(bits, other) ^ SIGN ^ (other & 1) for bits, other in zip(small, small[::-1], strict=True)]
    return [*triples, *zip(x, y, random_bits(1500, 6), strict=True), *zip(small, small[::-1], near, strict=True)]


def one_float() -> list[Any]:
    return [(bits,) for bits in (*SPECIAL, *random_bits(500, 7))]


def near_whole_numbers() -> list[float]:
    """Whole numbers, ties and what lies next to them, of the exponents of normal numbers."""
    whole = np.arange(-126, 128, dtype=np.float32)
    exact = np.concatenate([whole, whole[:-1] + np.float32(0.5), np.float32([-126.5, 0.25, -0.25, 1e-30])])
    return [float(x) for x in np.concatenate([exact, *(np.nextafter(exact, np.float32(way)) for way in (-999, 999))])]


def fractions() -> list[Any]:
    """Below 2^22. -0 is left out: its fraction is a zero of either sign."""
    large = [sign * (2.0**n + part) for sign in (1, -1) for n in range(8, 22) for part in (0.5, 1.5, 0.25)]
    some = [int(np.float32(x).view(np.uint32)) for x in (*near_whole_numbers(), *large) if x]
    random = [x for (x,) in one_float() if is_nan(x) or x & ~SIGN < 0x4A800000]
    return [(x,) for x in (*some, *random) if x != SIGN]


def powers_of_two() -> list[Any]:
    exponents = [int(np.float32(x).view(np.uint32)) for x in near_whole_numbers() if -126.5 <= x < 127.5]
    return [*zip(itertools.cycle([*SPECIAL, *random_bits(700, 10)]), exponents * 3), (0x7FC00000, 0x7FC00000)]


def masked_floats() -> list[Any]:
    return [(bool(x % 3), bits, other) for x, (bits, other) in enumerate(pairs_of_floats()[::3])]


def one_int32() -> list[Any]:
    return [(x,) for x in INT32] + [(int(x),) for x in RNG.integers(-(1 << 31), 1 << 31, 600)]


def pairs_of_int32() -> list[Any]:
    return [
        *itertools.product(INT32, INT32),
        *((int(x), int(y)) for x, y in RNG.integers(-(1 << 31), 1 << 31, (300, 2))),
    ]


def pairs_of_small_int32() -> list[Any]:
    """Of every sign, with divisors that go in, do not, and are 0."""
    small = range(-7, 8)
    return [*pairs_of_int32(), *itertools.product(small, small), *((x, y) for x in INT32 for y in small)]


def masked_int32() -> list[Any]:
    return [(x % 3 == 0, *pair) for x, pair in enumerate(pairs_of_int32())]


def masks() -> list[Any]:
    """Pairs of truth values in every order over the lanes."""
    return [(bool(x), bool(y)) for x, y in RNG.integers(0, 2, (10 * LANES, 2))]


def whole_masks() -> list[Any]:
    """None, all, each lane alone, all but each lane."""
    alone = [x == y for x in range(LANES) for y in range(LANES)]
    return [(x,) for x in [*[False] * LANES, *[True] * LANES, *alone, *(not x for x in alone)]]


def small_integers() -> list[Any]:
    """Pairs whose sum, difference and product fit 64 bits."""
    edges = [0, 1, -1, 7, -8, 1 << 31, -(1 << 31), (1 << 31) - 1, 3037000499, -3037000499]
    return list(itertools.product(edges, edges))


def dividends() -> list[Any]:
    x = [0, 1, 2, 15, 16, 17, 1 << 31, (1 << 32) + 1, 1 << 56, INT64_MAX - 1, INT64_MAX]
    return [(a, b) for a, b in itertools.product(x, x) if b]


def any_integers() -> list[Any]:
    x = [INT64_MIN, INT64_MIN + 1, -(1 << 32), -1, 0, 1, (1 << 32) - 1, 1 << 32, 1 << 62, INT64_MAX - 1, INT64_MAX]
    return list(itertools.product(x, x))


def ranges_of_lanes() -> list[Any]:
    x = [INT64_MIN, INT64_MIN + 1, -(1 << 32), -(1 << 31), 1 << 31, 1 << 32, (1 << 32) + 5, INT64_MAX - 1, INT64_MAX]
    return list(itertools.product([*range(-3, LANES + 4), *x], repeat=2))


def truths(count: int) -> Callable[[], list[Any]]:
    return lambda: list(itertools.product((False, True), repeat=count))


def choices() -> list[Any]:
    return [(x % 2 == 0, a, b) for x, (a, b) in enumerate(any_integers())]


def bits_below(x: int) -> int:
    return x & 0xFFFFFFFF


def arithmetic(say: Callable[..., Any], means: Callable[..., Any], inputs: Callable[[], list[Any]]) -> Case:
    return Case(say, means, inputs, exact_nan=False)


CASES: dict[str, Case] = {
    "iadd": Case(lambda b, x, y: x + y, lambda x, y: x + y, small_integers),
    "isub": Case(lambda b, x, y: x - y, lambda x, y: x - y, small_integers),
    "imul": Case(lambda b, x, y: x * y, lambda x, y: x * y, small_integers),
    "idiv": Case(lambda b, x, y: x // y, lambda x, y: x // y, dividends),
    "irem": Case(lambda b, x, y: x % y, lambda x, y: x % y, dividends),
    "imin": Case(lambda b, x, y: b.imin(x, y), min, any_integers),
    "imax": Case(lambda b, x, y: b.imax(x, y), max, any_integers),
    "ilt": Case(lambda b, x, y, flip: y > x if flip else x < y, lambda x, y, _: x < y, any_integers, (False, True)),
    "ile": Case(lambda b, x, y, flip: y >= x if flip else x <= y, lambda x, y, _: x <= y, any_integers, (False, True)),
    "ieq": Case(lambda b, x, y: x.equals(y), lambda x, y: x == y, any_integers),
    "both": Case(lambda b, x, y: x & y, lambda x, y: x and y, truths(2)),
    "either": Case(lambda b, x, y: x | y, lambda x, y: x or y, truths(2)),
    "negate": Case(lambda b, x: ~x, lambda x: not x, truths(1)),
    "choose": Case(lambda b, c, x, y: b.choose(c, x, y), lambda c, x, y: x if c else y, choices),
    "add": arithmetic(lambda b, x, y: x + y, scalar.add, close_pairs),
    "sub": arithmetic(lambda b, x, y: x - y, scalar.sub, close_pairs),
    "mul": arithmetic(lambda b, x, y: x * y, scalar.mul, pairs_of_floats),
    "div": arithmetic(lambda b, x, y: x / y, scalar.div, pairs_of_floats),
    "fma": arithmetic(lambda b, x, y, z: b.fma(x, y, z), scalar.fma, triples_of_floats),
    "fraction": arithmetic(lambda b, x: b.fraction(x), scalar.fraction, fractions),
    "ldexp": arithmetic(lambda b, x, y: b.ldexp(x, y), scalar.ldexp, powers_of_two),
    "max": Case(lambda b, x, y: b.max(x, y), scalar.maximum, close_pairs),
    "lt": Case(lambda b, x, y: x < y, scalar.comparison(lambda x, y: x < y), close_pairs),
    "le": Case(lambda b, x, y: x <= y, scalar.comparison(lambda x, y: x <= y), close_pairs),
    "eq": Case(lambda b, x, y: x.equals(y), scalar.comparison(lambda x, y: x == y), close_pairs),
    "where": Case(lambda b, m, x, y: b.where(m, x, y), lambda m, x, y: x if m else y, masked_floats),
    "shuffle": Case(
        lambda b, x, y, lanes: b.shuffle(x, y, lanes), lambda x, y, lanes: [[*x, *y][lane] for lane in lanes],
        lambda: list(zip(random_bits(320, 8), random_bits(320, 9), strict=True)), tuple(LANE_LISTS), by_lane=False,
    ),
    "bits": Case(lambda b, x: b.bits(x), scalar.int32, one_float),
    "floats": Case(lambda b, x: b.floats(x), bits_below, one_int32),
    "to_float": Case(lambda b, x: b.to_float(x), scalar.rounded, one_int32),
    "nadd": Case(lambda b, x, y: x + y, lambda x, y: scalar.int32(x + y), pairs_of_int32),
    "nsub": Case(lambda b, x, y: x - y, lambda x, y: scalar.int32(x - y), pairs_of_int32),
    "nand": Case(lambda b, x, y: x & y, lambda x, y: x & y, pairs_of_int32),
    "splat": Case(
        lambda b, x: b.splat(x), lambda x: [scalar.int32(x)] * LANES, lambda: [(x,) for x, _ in any_integers()],
        by_lane=False,
    ),
    "nmul": Case(lambda b, x, y: x * y, lambda x, y: scalar.int32(x * y), pairs_of_int32),
    "ndiv": Case(lambda b, x, y: x // y, scalar.quotient, pairs_of_small_int32),
    "nrem": Case(lambda b, x, y: x % y, scalar.rest, pairs_of_small_int32),
    "nlt": Case(lambda b, x, y: x < y, lambda x, y: x < y, pairs_of_int32),
    "neq": Case(lambda b, x, y: x.equals(y), lambda x, y: x == y, pairs_of_int32),
    "nwhere": Case(lambda b, m, x, y: b.where_ints(m, x, y), lambda m, x, y: x if m else y, masked_int32),
    "shl": Case(lambda b, x, n: x << n, lambda x, n: scalar.int32(x << n), one_int32, tuple(range(32))),
    "shr": Case(lambda b, x, n: x >> n, lambda x, n: scalar.int32(bits_below(x) >> n), one_int32, tuple(range(32))),
    "between": Case(
        lambda b, lo, hi: b.between(lo, hi), lambda lo, hi: [lo <= x < hi for x in range(LANES)], ranges_of_lanes,
        by_lane=False,
    ),
    "mand": Case(lambda b, x, y: x & y, lambda x, y: x and y, masks),
    "mor": Case(lambda b, x, y: x | y, lambda x, y: x or y, masks),
    "mnot": Case(lambda b, x: ~x, lambda x: not x, whole_masks),
    "any": Case(lambda b, m: b.any(m), any, whole_masks, by_lane=False),
    "all": Case(lambda b, m: b.all(m), all, whole_masks, by_lane=False),
}  # fmt: skip


def width(kind: str) -> int:
    """Elements that an operand or a result takes: 16 lanes or one scalar."""
    return 1 if kind in "ib" else LANES


def stored(kind: str, values: list[Any]) -> Any:
    """Operands of a kind as an array for the kernel: integers and Bools as int64, the rest as float32 by their bits."""
    if kind in "ib":
        return np.array(values, np.int64)
    return floats([bits_below(x) for x in values]) if kind in "vn" else np.array(values, np.float32)


def operand(b: Builder, kind: str, p: Ptr) -> Any:
    if kind in "ib":
        return b.load_int(p) if kind == "i" else b.load_int(p).equals(1)
    x = b.load(p)
    return {"v": x, "n": b.bits(x), "m": b.vec(0.0) < x}[kind]


def keep(b: Builder, p: Ptr, result: Any) -> None:
    """Store a result of any kind; truth values as 1 and 0."""
    if isinstance(result, Int | Bool):
        b.store_int(p, result if isinstance(result, Int) else b.choose(result, 1, 0))
    elif isinstance(result, Vec | IVec):
        b.store(p, result if isinstance(result, Vec) else b.floats(result))
    else:
        assert isinstance(result, Mask)
        b.store(p, b.where(result, b.vec(1.0), b.vec(0.0)))


@functools.cache
def expected(word: str) -> tuple[list[str], list[Any], list[Any]]:
    """(kinds of operands, arrays of operands, what each item and variant must give), the inputs in whole vectors."""
    case, (kinds, _, result) = CASES[word], WORDS[word].partition(">")
    rows = list(case.inputs())
    vectors = LANES in [width(kind) for kind in kinds]  # else each row of scalars is an item
    step = LANES if vectors else 1
    rows += rows[: -len(rows) % step]
    columns = [list(x) for x in zip(*rows, strict=True)]
    wanted: list[Any] = []
    for start in range(0, len(rows), step):
        for variant in [(x,) for x in case.variants] or [()]:
            operands = [column[start : start + step] for column in columns]
            if case.by_lane:
                values = [case.means(*lane, *variant) for lane in zip(*operands, strict=True)]
            else:
                values = case.means(*(x if vectors else x[0] for x in operands), *variant)
            wanted += values if isinstance(values, list) else [values]
    assert len(wanted) == len(rows) // step * max(1, len(case.variants)) * width(result)
    return list(kinds), [stored(kind, column) for kind, column in zip(kinds, columns, strict=True)], wanted


def apply(word: str, ring: str) -> Any:
    """The results of a word on all of its inputs."""
    case, (kinds, inputs, wanted) = CASES[word], expected(word)
    kind = WORDS[word].partition(">")[2]
    result = np.zeros(len(wanted), np.int64 if kind in "ib" else np.float32)
    variants = [(x,) for x in case.variants] or [()]
    items = len(inputs[0]) // width(kinds[0])

    def body(b: Builder, *pointers: Ptr) -> None:
        for j in b.loop(0, items):
            operands = [operand(b, kind, p + j * width(kind)) for kind, p in zip(kinds, pointers, strict=False)]
            for x, variant in enumerate(variants):
                place = pointers[-1] + (j * len(variants) + x) * width(kind)
                keep(b, place, case.say(b, *operands, *variant))

    assert run(body, ring, *inputs, result) == 0
    return result


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("word", CASES)
def test_word(word: str, ring: str) -> None:
    result, kind, wanted = apply(word, ring), WORDS[word][-1], expected(word)[2]
    if kind in "ib":
        assert result.tolist() == [int(x) for x in wanted]
    elif kind == "m":
        assert result.tolist() == [float(x) for x in wanted]
    else:
        got, want = result.view(np.uint32), np.array([bits_below(x) for x in wanted], np.uint32)
        same = got == want
        if not CASES[word].exact_nan:
            same |= np.isnan(result) & np.isnan(want.view(np.float32))
        wrong = np.flatnonzero(~same)
        assert not len(wrong), [(int(x), hex(got[x]), hex(want[x])) for x in wrong[:5]]


@pytest.mark.parametrize("word", CASES)
def test_case_says_its_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators and methods of the values lead to the word that the case is filed under."""
    said: list[str] = []
    meaning = NumpyBuilder.word

    def spy(self: NumpyBuilder, name: str, *operands: Any, **static: Any) -> Any:
        said.append(name)
        return meaning(self, name, *operands, **static)

    b, kinds = NumpyBuilder(), WORDS[word].partition(">")[0]
    constants = {"i": b.integer(3), "v": b.vec(1.0), "n": b.ivec(5), "m": b.between(0, 4), "b": Bool(b, True)}
    monkeypatch.setattr(NumpyBuilder, "word", spy)
    CASES[word].say(b, *(constants[kind] for kind in kinds), *CASES[word].variants[:1])
    assert said == [word]


def test_every_word_has_a_test() -> None:
    tables = (CASES, MEMORY_WORDS, MEMORY_OF_INTEGERS)
    assert sum(map(len, tables)) == len(WORDS)
    assert set().union(*tables) == WORDS.keys()


def test_inputs_reach_the_hard_cases() -> None:
    """Halfway cases, cancellation to zero, overflow and subnormal results occur, so that the tests above mean much."""
    for word in ("add", "sub", "mul", "div", "fma"):
        wanted = expected(word)[2]
        assert {0, SIGN, 0x7F800000, 0xFF800000} <= set(wanted)
        assert any(is_nan(x) for x in wanted)
        assert sum(0 < x & ~SIGN < 0x00800000 for x in wanted) > 20
    twice_rounded = 0
    with np.errstate(all="ignore"):
        x, y, z = (array.astype(np.float64) for array in expected("fma")[1])
        in_float64 = (x * y + z).astype(np.float32).view(np.uint32).tolist()
    for got, want in zip(in_float64, expected("fma")[2], strict=True):
        twice_rounded += got != want and not is_nan(got)
    assert twice_rounded > 20  # a product and sum in float64, then rounded, would be found out
