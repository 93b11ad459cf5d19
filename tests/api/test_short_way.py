"""Calls of q, k and v alone go a short way from the second one on: same bits, same errors."""

from __future__ import annotations

import math
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
    (known,) = {id(known): known for known in entry._memory.values()}.values()  # by its own key and that of its steps
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


def assert_same_results(got: Any, wanted: Any) -> None:
    for x, y in zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]:
        assert_same_bits(x, y)


def results(types: tuple[str, ...] = ("f32",) * 3) -> dict[str, Array]:
    """Arrays for results, of another value everywhere."""
    return {"out": np.full_like(arrays(types)[0], 7), "lse": np.full((1, 4, 3), 7, np.float32)}


@pytest.mark.parametrize(
    "more",
    [{"sinks": np.ones(4, np.float32)}, {"mask": np.ones((3, 40), np.bool_)}, {"bias": np.ones((3, 40), np.float32)},
     {"alibi_slopes": np.ones(4, np.float32), "q_offset": 37}],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_other_arrays_go_the_long_way(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    operands = arrays()
    wanted = long_way(monkeypatch, *operands, **more)
    tw.attention(*operands, **more)
    assert only_known().short is None
    assert_same_results(tw.attention(*operands, **more), wanted)


@pytest.mark.parametrize("names", [("out",), ("lse",), ("out", "lse")], ids=str)
@pytest.mark.parametrize("types", [("f32",) * 3, ("bf16",) * 3, ("f16", "f32", "bf16")], ids=str)
def test_results_into_given_arrays(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], types: tuple[str, str, str]
) -> None:
    operands = arrays(types)
    wanted = long_way(monkeypatch, *operands, return_lse="lse" in names)
    tw.attention(*operands, **{name: results(types)[name] for name in names})
    assert only_known().short is not None
    given = {name: results(types)[name] for name in names}
    got = tw.attention(*operands, **given)
    assert_same_results(got, wanted)
    assert (got if len(names) == 1 and "out" in names else got[0]) is given.get("out", got[0])
    assert "lse" not in names or got[1] is given["lse"]


def test_lse_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = arrays()
    wanted = long_way(monkeypatch, *operands, return_lse=True)
    tw.attention(*operands, return_lse=True)
    assert only_known().short is not None
    assert_same_results(tw.attention(*operands, return_lse=True), wanted)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_what_may_not_be_written_is_refused(name: str) -> None:
    """By a layout that is known already, and nothing is written."""
    operands, given = arrays(), results()
    tw.attention(*operands, **given)
    given[name].flags.writeable = False
    with pytest.raises(tw.InvalidArgument, match=f"{name} is read-only"):
        tw.attention(*operands, **given)
    before = {name: x.copy() for name, x in results().items()}
    given[name] = shifted(before[name], 2)
    with pytest.raises(tw.InvalidArgument, match="not aligned"):
        tw.attention(*operands, **given)
    assert_same_bits(given[name], before[name])


@pytest.mark.parametrize(("other", "at"), [("q", 280), ("k", 3232), ("v", 6304), ("lse", 7004)])
def test_results_over_other_arrays_are_refused(monkeypatch: pytest.MonkeyPatch, other: str, at: int) -> None:
    """Also where the keys of a step reach into them, and those of the step before did not."""
    memory = np.random.default_rng(0).standard_normal(8192, np.float32)

    def piece(at: int, *shape: int) -> Array:
        return memory[at : at + math.prod(shape)].reshape(shape)

    q, k, v, lse = piece(0, 1, 4, 3, 24), piece(1024, 1, 2, 48, 24), piece(4096, 1, 2, 48, 24), piece(7000, 1, 4, 3)
    out, first = piece(at, 1, 4, 3, 24), (q, k[:, :, :40], v[:, :, :40])
    wanted = long_way(monkeypatch, *first)
    tw.attention(*first, out=np.empty_like(q), lse=lse)
    if other in ("k", "v"):
        assert_same_bits(tw.attention(*first, out=out, lse=lse)[0], wanted)
    before = memory.copy()
    with pytest.raises(tw.InvalidArgument, match=f"out overlaps {other}"):
        tw.attention(q, k, v, out=out, lse=lse)
    assert_same_bits(memory, before)


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
