"""The forward kernel: exact attention, one tile of keys at a time (Dao et al., 2022 and 2023), recipe 1.

Inputs are addressed through a table for the call and a descriptor for each sequence (`tables.py`); a work item is
(sequence, KV head, query tile), where a query tile is `rows` consecutive rows of the group's heads, flattened as
position * group + head. So all query heads of a group share each tile of keys.

Cost of a work item: 2 (D + Dv) flops for each visible pair; each key and value is read once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from tilewise.kernels import pack, stream
from tilewise.kernels.claims import work_items
from tilewise.kernels.microkernel import scores, weighted_sum, widths
from tilewise.kernels.scores import Scores
from tilewise.kernels.softmax import OnlineSoftmax
from tilewise.kernels.tables import CALL, NO_KEY, SEQUENCE, Fields, Row, Shape, size_of, up_to
from tilewise.kernels.variants import FULL, GROUPS, KINDS, SKIP
from tilewise.simd.builder import F32, I64, LANES, U8, Bool, Builder, Int, IntLike, Kernel, Ptr, Vec
from tilewise.simd.math import LOG2E, NEG_INF


def forward_kernel(shape: Shape) -> Kernel:
    """The kernel of attention for one shape: every length, mask, stride and sink is a run-time value."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, CALL)
        for descriptor, item, claimed in work_items(b, call):
            Item(b, shape, call, Row(b, descriptor, SEQUENCE), worker, item, claimed).run()

    return Kernel(shape.name, body)


