"""What the tests of PyTorch's frontends share: tensors that show a swap, and comparison of bits and of errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support import FLOOR_ULPS, inputs


def tensors(
    B: int = 2, H: int = 4, Hkv: int = 2, Tq: int = 5, Tk: int = 70, D: int = 16, Dv: int = 24,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]."""
    return [torch.from_numpy(x).to(dtype) for x in inputs(B, H, Hkv, Tq, Tk, D, Dv, seed)]


def pages_of(k: torch.Tensor, page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages, block table) that hold k [B, Hkv, Tk, D], the pages in another order than the keys."""
    B, Hkv, Tk, D = k.shape
    count = -(-Tk // page_size)
    padded = torch.full((B, count * page_size, Hkv, D), torch.nan, dtype=k.dtype)
    padded[:, :Tk] = k.transpose(1, 2)
    order = torch.arange(B * count).flip(0)
    return padded.view(B * count, page_size, Hkv, D)[order].contiguous(), order.view(B, count).to(torch.int32)


def assert_same_bits(a: Any, b: Any) -> None:
    """a and b are equal in every bit: two tensors, or two tuples of them."""
    if isinstance(a, tuple):
        assert isinstance(b, tuple)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    integer = {2: torch.int16, 4: torch.int32}[a.itemsize]
    x, y = (t.contiguous().view(integer) for t in (a, b))
    assert torch.equal(x, y), f"{int((x != y).sum())} of {a.numel()} elements differ in bits"


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o, lse) of [..., H, T, D] in float64 (or `dtype`) by the definition; `visible` bool, broadcast to [..., Tq, Tk].

    A row that sees nothing is 0, its lse -inf.
    """
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = float(np.float32(q.shape[-1] ** -0.5)) if scale is None else scale
    s = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)


def assert_as_accurate_as_naive(got: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
    """The largest error is at most twice that of naive float32, or some ULP: tests.support has the reasons."""
    assert got.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(got[~finite].double(), exact[~finite])
    if not finite.any():
        return
    error, naive_error = (float((x[finite].double() - exact[finite]).abs().max()) for x in (got, naive))
    floor = FLOOR_ULPS * float(np.spacing(np.float32(exact[finite].abs().max())))
    assert error <= max(2 * naive_error, floor), f"error {error:.3g}, naive {naive_error:.3g}, floor {floor:.3g}"
