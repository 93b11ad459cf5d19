"""The merge of partial results: the states of all spans of a row, in ascending order, to o and lse (recipe 1, 5 to 7).

It is what a forward kernel does between the spans of a work item, with states that come from memory.
"""

from __future__ import annotations

import functools

from tilewise.kernels import pack
from tilewise.kernels.softmax import OnlineSoftmax
from tilewise.kernels.tables import MERGE, Fields, Row, Shape, size_of
from tilewise.simd.builder import F32, I64, LANES, Builder, Element, Int, Kernel, Ptr
from tilewise.simd.math import LOG2E, NEG_INF


def merge_shape(Dv: int, type: str) -> Shape:
    """The shape of which this kernel uses the states' part: values of Dv columns, o of that type."""
    return Shape(1, Dv, 1, LANES, 1, 1, ("f32", "f32", "f32", type))


def merge_kernel(shape: Shape) -> Kernel:
    """o, lse [sequence, row] from states [sequence, span, row], 16 rows at a time."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, MERGE)
        for sequence in b.loop(0, call["sequences"]):
            for row in b.loop(0, call["rows"], LANES):
                _merge_rows(b, shape, call, sequence, row)

    return Kernel(f"merge_{shape.types[3]}_d{shape.Dv}", body)


def _merge_rows(b: Builder, shape: Shape, call: Row, sequence: Int, row: Int) -> None:
    """The 16 rows of a sequence from `row` on, or as many as there are."""
    rows = b.integer(LANES)
    address = call["scratch"]
    scratch = Fields(b, shape.scratch_fields(), address, rows)
    address = address + size_of(shape.scratch_fields(), LANES)
    total = Fields(b, shape.state_fields(), address, rows)
    state = Fields(b, shape.state_fields(), address + size_of(shape.state_fields(), LANES), rows)
    softmax = OnlineSoftmax(b, shape, scratch, b.vec(1.0), together=1)
    count = b.imin(rows, call["rows"] - row)

    softmax.init(total, rows)
    for _ in b.when(~call["sinks"].equals(0)):
        for r in b.loop(0, count):
            b.store_lane(total.m + r, b.broadcast(_at(b, call, "sinks") + row + r) * b.vec(LOG2E), 0)
            b.store_lane(total.l + r, b.vec(1.0), 0)
    for span in b.loop(0, call["spans"]):
        softmax.init(state, rows)
        for r in b.loop(0, count):
            place = (sequence * call["spans"] + span) * call["rows"] + row + r
            values, stats = _at(b, call, "a") + place * shape.Dv, _at(b, call, "stats") + place * 2
            pack.copy_row(b, shape.Dv, values, state.a + r * shape.width)
            b.store_lane(state.m + r, b.broadcast(stats), 0)
            b.store_lane(state.l + r, b.broadcast(stats + 1), 0)
        softmax.merge(total, state, rows)
    softmax.finalize(total, rows)
    for r in b.loop(0, count):
        place = sequence * call["rows"] + row + r
        o, lse = _at(b, call, "o", shape.element("o")) + place * shape.Dv, _at(b, call, "lse") + place
        seen = ~b.load_int(_at(b, call, "seen", I64) + place).equals(0)
        for _ in b.when(seen):
            pack.unpack_row(b, shape.Dv, o, functools.partial(softmax.output, total, r))
            b.store_lane(lse, b.broadcast(scratch.lse + r), 0)
        for _ in b.when(~seen):
            pack.unpack_row(b, shape.Dv, o, lambda c: b.vec(0.0))
            b.store_lane(lse, b.vec(NEG_INF), 0)
            for _ in b.when(~call["sinks"].equals(0)):
                b.store_lane(lse, b.broadcast(_at(b, call, "sinks") + row + r), 0)


def _at(b: Builder, call: Row, name: str, element: Element = F32) -> Ptr:
    """The first element of an array of the table."""
    address = call[name]
    return b.pointer(address, address, call[name + "_hi"], element)
