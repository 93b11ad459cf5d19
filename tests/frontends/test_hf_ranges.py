"""Blocks of rows: whatever the ranges or the masks of transformers, the blocks see exactly the same keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewise.frontends.hf_ranges import Block, Calls, blocks
from tilewise.visibility import bounds, visible_range


def seen_by(parts: list[Block], B: int, Tq: int, Tk: int) -> NDArray[np.bool_]:
    """[B, Tq, Tk]: the keys that the rows of blocks see, by the definition of causal and window; each row once."""
    seen, times = np.zeros((B, Tq, Tk), np.bool_), np.zeros((B, Tq), int)
    for part in parts:
        for i in range(part.rows):
            lo, hi = visible_range(
                part.q_offset + i, part.k_offset, part.k_offset + part.keys, *bounds(part.causal, part.window)
            )
            shift = part.start - part.k_offset
            seen[part.sequence, part.row + i, lo + shift : max(lo, hi) + shift] = True
            times[part.sequence, part.row + i] += 1
    assert times.max(initial=0) <= 1
    assert not seen[times == 0].any()
    return seen


def regrouped(calls: Calls) -> Iterator[Block]:
    """The blocks under the masks with which they are really computed."""
    for (causal, window), parts in calls.parts.items():
        yield from (part._replace(causal=causal, window=window) for part in parts)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """[lo, hi) of rows that grow, jump, shrink and vanish."""
    Tk = draw(st.integers(1, 12))
    lo, hi, rows = draw(st.integers(0, Tk)), draw(st.integers(0, Tk)), []
    for step in draw(st.lists(st.sampled_from(["both", "hi", "lo", "stay", "jump", "none"]), min_size=1, max_size=20)):
        lo += step in ("both", "lo")
        hi += step in ("both", "hi")
        if step == "jump":
            lo, hi = draw(st.integers(0, Tk)), draw(st.integers(0, Tk))
        rows.append((0, 0) if step == "none" else (min(lo, Tk), min(hi, Tk)))
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows]), Tk


@given(ranges(), st.booleans())
def test_blocks_see_what_their_rows_see(drawn: Any, anchored: bool) -> None:
    lo, hi, Tk = drawn
    columns = np.arange(Tk)
    want = (lo[:, None] <= columns) & (columns < hi[:, None])
    parts = list(blocks(lo, hi, 0, 0 if anchored else None))
    assert (seen_by(parts, 1, len(lo), Tk)[0] == want).all()
    calls = Calls((1, len(lo), Tk), parts)
    assert (seen_by(list(regrouped(calls)), 1, len(lo), Tk)[0] == want).all()
    assert calls.blind == (not want.any(1).all())
    assert all(part.q_offset >= 0 <= part.k_offset for part in parts)
    if anchored:
        assert all(part.k_offset == part.start for part in parts)


def test_common_masks_are_one_block() -> None:
    n, i = 20, np.arange(20)
    for lo, hi, causal, window in (
        (0 * i, i + 1, True, None),
        (np.maximum(0, i - 4), i + 1, True, 5),
        (np.maximum(3, i - 4), np.minimum(i + 6, 18), True, 10),  # both sides, padded on both
        (0 * i, np.full(n, n), False, None),
        (np.maximum(0, i - 4), np.full(n, n), False, None),
    ):
        (block,) = blocks(lo, hi, 0, 0)
        assert (block.row, block.rows, block.causal) == (0, n, causal)
        assert window is None or block.window == window


def test_packed_sequences_start_at_position_0_and_are_one_call() -> None:
    lengths = [5, 1, 9, 3]
    ends = np.cumsum(lengths)
    lo = np.repeat(ends - lengths, lengths)
    hi = np.arange(18) + 1
    parts = list(blocks(np.maximum(lo, hi - 4), hi, 0))  # a window of 4, which not all of them fill
    assert [part.start for part in parts] == [0, 5, 6, 15]
    assert not any(part.k_offset or part.q_offset for part in parts)
    assert list(Calls((1, 18, 18), parts).parts) == [(True, 4)]


def test_two_rows_that_see_the_same_keys_are_not_causal() -> None:
    lo, hi = np.zeros(5, int), np.array([1, 2, 4, 4, 5])  # text, an image of two tokens, text
    calls = Calls((1, 5, 5), list(blocks(lo, hi, 0, 0)))
    assert {mask: len(parts) for mask, parts in calls.parts.items()} == {(True, None): 2, (False, None): 1}
    assert (seen_by(list(regrouped(calls)), 1, 5, 5)[0] == (np.arange(5) < hi[:, None])).all()


def test_no_rows() -> None:
    assert not list(blocks(np.zeros(0, int), np.zeros(0, int), 0))


@pytest.fixture
def T() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers").masking_utils


def _functions(M: Any, torch: Any) -> dict[str, Any]:
    segments = torch.tensor([[0] * 4 + [1] * 8 + [2] * 1 + [3] * 7] * 2)
    positions = torch.tensor([[*range(4), *range(8), *range(1), *range(7)]] * 2)
    packed = M.packed_sequence_mask_function(segments)
    images = torch.full((2, 20), -1)
    images[0, 3:7], images[1, 8:13] = 0, 1
    windowed = M.sliding_window_causal_mask_function(3)
    return {
        "causal": M.causal_mask_function,
        "both ways": M.bidirectional_mask_function,
        "window": windowed,
        "window of 1": M.sliding_window_causal_mask_function(1),
        "window on both sides": M.sliding_window_bidirectional_mask_function(2),
        "packed": M.and_masks(M.remap_positions_for_packed_sequence(M.causal_mask_function, positions), packed),
        "packed windows": M.and_masks(M.remap_positions_for_packed_sequence(windowed, positions), packed),
        "chunks": M.chunked_causal_mask_function(6, torch.tensor([0, 0])),
        "images": M.or_masks(M.causal_mask_function, M.blockwise_overlay(images)),
    }


@pytest.mark.parametrize(
    ("Tq", "q_offset", "kv_offset"), [(20, 0, 0), (1, 19, 0), (5, 15, 0), (1, 17, 11), (4, 16, 13)]
)
@pytest.mark.parametrize("padding", [None, "left", "right", "none", "short"])
def test_mask_functions(T: Any, Tq: int, q_offset: int, kv_offset: int, padding: str | None) -> None:
    torch, masks = importlib.import_module("torch"), importlib.import_module("tilewise.frontends.hf_masks")
    real = torch.ones(2, 18 if padding == "short" else 20, dtype=torch.bool)
    if padding == "left":
        real[0, :7] = False
    if padding == "right":
        real[1, 14:] = False
    Tk = 20 - kv_offset
    for name, function in _functions(T, torch).items():
        options = {
            "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": function,
            "attention_mask": None if padding is None else real,
        }  # fmt: skip
        want = T.sdpa_mask(2, Tq, Tk, **options, allow_is_causal_skip=False)
        for use_vmap in (False, True):
            made = masks.range_mask(2, Tq, Tk, **options, use_vmap=use_vmap)
            assert made.shape == (2, 1, Tq, Tk)
            assert (seen_by(list(regrouped(made.calls)), 2, Tq, Tk) == want[:, 0].numpy()).all(), name
        first = 7 if padding == "left" else 0  # of sequence 0: its position 0, except in packed sequences
        for part in list(regrouped(made.calls)) if "packed" not in name else []:
            if part.sequence == 0:
                assert part.start + kv_offset - part.k_offset == first, name
