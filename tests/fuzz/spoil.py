"""What can be wrong with an argument, or odd but good: a function each, by the argument it is done to."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

import tilewise as tw
from tests.fuzz.trial import Trial
from tests.support import poisoned

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
    room = np.zeros(x.nbytes * 2 + 64 + 2 * x.size, np.uint8)
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
    dtype = t.rng.choice(["f8", "f2", "i4", "u1", "c8", "?", "O", "S4", "U2", "M8[s]", "m8[s]", "V4", ">f4", "f4,f4"])
    value = np.zeros(x.shape, dtype) if dtype != ">f4" else x.astype(dtype)
    if np.little_endian is False and dtype == ">f4":
        return
    t.give(name, value, None)
    t.refuse(f"{name} of dtype {dtype}", TypeError)


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


# ---- numbers


def flags(t: Trial, name: str) -> None:
    wrong = [1, 0, None, "yes", [True], 1.0, np.array(True), np.int8(1), b"", float("nan")]
    value = t.rng.choice([*wrong, np.bool_(True), np.bool_(False)])
    t.given[name] = value
    if isinstance(value, np.bool_):
        if name == "causal":
            t.plain[name] = bool(value)
    else:
        t.refuse(f"{name} {value!r}", TypeError)


def windows(t: Trial, name: str) -> None:
    value, meaning = t.rng.choice([
        (np.int32(3), 3), (np.uint8(1), 1), (np.array(4), 4), (Index(2), 2), (0, None), (-(10**30), None),
        (10**30, None), (1 << 62, None), ((1 << 63) - 1, None), (1 << 64, None), (-(1 << 63), None),
        (1 << 56, None), ((1 << 56) - 1, None),
        (True, TypeError), (2.0, TypeError), ("3", TypeError), (float("nan"), TypeError), ([3], TypeError),
        (np.array([3]), TypeError), (np.float32(3), TypeError), (1j, TypeError), (np.bool_(True), TypeError),
        (Evil(), Own), (Fraction(3), TypeError), (b"3", TypeError),
    ])  # fmt: skip
    outcome(t, name, value, meaning)


def scales(t: Trial, name: str) -> None:
    value, meaning = t.rng.choice([
        (np.float16(0.5), 0.5), (np.float64(0.25), 0.25), (np.array(0.5), 0.5), (Fraction(1, 2), 0.5), (1, 1.0),
        (Decimal("0.5"), 0.5), (np.int8(1), 1.0), (Index(1), 1.0), (-0.0, -0.0), (1e-46, 0.0), (2.0**-149, 2.0**-149),
        (float("nan"), BAD), (float("inf"), BAD), (-float("inf"), BAD), (1e39, BAD), (10**400, BAD), (-(10**60), BAD),
        (np.float32("nan"), BAD), (Decimal("NaN"), BAD), (3.4028236e38, BAD),
        ("0.5", TypeError), (b"1", TypeError), (True, TypeError), (np.bool_(True), TypeError), (1j, TypeError),
        ([0.5], TypeError), (np.ones(2), TypeError), ({}, TypeError), (Evil(), Own), (object(), TypeError),
    ])  # fmt: skip
    outcome(t, name, value, meaning)


def outcome(t: Trial, name: str, value: Any, meaning: Any) -> None:
    """Hand over `value`: `meaning` is what it means, or the class of the error."""
    t.given[name] = value
    if isinstance(meaning, type):
        t.refuse(f"{name} {value!r:.60}", meaning)
    else:
        t.plain[name] = meaning


def sizes(t: Trial, name: str) -> None:
    wrong: list[tuple[Any, Any]] = [
        (-1, BAD), (-(10**30), BAD), (10**30, BAD), (1 << 63, BAD), (1 << 64, BAD), (2.0, TypeError), (None, TypeError),
        ("8", TypeError), (True, TypeError), (np.array([8]), TypeError), (Evil(), Own), (float("nan"), TypeError),
    ]  # fmt: skip
    bc = t.sizes["bc"]
    good: dict[str, list[tuple[Any, Any]]] = {
        "br": [(np.uint8(3), 3), (np.array(5), 5), (Index(1), 1), (1 << 50, 0), (1 << 56, 0)],
        "bc": [(np.int16(bc), bc), (513, BAD), (1 << 40, BAD)],
        "span": [(np.int64(bc), bc), (bc << 40, bc << 40), (bc << 52, bc << 52), (bc + 1, BAD), (1, BAD), (bc - 1, BAD)],
    }
    outcome(t, name, *t.rng.choice(good[name] + (wrong if t.rng.random() < 0.5 else [])))
    if name == "br":
        t.plain.pop("br", None)


def positions(t: Trial, name: str) -> None:
    B, rng = t.sizes["B"], t.rng
    far = (1 << 56) + 1
    wrong: list[tuple[Any, Any]] = [
        (-1, BAD), (far, BAD), (1 << 63, BAD), (1 << 70, BAD), (-(1 << 70), BAD), (10**40, BAD), (1.0, TypeError),
        ("0", TypeError), (True, TypeError), (float("nan"), TypeError), (Evil(), Own), ({}, TypeError),
        (range(B), TypeError), ([0] * (B + 1), SHAPE), ([[0]] * B, SHAPE), ([0.0] * B, TypeError), ([True] * B, TypeError),
        ([None] * B, TypeError), (["0"] * B, TypeError), ([-1] * B, BAD), ([far] * B, BAD), ([1 << 63] * B, BAD),
        ([1 << 70] * B, TypeError), (np.zeros(B), TypeError), (np.zeros(B, bool), TypeError),
        (np.full(B, (1 << 64) - 1, np.uint64), BAD), (np.full(B, -(1 << 63)), BAD), (np.zeros((B, 1), int), SHAPE),
        (np.zeros(0, int), SHAPE), (np.full(B, 1, object), TypeError), ([[0], [0, 1]], (TypeError, SHAPE, BAD)),
        (np.zeros(B, "m8[s]"), TypeError), (b"0", TypeError),
    ]  # fmt: skip
    forms: list[Callable[[int], Any]] = [
        lambda n: n, np.int32, np.uint64, lambda n: np.array(n), Index, lambda n: [n] * B, lambda n: (n,) * B,
        lambda n: np.full(B, n, np.uint8), lambda n: np.full(B, n, ">i4"), lambda n: np.broadcast_to(np.int64(n), B),
        lambda n: np.full(2 * B, n)[::-2], lambda n: np.full(B, n).view(Subclass),
    ]  # fmt: skip
    Tk = t.sizes["Tk"]
    if rng.random() < 0.5:
        value, kinds = rng.choice(wrong)
        t.given[name] = value
        t.refuse(f"{name} {value!r:.60}", *(kinds if isinstance(kinds, tuple) else (kinds,)))
        return
    for other in ("kv_start", "kv_len"):
        if name in ("kv_start", "kv_len") and other not in t.touched:
            t.given.pop(other, None)
            t.plain.pop(other, None)
    n = rng.choice([0, 1, 40]) if name in ("q_offset", "k_offset") else rng.randint(0, Tk)
    if name in ("q_offset", "k_offset") and rng.random() < 0.1:
        n = (1 << 56) - 3
        forms = [lambda n: n, lambda n: [n] * B, lambda n: np.full(B, n, np.uint64)]
    t.given[name], t.plain[name] = rng.choice(forms)(n), n
    if name in ("kv_start", "kv_len") and {"kv_start", "kv_len"} <= t.touched:
        t.maybe.append(BAD)  # together they may pass Tk


def past_the_end(t: Trial, name: str) -> None:
    n = t.sizes["Tk"] + t.rng.choice([1, 5, 1 << 40])
    t.given[name] = t.rng.choice([n, [n] * t.sizes["B"]])
    t.refuse(f"{name} past Tk", BAD)


def threads(t: Trial, name: str) -> None:
    closed = tw.Pool(2)
    closed.close()
    value, meaning = t.rng.choice([
        (None, 1), (np.int64(2), 1), (Index(2), 1), (0, BAD), (-3, BAD), (-(10**30), BAD), (True, TypeError),
        ("2", TypeError), (2.0, TypeError), ([], TypeError), (closed, BAD), (np.array([2]), TypeError), (Evil(), Own),
    ])  # fmt: skip
    t.given[name] = value
    if isinstance(meaning, type):
        t.refuse(f"pool {value!r}", meaning)


def arenas(t: Trial, name: str) -> None:
    small, fine = tw.Arena(limit=t.rng.choice([0, 1, 64])), tw.Arena(t.rng.choice([0, 10_000]))
    fine.alloc(t.rng.choice([1, 100]))
    value, kind = t.rng.choice([
        (1, TypeError), ("x", TypeError), (tw.Arena, TypeError), (bytearray(9), TypeError), (small, tw.ArenaExhausted),
        (fine, None), (tw.Arena(limit=1 << 30), None),
    ])  # fmt: skip
    t.given[name] = value
    if value is small and not t.given["q"].size * t.sizes["Dv"]:
        t.maybe.append(tw.ArenaExhausted)  # there is nothing to do; whether scratch is asked for is open
    elif kind:
        t.refuse(f"arena {value!r:.60}", kind)


# ---- outputs


def outputs(t: Trial, name: str) -> None:
    s, rng = t.sizes, t.rng
    shape = (s["B"], s["H"], s["Tq"], s["Dv"])[: 4 if name == "out" else 3]
    right = poisoned(shape)
    fixed = poisoned(shape)
    fixed.flags.writeable = False
    wrong: list[tuple[Any, Any]] = [
        (right.tolist(), TypeError), (Interface(right), TypeError), (right.astype("f8"), TypeError), (1.5, TypeError),
        (np.zeros(shape, ">f4"), TypeError), ("out", TypeError), (right[None], SHAPE), (fixed, BAD),
        (poisoned((*shape[:-1], shape[-1] + 1)), SHAPE), (right[0], SHAPE), (np.zeros(shape, "f2"), TypeError),
    ]  # fmt: skip
    if right.size:
        wrong += [(misaligned(right), BAD)]
        if right.size > 1:
            wrong += [(np.lib.stride_tricks.as_strided(right, shape, (0,) * (len(shape) - 1) + (4,)), BAD)] * (
                right.size > shape[-1]
            )
        if name == "out":
            wrong += [(np.repeat(right, 2, -1)[..., ::2], BAD), (right[..., ::-1], BAD)]
    if rng.random() < 0.5:
        value, kind = rng.choice(wrong)
        t.rooms = [room for room in t.rooms if room[0] != name]
        t.given[name] = value
        t.refuse(f"{name} {type(value).__name__} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}", kind)
        return
    t.rooms = [room for room in t.rooms if room[0] != name]
    gaps = tuple(2 * n + 3 for n in shape[:-1]) + ((shape[-1] if name == "out" else 2 * shape[-1]) + 3,)
    room = poisoned(gaps)
    view = room[tuple(slice(1, 2 * n + 1, 2) for n in shape[:-1]) + (
        slice(1, shape[-1] + 1) if name == "out" else slice(1, 2 * shape[-1] + 1, 2),
    )]  # fmt: skip
    view = view[tuple(slice(None, None, rng.choice([1, -1])) for _ in range(len(shape) - 1))]
    t.given[name] = view
    t.rooms.append((name, room, view))


def overlaps(t: Trial, name: str) -> None:
    """An output that shares memory with an input, or with the other output."""
    s = t.sizes
    shape = (s["B"], s["H"], s["Tq"], s["Dv"])[: 4 if name == "out" else 3]
    other = t.rng.choice(["q", "k", "v", "sinks", "lse" if name == "out" else "q"])
    x = t.given.get(other)
    size = int(np.prod(shape))
    if not isinstance(x, np.ndarray) or not x.size or not size or (other == "lse" and "lse" in t.touched):
        return
    if other == "lse":
        x = t.given["lse"]
    memory = np.zeros(size + x.size + 8, np.float32)
    shift = t.rng.randint(0, min(size, x.size) - 1)
    first, second = (0, size - 1 - shift) if t.rng.random() < 0.5 else (x.size - 1 - shift, 0)
    view = memory[second : second + x.size].reshape(x.shape)
    view[...] = x
    t.rooms = [room for room in t.rooms if room[0] not in (name, other)]
    t.given[other] = view
    t.given[name] = memory[first : first + size].reshape(shape)
    t.touched.add(other)
    t.refuse(f"{name} overlaps {other}", BAD)


def unknown(t: Trial, name: str) -> None:
    t.given[t.rng.choice(["mask", "is_causal", "Causal", "dropout_p", "softcap"])] = 0
    t.refuse("unknown argument", TypeError)


SPOIL: dict[str, list[Callable[[Trial, str], None]]] = {
    **dict.fromkeys("qkv", [array_layouts, array_dtypes, array_others, array_shapes, array_memory]),
    "sinks": [array_layouts, array_dtypes, array_others, array_shapes, array_memory],
    "causal": [flags], "return_lse": [flags], "window": [windows], "scale": [scales],
    "q_offset": [positions], "k_offset": [positions], "kv_start": [positions, past_the_end],
    "kv_len": [positions, past_the_end], "br": [sizes], "bc": [sizes], "span": [sizes], "pool": [threads],
    "arena": [arenas], "out": [outputs, overlaps], "lse": [outputs, overlaps], "unknown": [unknown],
}  # fmt: skip
WEIGHTS = [6 if name in ("q", "k", "v", "out") else 2 for name in SPOIL]


def spoil(t: Trial) -> None:
    """None to three arguments, each once."""
    for name in t.rng.choices(list(SPOIL), WEIGHTS, k=t.rng.choice([0, 1, 1, 1, 2, 2, 3])):
        if name in t.touched or (name == "sinks" and t.given.get("sinks") is None):
            continue
        t.touched.add(name)
        change = t.rng.choice(SPOIL[name])
        t.what.append(f"{name}: {change.__name__}")
        change(t, name)
