"""The debug ladder counts the bytes of q, k, v and the results: a mask of bytes once ended it with a KeyError."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw


def test_a_mask_is_traced(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.ones((1, 1, 4, 16), np.float32)
    mask = np.ones((4, 4), np.bool_)
    with tw.config(debug=3):
        traced = tw.attention(x, x, x, mask=mask)
    assert "GFLOP/s" in capfd.readouterr().err
    assert np.array_equal(traced, tw.attention(x, x, x, mask=mask))
