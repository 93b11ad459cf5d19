"""A row's zeros had the sign that the other rows of its work item gave them."""

from __future__ import annotations

import numpy as np

from tests.support import Case, assert_same_bits


def test_an_empty_span_keeps_the_sign_of_zero(ring: str) -> None:
    """Recipe 1, step 5: to merge with an empty span is the identity, also for an output that has become -0.

    The first span's value is a negative subnormal; the second span outweighs it by 2^-43, so the row's output is a
    negative number that underflows. The row sees no key of the third span, which other rows of its work item do see:
    walking it must leave the bits as they are where nobody walks it.
    """
    q = np.ones((1, 1, 3, 1), np.float32)
    k = np.array([0, 0, 30, 30, 30, 30], np.float32).reshape(1, 1, 6, 1)
    v = np.array([-1e-44, -1e-44, 0, 0, 0, 0], np.float32).reshape(1, 1, 6, 1)
    c = Case(q, k, v, {"causal": True, "q_offset": 3, "scale": 1.0, "bc": 1, "span": 2})
    together = c.run()
    for row in range(3):
        assert_same_bits(c.rows(row, row + 1).run(), tuple(x[:, :, row : row + 1] for x in together), f"row {row}")
