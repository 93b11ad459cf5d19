"""Which keys a query row sees. Pure integers; the one place that knows causal, window and lengths.

`visible_range` is also called by the kernels, with run-time integers and their own min and max.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 60  # left or right of a row that sees everything on that side
N = TypeVar("N")


def bounds(causal: bool, window: int | tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right): how many keys before and after its own position a row sees, at most.

    A window counts the row's own key, so it leaves window - 1 before it; None, 0 or negative: no window. A pair counts
    the keys before and after it, None without a limit.
    """
    right = 0 if causal else UNBOUNDED
    if isinstance(window, tuple):
        before, after = (UNBOUNDED if side is None else side for side in window)
        return before, min(after, right)
    return (window - 1 if window is not None and window > 0 else UNBOUNDED), right


def visible_range(
    position: N, first: N, end: N, left: N, right: N,
    minimum: Callable[..., Any] = min, maximum: Callable[..., Any] = max,
) -> tuple[N, N]:  # fmt: skip
    """The positions [lo, hi) that a row at `position` sees of the keys [first, end); empty where lo >= hi."""
    p: Any = position
    return maximum(first, p - left), minimum(end, p + right + 1)


def visible_pairs(rows: Any, offset: Any, first: Any, keys: Any, left: int, right: int) -> NDArray[np.int64]:
    """How many (row, key) pairs are visible to rows at offset, offset + 1, ...; of one sequence or of arrays of them.

    A row sees the keys below p + right + 1 that are not below p - left; both counts are ramps over the rows, clipped
    to [0, keys], with sums in closed form.
    """
    rows, keys = np.asarray(rows, np.int64), np.asarray(keys, np.int64)

    def keys_below(shift: int) -> Any:
        """The keys below position p + shift, summed over the rows."""
        start = offset + shift - first
        rises, stops = np.clip(-start, 0, rows), np.clip(keys - start, 0, rows)
        return (stops - rises) * (2 * start + rises + stops - 1) // 2 + (rows - stops) * keys

    return np.asarray(keys_below(right + 1) - keys_below(-left), np.int64)
