"""The constants of exp2, log2 and the scores are those of the recipe, to the last bit.

A coefficient off by one in its last place moves so few results that no sample of them would notice.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from tilewise.simd import math

DOCUMENT = (Path(__file__).parents[2] / "docs" / "explanation" / "recipe.md").read_text()
TABLE = {name: int(bits, 16) for name, bits in re.findall(r"^\| `(\w+)` \| `(0x\w{8})` ", DOCUMENT, re.M)}


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def test_constants_are_the_recipes() -> None:
    assert [bits_of(c) for c in (1.0, *math.EXP2)] == [TABLE[f"c{i}"] for i in range(7)]
    assert [bits_of(c) for c in math.LOG2] == [TABLE[f"d{i}"] for i in range(10)]
    assert bits_of(math.LOG2E) == TABLE["LOG2E"]
    assert bits_of(math.LN2) == TABLE["LN2"]
    assert bits_of(math.ROUND) == TABLE["ROUND"]
    assert TABLE["SQRT_HALF"] == math.SQRT_HALF_BITS
    assert math.EXP2_SMALLEST == -126
