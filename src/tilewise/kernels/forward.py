"""The forward kernel: exact attention, one tile of keys at a time (Dao et al., 2022 and 2023), recipe 1.

Inputs are addressed through a table for the call and a descriptor for each sequence (`tables.py`); a work item is
(sequence, KV head, query tile), where a query tile is `rows` consecutive rows of the group's heads, flattened as
position * group + head. So all query heads of a group share each tile of keys.

Cost of a work item: 2 (D + Dv) flops for each visible pair; each key and value is read once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tilewise.kernels import pack
from tilewise.kernels.microkernel import accumulators, outer_products, scores, weighted_sum, widths
from tilewise.kernels.softmax import OnlineSoftmax
from tilewise.kernels.tables import CALL, NO_KEY, SEQUENCE, Row, Scratch, Shape, up_to
from tilewise.simd.builder import F32, I64, LANES, Builder, Int, Kernel, Ptr, Vec
from tilewise.simd.math import LOG2E, NEG_INF


def forward_kernel(shape: Shape) -> Kernel:
    """The kernel of attention for one shape: every length, mask, stride and sink is a run-time value."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, CALL)
        scratch = Scratch(b, shape, call["scratch"] + worker * call["scratch_bytes"], call["rows"])
        for descriptor, item in work_items(b, call):
            Item(b, shape, call, Row(b, descriptor, SEQUENCE), scratch, item).run()

    return Kernel(shape.name, body)


def work_items(b: Builder, call: Row) -> Iterator[tuple[Int, Int]]:
    """Claim work items until none is left or `batch` are taken: (descriptor's address, item of that sequence)."""
    items, size = call["items"], 8 * len(SEQUENCE)

    def first_item(descriptor: Int) -> Int:
        address = descriptor + 8 * SEQUENCE.index("first_item")
        return b.load_int(b.pointer(address, address, address + 8, I64))

    claimed, taken = b.var(b.fetch_add(call.cell("counter"), 1)), b.var(b.integer(0))
    descriptor = b.var(call["sequences"])
    for _ in b.repeat(lambda: claimed.value < items):
        for _ in b.repeat(lambda: first_item(descriptor.value + size) <= claimed.value):
            descriptor.value = descriptor.value + size
        yield descriptor.value, claimed.value - first_item(descriptor.value)
        taken.value = taken.value + 1
        last = taken.value >= call["batch"]
        claimed.value = items
        for _ in b.when(~last):
            claimed.value = b.fetch_add(call.cell("counter"), 1)


