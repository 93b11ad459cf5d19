"""The steps of a loop that decodes differ in their number of keys and their position: they are prepared for once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import BF16
from tests.support import assert_same_bits
from tilewise import entry
from tilewise.arguments import Array

H, HKV, D, LONGEST = 4, 2, 24, 150
TILES = {"bc": 16, "span": 32}  # spans become work items where two threads have few tiles
OPTIONS: list[dict[str, Any]] = [
    {}, {"softcap": 3.0}, {"causal": True}, {"causal": True, "window": 33}, {"causal": True, "window": 5},
    {"window": (40, 20)}, {"return_lse": True},
]  # fmt: skip


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is remembered; the list grows with every call that is prepared."""
    monkeypatch.setattr(entry, "_memory", {})
    made: list[int] = []
    prepare = entry._prepare

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return prepare(*arguments)

    monkeypatch.setattr(entry, "_prepare", counted)
    return made


def cache(B: int = 1, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, HKV, LONGEST, D), np.float32) for _ in "kv"]


def queries(B: int, Tq: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((B, H, Tq, D), np.float32)


def alone(monkeypatch: pytest.MonkeyPatch, *operands: Array, **options: Any) -> Any:
    """As if it were the only call of the process, with exactly these lengths."""
    with monkeypatch.context() as patch:
        patch.setattr(entry, "_memory", {})
        patch.setattr(entry, "_step", lambda *_: None)
        return tw.attention(*operands, **options)


def keys_of_step(grown: str, t: int, q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], dict[str, int]]:
    """The arrays of a step with t keys, in one of the ways that loops have them, and the arguments that say so."""
    if grown == "kv_len":
        return (q, k, v), {"kv_len": t}
    return (q, *(x[:, :, :t] if grown == "slices" else x[:, :, :t].copy() for x in (k, v))), {}


def positioned(options: dict[str, Any], position: int) -> dict[str, Any]:
    return options | ({"q_offset": position} if {"causal", "window"} & set(options) else {})


