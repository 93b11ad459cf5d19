"""Kernels of these tests are compiled anew and stay out of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilewise.config import config


@pytest.fixture(autouse=True)
def _no_disk_cache() -> Iterator[None]:
    with config(cache="off", dump=None):
        yield
