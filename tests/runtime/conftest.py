"""A pool for every test that asks for one, and an end to every deadlock."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tilewise.runtime.pool import Pool


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A deadlock ends the run, with a traceback of every thread, instead of hanging it."""
    faulthandler.dump_traceback_later(30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(3) as three:
        yield three
