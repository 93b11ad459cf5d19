"""The option that accepts the kernels as they are now: pytest tests/kernels --update-golden."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/kernels anew instead of comparing"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written. A run from the root does not know the option and compares."""
    return bool(request.config.getoption("--update-golden", default=False))
