"""Fixtures of all tests, and the Hypothesis profiles: dev (the default), ci and nightly, by HYPOTHESIS_PROFILE."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import tilewise as tw
from tests.support import RUNNABLE

# No deadline, and no complaint about slow drawing: the first call of a shape compiles a kernel.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("dev", _COMMON, max_examples=40, derandomize="CI" in os.environ)
settings.register_profile("ci", _COMMON, max_examples=200, derandomize=True, print_blob=True)
settings.register_profile("nightly", _COMMON, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# A shell starts background jobs with interrupts ignored, and Python then has no KeyboardInterrupt to test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["native", "interpreted"])
def ring(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both rings that run the kernel's text; the third, the reference, is what they are compared with."""
    with tw.config(interpret=request.param == "interpreted"):
        yield request.param


@pytest.fixture(params=RUNNABLE)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each target that this machine can run, forced."""
    with tw.config(target=request.param):
        yield request.param


@pytest.fixture
def eager_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use every thread that is offered, however small the problem, and return from the kernel after every work item."""
    monkeypatch.setattr("tilewise.plan.SMALLEST_JOB", 1)
    monkeypatch.setattr("tilewise.plan.BATCH_FLOPS", 1)
    remembered = sys.modules["tilewise.entry"]._memory
    remembered.clear()  # calls are planned anew here, and after it
    yield
    remembered.clear()
