"""From ranges of keys to calls: what each query row sees, as blocks of rows that the core can be asked for.

A row sees the keys [lo, hi) of its sequence's buffer. Rows whose ranges grow as a causal mask or a window lets them
grow form a block; a batch is a list of blocks, and all blocks of one (causal, window) are computed in one call, each as
a sequence of its own. So padding, packed sequences, windows and chunks are one thing, without a mask in memory. What is
no range, such as a mask with holes, is a dense mask or bias beside blocks that reach around what the rows see.
Positions count from a sequence's first real key, so that padding on its left moves no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tilewise.arguments import Array, I64Array

_PIECES = 4  # blocks of a sequence whose mask is dense anyway: with more, one block for all its rows is faster


class Block(NamedTuple):
    """Query rows [row, row + rows) of a sequence, and the keys [start, start + keys) that they may see."""

    sequence: int
    row: int
    rows: int
    start: int
    keys: int
    k_offset: int  # position of the first key
    q_offset: int  # position of the first row
    causal: bool
    window: int | None

    def allows(self, causal: bool, window: int | None) -> bool:
        """Whether the rows see the same keys under another mask: one row needs none, a short reach no window."""
        if self.rows > 1 and self.causal != causal:
            return False
        reach = self.q_offset - self.k_offset + self.rows  # from the first key to the last row's position
        return self.window == window or (self.window is None and window is not None and reach <= window)


def blocks(lo: I64Array, hi: I64Array, sequence: int, first: int | None = None) -> Iterator[Block]:
    """The blocks of one sequence, as few as there can be; its row i sees the keys [lo[i], hi[i]), none if lo >= hi.

    first: index of the key at position 0. None: where a block's keys overlap none of the block before, as those of
    packed sequences, its first key is at position 0.
    """
    if len(lo) == 1:  # a decode step, which has no time for what follows
        begin, end = int(lo[0]), int(hi[0])
        offset = begin - first if first is not None else 0
        if begin < end:
            yield Block(sequence, 0, 1, begin, end - begin, offset, offset + end - begin - 1, False, None)
        return
    rises, climbs = np.diff(hi), np.diff(lo)  # from each row to the next: 0 or 1, or the block ends
    sees = lo < hi
    ends = ~(sees[1:] & sees[:-1] & (rises >= 0) & (rises <= 1) & (climbs >= 0) & (climbs <= 1))
    if first is None:
        ends |= lo[1:] >= hi[:-1]
    # hi rises with the row until the keys end, lo stays until the window leaves it: not the other way round
    turns = np.zeros_like(ends)
    turns[1:] = (rises[1:] > rises[:-1]) | (climbs[1:] < climbs[:-1])
    start, anchor, seen = 0, first, -1
    if not len(lo):
        return
    for step in [*np.flatnonzero(ends | turns).tolist(), len(lo) - 1]:
        if not (step == len(lo) - 1 or ends[step] or step > start):  # a turn needs two steps of the same block
            continue
        row, start = start, step + 1
        if not sees[row]:
            continue
        begin, end, position = int(lo[row]), int(hi[step]), int(hi[row]) - 1
        if first is None and (anchor is None or begin >= seen or begin < anchor):
            anchor = begin
        seen = end
        offset = begin - (anchor or 0)
        causal = step > row and bool(rises[row])
        window = position + (step - row) - int(lo[step]) + 1 if lo[step] > begin else None
        yield Block(
            sequence, row, start - row, begin, end - begin, offset, offset + position - begin, causal, window
        )  # fmt: skip


def covering(lo: I64Array, hi: I64Array, sequence: int, first: int | None) -> list[Block]:
    """Blocks of one sequence that reach around the keys of each row, for rows that a dense mask tells the rest.

    first: as in `blocks`, but that None means the first key that a row sees.
    """
    sees = lo < hi
    if not sees.any():
        return []
    begin, end = int(lo[sees].min()), int(hi[sees].max())
    first = begin if first is None else first
    parts = list(blocks(lo, hi, sequence, first))
    if len(parts) <= _PIECES:
        return parts
    return [Block(sequence, 0, len(lo), begin, end - begin, begin - first, begin - first, False, None)]


class Calls:
    """The calls for a batch of blocks, prepared once (see `hf_launch`) and used again by each layer of a forward pass.

    mask, bias: what rows see beyond ranges, and what is added to their scores, broadcastable to [B, H, Tq, Tk].
    """

    def __init__(
        self, shape: tuple[int, int, int], parts: list[Block], mask: Array | None = None, bias: Array | None = None
    ) -> None:
        self.shape = shape  # [B, Tq, Tk]
        self.mask, self.bias = mask, bias
        self.parts: dict[tuple[bool, int | None], list[Block]] = {}
        for part in sorted(parts, key=lambda part: (part.window is None, part.rows == 1)):
            masks = [mask for mask in self.parts if part.allows(*mask)]
            self.parts.setdefault(masks[0] if masks else (part.causal, part.window), []).append(part)
        rows = sum(part.rows for part in parts)
        self.blind = rows < shape[0] * shape[1]  # some row sees no key
        self.step = shape[1] == 1 and len(parts) == shape[0]  # a step of decode: a row of each sequence
        self.of_one_pass = False  # so that nobody changes knobs or the number of threads in between
        self.made: Any = None  # by `hf_launch`: knobs, a pool, and what is ready for each layout of a layer's arrays
        self.last: Any = None  # by the same: what the layer before had, within one pass

    def starts(self) -> set[int]:
        """The rows at which a block begins."""
        return {block.row for part in self.parts.values() for block in part}
