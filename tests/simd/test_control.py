"""Loops, branches and variables of a kernel do what Python's would, in each ring."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.simd.support import INT64_MAX, INT64_MIN, RINGS, compiled, run
from tilewise.simd.builder import I64, LANES, Bool, Builder, Int, Ptr
from tilewise.simd.interp import NumpyBuilder

pytestmark = pytest.mark.parametrize("ring", RINGS)
UNUSED = -99


def trace(ring: str, body: Callable[[Builder, Callable[[Any], None], list[Int]], None], *values: int) -> list[int]:
    """What the body records at run time, in order; `values` reach it as integers of the kernel."""
    log = np.full(4096, UNUSED, np.int64)
    given = np.array([*values, 0], np.int64)

    def kernel(b: Builder, log: Ptr, given: Ptr) -> None:
        length = b.var(b.integer(0))

        def record(x: Any) -> None:
            b.store_int(log + length.value, x)
            length.value = length.value + 1

        body(b, record, [b.load_int(given + j) for j in range(len(values))])
        b.store_int(log + length.value, UNUSED)

    assert run(kernel, ring, log, given) == 0
    return log.tolist()[: log.tolist().index(UNUSED)]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_loop_is_range(ring: str, step: int) -> None:
    """Empty, reversed, negative; steps that divide the range and steps that do not; bounds of either kind."""
    edges = [-9, -4, -1, 0, 1, 4, 7, 14]
    bounds = list(itertools.product(edges, edges))

    def static(b: Builder, record: Any, given: list[Int]) -> None:
        for lo, hi in bounds[::5]:
            for j in b.loop(lo, hi, step):
                record(j)

    assert trace(ring, static) == [j for lo, hi in bounds[::5] for j in range(lo, hi, step)]

    def dynamic(b: Builder, record: Any, given: list[Int]) -> None:
        lo, hi, stride = given
        for j in b.loop(lo, hi, stride):
            record(j)
        record(1000)

    for lo, hi in bounds[::7]:
        assert trace(ring, dynamic, lo, hi, step) == [*range(lo, hi, step), 1000]


def test_loop_of_the_largest_numbers(ring: str) -> None:
    def body(b: Builder, record: Any, given: list[Int]) -> None:
        for lo, hi in ((given[0] - 3, given[0]), (given[1], given[1] + 3), (given[0], given[1])):
            for j in b.loop(lo, hi):
                record(j)

    far = 1 << 62
    assert trace(ring, body, far, -far) == [*range(far - 3, far), *range(-far, -far + 3)]


def test_nested_loops(ring: str) -> None:
    """Inner bounds that depend on the outer index, some of them empty."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        for i in b.loop(given[0], given[1], 2):
            record(i)
            for j in b.loop(i, given[2]):
                for k in b.loop(j, i + 2):
                    record(i * 100 + j * 10 + k)
            for j in b.loop(0, i):
                record(j)

    def plain() -> list[int]:
        out = []
        for i in range(-1, 6, 2):
            out.append(i)
            for j in range(i, 4):
                out += [i * 100 + j * 10 + k for k in range(j, i + 2)]
            out += list(range(i))
        return out

    assert trace(ring, body, -1, 6, 4) == plain()


def test_bounds_are_read_once(ring: str) -> None:
    """A bound is the value that it was when the loop began."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        end = b.var(given[0])
        for j in b.loop(0, end.value):
            end.value = end.value + 1
            record(j)
        record(end.value)

    assert trace(ring, body, 3) == [0, 1, 2, 6]


def test_when_branches(ring: str) -> None:
    """Both sides, nested, inside a loop, and what it leaves in a variable."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        largest = b.var(given[0])
        for j in b.loop(0, 10):
            odd = (j % 2).equals(1)
            for _ in b.when(odd):
                for _ in b.when(j > 4):
                    record(j)
                    largest.value = j
                record(0 - j)
            for _ in b.when(~odd & (j < 4)):
                record(j + 100)
        record(largest.value)

    expected = []
    for j in range(10):
        expected += ([j] if j > 4 else []) + [-j] if j % 2 else [j + 100] if j < 4 else []
    assert trace(ring, body, -5) == [*expected, 9]


def test_repeat_runs_while_its_condition_holds(ring: str) -> None:
    """The condition is computed anew each time, and may hold from the start not at all."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        for start in given:
            x = b.var(start)
            for _ in b.repeat(lambda x=x: (x.value < 100) & ~x.value.equals(28)):
                record(x.value)
                x.value = x.value * 2
            record(x.value + 1000)

    expected = []
    for x in (1, 7, 100, 300, 28, 27):
        y = x
        while y < 100 and y != 28:
            expected.append(y)
            y *= 2
        expected.append(y + 1000)
    assert trace(ring, body, 1, 7, 100, 300, 28, 27) == expected


def test_repeat_with_loops_inside(ring: str) -> None:
    def body(b: Builder, record: Any, given: list[Int]) -> None:
        left = b.var(given[0])
        for _ in b.repeat(lambda: left.value > 0):
            for j in b.loop(0, left.value):
                record(left.value * 10 + j)
            for _ in b.when(left.value.equals(2)):
                record(-1)
            left.value = left.value - 1

    assert trace(ring, body, 3) == [30, 31, 32, 20, 21, -1, 10]


def test_a_variable_begins_anew_where_it_is_made(ring: str) -> None:
    """In a loop it has its first value each time round, and keeps a new one until it is written."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        total = b.var(b.integer(0))
        for i in b.loop(0, 3):
            inner = b.var(i * 10)
            for j in b.loop(0, i):
                inner.value = inner.value + j + 1
            total.value = total.value + inner.value
            record(inner.value)
        record(total.value)

    assert trace(ring, body) == [0, 11, 23, 34]


