"""Fixtures of the frontends' tests."""

from __future__ import annotations

from typing import Any

import pytest

import tilewise as tw


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call that reaches the core's functions."""
    calls: list[dict[str, Any]] = []

    def watched(function: Any) -> Any:
        def watch(*given: Any, **arguments: Any) -> Any:
            calls.append(arguments)
            return function(*given, **arguments)

        return watch

    for name in ("attention", "attention_varlen", "attention_paged"):
        monkeypatch.setattr(tw, name, watched(getattr(tw, name)))
    return calls