class Item:
    """One work item: count rows from `start` on of one KV head of a sequence."""

    def __init__(self, b: Builder, shape: Shape, call: Row, sequence: Row, scratch: Scratch, item: Int) -> None:
        self.b, self.shape, self.call, self.sequence, self.scratch = b, shape, call, sequence, scratch
        tiles = (sequence["rows"] + call["rows"] - 1) // call["rows"]
        self.kv_head = item // tiles
        # the last tile of a head sees the most keys under a causal mask: take it first, so that workers end together
        self.start = (tiles - 1 - item % tiles) * call["rows"]
        self.count = b.imin(call["rows"], sequence["rows"] - self.start)
        self.padded = up_to(shape.panel, self.count)
        scale = b.broadcast(call.cell("scale", F32))
        self.softmax = OnlineSoftmax(b, shape, scratch, scale, together=min(shape.panel, 4))

    def run(self) -> None:
        """Rows in, spans in ascending order, rows out."""
        b, scratch, span = self.b, self.scratch, self.call["span"]
        self.softmax.init(scratch.m_total, scratch.l_total, scratch.a_total, self.padded)
        self.rows_in()
        lo, hi = pack.panel_ranges(b, self.shape, scratch, self.padded)
        for s0 in b.loop(lo // span * span, hi, span):
            self.softmax.init(scratch.m, scratch.l, scratch.a, self.padded)
            self.span(b.imax(s0, lo), b.imin(s0 + span, hi))
            self.softmax.merge(self.padded)
        self.softmax.finalize(self.padded)
        self.rows_out()

    def span(self, lo: Int, hi: Int) -> None:
        """The keys at positions [lo, hi) of one span, by tiles anchored at position 0."""
        b, shape, scratch, Bc = self.b, self.shape, self.scratch, self.shape.Bc
        for t0 in b.loop(lo // Bc * Bc, hi, Bc):
            tile_lo, tile_hi = b.imax(lo - t0, 0), b.imin(hi - t0, Bc)
            keys, values = self.tile_of("k", t0), self.tile_of("v", t0)
            pack.pack_keys(b, shape, keys, self.call["k_row"], scratch.keys, tile_lo, tile_hi)
            finite = pack.pack_values(b, shape, values, self.call["v_row"], scratch.values, tile_lo, tile_hi)
            for row in b.loop(0, self.padded, shape.panel):
                panel_lo = b.imax(b.load_int(scratch.panel_lo + row) - t0, 0)
                panel_hi = b.imin(b.load_int(scratch.panel_hi + row) - t0, Bc)
                for _ in b.when(panel_lo < panel_hi):
                    groups = panel_lo // LANES, up_to(LANES, panel_hi) // LANES
                    self.scores(row, *groups)
                    self.softmax.update(row, t0, *groups)
                    for _ in b.when(finite):
                        self.weighted_sum(row, panel_lo, panel_hi)
                    for _ in b.when(~finite):
                        self.weighted_sum_by_row(row, t0)

    def tile_of(self, name: str, t0: Int) -> Ptr:
        """Key or value t0 of the KV head, which need not exist."""
        address = self.sequence[name] + self.kv_head * self.call[name + "_head"] * F32.size
        base = self.b.pointer(address, self.call[name + "_lo"], self.call[name + "_hi"])
        return base + (t0 - self.sequence["first_key"]) * self.call[name + "_row"]

    def scores(self, row: Int, lo: Int, hi: Int) -> None:
        """S = Q @ K.T for a panel and the tile's groups [lo, hi)."""
        shape, scratch = self.shape, self.scratch
        nr = widths(shape.columns // LANES, shape.nr)[0]
        queries = scratch.queries + row * up_to(LANES, shape.D)
        scores(self.b, shape.panel, shape.mr, nr, shape.D, queries, scratch.keys, scratch.S, shape.columns, lo, hi)

    def weighted_sum(self, row: Int, lo: Int, hi: Int) -> None:
        """a = alpha * a + P @ V for a panel and keys [lo, hi): a key that a row does not see has weight 0 there."""
        shape, scratch = self.shape, self.scratch
        weighted_sum(
            self.b, shape.panel, shape.mr, shape.nr, scratch.a + row * shape.width, shape.width, scratch.alpha + row,
            scratch.S, shape.columns, scratch.values, lo, hi,
        )  # fmt: skip

    def weighted_sum_by_row(self, row: Int, t0: Int) -> None:
        """The same where a value is not finite: each row walks its own keys, since 0 * inf would not be nothing."""
        b, shape, scratch = self.b, self.shape, self.scratch
        for x in b.loop(0, shape.panel):
            lo = b.imax(b.load_int(scratch.row_lo + row + x) - t0, 0)
            hi = b.imin(b.load_int(scratch.row_hi + row + x) - t0, shape.Bc)
            for _ in b.when((lo < hi) & b.any(b.vec(0.0) < b.broadcast(scratch.seen + x))):
                for c in b.loop(0, shape.width, LANES):
                    a = scratch.a + (row + x) * shape.width + c
                    acc = accumulators(b, 1, 1)
                    acc[0][0].value = b.broadcast(scratch.alpha + row + x) * b.load(a)
                    weights = scratch.S + x * shape.columns
                    outer_products(b, acc, weights, 0, scratch.values + c, shape.width, LANES, lo, hi)
                    b.store(a, acc[0][0].value)

    def place(self, row: Int) -> tuple[Int, Int]:
        """(query row, query head) of a row of this item."""
        flat, group = self.start + row, self.call["group"]
        return flat // group, self.kv_head * group + flat % group

    def address(self, name: str, row: Int, head: Int) -> Ptr:
        """Where a query row's q, o or lse lies."""
        call = self.call
        offset = row * call[name + "_row"] + head * call[name + "_head"]
        return self.b.pointer(self.sequence[name], call[name + "_lo"], call[name + "_hi"]) + offset

    def rows_in(self) -> None:
        """Pack the queries, find what each row sees, start its total with its sink."""
        b, shape, call, scratch = self.b, self.shape, self.call, self.scratch
        for r in b.loop(0, self.count):
            i, head = self.place(r)
            pack.pack_query(b, shape, self.address("q", i, head), scratch.queries + r * up_to(LANES, shape.D))
            pack.row_ranges(b, call, self.sequence, scratch, r, self.sequence["q_offset"] + i)
            for _ in b.when(~call["sinks"].equals(0)):
                b.store_lane(scratch.m_total + r, self.sink(head) * b.vec(LOG2E), 0)
                b.store_lane(scratch.l_total + r, b.vec(1.0), 0)
        for r in b.loop(self.count, self.padded):  # rows that fill the last panel see nothing
            pack.no_query(b, shape, scratch, r)

    def sink(self, head: Int) -> Vec:
        call = self.call
        return self.b.broadcast(self.b.pointer(call["sinks"], call["sinks_lo"], call["sinks_hi"]) + head)

    def rows_out(self) -> None:
        """Write o and lse. A row that sees no key is empty by its indices: o = 0, lse = -inf or its sink."""
        b, shape, scratch = self.b, self.shape, self.scratch
        for r in b.loop(0, self.count):
            i, head = self.place(r)
            target = self.address("o", i, head)
            empty = b.load_int(scratch.row_hi + r).equals(NO_KEY[1])
            for _ in b.when(empty):
                pack.unpack_row(b, shape.Dv, target, lambda c: b.vec(0.0))
                b.store_lane(scratch.lse + r, b.vec(NEG_INF), 0)
                for _ in b.when(~self.call["sinks"].equals(0)):
                    b.store_lane(scratch.lse + r, self.sink(head), 0)
            for _ in b.when(~empty):
                pack.unpack_row(b, shape.Dv, target, functools.partial(self.softmax.output, r))
            for _ in b.when(~self.sequence["lse"].equals(0)):
                b.store_lane(self.address("lse", i, head), b.broadcast(scratch.lse + r), 0)
