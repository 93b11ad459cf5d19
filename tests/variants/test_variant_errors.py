"""What cannot be is refused, in the terms of the caller, before anything is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import POISON, assert_same_bits, poisoned
from tests.variants.calls import DENSE, RNG, TK, TQ, B, H, call
from tilewise import hooks

BIAS = RNG.standard_normal((B, H, TQ, TK)).astype(np.float32)
SLOPES = np.ones(H, np.float32)
FULL = rf"\({B}, {H}, {TQ}, {TK}\)"


def assert_refused(error: type[Exception], message: str, **options: Any) -> None:
    """Nothing is written or left in the arena, at the first and at a second call; a good call works afterwards."""
    c, out, lse, arena = call(), poisoned((B, H, TQ, 16)), poisoned((B, H, TQ)), tw.Arena()
    for _ in range(2):
        with pytest.raises(error, match=message):
            tw.attention(c.q, c.k, c.v, **c.arguments(**{"out": out, "lse": lse, "arena": arena, **options}))
        assert (out.view(np.uint32) == POISON).all()
        assert (lse.view(np.uint32) == POISON).all()
        assert arena.used == 0


NUMBERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softcap": 0}, tw.InvalidArgument, "softcap must be positive and finite"),
    ({"softcap": -1.0}, tw.InvalidArgument, "softcap must be positive and finite"),
    ({"softcap": math.nan}, tw.InvalidArgument, "softcap must be positive and finite"),
    ({"softcap": math.inf}, tw.InvalidArgument, "softcap must be positive and finite"),
    ({"softcap": 1e-40}, tw.InvalidArgument, "softcap must be positive and finite in float32, like 1 / softcap"),
    ({"softcap": 1e39}, tw.InvalidArgument, "softcap must be positive and finite"),
    ({"softcap": True}, TypeError, "softcap must be a number, got True"),
    ({"softcap": "2"}, TypeError, "softcap must be a number"),
    ({"softcap": [1, 2]}, TypeError, "softcap must be a number"),
    ({"window": (-1, 0)}, tw.InvalidArgument, "sides of window must not be negative"),
    ({"window": (0, -1)}, tw.InvalidArgument, "sides of window must not be negative"),
    ({"window": (1, 2, 3)}, tw.InvalidArgument, "window must be an integer or a pair"),
    ({"window": (1.0, 2)}, TypeError, "window must be an integer"),
    ({"window": (True, 2)}, TypeError, "window must be an integer"),
]
ARRAYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alibi_slopes": SLOPES[:3]}, tw.ShapeError, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(3,\)"),
    ({"alibi_slopes": np.ones((1, H), np.float32)}, tw.ShapeError, "alibi_slopes must have shape"),
    ({"alibi_slopes": SLOPES.astype(np.float64)}, TypeError, "alibi_slopes must be float32"),
    ({"alibi_slopes": [0.5] * H}, TypeError, "alibi_slopes must be a float32 NumPy array, got list"),
    ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a float32 NumPy array, got float"),
    ({"mask": DENSE.astype(np.uint8)}, TypeError, "mask must be bool, got dtype"),
    ({"mask": DENSE.astype(np.float32)}, TypeError, "mask must be bool"),
    ({"mask": DENSE.tolist()}, TypeError, "mask must be a bool NumPy array, got list"),
    ({"mask": True}, TypeError, "mask must be a bool NumPy array, got bool"),
    ({"mask": np.ma.masked_array(DENSE, DENSE)}, TypeError, "mask is a masked array"),
    ({"mask": DENSE[:, :3]}, tw.ShapeError, f"mask must be broadcastable to {FULL}"),
    ({"mask": DENSE[None]}, tw.ShapeError, f"mask must be broadcastable to {FULL}"),
    ({"mask": DENSE[..., :-1]}, tw.ShapeError, "mask must have 1 or 150 keys"),
    ({"mask": np.concatenate([DENSE, DENSE], -1)}, tw.ShapeError, "mask must have 1 or 150 keys"),
    ({"mask": DENSE[..., ::-1]}, tw.InvalidArgument, "last axis of mask must be contiguous"),
    ({"mask": np.ascontiguousarray(DENSE.swapaxes(2, 3)).swapaxes(2, 3)}, tw.InvalidArgument, "must be contiguous"),
    ({"bias": BIAS.astype(np.float64)}, TypeError, "bias must be float32, float16 or bfloat16, got dtype"),
    ({"bias": BIAS.astype(">f4")}, TypeError, "bias must be float32"),
    ({"bias": DENSE}, TypeError, "bias must be float32"),
    ({"bias": 0.0}, TypeError, "bias must be a float32, float16 or bfloat16 NumPy array, got float"),
    ({"bias": BIAS[..., :2]}, tw.ShapeError, "bias must have 1 or 150 keys"),
    ({"bias": BIAS[:, :, :2]}, tw.ShapeError, "bias must be broadcastable"),
]


@pytest.mark.parametrize(("options", "error", "message"), [*NUMBERS, *ARRAYS])
def test_arguments(options: Any, error: type[Exception], message: str) -> None:
    assert_refused(error, message, **options)


def test_unaligned_arrays() -> None:
    odd = np.zeros(BIAS.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(BIAS.shape)
    assert_refused(tw.InvalidArgument, "bias is not aligned", bias=odd)
    slopes = np.zeros(4 * H + 1, np.uint8)[1:].view(np.float32)
    assert_refused(tw.InvalidArgument, "alibi_slopes is not aligned", alibi_slopes=slopes)


def test_results_that_overlap() -> None:
    """Also where a call of the same layout was prepared."""
    c, out, lse = call(), np.zeros((B, H, TQ, 16), np.float32), np.zeros((B, H, TQ), np.float32)
    for name, x in (
        ("bias", out.reshape(-1)[:TK]), ("bias", lse[0, 0, :, None]), ("alibi_slopes", out.reshape(-1)[:H]),
        ("mask", out.view(np.bool_).reshape(-1)[:TK]),
    ):  # fmt: skip
        c.run(out=out, lse=lse, **{name: x.copy()})
        for _ in range(2):
            with pytest.raises(tw.InvalidArgument, match=f"(out|lse) overlaps {name}"):
                c.run(out=out, lse=lse, **{name: x})


def test_good_and_bad_in_turn() -> None:
    """Nothing that was remembered of a good call lets a bad one pass."""
    c = call()
    good = c.run(softcap=1, window=(3, 4), bias=BIAS)
    for bad in ({"softcap": True}, {"window": (3, 4.0)}, {"window": (3, True)}, {"bias": BIAS.astype(">f4")}):
        for _ in range(2):
            with pytest.raises((TypeError, tw.InvalidArgument)):
                c.run(**{"softcap": 1, "window": (3, 4), "bias": BIAS, **bad})
    for window in ([3, 4], (np.int64(3), np.int8(4))):
        assert_same_bits(good, c.run(softcap=1.0, window=window, bias=BIAS))


def test_ragged_masks() -> None:
    q, k = np.zeros((5, 2, 4), np.float32), np.zeros((9, 2, 4), np.float32)
    ends: dict[str, Any] = {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": np.array([0, 3, 9]), "q_offset": 0}
    for mask, message in (
        (np.ones((2, 2, 5, 6), np.bool_), "broadcastable"), (np.ones((4, 6), np.bool_), "broadcastable"),
        (np.ones((5, 5), np.bool_), "1 or 6 keys"), (np.ones((3, 5, 6), np.bool_), "broadcastable"),
    ):  # fmt: skip
        with pytest.raises(tw.ShapeError, match=message):
            tw.attention_varlen(q, k, k, mask=mask, **ends)
    with pytest.raises(tw.ShapeError, match="alibi_slopes"):
        tw.attention_varlen(q, k, k, alibi_slopes=np.ones((5, 2), np.float32), **ends)
    for good in (np.ones((2, 5, 6), np.bool_), np.ones((5, 8), np.bool_), np.ones((1, 5, 1), np.bool_), np.array(True)):
        tw.attention_varlen(q, k, k, mask=good, **ends)


# ---- functions that cannot be traced: (function, what the message says)
TABLE = np.arange(300, dtype=np.int64)


def branches(b: Any, h: Any, i: Any, j: Any) -> Any:
    if j > i:
        return False
    return i > 3


def loops(b: Any, h: Any, i: Any, j: Any) -> Any:
    result = j > i
    for x in range(j):
        result = result | (x == i)
    return result


def through_a_helper(b: Any, h: Any, i: Any, j: Any) -> Any:
    return helper(i) < j


def helper(x: Any) -> Any:
    return math.floor(x / 2)


KEEPS: list[tuple[Any, str]] = [
    (branches, r"if j > i:: .*use where, &, \|, ~"),
    (loops, r"for x in range\(j\):: int"),
    (lambda b, h, i, j: j <= i and j > 3, "and j > 3.*`and`"),
    (lambda b, h, i, j: j <= i or j > 3, "or j > 3.*`or`"),
    (lambda b, h, i, j: not j <= i, "not j <= i.*`not`"),
    (lambda b, h, i, j: 0 <= i - j < 5, "0 <= i - j < 5.*`and`"),
    (lambda b, h, i, j: i in (1, 2), r"i in \(1, 2\)"),
    (lambda b, h, i, j: min(i, 5) == j, r"min\(i, 5\)"),
    (lambda b, h, i, j: int(i) < j, r"int\(i\).*int\(\)"),
    (lambda b, h, i, j: float(i) < j, r"float\(i\).*float\(\)"),
    (lambda b, h, i, j: [1, 2, 3][i] < j, r"\[1, 2, 3\]\[i\]"),
    (lambda b, h, i, j: {1: 2}[i] < j, r"unhashable"),
    (lambda b, h, i, j: [*i], "cannot be iterated over"),
    (lambda b, h, i, j: i**3 < j, r"\*\* is not a word"),
    (lambda b, h, i, j: 2**i < j, r"2\*\*i"),
    (lambda b, h, i, j: i << 2 < j, r"i << 2"),
    (lambda b, h, i, j: np.sin(i) < j, "np.sin is not a word of hooks"),
    (lambda b, h, i, j: np.clip(i, 0, 5) < j, "np.clip is not a word of hooks"),
    (lambda b, h, i, j: np.add.reduce(i) < j, "np.add is not a word of hooks"),
    (through_a_helper, r"math.floor\(x / 2\)"),
    (lambda b, h, i, j: (j <= i) + 1, "arithmetic on truth values"),
    (lambda b, h, i, j: i | j, "a truth value is needed"),
    (lambda b, h, i, j: i ^ j, "a truth value is needed"),
    (lambda b, h, i, j: i, "a truth value is needed here: compare with something"),
    (lambda b, h, i, j: 1, "a truth value is needed here"),
    (lambda b, h, i, j: None, "a NoneType has no place in a kernel"),
    (lambda b, h, i, j: j < "5", "a str has no place in a kernel"),
    (lambda b, h, i, j: j < 1j, "a complex has no place in a kernel"),
    (lambda b, h, i, j: j < 1 << 31, "32 bits, got 2147483648"),
    (lambda b, h, i, j: j >= -(1 << 31) - 1, "32 bits, got -2147483649"),
    (lambda b, h, i, j: TABLE[i + 0.5] == j, "an integer is needed here"),
    (lambda b, h, i, j: TABLE[i, j] == 0, "an array of 1 axes"),
    (lambda b, h, i, j: TABLE[300] == j, r"must lie in 0 ... 299, got 300|not in 0 ... 299"),
    (lambda b, h, i, j: TABLE[-1] == j, "-1"),
    (lambda b, h, i, j: TABLE[1:] == j, "slice"),
    (lambda b, h, i, j: TABLE + j < 5, "TABLE"),
    (lambda b, h, i, j: hooks.exp(2.0) < j, r"hooks.exp\(2.0\)"),
    (lambda b, h, i, j: i // 2.0 < j, "an integer is needed here"),
    (lambda b, h: True, "4 were given"),
    (lambda b, h, i, j: undefined < j, "undefined"),  # type: ignore[name-defined]  # noqa: F821
]  # fmt: skip


@pytest.mark.parametrize(("keep", "message"), KEEPS)
def test_keep_functions_that_cannot_be_traced(keep: Any, message: str) -> None:
    with pytest.raises(tw.InvalidArgument, match=f"(?s)keep cannot be traced: .*{message}"):
        tw.block_mask(keep)


def test_the_line_is_named() -> None:
    first = branches.__code__.co_firstlineno
    with pytest.raises(tw.InvalidArgument, match=rf"line {first + 1} of .*test_variant_errors.py: if j > i:"):
        tw.block_mask(branches)
    line = helper.__code__.co_firstlineno + 1
    assert_refused(tw.InvalidArgument, rf"line {line} of .*: return math.floor\(x / 2\)", keep=through_a_helper)


SCORES: list[tuple[Any, str]] = [
    (lambda s, b, h, i, j: math.sin(s), r"math.sin\(s\).*math"),
    (lambda s, b, h, i, j: np.sin(s), "np.sin is not a word of hooks"),
    (lambda s, b, h, i, j: s if j <= i else 0.0, "else 0.0"),
    (lambda s, b, h, i, j: s.max(), "max"),
    (lambda s, b, h, i, j: s > 0, "an integer is needed here|truth"),
    (lambda s, b, h, i, j: s & 1, "an integer is needed here|truth"),
    (lambda s, b, h, i, j: None, "a NoneType has no place in a kernel"),
    (lambda s, b, h, i: s, "5 were given"),
    (lambda s, b, h, i, j: s + call, "function has no place"),
]


@pytest.mark.parametrize(("score", "message"), SCORES)
def test_score_functions_that_cannot_be_traced(score: Any, message: str) -> None:
    assert_refused(tw.InvalidArgument, f"(?s)score cannot be traced: .*{message}", score=score)


@pytest.mark.parametrize("score", [3, "alibi", [1.0], np.ones(4, np.float32)])
def test_what_is_no_function(score: Any) -> None:
    assert_refused(TypeError, f"score must be a function, got {type(score).__name__}", score=score)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.array(["a", "b"]), "must hold numbers"), (np.zeros((3, 0)), "must hold numbers, at least one"),
        (np.array([1 + 2j]), "must hold numbers"), (np.array([1 << 31]), "must fit 32 bits"),
        (np.array([-(1 << 31) - 1]), "must fit 32 bits"), (np.array([1 << 40], np.uint64), "must fit 32 bits"),
        (np.array([None]), "must hold numbers"),
    ],
)  # fmt: skip
def test_captured_arrays(table: Any, message: str) -> None:
    assert_refused(tw.InvalidArgument, f"captured array.*{message}", keep=lambda b, h, i, j: table[j] == 1)
    table = table[:1]
    assert_refused(tw.InvalidArgument, f"captured array.*{message}", score=lambda s, b, h, i, j: s * table[j])


def test_too_many_arrays() -> None:
    tables = [np.full(300, n, np.int32) for n in range(10)]

    nine = tuple(tables[:9])
    with pytest.raises(tw.InvalidArgument, match=r"captures 9 arrays, at most 8|more than 8 arrays"):
        tw.block_mask(lambda b, h, i, j: sum((t[j] for t in nine), start=i) > 0)
    five = tuple(tables[:5])
    assert_refused(
        tw.InvalidArgument, "score and keep capture 10 arrays, at most 8",
        score=lambda s, b, h, i, j: sum((t[j] for t in five), start=s),
        keep=lambda b, h, i, j: sum((t[j] for t in five), start=i) > 0,
    )  # fmt: skip


def test_an_error_of_the_function_itself_is_kept() -> None:
    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(tw.InvalidArgument, match="mine") as caught:
        tw.block_mask(keep)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_scratch_bytes_takes_what_attention_takes() -> None:
    c = call()
    for options in ({"keep": hooks.causal}, {"score": hooks.softcap(3.0)}, {"mask": DENSE}):
        arguments, arena = c.arguments(**options), tw.Arena()
        expected = tw.scratch_bytes(c.q, c.k, c.v, pool=1, **arguments)
        tw.attention(c.q, c.k, c.v, pool=1, arena=arena, **arguments)
        assert arena.high_water == expected


def test_these_calls_are_remembered() -> None:
    """What the tests of calls in turn rest on: a second call of a layout does not check its arguments again."""
    from tilewise.entry import _memory

    _memory.clear()
    c = call(bias=BIAS, mask=DENSE, alibi_slopes=SLOPES, softcap=2.0, window=(90, 3))
    c.run()
    assert len(_memory) == 1
    c.run(bias=BIAS.copy())
    assert len(_memory) == 1
    c.run(bias=BIAS.astype(np.float16))
    assert len(_memory) == 2
