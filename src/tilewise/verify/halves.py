"""float32 to half types and back, in plain NumPy: what the kernels' own conversions are held to."""

from __future__ import annotations

import numpy as np

from tilewise.arguments import BFLOAT16
from tilewise.verify.findings import Array

_NAN = 0x7FC0  # the one NaN of a bfloat16 result


def rounded(x: Array, type: str) -> Array:
    """float32s in a type (f32, f16 or bf16): to nearest, ties to even."""
    if type != "bf16":
        return x.astype({"f32": np.float32, "f16": np.float16}[type])
    bits = x.view(np.uint32)
    number = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(_NAN), number).astype(np.uint16).view(BFLOAT16)


def wide(x: Array, type: str) -> Array:
    """float32 of what is of a type: exact."""
    if type != "bf16":
        return x.astype(np.float32)
    return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