def both(x: Any) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grown", ["slices", "copies", "kv_len"])
@pytest.mark.parametrize(("B", "Tq", "pool"), [(1, 1, 1), (1, 1, 2), (3, 1, 2), (1, 5, 2), (2, 40, 2)])
def test_every_step_has_the_bits_that_it_has_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], grown: str, B: int, Tq: int, pool: int
) -> None:
    """First ever more keys, then in no order, so that a table follows both; copies lie otherwise at each step."""
    k, v = cache(B)
    q = queries(B, Tq)
    steps = np.arange(Tq, LONGEST)
    for t in [*steps[::6].tolist(), *np.random.default_rng(2).permutation(steps)[:20].tolist()]:
        operands, filled = keys_of_step(grown, t, q, k, v)
        step = positioned(options, t - Tq) | TILES | {"pool": pool} | filled
        wanted = alone(monkeypatch, *operands, **step)
        for x, y in zip(both(tw.attention(*operands, **step)), both(wanted), strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("grown", ["slices", "copies", "kv_len"])
def test_a_loop_is_prepared_for_a_few_times(prepared: list[int], grown: str) -> None:
    k, v = cache()
    for t in range(1, LONGEST):
        operands, filled = keys_of_step(grown, t, queries(1, 1), k, v)
        tw.attention(*operands, **filled, causal=True, q_offset=t - 1)
    assert len(prepared) == 16  # once for 1 key, and for 2; for up to 4, 8, ... 256 with positions up to half, and all
    for t in range(100, LONGEST):  # the same for keys that lie otherwise
        tw.attention(queries(1, 1), *(np.flip(x, 1)[:, :, :t] for x in (k, v)), causal=True, q_offset=t - 1)
    assert len(prepared) == 16


def test_with_sinks_arenas_results_and_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not go the short way follows the step all the same."""
    k, v = cache()
    q, sinks, arena = queries(1, 1), np.ones(H, np.float32), tw.Arena()
    ways: list[dict[str, Any]] = [{"sinks": sinks}, {"arena": arena}, {"sinks": sinks, "return_lse": True}]
    for t, more in itertools.product((90, 140, 33, 77), ways):
        operands = q, k[:, :, :t], v[:, :, :t]
        wanted = alone(monkeypatch, *operands, **more)
        for x, y in zip(both(tw.attention(*operands, **more)), both(wanted), strict=True):
            assert_same_bits(x, y)
        out = np.empty_like(q)
        assert tw.attention(*operands, out=out, arena=arena) is out
        assert_same_bits(out, alone(monkeypatch, *operands))
        assert arena.high_water == tw.scratch_bytes(*operands)
        assert arena.used == 0


def test_layouts_of_other_strides_and_types_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = cache()
    q = queries(1, 1)
    keys: dict[str, Callable[[int], Array]] = {
        "usual": lambda t: k[:, :, :t],
        "one head": lambda t: k[:, :1, :t],
        "heads inside": lambda t: np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[:, :, :t],
        "every second": lambda t: np.repeat(k, 2, axis=2)[:, :, ::2][:, :, :t],
        "backwards": lambda t: k[:, :, t - 1 :: -1],
        "heads backwards": lambda t: k[:, ::-1, :t],
        "bfloat16": lambda t: BF16.rounded(k)[:, :, :t],
    }
    for t, name in itertools.product((100, 120, 70, 128), keys):
        operands = q, keys[name](t), v[:, :1, :t] if name == "one head" else v[:, :, :t]
        assert_same_bits(tw.attention(*operands), alone(monkeypatch, *operands))


def test_a_step_that_is_wrong_is_refused() -> None:
    k, v = cache()
    q = queries(1, 1)
    tw.attention(q, k[:, :, :100], v[:, :, :100])
    tw.attention(q, k[:, :, :100], v[:, :, :100], causal=True, q_offset=99)
    with pytest.raises(tw.ShapeError, match="same KV heads and keys"):
        tw.attention(q, k[:, :, :101], v[:, :, :100])
    with pytest.raises(tw.InvalidArgument, match="q_offset must be given"):
        tw.attention(q, k[:, :, :101], v[:, :, :101], causal=True)
    tw.attention(q, k[:, :, :100], v[:, :, :100], causal=True, q_offset=3)
    with pytest.raises(tw.InvalidArgument, match="q_offset"):
        tw.attention(q, k[:, :, :101], v[:, :, :101], causal=True, q_offset=-1)
    tw.attention(q, k[:, :, :140], v[:, :, :140])
    for wrong in (131, -1):
        with pytest.raises(tw.InvalidArgument, match="kv_len"):
            tw.attention(q, k[:, :, :130], v[:, :, :130], kv_len=wrong)
    longest = np.broadcast_to(np.ones(D, np.float16), (1, 1, 1 << 57, D))
    tw.attention(q[:, :1], longest, longest, causal=True, window=4, q_offset=5)
    with pytest.raises(tw.InvalidArgument, match="kv_len"):
        tw.attention(q[:, :1], longest, longest, causal=True, window=4, q_offset=5, kv_len=1 << 57)
    raw = np.zeros(k.size * 4 + 64, np.uint8)
    odd = np.ndarray((1, HKV, 101, D), np.float32, raw, 0, (0, 101 * D * 4 + 2, D * 4, 4))
    with pytest.raises(tw.InvalidArgument):
        tw.attention(q, odd, v[:, :, :101])
    assert_same_bits(tw.attention(q, k[:, :, :0], v[:, :, :0]), np.zeros_like(q))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(np.zeros((HKV, 5, D), np.float32), tw.ShapeError), (np.zeros((1, HKV, 5, D, 1), np.float32), tw.ShapeError),
     (np.zeros((1, HKV, 5), np.float32), tw.ShapeError), (np.empty((1, HKV, 5, D), np.dtype([])), TypeError),
     (np.empty((1, HKV, 5, D), np.int32), TypeError), (np.empty((1, HKV, 5, D), "V0"), TypeError)],
    ids=lambda x: x.__name__ if isinstance(x, type) else f"{x.shape} {x.dtype}",
)  # fmt: skip
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_no_array_of_keys_is_refused_as_ever(name: str, wrong: Array, error: type[Exception]) -> None:
    operands = {x: np.zeros((1, HKV, 5, D), np.float32) for x in ("k", "v")} | {name: wrong}
    for _ in range(2):
        with pytest.raises(error, match=name):
            tw.attention(queries(1, 1), **operands)


def test_more_sequences_than_any_memory_holds_are_no_steps() -> None:
    q, k = queries(1, 1), np.zeros((1, HKV, 5, D), np.float32)
    many = [np.broadcast_to(x, (1 << 40, *x.shape[1:])) for x in (q, k, k)]
    with pytest.raises(MemoryError):
        tw.attention(*many)


def test_knobs_do_not_meet_another_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Checked, interpreted and traced calls are prepared for exactly."""
    k, v = cache()
    q = queries(1, 1)
    for t, knobs in itertools.product((60, 45), ({}, {"check": 2}, {"interpret": True}, {"debug": 2}, {})):
        operands = q, k[:, :, :t], v[:, :, :t]
        tw.attention(*operands)
        tw.attention(q, k[:, :, : t + 1], v[:, :, : t + 1])
        with tw.config(**knobs):
            o = tw.attention(*operands)
        assert f"Tk {t} " in capsys.readouterr().err or "debug" not in knobs
        assert_same_bits(o, alone(monkeypatch, *operands))
