"""Corners of the checks of single arguments: what only an odd object, or an array of no or one element, shows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import F32Array, assert_same_bits, inputs
from tilewise import arguments
from tilewise.runtime.arena import aligned

ACCEPTED = "float32, float16 or bfloat16"
Q, K, V = inputs(1, 2, 1, 3, 4, 8, 5)


class ByArray:
    """An object that is an array by `__array__` alone."""

    def __init__(self, array: F32Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> F32Array:
        return self.array


class ByStruct:
    """By `__array_struct__` alone."""

    def __init__(self, array: F32Array) -> None:
        self.array = array

    @property
    def __array_struct__(self) -> Any:
        return self.array.__array_struct__


class Broken:
    """Says that it is an array, and cannot be made one."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> F32Array:
        raise ValueError("no memory left on the device")


@pytest.mark.parametrize("wrap", [ByArray, ByStruct])
def test_each_protocol_is_enough(wrap: Any) -> None:
    expected = tw.attention(Q, K, V)
    assert_same_bits(tw.attention(wrap(Q), wrap(K), wrap(V)), expected)


def test_an_object_that_cannot_be_an_array() -> None:
    with pytest.raises(TypeError, match=f"^k must be a {ACCEPTED} NumPy array, got Broken, of which none can be made$"):
        tw.attention(Q, Broken(), V)


def test_an_output_without_elements_does_not_overlap_itself() -> None:
    out, lse = np.empty((1, 2, 0, 5), np.float32), np.empty((1, 2, 0), np.float32)
    o, logsumexp = tw.attention(Q[:, :, :0], K, V, out=out, lse=lse)
    assert o is out
    assert logsumexp is lse


