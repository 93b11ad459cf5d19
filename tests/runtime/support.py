"""What several tests of the pool need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tilewise.runtime.pool import Pool


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread to get somewhere; the watchdog knows when to give up."""
    while not condition():
        time.sleep(0.001)


def calls_of_run(pool: Pool, workers: int) -> dict[int, int]:
    """Which thread called fn(w); asserts that each w was called once."""
    seen: list[tuple[int, int]] = []
    pool.run(workers, lambda w: seen.append((w, threading.get_ident())))
    assert sorted(w for w, _ in seen) == list(range(workers))
    return dict(seen)