def test_a_value_read_is_a_value_kept(ring: str) -> None:
    """What was read from a variable does not change with it: here, a swap and Fibonacci's numbers."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        x, y = b.var(given[0]), b.var(given[1])
        for _ in b.loop(0, 9):
            old = x.value
            x.value = y.value
            y.value = old + y.value
            record(old)
        x.value, y.value = y.value, x.value
        record(x.value)
        record(y.value)

    assert trace(ring, body, 0, 1) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 55, 34]


def test_variables_of_every_kind(ring: str) -> None:
    out = np.zeros((4, LANES), np.float32)

    def body(b: Builder, result: Ptr) -> None:
        flag, mask = b.var(b.integer(1) < 2), b.var(b.between(0, 0))
        vector, bits = b.var(b.vec(1.0)), b.var(b.ivec(0))
        for j in b.loop(0, 5):
            vector.value = vector.value + vector.value
            bits.value = bits.value + b.ivec(1)
            mask.value = mask.value | b.between(j * 3, j * 3 + 1)
            flag.value = ~flag.value
        for _ in b.when(~flag.value):
            b.store(result, vector.value)
        b.store(result + LANES, b.to_float(bits.value))
        b.store(result + 2 * LANES, b.where(mask.value, b.vec(1.0), b.vec(2.0)))
        for _ in b.when(flag.value):
            b.store(result + 3 * LANES, vector.value)

    assert run(body, ring, out) == 0
    lanes = [1.0 if x % 3 == 0 and x < 15 else 2.0 for x in range(LANES)]
    assert out.tolist() == [[32.0] * LANES, [5.0] * LANES, lanes, [0.0] * LANES]


def test_integers_mix_with_pythons(ring: str) -> None:
    """On either side, and with the shortcuts for 0 and 1."""

    def body(b: Builder, record: Any, given: list[Int]) -> None:
        x = given[0]
        for value in (
            x + 5, 5 + x, x - 5, 5 - x, x * 3, 3 * x, x // 4, x % 4, x + 0, 0 + x, x * 1, 1 * x, x - 0,
            x * 0, 0 * x, x + 1, 1 + x, 0 - x, x - x, x // 1, x % 1, b.imin(x, 3),
            b.imin(30, x), b.imax(3, x), b.imax(x, 30), b.choose(x < 18, x, 1), b.choose(x <= 17, 2, x),
            b.choose(x > 17, 3, 4), b.choose(x >= 17, 3, 4), b.choose(x.equals(17), 5, 6),
        ):  # fmt: skip
            record(value)

    wanted = [
        22,
        22,
        12,
        -12,
        51,
        51,
        4,
        1,
        17,
        17,
        17,
        17,
        17,
        0,
        0,
        18,
        18,
        -17,
        0,
        17,
        0,
        3,
        17,
        17,
        30,
        17,
        2,
        4,
        3,
        5,
    ]
    assert trace(ring, body, 17) == wanted


def test_constants(ring: str) -> None:
    """The largest integers; floats are rounded to float32, -0.0 and 0.0 are two constants."""
    floats = [
        0.0,
        -0.0,
        0.1,
        1 / 3,
        2.0**-149,
        2.0**-150,
        1.5 * 2.0**-149,
        3.4e38,
        float("inf"),
        float("-inf"),
        16777217.0,
    ]
    out, cells = np.zeros((len(floats) + 1, LANES), np.float32), np.zeros(4, np.int64)

    def body(b: Builder, result: Ptr, cells: Ptr) -> None:
        for j, x in enumerate(floats):
            b.store(result + j * LANES, b.vec(x))
        b.store(result + len(floats) * LANES, b.to_float(b.ivec(-7)))
        for j, x in enumerate((INT64_MIN, INT64_MAX, 0, 1)):
            b.store_int(cells + j, x)

    assert run(body, ring, out, cells) == 0
    with np.errstate(all="ignore"):
        expected = np.array([*floats, -7.0], np.float64).astype(np.float32)
    assert (out.view(np.int32) == expected.view(np.int32)[:, None]).all()
    assert cells.tolist() == [INT64_MIN, INT64_MAX, 0, 1]


def test_workers_get_their_number_and_the_table(ring: str) -> None:
    cells = np.full(8, UNUSED, np.int64)
    address = cells.__array_interface__["data"][0]

    def body(b: Builder, table: Int, worker: Int) -> None:
        b.store_int(b.pointer(table, table, table + 64, I64) + worker, worker * worker)

    entry = compiled(body, ring)
    for worker in (0, 3, 7):
        assert entry(address, worker) == 0
    assert cells.tolist() == [0, UNUSED, UNUSED, 9, UNUSED, UNUSED, UNUSED, 49]


def test_a_truth_value_of_the_kernel_is_none_of_python(ring: str) -> None:
    """`if`, `and` and chained comparisons would fold while the kernel is written: they are refused."""

    def kernel_of(use: Callable[[Int], Any]) -> Callable[[Builder, Int, Int], None]:
        return lambda b, table, worker: use(table)

    for use in (lambda x: bool(x < 3), lambda x: x < 3 and x > 1, lambda x: 1 < x < 3, lambda x: not (x <= 3)):
        with pytest.raises(TypeError, match=r"b\.when"):
            compiled(kernel_of(use), ring)(0, 0)
    with pytest.raises(TypeError):
        bool(Bool(NumpyBuilder(), True))
