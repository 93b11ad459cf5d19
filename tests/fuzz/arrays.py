"""What can be wrong with an array, or odd but good: a function each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewise as tw
from tests.fuzz.trial import Trial, narrow
from tilewise.arguments import BFLOAT16

BAD = tw.InvalidArgument
SHAPE = tw.ShapeError


class Interface:
    """An object that shares its memory by `__array_interface__`, and keeps it alive."""

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def __array_interface__(self) -> Any:
        return self._x.__array_interface__


class Makes:
    """An object whose `__array__` makes something: an array that nobody else holds, or nonsense, or an error."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._make()


class Own(RuntimeError):
    own = True


class Evil:
    """A number that will not be one."""

    def __repr__(self) -> str:
        return "Evil()"

    def __index__(self) -> int:
        raise Own("index")

    def __float__(self) -> float:
        raise Own("float")


class Index:
    def __init__(self, n: int) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n


class Subclass(np.ndarray):
    """An array that answers every question wrongly where it can."""

    def __getitem__(self, key: Any) -> Any:
        raise Own("getitem")

    def __array_finalize__(self, other: Any) -> None:
        pass


def fails() -> Any:
    raise Own("array")


# ---- arrays of any axis order, spread in memory


def spread(rng: random.Random, x: Any) -> Any:
    """The same numbers at other strides: outer axes in any order in memory, backwards, with gaps."""
    order = [*rng.sample(range(x.ndim - 1), x.ndim - 1), x.ndim - 1]
    room = np.full([x.shape[axis] + rng.choice([0, 0, 2]) for axis in order], np.nan, np.float32)
    view = room[tuple(slice(0, x.shape[axis]) for axis in order)].transpose(np.argsort(order))
    view = view[tuple(slice(None, None, rng.choice([1, -1])) for _ in range(x.ndim - 1))]
    view[...] = x
    return view


def misaligned(x: Any) -> Any:
    raw = np.zeros(x.nbytes + 8, np.uint8)
    view = raw[1 : 1 + x.nbytes].view(np.float32).reshape(x.shape)
    view[...] = x
    return view


def off_stride(x: Any) -> Any:
    """The rows begin two bytes after a multiple of 4."""
    room = np.zeros(x.nbytes * 4 + 64, np.uint8)
    strides = [4]
    for n in x.shape[:0:-1]:
        strides.insert(0, strides[0] * n + (2 if len(strides) == 1 else 0))
    return np.lib.stride_tricks.as_strided(room.view(np.float32)[:1], x.shape, strides)


def array_layouts(t: Trial, name: str) -> None:
    x, rng = t.given[name], t.rng
    kind = rng.choice(["spread", "broadcast", "read-only", "subclass", "interface", "made", "kept by nobody"])
    if kind == "broadcast":
        axis = rng.randrange(x.ndim - 1) if x.ndim > 1 else None
        if axis is not None and x.shape[axis]:
            index = (slice(None),) * axis + (slice(0, 1),)
            x = np.broadcast_to(x[index], x.shape)
        t.give(name, x, np.array(x))
    elif kind == "read-only":
        x.flags.writeable = False
    elif kind == "subclass":
        t.give(name, x.view(Subclass), x.copy())
    elif kind == "interface":
        t.give(name, Interface(x), x.copy())
    elif kind == "made":
        t.give(name, Makes(lambda: x), x.copy())
    elif kind == "kept by nobody":  # only the call can keep the memory alive
        data = x.tobytes()
        t.give(name, Makes(lambda: np.frombuffer(bytearray(data), np.float32).reshape(x.shape)), x.copy())
    else:
        t.give(name, spread(rng, x) if x.ndim > 1 else x, x.copy())


def array_dtypes(t: Trial, name: str) -> None:
    x = t.given[name]
    dtype = t.rng.choice([
        "f8", "i4", "u1", "u2", "c8", "?", "O", "S4", "U2", "M8[s]", "m8[s]", "V4", "V2", ">f4", ">f2", "f4,f4",
        [("half", "u2")], BFLOAT16.newbyteorder(),
    ])  # fmt: skip
    value = np.zeros(x.shape, dtype) if dtype != ">f4" else x.astype(dtype)
    t.give(name, value, None)
    t.refuse(f"{name} of dtype {dtype}", TypeError)


