"""The online softmax (Milakov and Gimelshein, 2018), extended to the output: recipe 1, steps 4 to 7.

A row's state is (m, l, a): running maximum (of base-2 scores), denominator, output. It is updated by tiles, started
anew for every span, and merged into the row's total in ascending order of spans. Statistics of 16 rows share a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.kernels.scores import Scores
from tilewise.kernels.tables import Fields, Shape
from tilewise.simd.builder import LANES, Bool, Builder, Int, IntLike, Mask, Ptr, Vec
from tilewise.simd.math import LN2, LOG2E, NAN, NEG_INF, exp2, exp2_each, fold, log2

LARGEST_DIVISOR = 2.0**24  # of `quotient`
LARGEST_SQUARE = 2.0**120  # and of its result


def shift(b: Builder, M: Vec) -> Vec:
    """What scores are reduced by: M, or 0 where M is -inf, so that exp2(-inf - shift) is 0 and not NaN."""
    return b.where(M.equals(b.vec(NEG_INF)), b.vec(0.0), M)


@dataclass(frozen=True)
class OnlineSoftmax:
    """The softmax of the rows of one work item. `together` rows share the loop over the groups of a tile."""

    b: Builder
    shape: Shape
    scratch: Fields
    scale: Vec
    together: int
    scores: Scores | None = None  # where the kernel is of a variant

    def init(self, state: Fields, rows: Int) -> None:
        """The empty state (-inf, 0, 0)."""
        b = self.b
        for r in b.loop(0, rows, LANES):
            b.store(state.m + r, b.vec(NEG_INF))
            b.store(state.l + r, b.vec(0.0))
            if self.shape.variant.elements:
                b.store(state.any + r, b.vec(0.0))
        for i in b.loop(0, rows * self.shape.width, LANES):
            b.store(state.a + i, b.vec(0.0))

    def no_scores(self) -> None:
        """Before the scores of a panel: no maxima, where `put` is to find them."""
        if not self.shape.variant.changes:
            for r in range(self.shape.panel):
                self.b.store(self.scratch.lanes + r * LANES, self.b.vec(NEG_INF))

    def put(self, r: Int, group: Int, scores: list[Vec]) -> None:
        """Scores of row r of a panel, from a group of the tile on: S = base-2 scores y; lanes[r] = maxima by lane.

        Scores that the variant changes are left as they are for `change`.
        """
        b, lanes = self.b, self.scratch.lanes + r * LANES
        target = self.scratch.S + r * self.shape.columns + group * LANES
        if not self.shape.variant.changes:
            scores = [s * self.scale * b.vec(LOG2E) for s in scores]
            b.store(lanes, functools.reduce(b.max, scores, b.load(lanes)))
        for x, score in enumerate(scores):
            b.store(target + x * LANES, score)

    def change(self, state: Fields, row: Int, t0: Int, lo: Int, hi: Int, masked: bool) -> None:
        """S, as `put` left it, to base-2 scores over groups [lo, hi), -inf where a row does not see; their maxima."""
        b, scratch, columns, variant = self.b, self.scratch, self.shape.columns, self.shape.variant
        for r in b.loop(0, self.shape.panel, self.together):
            rows = [row + r + x for x in range(self.together)]
            sees = [self.sees(own, t0) for own in rows if masked]
            best = [b.var(b.vec(NEG_INF)) for _ in rows]
            some = [b.var(b.between(0, 0)) for _ in rows if variant.elements and masked]
            scores = [self.scores.of_row(x) for x in rows if self.scores]
            for group in b.loop(lo, hi):
                j = t0 + group * LANES
                for x in range(self.together):
                    y = scratch.S + (r + x) * columns + group * LANES
                    score = b.load(y)
                    if variant.changes:
                        score = scores[x].change(score * self.scale, j) * b.vec(LOG2E)
                    if masked:
                        visible = sees[x](group)
                        if variant.elements:
                            visible = visible & scores[x].sees(j)
                            some[x].value = some[x].value | visible
                        score = b.where(visible, score, b.vec(NEG_INF))
                    b.store(y, score)
                    best[x].value = b.max(best[x].value, score)
            for x, own in enumerate(rows):
                b.store(scratch.lanes + (r + x) * LANES, best[x].value)
                for seen in some[x : x + 1]:
                    for _ in b.when(b.any(seen.value)):
                        b.store_lane(state.any + own, b.vec(1.0), 0)

    def sees(self, row: Int, t0: Int) -> Callable[[Int], Mask]:
        """Which keys of a group of the tile a row sees, given the group; lanes past Bc belong to the next tile."""
        b, Bc = self.b, self.shape.Bc
        ends = (b.load_int(end + row) - t0 for end in (self.scratch.row_lo, self.scratch.row_hi))
        lo, hi = (b.splat(b.imin(b.imax(end, 0), Bc)) for end in ends)

        def of(group: Int) -> Mask:
            key = b.iota() + b.splat(group * LANES)
            return ~(key < lo) & (key < hi)

        return of

    def note_visible(self, row: Int, t0: Int, lo: Int, hi: Int) -> None:
        """visible = 1 for the keys of groups [lo, hi) that the variant lets the rows of a panel see, 0 for others."""
        b, scratch = self.b, self.scratch
        if self.scores and self.shape.variant.elements:
            for x in b.loop(0, self.shape.panel):
                own = self.scores.of_row(row + x)
                for group in b.loop(lo, hi):
                    seen = b.where(own.sees(t0 + group * LANES), b.vec(1.0), b.vec(0.0))
                    b.store(scratch.visible + x * self.shape.columns + group * LANES, seen)

    def weights(self, lo: Int, hi: Int) -> None:
        """S to weights p = exp2(y - shift) over groups [lo, hi); lanes[r] = their sums by lane, groups ascending."""
        b, scratch, columns, together = self.b, self.scratch, self.shape.columns, range(self.together)
        for r in b.loop(0, self.shape.panel, self.together):
            shifts = [b.broadcast(scratch.shift + r + x) for x in together]
            sums = [b.var(b.vec(0.0)) for _ in together]
            rows = scratch.S + r * columns
            for at in b.loop(lo * LANES, hi * LANES, LANES):
                y = [rows + at + x * columns for x in together]
                p = exp2_each(b, [b.load(y[x]) - shifts[x] for x in together])
                for x in together:
                    b.store(y[x], p[x])
                    sums[x].value = sums[x].value + p[x]
            for x in together:
                b.store(scratch.lanes + (r + x) * LANES, sums[x].value)

    def fold_lanes(self, operation: str) -> Vec:
        """Lane r: the fold of lanes[r], for the rows of the panel."""
        b, panel = self.b, self.shape.panel
        rows = [b.load(self.scratch.lanes + r * LANES) for r in range(panel)]
        return fold(b, rows + [b.vec(0.0)] * (LANES - panel), operation)

    def update(self, state: Fields, row: Int, t0: Int, lo: Int, hi: Int, whole: Bool | None = None) -> None:
        """Take in the scores of a panel with the tile's groups [lo, hi): m, l and alpha of its rows, and S = P.

        M = max(m, y); alpha = exp2(m - M); p = exp2(y - M); l = fma(l, alpha, sum of p). A row that sees nothing here,
        or only scores of -inf, keeps its state: its alpha is 1, or multiplies zeros. `whole`: nothing is
        hidden by a variant.
        """
        b, scratch, variant = self.b, self.scratch, self.shape.variant
        start, end = t0 + lo * LANES, t0 + hi * LANES
        full = (b.load_int(scratch.panel_lo_max + row) <= start) & (end <= b.load_int(scratch.panel_hi_min + row))
        if self.shape.Bc % LANES:
            full = full & (hi * LANES <= self.shape.Bc)
        if whole is not None:
            full = full & whole
        if variant.changes or variant.elements:
            for _ in b.when(full):
                if variant.changes:
                    self.change(state, row, t0, lo, hi, masked=False)
                if variant.elements:
                    self._store_rows(state.any + row, b.vec(1.0), self.shape.panel)
        for _ in b.when(~full):
            self.change(state, row, t0, lo, hi, masked=True)
        tile_max, m = self.fold_lanes("max"), b.load(state.m + row)
        M = b.max(m, tile_max)
        alpha = exp2(b, m - shift(b, M))
        b.store(scratch.shift, shift(b, M))
        self.weights(lo, hi)
        t = self.fold_lanes("add")
        nothing = tile_max.equals(b.vec(NEG_INF)) & t.equals(b.vec(0.0))
        b.store(scratch.seen, b.where(nothing, b.vec(0.0), b.vec(1.0)))
        panel = self.shape.panel
        self._store_rows(state.m + row, M, panel)
        self._store_rows(scratch.alpha + row, alpha, panel)
        self._store_rows(state.l + row, b.fma(b.load(state.l + row), alpha, t), panel)

    def _store_rows(self, p: Ptr, x: Vec, count: int) -> None:
        if count == LANES:
            self.b.store(p, x)
        else:
            self.b.store_part(p, x, count)

    def merge(self, total: Fields, state: Fields, rows: Int) -> None:
        """Merge a span's state into the total: M = max, l = fma(l, alpha, l' * beta), a likewise.

        With shift() for M this is the identity where either side is empty.
        """
        b, scratch, width = self.b, self.scratch, self.shape.width
        for r in b.loop(0, rows, LANES):
            m, m_span = b.load(total.m + r), b.load(state.m + r)
            M = b.max(m, m_span)
            alpha, beta = exp2(b, m - shift(b, M)), exp2(b, m_span - shift(b, M))
            b.store(total.m + r, M)
            b.store(scratch.alpha + r, alpha)
            b.store(scratch.beta + r, beta)
            l, l_span = b.load(total.l + r), b.load(state.l + r)
            b.store(total.l + r, b.fma(l, alpha, l_span * beta))
            if self.shape.variant.elements:
                b.store(total.any + r, b.max(b.load(total.any + r), b.load(state.any + r)))
        for r in b.loop(0, rows):
            alpha, beta = b.broadcast(scratch.alpha + r), b.broadcast(scratch.beta + r)
            for c in b.loop(r * width, r * width + width, LANES):
                b.store(total.a + c, b.fma(b.load(total.a + c), alpha, b.load(state.a + c) * beta))

    def finalize(self, total: Fields, rows: Int) -> None:
        """lse = (m + log2 l) ln 2 of every row, a natural logarithm; and 1 / l for `quotient`, NaN where it may not."""
        b, scratch = self.b, self.scratch
        for r in b.loop(0, rows, LANES):
            l = b.load(total.l + r)
            lse = (b.load(total.m + r) + log2(b, l)) * b.vec(LN2)
            b.store(scratch.lse + r, canonical(b, lse))
            common = (b.vec(1.0) <= l) & (l <= b.vec(LARGEST_DIVISOR))
            b.store(scratch.inverse + r, b.where(common, b.vec(1.0) / l, b.vec(NAN)))

    def output(self, total: Fields, row: Int, column: IntLike) -> Vec:
        """o = a / l, 16 columns of a row. a + 0 makes every zero +0, so no bit tells how a zero came about."""
        b = self.b
        a, l = b.load(total.a + row * self.shape.width + column) + b.vec(0.0), b.broadcast(total.l + row)
        return quotient(b, a, l, b.broadcast(self.scratch.inverse + row))


def quotient(b: Builder, a: Vec, l: Vec, inverse: Vec) -> Vec:
    """a / l, correctly rounded, given RN(1 / l) or NaN: at a third of the cost of the divider where nothing is extreme.

    a * inverse is within 2 ulp of a / l; one correction by the residual makes it a faithful rounding, of which the
    next residual is exact, and one more makes it the correct one (Markstein's theorem, Handbook of Floating-Point
    Arithmetic, 2nd ed., section 4.7). That needs normal numbers throughout, hence the bounds.
    """
    q = a * inverse
    size = q * q
    o = b.var(q)
    common = b.all((b.vec(1 / LARGEST_SQUARE) <= size) & (size <= b.vec(LARGEST_SQUARE)))
    for _ in b.when(common):
        for _ in range(2):
            o.value = b.fma(b.fma(b.vec(0.0) - o.value, l, a), inverse, o.value)
    for _ in b.when(~common):
        o.value = canonical(b, a / l)
    return o.value


def canonical(b: Builder, x: Vec) -> Vec:
    """x with every NaN replaced by one: machines differ in the NaN that they make."""
    return b.where(x.equals(x), x, b.vec(NAN))
