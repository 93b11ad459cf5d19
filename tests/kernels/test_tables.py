"""The tables that the caller fills and the kernel reads, and the scratch of a worker: one list, one layout."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.config import config
from tilewise.kernels.forward import forward_kernel
from tilewise.kernels.tables import (
    CALL,
    CALL_INDEX,
    MERGE,
    SEQUENCE,
    SEQUENCE_INDEX,
    Fields,
    Row,
    Shape,
    size_of,
    up_to,
)  # fmt: skip
from tilewise.kernels.variants import Operand, Variant
from tilewise.simd.builder import F32, I64, LANES, Int, Kernel
from tilewise.simd.interp import NumpyBuilder

LINE = 64  # bytes of a cache line, and of a vector
SHAPES = [
    Shape(D, Dv, Bc, panel, 1, 1)
    for D, Dv, Bc, panel in [
        (64, 64, 64, 16), (20, 33, 33, 4), (1, 1, 1, 1), (17, 15, 16, 2), (128, 128, 64, 8),
        (1024, 1023, 511, 16), (3, 5, 512, 1),
    ]
]  # fmt: skip
ROWS = [1, 15, 16, 17, 33, 192]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def lists(shape: Shape) -> list[list[Any]]:
    """Every list of fields that memory is laid out by."""
    return [shape.scratch_fields(), shape.state_fields()]


def extents(fields: list[Any], address: int, rows: int) -> dict[str, tuple[int, int, int]]:
    """(address, end, bytes an element) of each field, as a kernel that is given `rows` at run time places them."""
    b = NumpyBuilder()
    laid = Fields(b, fields, Int(b, address), Int(b, rows))
    pointers = {name: getattr(laid, name) for name, *_ in fields}
    assert all(p.raw == p.lo for p in pointers.values())
    return {name: (p.lo, p.hi, p.element.size) for name, p in pointers.items()}


@pytest.mark.parametrize("multiple", [1, 2, 16, 64])
def test_up_to(multiple: int) -> None:
    """The same for Python's integers and the kernel's."""
    b = NumpyBuilder()
    for n in range(3 * multiple + 2):
        expected = min(m for m in range(0, 5 * multiple + 5, multiple) if m >= n)
        assert up_to(multiple, n) == expected
        assert up_to(multiple, Int(b, n)).raw == expected


@pytest.mark.parametrize("names", [CALL, SEQUENCE, MERGE, *([x[0] for x in fields] for fields in lists(SHAPES[0]))])
def test_names_are_unique(names: Any) -> None:
    assert len(set(names)) == len(names)


def test_indices_follow_the_lists() -> None:
    assert [CALL[index] for index in CALL_INDEX.values()] == list(CALL_INDEX) == list(CALL)
    assert [SEQUENCE[index] for index in SEQUENCE_INDEX.values()] == list(SEQUENCE_INDEX) == list(SEQUENCE)


@pytest.mark.parametrize("rows", ROWS)
@EVERY_SHAPE
def test_fields_are_disjoint_and_on_cache_lines(shape: Shape, rows: int) -> None:
    address = 1 << 20
    for names in lists(shape):
        placed = extents(names, address, rows)
        assert list(placed) == [name for name, *_ in names]
        for lo, hi, size in placed.values():
            assert lo % LINE == 0
            assert hi >= lo  # a shape may have no use for a field
            assert (hi - lo) % size == 0
        for (_, end, _), (lo, _, _) in itertools.pairwise(sorted(placed.values())):
            assert end <= lo
        assert min(lo for lo, _, _ in placed.values()) == address


@pytest.mark.parametrize("rows", ROWS)
@EVERY_SHAPE
def test_fields_are_as_large_as_they_say(shape: Shape, rows: int) -> None:
    """What the plan takes from the arena, in Python's integers, is what the kernel lays out in its own."""
    b = NumpyBuilder()
    for names in lists(shape):
        size = size_of(names, rows)
        assert max(hi for _, hi, _ in extents(names, 0, rows).values()) == size
        assert size_of(names, Int(b, rows)).raw == size
        assert size_of(names, up_to(LANES, rows)) == size
        assert size % LINE == 0
    assert shape.worker_bytes(rows) % LINE == 0
    assert shape.worker_bytes(rows) >= sum(size_of(names, rows) for names in lists(shape))


def test_name_states_every_constant() -> None:
    """Two shapes that differ in one constant have two names: kernels are kept by name."""
    base = Shape(20, 24, 32, 4, 2, 3)
    numbers = {x.name for x in fields(Shape)} - {"types", "partial", "variant"}
    shapes = [base, replace(base, partial=True)]
    shapes += [replace(base, **{name: getattr(base, name) + 1}) for name in numbers]
    others = set(itertools.product(("f32", "f16", "bf16"), repeat=4)) - {base.types}
    shapes += [replace(base, types=types) for types in others]
    operands = [Operand(kind, spread) for kind in ("u8", "f32", "f16", "bf16") for spread in (False, True)]
    variants = [{"softcap": True}, {"alibi": True}]
    variants += [{name: x} for name in ("bias", "mask") for x in operands]
    shapes += [replace(base, variant=Variant(**variant)) for variant in variants]
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert all(forward_kernel(shape).name == shape.name for shape in shapes)
    assert all(shape.name.isidentifier() for shape in shapes)


def test_row_of_a_table_by_name() -> None:
    """Fields are 8 bytes apart; a cell can be written, and read as a float where it is one."""
    names = ("first", "scale", "last")
    cells = np.array([11, 0, 33], np.int64)
    cells[1:2].view(np.float32)[0] = 0.25
    seen: list[float] = []

    def body(b: NumpyBuilder, table: Int, worker: Int) -> None:
        row = Row(b, table, names)
        seen.extend((row["first"].raw, row["last"].raw, float(b.broadcast(row.cell("scale", F32)).raw[0])))
        b.store_int(row.cell("last"), row["first"] + 1)
        assert row["last"].raw == 33  # read once and kept
        assert row.cell("scale").element is I64

    b = NumpyBuilder()
    Kernel("row", body).body(b, Int(b, cells.__array_interface__["data"][0]), Int(b, 0))
    assert seen == [11, 33, 0.25]
    assert cells[2] == 12


def test_arena_gives_what_the_fields_say() -> None:
    """From the front door: the high water of a call is the layout of its shape, a worker at a time."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 2, 9, width)).astype(np.float32) for width in (20, 20, 33))
    arena = tw.Arena()
    with config(interpret=True):
        tw.attention(q, k, v, bc=33, arena=arena, pool=1)
    assert arena.high_water % LINE == 0
    assert arena.high_water == tw.scratch_bytes(q, k, v, bc=33, pool=1)
