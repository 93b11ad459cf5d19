"""Which keys a row sees: pure integers, compared with the definition for every small case and by hand at the edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewise.visibility import UNBOUNDED, bounds, visible_pairs, visible_range

WINDOWS = (None, -3, 0, 1, 2, 3, 7)


def sees(position: int, key: int, first: int, keys: int, causal: bool, window: int | None) -> bool:
    """The definition of the specification, section 2.1, for keys from position `first` on."""
    in_window = window is None or window <= 0 or key > position - window
    return first <= key < first + keys and in_window and (not causal or key <= position)


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (False, None, UNBOUNDED, UNBOUNDED),
        (True, None, UNBOUNDED, 0),
        (False, 1, 0, UNBOUNDED),
        (True, 1, 0, 0),
        (True, 2, 1, 0),
        (True, 0, UNBOUNDED, 0),
        (False, -1, UNBOUNDED, UNBOUNDED),
    ],
)
def test_bounds_by_hand(causal: bool, window: int | None, left: int, right: int) -> None:
    assert bounds(causal, window) == (left, right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_range_is_the_definition(causal: bool, window: int | None) -> None:
    left, right = bounds(causal, window)
    for position, first, keys in itertools.product(range(9), range(4), range(6)):
        lo, hi = visible_range(position, first, first + keys, left, right)
        expected = [key for key in range(20) if sees(position, key, first, keys, causal, window)]
        assert list(range(lo, hi)) == expected, (position, first, keys)


def test_range_of_arrays() -> None:
    positions = np.arange(5)
    lo, hi = visible_range(positions, 1, 4, 1, 0, np.minimum, np.maximum)
    assert lo.tolist() == [1, 1, 1, 2, 3]
    assert hi.tolist() == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_pairs_are_counted_one_by_one(causal: bool, window: int | None) -> None:
    left, right = bounds(causal, window)
    for rows, offset, first, keys in itertools.product(range(5), range(7), range(4), range(6)):
        expected = sum(
            sees(position, key, first, keys, causal, window)
            for position in range(offset, offset + rows)
            for key in range(first, first + keys)
        )
        got = visible_pairs(rows, offset, first, keys, left, right)
        assert got == expected, (rows, offset, first, keys)
        assert got.dtype == np.int64


def test_pairs_of_several_sequences() -> None:
    pairs = visible_pairs(np.array([3, 3, 0]), np.array([0, 5, 2]), np.array([0, 4, 0]), np.array([3, 2, 9]), 1, 0)
    # rows 0, 1, 2 see 1, 2, 2 keys; rows 5, 6, 7 of keys 4 and 5 see both, the last one, none; no rows see none
    assert pairs.tolist() == [5, 3, 0]


@pytest.mark.parametrize("rows", [1, 1000])
def test_pairs_far_from_zero(rows: int) -> None:
    """Positions up to 2^56 and lengths of 2^50 are counted exactly, with every bound."""
    far = 1 << 56
    assert visible_pairs(rows, far, 0, 1 << 50, UNBOUNDED, 0) == rows << 50
    assert visible_pairs(3, 1 << 54, 0, 1 << 55, UNBOUNDED, 0) == (3 << 54) + 6  # no float64 holds it
    assert visible_pairs(rows, far, far, 1 << 50, UNBOUNDED, 0) == rows * (rows + 1) // 2
    assert visible_pairs(rows, far, 0, far, UNBOUNDED, UNBOUNDED) == rows << 56 if rows == 1 else True
    assert visible_pairs(rows, far, far - 9, 1 << 50, 9, 0) == rows * 10
    assert visible_pairs(rows, 0, far, 1 << 50, UNBOUNDED, UNBOUNDED) == rows << 50