def array_halves(t: Trial, name: str) -> None:
    """Half types are good, and mean the float32 numbers that they are; sinks are float32 only."""
    dtype = np.dtype(t.rng.choice([np.float16, BFLOAT16]))
    half = narrow(t.given[name], dtype)
    wide = half.astype(np.float32) if dtype == np.float16 else (half.view("u2").astype("u4") << 16).view("f4")
    t.give(name, half, wide)
    if name == "sinks":
        t.refuse(f"sinks of dtype {dtype}", TypeError)


def array_others(t: Trial, name: str) -> None:
    """What is no array at all."""
    x = t.given[name]
    t.what.append("other")
    values: list[tuple[Any, Any]] = [
        (x.tolist(), TypeError), (tuple(x), TypeError), ("x", TypeError), (b"x" * 64, TypeError), (1.5, TypeError),
        (7, TypeError), ({}, TypeError), (memoryview(np.zeros(4)), TypeError), (object(), TypeError),
        (np.float64(1), TypeError), (range(4), TypeError), (type(x), (TypeError, ValueError)), (x.__array__, TypeError),
        (Makes(fails), Own), (Makes(lambda: x.astype("f8")), TypeError),
        (Makes(lambda: 3), (TypeError, ValueError)), (np.float32(1), SHAPE),
    ]  # fmt: skip
    if name != "sinks":
        values.append((None, BAD))
    value, kinds = t.rng.choice(values)
    t.give(name, value, None)
    t.refuse(f"{name} is {type(value).__name__}", *(kinds if isinstance(kinds, tuple) else (kinds,)))


def array_shapes(t: Trial, name: str) -> None:
    x, rng = t.given[name], t.rng
    kind = rng.choice(["less", "more", "0-d", "flat", "batch", "heads", "rows", "wide", "narrow", "empty"])
    grown = {"batch": 0, "heads": 1, "rows": 2}
    if name == "sinks":
        value = rng.choice([x[None], np.float32(1) + np.zeros(()), np.zeros(x.size + 1, np.float32), x[:-1]])
        value = value.astype(np.float32)
    elif kind == "less":
        value = x[0]
    elif kind == "more":
        value = x[None]
    elif kind == "0-d":
        value = np.float32(3) * np.ones((), np.float32)
    elif kind == "flat":
        value = x.reshape(-1)
    elif kind in grown:
        if name == "q" and kind == "rows":
            return  # any number of rows is good
        shape = list(x.shape)
        shape[grown[kind]] += rng.choice([1, 7])
        if name == "q" and kind == "heads" and shape[1] % t.sizes["Hkv"] == 0:
            return
        value = np.zeros(shape, np.float32)
    else:
        width = {"wide": 1025, "narrow": x.shape[3] - 1, "empty": 0}[kind]
        if name == "v" and kind == "narrow":
            return  # Dv may be anything
        value = np.zeros((*x.shape[:3], width), np.float32)
    value = np.asarray(value, np.float32)
    t.give(name, value, None)
    t.refuse(f"{name} of shape {value.shape}", SHAPE)


def array_memory(t: Trial, name: str) -> None:
    x, kind = t.given[name], t.rng.choice(["strided", "backwards", "one number", "misaligned", "off stride"])
    if x.shape[-1] < 2 or not x.size:
        return
    if kind == "off stride" and (x.ndim == 1 or x.shape[-2] < 2):
        return
    value = {
        "strided": lambda: np.repeat(x, 2, axis=-1)[..., ::2],
        "backwards": lambda: x[..., ::-1],
        "one number": lambda: np.broadcast_to(x[..., :1], x.shape),
        "misaligned": lambda: misaligned(x),
        "off stride": lambda: off_stride(x),
    }[kind]()
    t.give(name, value, None)
    t.refuse(f"{name}: {kind}", BAD)
