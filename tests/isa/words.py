"""The kernel language as fixtures: the words of tests/simd/test_words.py, those of memory, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.isa.fixtures import Fixture, arrays_fixture
from tests.simd.support import INTERPRETED, SPECIAL, floats, over_arrays, random_bits, run
from tests.simd.test_words import CASES, expected, keep, operand, width
from tilewise.simd.builder import LANES, WORDS, Builder, Ptr, Vec
from tilewise.simd.math import exp2, fold, log2, transpose

Body = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Program:
    """body(b, a pointer for each input, one for the output)."""

    body: Body
    inputs: tuple[Any, ...]
    output: Any  # like what the body writes

    def fixture(self, name: str) -> Fixture:
        return arrays_fixture(name, over_arrays(self.body, (*self.inputs, self.output)), self.inputs, self.output)

    def interpreted(self) -> Any:
        output = self.output.copy()
        assert run(self.body, INTERPRETED, *self.inputs, output) == 0
        return output


def word_program(word: str) -> Program:
    """A word on all of its inputs."""
    case, (kinds, inputs, wanted) = CASES[word], expected(word)
    kind = WORDS[word].partition(">")[2]
    variants = [(x,) for x in case.variants] or [()]
    items = len(inputs[0]) // width(kinds[0])

    def body(b: Builder, *pointers: Ptr) -> None:
        for j in b.loop(0, items):
            operands = [operand(b, kind, p + j * width(kind)) for kind, p in zip(kinds, pointers, strict=False)]
            for x, variant in enumerate(variants):
                place = pointers[-1] + (j * len(variants) + x) * width(kind)
                keep(b, place, case.say(b, *operands, *variant))

    return Program(body, tuple(inputs), np.zeros(len(wanted), np.int64 if kind in "ib" else np.float32))


def _each_vector(function: Callable[[Builder, Vec], Vec], x: Any) -> Program:
    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for j in b.loop(0, len(x), LANES):
            b.store(target + j, function(b, b.load(source + j)))

    return Program(body, (x,), np.zeros_like(x))


def _tile(function: Callable[[Builder, list[Vec]], list[Vec]]) -> Program:
    """A function of 16 vectors, on a tile of random finite numbers and one with NaN and infinities."""
    bits = [*(x & 0xBFFFFFFF for x in random_bits(LANES * LANES, 30)), *(SPECIAL * 5)[: LANES * LANES]]
    x = floats(bits)

    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for tile in b.loop(0, len(x), LANES * LANES):
            rows = [b.load(source + tile + r * LANES) for r in range(LANES)]
            for r, row in enumerate(function(b, rows)):
                b.store(target + tile + r * LANES, row)

    return Program(body, (x,), np.zeros_like(x))


def _parts() -> Program:
    """load_part and store_part of every count, also too small and too large ones, up to the last float of an array."""
    counts = list(range(-2, LANES + 3))
    x = floats(random_bits(len(counts) * LANES, 31))

    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for i, count in enumerate(counts):
            start = i * LANES + (LANES - max(0, min(LANES, count)))  # so that it ends with the row
            part = b.load_part(source + start, b.integer(count))
            b.store(target + i * 2 * LANES, part)
            b.store(target + (i * 2 + 1) * LANES, b.vec(-1.0))
            b.store_part(target + (i * 2 * LANES + 2 * LANES - max(0, min(LANES, count))), b.load(source), count)

    return Program(body, (x,), np.zeros(2 * x.size, np.float32))


def _halves() -> Program:
    """load_halves of a row and the one after it, and the transpose of 8 such vectors."""
    x = floats(random_bits(3 * LANES * LANES, 34))

    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for tile in b.loop(0, len(x), LANES * LANES):
            half = LANES // 2
            rows = [b.load_halves(source + tile + r * LANES, source + tile + (r + half) * LANES) for r in range(half)]
            for r, row in enumerate([*rows, *transpose(b, rows)]):
                b.store(target + tile + r * LANES, row)

    return Program(body, (x,), np.zeros_like(x))


def _floats_of_memory() -> Program:
    """broadcast, store_lane and prefetch, lane by lane."""
    x = floats(random_bits(LANES, 32))

    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for lane in range(LANES):
            b.prefetch(source + lane)
            b.store(target + lane * LANES, b.broadcast(source + lane))
            b.store_lane(target + (LANES * LANES + (LANES - 1 - lane)), b.load(source), lane)

    return Program(body, (x,), np.zeros(LANES * (LANES + 1), np.float32))


def _integers_of_memory() -> Program:
    """load_int, store_int, fetch_add, load_acquire, store_release and pause."""
    cells = np.array([5, -7, 1 << 62, -(1 << 63), 0, 11, 13, 17], np.int64)

    def body(b: Builder, source: Ptr, target: Ptr) -> None:
        for i in range(len(cells)):
            b.store_int(target + i, b.load_int(source + i))
        b.store_int(target + 8, b.fetch_add(target, 37))
        b.store_int(target + 9, b.fetch_add(target + 1, -1))
        b.pause()
        b.store_release(target + 10, b.load_acquire(target) + 1)
        b.store_int(target + 11, b.load_acquire(target + 10))

    return Program(body, (cells,), np.zeros(12, np.int64))


def _exp2_inputs() -> Any:
    near = np.concatenate([np.linspace(-127, 128, 2048), np.arange(-126, 1) - 0.5, np.arange(-130, 130)])
    return _whole(np.concatenate([near.astype(np.float32), floats([*SPECIAL, *random_bits(2000, 33)])]))


def _log2_inputs() -> Any:
    near = np.concatenate([np.linspace(0.5, 2.5, 2048), 2.0 ** np.arange(-126, 128), np.linspace(1, 1e6, 512)])
    return _whole(np.concatenate([near.astype(np.float32), floats([*SPECIAL, *random_bits(2000, 34)])]))


def _whole(x: Any) -> Any:
    return np.concatenate([x, x[: -len(x) % LANES]])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "exp2": lambda: _each_vector(exp2, _exp2_inputs()),
    "log2": lambda: _each_vector(log2, _log2_inputs()),
    "fold_add": lambda: _tile(lambda b, rows: [fold(b, rows, "add")] * LANES),
    "fold_max": lambda: _tile(lambda b, rows: [fold(b, rows, "max")] * LANES),
    "transpose": lambda: _tile(transpose),
    "halves": _halves,
    "parts": _parts,
    "floats_of_memory": _floats_of_memory,
    "integers_of_memory": _integers_of_memory,
}
