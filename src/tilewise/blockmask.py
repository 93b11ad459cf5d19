"""Keep functions, and which tiles of keys they hide wholly: computed once, before the attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidArgument
from tilewise.kernels.blocks import BLOCKS, blocks_kernel
from tilewise.kernels.hooks import Hook, trace
from tilewise.kernels.tables import Shape
from tilewise.kernels.variants import SKIP
from tilewise.problem import Problem
from tilewise.runtime.launch import run_once

LARGEST_POSITION = 1 << 30  # hooks compute with integers of 32 bits
_REMEMBERED = 16  # layouts of calls


class BlockMask:
    """A keep function, traced, with the arrays that it captured as they were, and what it says of whole tiles.

    Made by `block_mask`, or by each call that is given a plain function.
    """

    def __init__(self, hook: Hook, arrays: list[NDArray[Any]]) -> None:
        self.hook, self.arrays = hook, arrays
        self._tables: dict[Any, dict[str, NDArray[Any]]] = {}

    def tables(self, problem: Problem, shape: Shape) -> dict[str, NDArray[Any]]:
        """What the kernel is told of a layout of rows and keys.

        kinds: bytes [B or 1, Hkv or 1, panel, tile]: SKIP, PARTIAL or FULL for the keys that a panel of rows may see,
        see `variants.KINDS`; tiles: int64 [B or 1, Hkv or 1, panel, 2]: the first tile that is not SKIP, and the end.
        """
        per_sequence = (problem.rows, problem.q_offset, problem.k_offset, problem.kv_len, problem.index)
        layout = (*(x.tobytes() for x in per_sequence), problem.group, problem.Hkv, shape.panel, shape.Bc)
        known = self._tables.get(layout)
        if known is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            kinds = self._compute(problem, shape)
            known = self._tables[layout] = {"kinds": kinds, "tiles": _ends(kinds != SKIP)}
        return known

    def _compute(self, problem: Problem, shape: Shape) -> NDArray[np.uint8]:
        per_sequence = [problem.rows, problem.q_offset, problem.k_offset, problem.kv_len, problem.index]
        if not self.hook.reads_sequence and all((x == x[:1]).all() for x in per_sequence[:4]):
            per_sequence = [x[:1] for x in per_sequence]
        rows, q_offset, first, keys, index = (np.ascontiguousarray(x) for x in per_sequence)
        heads = problem.Hkv if self.hook.reads_head else 1
        panels = -(-int(rows.max(initial=0)) * problem.group // shape.panel)
        tiles = int(((first + keys - 1) // shape.Bc - first // shape.Bc + 1).max(initial=0))
        # a sequence's number is its place in the whole batch, of which this problem may be a part
        sequences = int(problem.index.max(initial=-1)) + 1 if len(rows) != 1 or self.hook.reads_sequence else 1
        spread = [np.zeros(sequences, np.int64) for _ in range(3)]
        for target, x in zip(spread, (rows, q_offset, first), strict=True):
            target[index if sequences > 1 else slice(None)] = x
        kinds = np.zeros((sequences, heads, panels, tiles), np.uint8)
        numbers = {
            "sequences": sequences, "heads": heads, "panels": panels, "tiles": tiles, "panel": shape.panel,
            "group": problem.group,
        }  # fmt: skip
        arrays = dict(zip(("rows_of", "q_offset", "first_key"), spread, strict=True)) | {"kinds": kinds}
        arrays |= {f"table{n}": x for n, x in enumerate(self.arrays)}
        if kinds.size:
            run_once(blocks_kernel(self.hook, shape.Bc), BLOCKS, numbers, arrays)
        return kinds


def _ends(seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[.., tile] to [.., 2]: the first tile that is seen and the end of those; 0, 0 where none is."""
    tiles = seen.shape[-1]
    if not tiles:
        return np.zeros((*seen.shape[:-1], 2), np.int64)
    first, after = seen.argmax(-1), seen[..., ::-1].argmax(-1)
    return np.where(seen.any(-1, keepdims=True), np.stack([first, tiles - after], -1), 0).astype(np.int64)


def block_mask(keep: Any) -> BlockMask:
    """A mask of a keep function, to be used by many calls.

    Parameters
    ----------
    keep : function keep(b, h, i, j) -> bool
        Whether query row i of sequence b and query head h sees key j; i and j are absolute positions. See
        `tilewise.hooks` for what it may compute with, and for ready ones. Arrays that it captured are copied.

    Returns
    -------
    A mask for the argument `keep` of `attention`, `attention_varlen` and `attention_paged`: which tiles are hidden
    wholly, in part or not at all is computed at its first use for each layout of rows and keys, and kept.

    Raises
    ------
    InvalidArgument, naming the line, for a function that cannot be traced.
    """
    return BlockMask(*trace("keep", keep))


def as_block_mask(keep: Any) -> BlockMask:
    return keep if isinstance(keep, BlockMask) else block_mask(keep)


def check_positions(problem: Problem) -> None:
    """Hooks and ALiBi compute with positions of 32 bits."""
    ends = (problem.q_offset + problem.rows, problem.k_offset + problem.kv_len)
    largest = max(int(x.max(initial=0)) for x in ends)
    if largest > LARGEST_POSITION:
        raise InvalidArgument(f"alibi_slopes, score and keep need positions up to {LARGEST_POSITION}, got {largest}")