class Item:
    """A work item: a query tile, `count` rows from `start` on of one KV head of a sequence; all its spans, or one.

    Where spans are work items of their own (units > 1), they are claimed in ascending order and merged in that order:
    a worker waits for its turn, which an earlier claim always precedes. The total then lies in the slot of the tile,
    reused `slots` tiles later, when its progress says that the tile is done. Otherwise the total is the worker's own.
    """

    def __init__(
        self, b: Builder, shape: Shape, call: Row, sequence: Row, worker: Int, item: Int, claimed: Int
    ) -> None:
        self.b, self.shape, self.call, self.sequence = b, shape, call, sequence
        units, rows, slots = call["units"], call["rows"], call["slots"]
        tiles = (sequence["rows"] + rows - 1) // rows
        self.split = units > 1
        self.unit, tile, tile_of_all = item % units, item // units, claimed // units
        self.kv_head = tile // tiles
        # the last tile of a head sees the most keys under a causal mask: take it first, so that workers end together
        self.start = (tiles - 1 - tile % tiles) * rows
        self.count = b.imin(rows, sequence["rows"] - self.start)
        self.padded = up_to(shape.panel, self.count)
        self.turn = tile_of_all // slots * units + self.unit
        slot = b.choose(self.split, tile_of_all % slots, worker)
        end = call["progress"] + 8 * slots
        self.progress = b.pointer(call["progress"] + 8 * slot, call["progress"], end, I64)
        address = call["scratch"] + worker * call["scratch_bytes"]
        self.scratch = Fields(b, shape.scratch_fields(), address, rows)
        self.own_address = address + size_of(shape.scratch_fields(), rows)
        state_bytes = size_of(shape.state_fields(), rows)
        self.total_address = self.own_address + state_bytes + (slot - worker) * call["scratch_bytes"]
        self.total = self.state_at(self.total_address)
        scale = b.broadcast(call.cell("scale", F32))
        scores = None if shape.variant.plain else Scores(b, shape, call, sequence, self.scratch)
        self.softmax = OnlineSoftmax(b, shape, self.scratch, scale, together=min(shape.panel, 4), scores=scores)

    def state_at(self, address: Int) -> Fields:
        return Fields(self.b, self.shape.state_fields(), address, self.call["rows"])

    def run(self) -> None:
        """Rows in, spans in ascending order, rows out."""
        b, span, softmax = self.b, self.call["span"], self.softmax
        self.rows_in()
        pack.no_places(b, self.shape, self.scratch)
        lo, hi = pack.panel_ranges(b, self.shape, self.scratch, self.padded)
        first, end = lo // span, (hi + span - 1) // span
        if self.shape.partial:  # all keys are of one span; a tile may see none
            softmax.init(self.total, self.padded)
        begin = first + self.unit
        for s in b.loop(begin, b.choose(self.split, b.imin(begin + 1, end), end)):
            # the first span of an empty total is the total: no merge
            alone = s.equals(first) & ~self.split & self.call["sinks"].equals(0)
            state = self.state_at(b.choose(alone, self.total_address, self.own_address))
            softmax.init(state, self.padded)
            self.span(state, b.imax(s * span, lo), b.imin((s + 1) * span, hi), hi)
            for _ in b.when(~alone):
                self.wait()
                for _ in b.when(s.equals(first)):
                    self.init_total()
                softmax.merge(self.total, state, self.padded)
        self.wait()
        for _ in b.when(self.unit.equals(self.call["units"] - 1)):
            if self.shape.partial:
                self.states_out()
            else:
                softmax.finalize(self.total, self.padded)
                self.rows_out()
        b.store_release(self.progress, self.turn + 1)

    def wait(self) -> None:
        """Until all earlier spans of this tile are merged, and the tile that had its slot is done."""
        b = self.b
        for _ in b.repeat(
            lambda: self.split & (b.load_acquire(self.progress) < self.turn) & b.load_acquire(self.abort).equals(0)
        ):
            b.pause()

    @property
    def abort(self) -> Ptr:
        return self.call.cell("abort")

    def init_total(self) -> None:
        """The total of a tile before its first span: empty, or its sinks at (z log2 e, 1, 0)."""
        b, total = self.b, self.total
        self.softmax.init(total, self.padded)
        for _ in b.when(~self.call["sinks"].equals(0)):
            for r, _, head in self.rows(0, self.count):
                b.store_lane(total.m + r, self.sink(head) * b.vec(LOG2E), 0)
                b.store_lane(total.l + r, b.vec(1.0), 0)

    def span(self, state: Fields, lo: Int, hi: Int, end: Int) -> None:
        """The keys at positions [lo, hi) of one span, by tiles anchored at position 0; those up to end will follow."""
        b, Bc = self.b, self.shape.Bc
        first = lo // Bc * Bc
        self.places(0, first, lo, end)
        for t0 in b.loop(first, hi, Bc):
            tile_lo, tile_hi, more = b.imax(lo - t0, 0), b.imin(hi - t0, Bc), t0 + Bc < end
            for _ in b.when(more):  # else nothing is to be asked for, and what lies there does not matter
                self.places(self.shape.columns, t0 + Bc, lo, end)
            for _ in self.when_needed(t0):
                if self.shape.streamed:
                    self.stream_tile(state, t0, tile_lo, tile_hi)
                else:
                    self.pack_tile(state, t0, tile_lo, tile_hi, more)
            pack.next_places(b, self.shape, self.scratch)

    def when_needed(self, t0: Int) -> Iterator[None]:
        """The body runs unless the variant hides the tile from all panels."""
        if not self.shape.variant.elements:
            yield
            return
        b = self.b
        needed = b.var(b.integer(SKIP))
        for row in b.loop(0, self.padded, self.shape.panel):
            if self.shape.variant.arrays:
                b.store_int(self.scratch.kinds + row, self.look(row, t0))
            needed.value = b.imax(needed.value, functools.reduce(b.imin, self.kinds(row, t0)))
        for _ in b.when(~needed.value.equals(SKIP)):
            yield

    def kinds(self, row: Int, t0: Int) -> list[Int]:
        """What the block mask and a look at bias and mask say of a panel and a tile, see `variants.KINDS`."""
        b, call, variant, found = self.b, self.call, self.shape.variant, []
        if variant.keep:
            Bc, kinds = self.shape.Bc, b.pointer(call["kinds"], call["kinds"], call["kinds_hi"], U8)
            tile = t0 // Bc - self.sequence["first_key"] // Bc
            found.append(b.load_int(kinds + (self.panel_number(row) * call["kinds_panel"] + tile)))
        if variant.arrays:
            found.append(b.load_int(self.scratch.kinds + row))
        return found

    def look(self, row: Int, t0: Int) -> Int:
        """What bias and mask say of a panel and a tile."""
        assert self.softmax.scores is not None
        rows = self.b.imin(self.shape.panel, self.count - row)
        return self.softmax.scores.look(row, rows, t0, *self.panel_keys(row, t0))

    def panel_keys(self, row: Int, t0: Int) -> tuple[Int, Int]:
        """The keys [lo, hi) of a tile that lie within the range of some row of a panel."""
        b, scratch = self.b, self.scratch
        lo, hi = (b.load_int(ends + row) - t0 for ends in (scratch.panel_lo, scratch.panel_hi))
        lo = b.imin(b.imax(lo, 0), self.shape.Bc)
        return lo, b.imax(lo, b.imin(hi, self.shape.Bc))

    def trim(self, row: Int, t0: Int, lo: Int, hi: Int) -> tuple[Int, Int, Bool | None]:
        """The keys [lo, hi) of a tile but those that the variant hides at its ends, and whether it hides none."""
        b, whole = self.b, None
        if self.shape.variant.elements:
            for kind in self.kinds(row, t0):
                if self.shape.columns // LANES <= GROUPS:
                    first, last = kind // KINDS % GROUPS, kind // (KINDS * GROUPS)
                    lo, hi = b.imax(lo, first * LANES), b.imin(hi, (last + 1) * LANES)
                hi = b.choose(kind.equals(SKIP), lo, hi)
                full = (kind % KINDS).equals(FULL)
                whole = full if whole is None else whole & full
        return lo, hi, whole

    def places(self, at: int, t0: Int, lo: Int, end: Int) -> None:
        """Find the keys and values [lo, end) of the tile at t0."""
        b, scratch = self.b, self.scratch
        lo, hi = b.imax(lo, t0), b.imin(end, t0 + self.shape.Bc)
        pack.places(b, self.call, self.sequence, scratch.k_at + at, scratch.v_at + at, t0, lo, hi)

    def stream_tile(self, state: Fields, t0: Int, lo: Int, hi: Int) -> None:
        """Keys [lo, hi) of a tile for the one panel of a few rows, K and V read where they lie."""
        b, shape, scratch, row = self.b, self.shape, self.scratch, self.b.integer(0)
        keys, values = self.rows_of("k"), self.rows_of("v")
        lo, hi, whole = self.trim(row, t0, lo, hi)
        self.softmax.no_scores()
        stream.scores(b, shape, scratch.queries, scratch.keys, keys, values, self.softmax.put, lo, hi)
        groups = lo // LANES, up_to(LANES, hi) // LANES
        self.softmax.update(state, row, t0, *groups, whole)
        for (c, count), rows in itertools.product(stream.chunks(shape), stream.row_blocks(shape)):
            finite = stream.weighted_sum(b, shape, rows, c, count, state.a, scratch.alpha, scratch.S, values, lo, hi)
            for _ in b.when(~finite):
                self.softmax.note_visible(row, t0, *groups)
                for column in range(c, c + count * LANES, LANES):

                    def value(j: Int, column: int = column) -> Vec:
                        return pack.load_columns(b, values.at(j) + column, shape.Dv - column)

                    self.weighted_sum_by_row(state, row, rows, t0, lo, hi, b.integer(column), value)

    def pack_tile(self, state: Fields, t0: Int, lo: Int, hi: Int, more: Bool) -> None:
        """Keys [lo, hi) of a tile for all panels, K and V packed once. `more`: whether another tile will follow."""
        b, shape, scratch, all_rows = self.b, self.shape, self.scratch, range(self.shape.panel)
        pack.pack_keys(b, shape, self.head_of("k"), scratch.k_at, scratch.keys, lo, hi)
        finite = pack.pack_values(b, shape, self.head_of("v"), scratch.v_at, scratch.values, lo, hi)
        for row in b.loop(0, self.padded, shape.panel):
            self.ask(row, more)
            panel_lo, panel_hi, whole = self.trim(row, t0, *self.panel_keys(row, t0))
            for _ in b.when(panel_lo < panel_hi):
                groups = panel_lo // LANES, up_to(LANES, panel_hi) // LANES
                self.softmax.no_scores()
                self.scores(row, *groups)
                self.softmax.update(state, row, t0, *groups, whole)
                for _ in b.when(finite):
                    self.weighted_sum(state, row, panel_lo, panel_hi)
                for _ in b.when(~finite):
                    self.softmax.note_visible(row, t0, *groups)
                    for column in b.loop(0, shape.width, LANES):

                        def value(j: Int, column: Int = column) -> Vec:
                            return b.load(scratch.values + j * shape.value_step + column)

                        self.weighted_sum_by_row(state, row, all_rows, t0, panel_lo, panel_hi, column, value)

    def ask(self, row: Int, more: Bool) -> None:
        """Prefetch, beside a panel, its share of the next tile; beside the last tile its rows of o."""
        b, shape = self.b, self.shape
        for _ in b.when(more):
            first, end = (shape.columns * x // self.padded for x in (row, row + shape.panel))
            keys, values = self.rows_of("k"), self.rows_of("v")
            for j in b.loop(shape.columns + first, shape.columns + end):
                keys.ask(j, 0, shape.D, stream.SECOND_LEVEL)
                values.ask(j, 0, shape.Dv, stream.SECOND_LEVEL)
        for _ in b.when(~more):
            for _, i, head in self.rows(row, b.imin(row + shape.panel, self.count)):
                stream.ask(b, self.address("o", i, head), 0, shape.Dv, stream.SECOND_LEVEL)

    def rows_of(self, name: str) -> stream.Rows:
        """The rows of K or V in this tile and the next."""
        at = self.scratch.k_at if name == "k" else self.scratch.v_at
        return stream.Rows(self.b, self.head_of(name), at, self.shape.columns)

    def head_of(self, name: str) -> Ptr:
        """What the places of keys or values count from: the KV head's first row of all."""
        element = self.shape.element(name)
        address = self.sequence[name] + self.kv_head * self.call[name + "_head"] * element.size
        return self.b.pointer(address, self.call[name + "_lo"], self.call[name + "_hi"], element)

    def scores(self, row: Int, lo: Int, hi: Int) -> None:
        """S = Q @ K.T for a panel and the tile's groups [lo, hi)."""
        shape, scratch = self.shape, self.scratch
        nr = widths(shape.columns // LANES, shape.nr)[0]
        queries = scratch.queries + row * up_to(LANES, shape.D)
        scores(self.b, shape.panel, shape.mr, nr, shape.D, queries, scratch.keys, self.softmax.put, lo, hi)

    def weighted_sum(self, state: Fields, row: Int, lo: Int, hi: Int) -> None:
        """a = alpha * a + P @ V for a panel and keys [lo, hi): a key that a row does not see has weight 0 there."""
        shape, scratch = self.shape, self.scratch
        weighted_sum(
            self.b, shape.panel, shape.mr, shape.nr, state.a + row * shape.width, shape.width, scratch.alpha + row,
            scratch.S, shape.columns, scratch.values, shape.value_step, lo, hi,
        )  # fmt: skip

    def weighted_sum_by_row(
        self, state: Fields, row: Int, rows: range, t0: Int, first: Int, end: Int, column: Int,
        value: Callable[[Int], Vec],
    ) -> None:  # fmt: skip
        """The same for some rows, 16 columns, where a value is not finite: a row walks its own keys, as 0 * inf is NaN.

        A row for which all that it sees of the tile is -inf skips the tile.
        """
        b, shape, scratch = self.b, self.shape, self.scratch
        for x in b.loop(rows.start, rows.stop):
            lo = b.imax(b.load_int(scratch.row_lo + row + x) - t0, first)
            hi = b.imin(b.load_int(scratch.row_hi + row + x) - t0, end)
            for _ in b.when((lo < hi) & b.any(b.vec(0.0) < b.broadcast(scratch.seen + x))):
                a = state.a + (row + x) * shape.width + column
                acc = b.var(b.broadcast(scratch.alpha + row + x) * b.load(a))
                for j in b.loop(lo, hi):
                    at = x * shape.columns + j
                    for _ in self.when_visible(at):
                        acc.value = b.fma(b.broadcast(scratch.S + at), value(j), acc.value)
                b.store(a, acc.value)

    def when_visible(self, at: Int) -> Iterator[None]:
        """The body runs where the variant lets a row see a key."""
        if self.shape.variant.elements:
            yield from self.b.when(self.b.any(self.b.vec(0.0) < self.b.broadcast(self.scratch.visible + at)))
        else:
            yield

    def rows(self, first: IntLike, end: Int) -> Iterator[tuple[Int, Int, Int]]:
        """Rows [first, end) of this item, each with its query row and query head."""
        b, flat, group = self.b, self.start + first, self.call["group"]
        i, head = b.var(flat // group), b.var(flat % group)
        for r in b.loop(first, end):
            yield r, i.value, self.kv_head * group + head.value
            head.value = head.value + 1
            over = head.value.equals(group)
            i.value, head.value = i.value + b.choose(over, 1, 0), b.choose(over, 0, head.value)

    def address(self, name: str, row: Int, head: Int) -> Ptr:
        """Where a query row's q, o or lse lies."""
        call = self.call
        offset = row * call[name + "_row"] + head * call[name + "_head"]
        element = self.shape.element(name)
        return self.b.pointer(self.sequence[name], call[name + "_lo"], call[name + "_hi"], element) + offset

    def rows_in(self) -> None:
        """Pack the queries and find what each row sees."""
        b, shape, call, scratch = self.b, self.shape, self.call, self.scratch
        for r, i, head in self.rows(0, self.count):
            pack.copy_row(b, shape.D, self.address("q", i, head), scratch.queries + r * up_to(LANES, shape.D))
            pack.row_range(b, call, scratch, r, self.sequence["q_offset"] + i, *self.keys_for(r))
            if not shape.variant.plain:
                b.store_int(scratch.row_index + r, i)
                b.store_int(scratch.row_head + r, head)
        for r in b.loop(self.count, self.padded):  # rows that fill the last panel see nothing
            pack.no_query(b, shape, scratch, r)
            if not shape.variant.plain:  # anything that may be read
                b.store_int(scratch.row_index + r, 0)
                b.store_int(scratch.row_head + r, self.kv_head * call["group"])

    def keys_for(self, row: Int) -> tuple[Int, Int]:
        """The positions [first, end) of all keys, or of the tiles that the block mask shows to a row's panel."""
        b, call, first = self.b, self.call, self.sequence["first_key"]
        end = first + self.sequence["keys"]
        if self.shape.variant.keep:
            Bc, tiles = self.shape.Bc, b.pointer(call["tiles"], call["tiles"], call["tiles_hi"], I64)
            at, base = tiles + 2 * self.panel_number(row), first // Bc * Bc
            end = b.imin(end, base + b.load_int(at + 1) * Bc)
            first = b.imax(first, base + b.load_int(at) * Bc)
        return first, end

    def panel_number(self, row: Int) -> Int:
        """Of all panels that the block mask tells of."""
        call = self.call
        number = self.sequence["index"] * call["panels_batch"] + self.kv_head * call["panels_head"]
        return number + (self.start + row) // self.shape.panel

    def sink(self, head: Int) -> Vec:
        call = self.call
        return self.b.broadcast(self.b.pointer(call["sinks"], call["sinks_lo"], call["sinks_hi"]) + head)

    def rows_out(self) -> None:
        """Write o and lse. A row that sees no key is empty by its indices: o = 0, lse = -inf or its sink."""
        b, shape, scratch = self.b, self.shape, self.scratch
        for r, i, head in self.rows(0, self.count):
            target = self.address("o", i, head)
            empty = b.load_int(scratch.row_hi + r).equals(NO_KEY[1])
            if shape.variant.elements:
                empty = empty | b.all(b.broadcast(self.total.any + r).equals(b.vec(0.0)))
            for _ in b.when(empty):
                pack.unpack_row(b, shape.Dv, target, lambda c: b.vec(0.0))
                b.store_lane(scratch.lse + r, b.vec(NEG_INF), 0)
                for _ in b.when(~self.call["sinks"].equals(0)):
                    b.store_lane(scratch.lse + r, self.sink(head), 0)
            for _ in b.when(~empty):
                pack.unpack_row(b, shape.Dv, target, functools.partial(self.softmax.output, self.total, r))
            for _ in b.when(~self.sequence["lse"].equals(0)):
                b.store_lane(self.address("lse", i, head), b.broadcast(scratch.lse + r), 0)

    def states_out(self) -> None:
        """Write the state of every row: a where o would lie, m and l where lse would."""
        b, shape, total = self.b, self.shape, self.total
        for r, i, head in self.rows(0, self.count):

            def value(c: IntLike, row: Ptr = total.a + r * shape.width) -> Vec:
                return b.load(row + c)

            pack.unpack_row(b, shape.Dv, self.address("o", i, head), value)
            stats = self.address("lse", i, head)
            b.store_lane(stats, b.broadcast(total.m + r), 0)
            b.store_lane(stats + 1, b.broadcast(total.l + r), 0)
