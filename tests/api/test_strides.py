"""Any strides on the outer axes, without a copy: the bits of contiguous arrays, and nothing written outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import (
    POISON,
    Case,
    F32Array,
    assert_same_bits,
    assert_written,
    case,
    poisoned,
    sinks_for,
)


def transposed(x: F32Array) -> F32Array:
    """[B, T, H, D] memory, as the projections of most models leave it."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def sliced(x: F32Array) -> F32Array:
    """A view inside an array of NaN: steps on every axis but the last, which begins in the middle."""
    shape = [2 * n + 3 for n in x.shape[:-1]] + [x.shape[-1] + 5]
    room = np.full(shape, np.nan, np.float32)
    view = room[(*(slice(1, 1 + 2 * n, 2) for n in x.shape[:-1]), slice(3, 3 + x.shape[-1]))]
    view[...] = x
    return view


def reversed_axes(x: F32Array) -> F32Array:
    """Negative strides on all outer axes."""
    back = tuple(slice(None, None, -1) for _ in x.shape[:-1])
    return np.ascontiguousarray(x[back])[back]


def time_first(x: F32Array) -> F32Array:
    """[T, D] outermost and innermost, batch and heads between: the axes in another order altogether."""
    return np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)


def unaligned(x: F32Array) -> F32Array:
    """Aligned to 4 bytes, to no more."""
    room = np.zeros(x.size + 32, np.float32)
    start = next(i for i in range(32) if (room.ctypes.data + 4 * i) % 64 == 4)
    view = room[start : start + x.size].reshape(x.shape)
    view[...] = x
    return view


def read_only(x: F32Array) -> F32Array:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[F32Array], F32Array]] = {
    f.__name__: f for f in (transposed, sliced, reversed_axes, time_first, unaligned, read_only)
}
PROBLEMS: dict[str, Callable[[], Case]] = {
    "causal": lambda: case(2, 4, 2, 35, 70, 24, 40, causal=True, q_offset=35),
    "ragged": lambda: case(
        3, 4, 2, 20, 100, 24, 40, window=33, sinks=sinks_for(4),
        q_offset=[70, 0, 7], kv_start=[0, 60, 13], kv_len=[100, 33, 50], k_offset=[0, 0, 5],
    ),
    "decode": lambda: case(2, 6, 2, 1, 70, 24, 40, causal=True, q_offset=69),
}  # fmt: skip
SMALL = case(2, 4, 2, 3, 9, 5, 3, causal=True, bc=4, span=8, q_offset=[6, 0], kv_start=[0, 2], kv_len=[9, 7])

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@every_layout
@pytest.mark.parametrize("problem", PROBLEMS)
def test_inputs(layout: Callable[[F32Array], F32Array], problem: str) -> None:
    c = PROBLEMS[problem]()
    expected = c.run()
    for name in ("q", "k", "v", "qkv"):
        view = replace(c, **{x: layout(getattr(c, x)) for x in name})
        before = [getattr(view, x).copy() for x in "qkv"]
        assert_same_bits(view.run(), expected, name)
        for x, old in zip("qkv", before, strict=True):
            assert_same_bits(getattr(view, x), old, f"the input {x}")


@every_layout
def test_inputs_interpreted(layout: Callable[[F32Array], F32Array]) -> None:
    with tw.config(interpret=True):
        assert_same_bits(Case(layout(SMALL.q), layout(SMALL.k), layout(SMALL.v), SMALL.options).run(), SMALL.run())


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
def test_broadcast_inputs(axes: tuple[int, ...]) -> None:
    """Stride 0: one sequence, one head or one row for all."""
    c = PROBLEMS["causal"]()
    for name in "qkv":
        x = getattr(c, name)
        one = x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
        view = np.broadcast_to(one, x.shape)
        assert 0 in view.strides
        assert_same_bits(replace(c, **{name: view}).run(), replace(c, **{name: view.copy()}).run(), name)


def outputs(shape: tuple[int, ...]) -> dict[str, tuple[F32Array, F32Array]]:
    """(memory, view of that shape in it): what of the memory is not the view must stay as it is."""
    rows, width = shape[:3], shape[3:]
    B, H, T = rows
    memory: dict[str, tuple[F32Array, F32Array]] = {}

    def put(name: str, room: F32Array, view: Callable[[F32Array], F32Array]) -> None:
        memory[name] = room, view(room)
        assert memory[name][1].shape == shape

    put("contiguous in the middle", poisoned((B + 2, H, T, *width)), lambda x: x[1:-1])
    put("transposed", poisoned((B, T + 2, H, *width)), lambda x: x[:, 1:-1].swapaxes(1, 2))
    put("steps", poisoned((2 * B, 3 * H, 2 * T + 1, *width)), lambda x: x[::2, 1::3, 1::2])
    put("reversed", poisoned((B, H, T, *width)), lambda x: x[::-1, ::-1, ::-1])
    put("unaligned", poisoned((B * H * T * (width[0] if width else 1) + 2,)), lambda x: x[1:-1].reshape(shape))
    if width:
        put("columns", poisoned((B, H, T, width[0] + 7)), lambda x: x[..., 3:-4])
        put("heads beside each other", poisoned((B, T, H * width[0])), lambda x: x.reshape(B, T, H, -1).swapaxes(1, 2))
    else:
        put("last axis not contiguous", poisoned((B, H, T, 3)), lambda x: x[..., 1])
        put("time first", poisoned((T, B, H)), lambda x: x.transpose(1, 2, 0))
    return memory


def untouched(memory: F32Array, view: F32Array) -> Any:
    """The elements of the memory that are not the view's, after marking those that are."""
    view[...] = 0
    return memory.view(np.uint32)[memory.view(np.uint32) != 0]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_outputs(ring: str, problem: str) -> None:
    c = PROBLEMS[problem]() if ring == "native" else SMALL
    expected = c.run()
    for i in range(7):
        (o_name, (o_room, o)), (lse_name, (lse_room, lse)) = (list(outputs(x.shape).items())[i] for x in expected)
        result = c.run(out=o, lse=lse)
        assert result[0] is o
        assert result[1] is lse
        for x in result:
            assert_written(x)
        assert_same_bits(result, expected, f"o {o_name}, lse {lse_name}")
        for room, view in ((o_room, o), (lse_room, lse)):
            outside = untouched(room, view)
            assert outside.size == room.size - view.size
            assert (outside == POISON).all(), f"something outside the view was written: o {o_name}, lse {lse_name}"
        if ring == "interpreted" and i == 2:
            break


def test_sinks_as_a_view() -> None:
    c = PROBLEMS["causal"]()
    z = np.full(9, np.nan, np.float32)
    z[3:7] = sinks_for(4)
    assert_same_bits(c.run(sinks=z[3:7]), c.run(sinks=sinks_for(4)))


def test_strides_of_axes_of_one_element_do_not_matter() -> None:
    """NumPy leaves them at any number, even one that is no multiple of the element."""
    c = PROBLEMS["decode"]()
    one = Case(c.q[:1], c.k[:1], c.v[:1], c.options)
    q = np.lib.stride_tricks.as_strided(one.q, one.q.shape, (12345, one.q.strides[1], 777, 4))
    assert_same_bits(replace(one, q=q).run(), one.run())
    single = case(1, 1, 1, 1, 5, 1, 1)  # a last axis of one element, with any stride
    wide = np.zeros((1, 1, 5, 3), np.float32)
    wide[..., :1] = single.k
    assert_same_bits(replace(single, k=wide[..., :1]).run(), single.run())
    assert_same_bits(replace(single, k=wide[..., ::3]).run(), single.run())
