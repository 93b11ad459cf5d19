"""Small calls of q, k and v alone go a short way from the second one on: same bits, same errors, new results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import BF16, BF16_BITS, F16, F32
from tests.support import assert_same_bits
from tilewise import entry
from tilewise.arguments import Array

TYPES: dict[str, Any] = {"f32": F32, "f16": F16, "bf16": BF16, "bits": BF16_BITS}
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True, "q_offset": 37}, {"window": 9, "q_offset": 30}, {"softcap": 5.0}]


def arrays(types: tuple[str, str, str] = ("f32", "f32", "f32"), B: int = 1, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    sizes = (4, 3), (2, 40), (2, 40)
    wide = [rng.standard_normal((B, *size, 24), np.float32) for size in sizes]
    return [TYPES[t].rounded(x) for x, t in zip(wide, types, strict=True)]


def long_way(monkeypatch: pytest.MonkeyPatch, *operands: Array, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(entry, "_memory", {})
        return tw.attention(*operands, **options)


def only_known() -> Any:
    (known,) = entry._memory.values()
    return known


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_memory", {})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "types", [("f32",) * 3, ("f16",) * 3, ("bf16",) * 3, ("bits",) * 3, ("f32", "f16", "bf16")], ids=str
)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("pool", [1, 2])
def test_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], types: tuple[str, str, str], B: int, pool: int
) -> None:
    first, second = arrays(types, B), arrays(types, B, seed=1)
    tw.attention(*first, pool=pool, **options)
    assert only_known().short is not None
    got = [tw.attention(*x, pool=pool, **options) for x in (second, first)]
    assert got[0] is not got[1]
    for x, o in zip((second, first), got, strict=True):
        assert_same_bits(o, long_way(monkeypatch, *x, pool=pool, **options))


@pytest.mark.parametrize(
    "more",
    [{"return_lse": True}, {"out": np.empty((1, 4, 3, 24), np.float32)}, {"lse": np.empty((1, 4, 3), np.float32)},
     {"sinks": np.ones(4, np.float32)}, {"mask": np.ones((3, 40), np.bool_)}, {"bias": np.ones((3, 40), np.float32)},
     {"alibi_slopes": np.ones(4, np.float32), "q_offset": 37}],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_other_arrays_and_results_go_the_long_way(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    operands = arrays()
    wanted = long_way(monkeypatch, *operands, **more)
    copies = [x.copy() for x in wanted] if isinstance(wanted, tuple) else wanted.copy()
    tw.attention(*operands, **more)
    assert only_known().short is None
    got = tw.attention(*operands, **more)
    for x, y in zip(got, copies, strict=True) if isinstance(got, tuple) else [(got, copies)]:
        assert_same_bits(x, y)


def shifted(x: Array, nbytes: int) -> Array:
    """A copy that begins so many bytes past a multiple of 64."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + nbytes
    y = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    y[:] = x
    return y


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("types", [("f32",) * 3, ("f16",) * 3, ("bits",) * 3])
def test_a_known_layout_that_is_not_aligned_is_refused(which: int, types: tuple[str, str, str]) -> None:
    operands = arrays(types)
    tw.attention(*operands)
    assert only_known().short is not None
    operands[which] = shifted(operands[which], operands[which].itemsize // 2)
    with pytest.raises(tw.InvalidArgument, match="not aligned"):
        tw.attention(*operands)


def test_half_types_may_lie_where_float32_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = arrays(("f32", "f16", "bf16"))
    wanted = tw.attention(*operands)
    assert_same_bits(tw.attention(operands[0], shifted(operands[1], 2), shifted(operands[2], 6)), wanted)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a call whose layout was known before."""
    operands = arrays()
    wanted = tw.attention(*operands)
    assert not capsys.readouterr().err
    with tw.config(debug=2):
        assert_same_bits(tw.attention(*operands), wanted)
    assert "attention" in capsys.readouterr().err


def test_an_arena_is_used() -> None:
    operands, arena = arrays(), tw.Arena()
    wanted = tw.attention(*operands)
    assert only_known().short is not None
    assert_same_bits(tw.attention(*operands, arena=arena), wanted)
    assert arena.high_water == tw.scratch_bytes(*operands)
    assert arena.used == 0