def test_strides_of_one_element_overlap_nothing() -> None:
    lse = np.lib.stride_tricks.as_strided(np.empty((2, 3), np.float32), (1, 2, 3), (0, 12, 4))
    expected = tw.attention(Q, K, V, return_lse=True)
    assert_same_bits(tuple(tw.attention(Q, K, V, lse=lse)), tuple(expected))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((2, 3), (12, 4), False), ((2, 3), (8, 4), True), ((2, 3), (4, 8), False), ((3, 2), (4, 12), False),
        ((2, 2), (0, 4), True), ((1, 2), (0, 4), False), ((2, 3), (-12, 4), False), ((2, 3), (-8, 4), True),
        ((2, 2, 2), (16, 8, 4), False), ((2, 2, 2), (12, 8, 4), True), ((0, 2), (0, 0), False),
    ],
    ids=str,
)  # fmt: skip
def test_overlap_with_itself(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    room = np.zeros(64, np.float32)[32:]
    x = np.lib.stride_tricks.as_strided(room, shape, strides)
    assert arguments._overlaps_itself(x) == overlaps


def test_strides_of_one_element_need_no_alignment() -> None:
    q = np.lib.stride_tricks.as_strided(Q[:, :, :1], (1, 2, 1, 8), (12345, Q.strides[1], 777, 4))
    assert arguments.tensor("q", q, 4) is q
    assert_same_bits(tw.attention(q, K, V, q_offset=0), tw.attention(Q[:, :, :1], K, V, q_offset=0))


@pytest.mark.parametrize("D", [1, 2])
def test_a_last_axis_of_one_element_has_any_stride(D: int) -> None:
    """Two elements that do not lie beside each other are refused; one alone is beside nothing."""
    wide = np.zeros((1, 1, 4, 3 * D), np.float32)
    if D == 1:
        assert arguments.tensor("k", wide[..., ::3], 4).strides[-1] == 12
    else:
        with pytest.raises(
            tw.InvalidArgument, match=r"^the last axis of k must be contiguous \(stride 4 bytes, got 12\)"
        ):
            arguments.tensor("k", wide[..., ::3], 4)


def test_scales_that_are_powers_of_two() -> None:
    for scale in (1.0, 0.5, -2.0, 2.0**127, 0.0):
        assert arguments.scale(scale, 16) == scale


def test_masked_arrays_are_refused_by_name() -> None:
    message = "{0} is a masked array, whose mask would be ignored: pass {0}.filled(...) or a window"
    masked = np.ma.zeros((1, 2, 3), np.float32)
    with pytest.raises(TypeError, match=f"^{re.escape(message.format('k'))}$"):
        tw.attention(Q, np.ma.MaskedArray(K), V)
    with pytest.raises(TypeError, match=f"^{re.escape(message.format('lse'))}$"):
        tw.attention(Q, K, V, lse=masked)


def test_memory_that_the_system_does_not_have() -> None:
    nbytes = 1 << 62
    with pytest.raises(tw.ArenaExhausted, match=f"^arena: requested {nbytes} bytes, more than the system gives$"):
        aligned(nbytes)


FLOATS = [
    0.0, 1.0, 1.5, 1 / 3, 0.1, 2.0**-126, 2.0**-127, 2.0**-149, 2.0**-150, 1.5 * 2.0**-150, 2.0**-151, 1e-300, 5e-324,
    1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 - 2.0**-25, 2.0**-126 - 2.0**-150, 3.4028234e38, 3.40282356e38, 3.5e38, 1e300,
]  # fmt: skip


@pytest.mark.parametrize("x", [*FLOATS, *(-x for x in FLOATS)])
def test_float32_bits_are_those_of_the_cast(x: float) -> None:
    with np.errstate(all="ignore"):
        assert arguments.float32_bits(x) == int(np.float32(x).view(np.uint32))


def test_an_empty_list_is_one_of_integers() -> None:
    """A batch of no sequences: what list() makes for it has no dtype of its own."""
    assert tw.attention(Q[:0], K[:0], V[:0], q_offset=[], kv_len=()).shape == (0, 2, 3, 5)
    assert arguments.per_sequence("q_offset", [], 0).dtype == np.int64
    assert arguments.per_sequence("q_offset", np.array([3], np.uint8), 1).tolist() == [3]


@pytest.mark.parametrize("name", ["q_offset", "kv_len"])
def test_a_list_that_is_no_list_of_integers(name: str) -> None:
    for wrong in ([[1], [2, 3]], [1 << 200], [1.5], [True], ["1"]):
        with pytest.raises(TypeError, match=rf"^{name} must be an integer or "):
            arguments.per_sequence(name, wrong, 1)


def test_an_overlap_that_is_too_hard_to_exclude_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy gives up after so much effort: the work on a question about two arrays must end."""
    x = np.zeros(100, np.float32)
    asked: list[Any] = []

    def too_hard(*arrays: Any, max_work: int) -> bool:
        asked.append(max_work)
        raise RuntimeError("exceeded max_work")

    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert arguments.share_memory(x[::2], x[1::2])
    assert asked == [10_000]
    assert not arguments.share_memory(x, np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tw.Arena().rewind(tw.Arena().mark()),
         "mark: got a mark of another arena, expected one of this arena"),
        (lambda: tw.Arena(-1), "capacity: got -1, expected 0 bytes or more"),
        (lambda: tw.Arena(limit=-1), "limit: got -1, expected 0 bytes or more"),
        (lambda: tw.Arena(65, 64), "capacity: got 65 bytes, expected at most the limit of 64 bytes"),
        (lambda: tw.Arena().alloc(-5), "nbytes: got -5, expected 0 bytes or more"),
        (lambda: tw.Arena(4096).alloc(1 << 62),
         f"arena: requested {1 << 62} bytes ({1 << 62} in lines of 64) "
         "with 0 bytes used and no limit but the system's"),
    ],
)  # fmt: skip
def test_messages_of_the_arena(call: Any, message: str) -> None:
    with pytest.raises((tw.InvalidArgument, tw.ArenaExhausted), match=f"^{re.escape(message)}$"):
        call()


def test_blocks_do_not_grow_past_the_limit() -> None:
    """An arena that doubles stops where it may use no more."""
    arena = tw.Arena(limit=9000)
    arena.alloc(5000)
    arena.alloc(64)
    assert arena.capacity <= 9000
