"""What can be wrong with an argument, or odd but good: a function each, by the argument it is done to."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

import tilewise as tw
from tests.fuzz.arrays import (
    BAD,
    SHAPE,
    Evil,
    Index,
    Interface,
    Own,
    Subclass,
    array_dtypes,
    array_halves,
    array_layouts,
    array_memory,
    array_others,
    array_shapes,
    misaligned,
)  # fmt: skip
from tests.fuzz.trial import Trial
from tests.support import poisoned
from tilewise.arguments import BFLOAT16

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
        (True, TypeError), (2.0, TypeError), ("3", TypeError), (float("nan"), TypeError), ([3], BAD),
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
        "span": [
            (np.int64(bc), bc),
            (bc << 40, bc << 40),
            (bc << 52, bc << 52),
            (bc + 1, BAD),
            (1, BAD),
            (bc - 1, BAD),
        ],
    }  # fmt: skip
    outcome(t, name, *t.rng.choice(good[name] + (wrong if t.rng.random() < 0.5 else [])))
    if name == "br":
        t.plain.pop("br", None)


def positions(t: Trial, name: str) -> None:
    B, rng = t.sizes["B"], t.rng
    far = (1 << 56) + 1
    wrong: list[tuple[Any, Any]] = [
        (-1, BAD), (far, BAD), (1 << 63, BAD), (1 << 70, BAD), (-(1 << 70), BAD), (10**40, BAD), (1.0, TypeError),
        ("0", TypeError), (True, TypeError), (float("nan"), TypeError), (Evil(), Own), ({}, TypeError),
        (range(B), TypeError), ([0] * (B + 1), SHAPE), ([[0]] * B, SHAPE), ([0.0] * B, TypeError),
        ([True] * B, TypeError),
        ([None] * B, TypeError), (["0"] * B, TypeError), ([-1] * B, BAD), ([far] * B, BAD), ([1 << 63] * B, BAD),
        ([1 << 70] * B, TypeError), (np.zeros(B), TypeError), (np.zeros(B, bool), TypeError),
        (np.full(B, (1 << 64) - 1, np.uint64), BAD), (np.full(B, -(1 << 63)), BAD), (np.zeros((B, 1), int), SHAPE),
        (np.zeros(0, int), SHAPE), (np.full(B, 1, object), TypeError), ([[0], [0, 1]], (TypeError, SHAPE, BAD)),
        (np.zeros(B, "m8[s]"), TypeError), (b"0", TypeError),
    ]  # fmt: skip
    forms: list[Callable[[int], Any]] = [
        lambda n: n, np.int32, np.uint64, np.array, Index, lambda n: [n] * B, lambda n: (n,) * B,
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
    if value is small and not t.sizes["Tq"]:
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
        (poisoned((*shape[:-1], shape[-1] + 1)), SHAPE), (right[0], SHAPE), (np.zeros(shape, ">f2"), TypeError),
    ]  # fmt: skip
    if name == "lse":
        wrong += [(np.zeros(shape, "f2"), TypeError)]
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
    if name == "out" and rng.random() < 0.3:
        t.given[name] = np.zeros(shape, rng.choice([np.float16, BFLOAT16]))
        return
    step = 1 if name == "out" else 2  # along the last axis, which is contiguous in out
    room = poisoned((*(2 * n + 3 for n in shape[:-1]), step * shape[-1] + 3))
    view = room[(*(slice(1, 2 * n + 1, 2) for n in shape[:-1]), slice(1, step * shape[-1] + 1, step))]
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
    if (
        not isinstance(x, np.ndarray)
        or x.dtype != np.float32
        or not x.flags.aligned
        or not x.size
        or not size
        or (other == "lse" and "lse" in t.touched)
    ):
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
    t.given[t.rng.choice(["is_causal", "Causal", "dropout_p", "softmax_scale"])] = 0
    t.refuse("unknown argument", TypeError)


ARRAY = [array_layouts, array_dtypes, array_halves, array_others, array_shapes, array_memory]
SPOIL: dict[str, list[Callable[[Trial, str], None]]] = {
    "q": ARRAY, "k": ARRAY, "v": ARRAY, "sinks": ARRAY,
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
