"""Variants in a kernel: the scores of a row changed, and which keys it sees, 16 keys at a time."""

from __future__ import annotations

import functools
import operator

from tilewise.kernels.tables import Fields, Row, Shape, up_to
from tilewise.kernels.variants import FULL, GROUPS, KINDS, PARTIAL, SKIP, Operand
from tilewise.simd.builder import ELEMENTS, F32, LANES, U8, Builder, Element, Int, Mask, Ptr, Vec
from tilewise.simd.math import NEG_INF, tanh


class Scores:
    """The variant of a kernel, for the rows of one work item."""

    def __init__(self, b: Builder, shape: Shape, call: Row, sequence: Row, scratch: Fields) -> None:
        self.b, self.variant, self.call, self.sequence, self.scratch = b, shape.variant, call, sequence, scratch
        self.groups = shape.columns // LANES
        self.pointers: dict[str, list[Ptr]] = {}
        taken = 0
        for hook in self.variant.hooks:  # which have the tables of the call in their order
            names = [f"table{taken + n}" for n in range(len(hook.tables))]
            self.pointers[hook.kind] = [b.pointer(call[n], call[n], call[n + "_hi"]) for n in names]
            taken += len(names)

    def of_row(self, row: Int) -> RowScores:
        return RowScores(self, row)

    def look(self, row: Int, rows: Int, t0: Int, lo: Int, hi: Int) -> Int:
        """What bias and mask say of keys [lo, hi) of a tile for `rows` rows from `row` on, see `variants.KINDS`."""
        b = self.b
        first, last = b.var(b.integer(-1)), b.var(b.integer(0))  # the groups that some row sees
        every = b.var(b.between(0, LANES))
        for group in b.loop(lo // LANES, up_to(LANES, hi) // LANES):
            inside = b.between(lo - group * LANES, hi - group * LANES)
            some = b.var(b.between(0, 0))
            for x in b.loop(row, row + rows):
                shown = self.of_row(x).shows(t0 + group * LANES)
                some.value = some.value | shown & inside
                every.value = every.value & (shown | ~inside)
            seen = b.any(some.value)
            first.value = b.choose(seen & (first.value < 0), group, first.value)
            last.value = b.choose(seen, group, last.value)
        kind = b.choose(b.all(every.value), FULL, PARTIAL)
        if self.groups <= GROUPS:
            kind = kind + first.value * KINDS + last.value * (KINDS * GROUPS)
        return b.choose(first.value < 0, SKIP, kind)

    def lanes(self, j: Int) -> tuple[Int, Int]:
        """Which of 16 keys from position j on exist: [lo, hi)."""
        first = self.sequence["first_key"] - j
        return first, first + self.sequence["keys"]


class RowScores:
    """The same for one row, with all that does not depend on the key."""

    def __init__(self, scores: Scores, row: Int) -> None:
        b, call, sequence, variant = scores.b, scores.call, scores.sequence, scores.variant
        self.b, self.scores, self.variant = b, scores, variant
        i, head = b.load_int(scores.scratch.row_index + row), b.load_int(scores.scratch.row_head + row)
        self.place = sequence["index"], head, sequence["q_offset"] + i
        if variant.softcap:
            self.cap, self.inverse_cap = (b.broadcast(call.cell(n, F32)) for n in ("softcap", "inverse_softcap"))
        if variant.alibi:
            slopes = b.pointer(call["slopes"], call["slopes_lo"], call["slopes_hi"])
            self.slope = b.broadcast(slopes + (sequence["index"] * call["slopes_batch"] + head * call["slopes_head"]))
        if variant.bias:
            self.bias = self._operand("bias", variant.bias, ELEMENTS[variant.bias.type], i, head)
        if variant.mask:
            self.mask = self._operand("mask", variant.mask, U8, i, head)

    def _operand(self, name: str, operand: Operand, element: Element, i: Int, head: Int) -> Ptr:
        """What the row's mask or bias for the key at position 0 would be, or its one for all keys."""
        call, sequence = self.scores.call, self.scores.sequence
        row = sequence["index"] * call[name + "_batch"] + head * call[name + "_head"]
        row = row + (sequence["first_row"] + i) * call[name + "_row"]
        if not operand.spread:
            row = row + sequence["first_column"] - sequence["first_key"]
        return self.b.pointer(call[name], call[name + "_lo"], call[name + "_hi"], element) + row

    def change(self, s: Vec, j: Int) -> Vec:
        """The scores of 16 keys from position j on changed: softcap, score function, ALiBi, bias."""
        b, variant = self.b, self.variant
        if variant.softcap:
            s = self.cap * tanh(b, s * self.inverse_cap)
        if variant.score:
            s = variant.score.score(b, self.scores.pointers["score"], s, *self.place, j)
        if variant.alibi:
            distance = b.to_float(b.splat(self.place[2] - j) - b.iota())
            s = s - self.slope * b.max(distance, b.vec(0.0) - distance)
        return s + self._bias_at(j) if variant.bias else s

    def _bias_at(self, j: Int) -> Vec:
        b, operand = self.b, self.variant.bias
        assert operand is not None
        return b.broadcast(self.bias) if operand.spread else b.load_lanes(self.bias + j, *self.scores.lanes(j))

    def sees(self, j: Int) -> Mask:
        """Which of 16 keys from position j on the bias, the mask and the keep function let the row see."""
        seen = self._shown(j)
        if self.variant.keep:
            seen.append(self.variant.keep.keep(self.b, self.scores.pointers["keep"], *self.place, j))
        return functools.reduce(operator.and_, seen)

    def shows(self, j: Int) -> Mask:
        """The same of bias and mask alone."""
        return functools.reduce(operator.and_, self._shown(j))

    def _shown(self, j: Int) -> list[Mask]:
        """Where the bias is not -inf, and where the mask is not 0."""
        b, variant, shown = self.b, self.variant, []
        if variant.bias:
            shown.append(~self._bias_at(j).equals(b.vec(NEG_INF)))
        if variant.mask and variant.mask.spread:
            one = b.load_int(self.mask)
            shown.append(b.between(b.choose(one.equals(0), 1 << 30, -(1 << 30)), 1 << 30))
        elif variant.mask:
            shown.append(b.load_mask_lanes(self.mask + j, *self.scores.lanes(j)))
        return shown
