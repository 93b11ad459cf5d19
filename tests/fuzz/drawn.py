"""The same calls with Hypothesis at the dice, so that a failure shrinks. test_fuzz.py runs it in its own process."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.__main__ import trial_of
from tests.fuzz.trial import run


@given(st.randoms(use_true_random=False))
def test_a_clear_error_or_the_right_answer(random: Any) -> None:
    run(trial_of(random))
