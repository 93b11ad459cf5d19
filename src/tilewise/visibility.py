"""Which keys a query row sees. Pure integers; the one place that knows causal, window and lengths.

`visible_range` is also called by the kernels, with run-time integers and their own min and max.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

UNBOUNDED = 1 << 60  # left or right of a row that sees everything on that side
N = TypeVar("N")


def bounds(causal: bool, window: int | None) -> tuple[int, int]:
    """(left, right): how many keys before and after its own position a row sees, at most.

    A window counts the row's own key, so it leaves window - 1 before it; None, 0 or negative: no window.
    """
    return (window - 1 if window is not None and window > 0 else UNBOUNDED), (0 if causal else UNBOUNDED)


def visible_range(
    position: N, first: N, end: N, left: N, right: N, minimum: Callable[..., Any] = min, maximum: Callable[..., Any] = max
) -> tuple[N, N]:
    """The positions [lo, hi) that a row at `position` sees of the keys [first, end); empty where lo >= hi."""
    p: Any = position
    return maximum(first, p - left), minimum(end, p + right + 1)


def visible_pairs(rows: int, offset: int, first: int, keys: int, left: int, right: int) -> int:
    """How many (row, key) pairs are visible to rows at offset, offset + 1, ...; closed form, no loop over rows."""
    if rows <= 0 or keys <= 0:
        return 0

    def area_below(shift: int) -> int:
        """Sum over rows of the number of keys below position p + shift."""
        # the count is clip(p + shift - first, 0, keys) for p = offset .. offset + rows - 1: a ramp
        start = offset + shift - first
        rising_from, rising_to = max(0, min(rows, -start)), max(0, min(rows, keys - start))
        ramp = rising_to - rising_from
        return ramp * (2 * start + rising_from + rising_to - 1) // 2 + (rows - rising_to) * keys

    return area_below(right + 1) - area_below(-left)
