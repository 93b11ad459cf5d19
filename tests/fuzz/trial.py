"""One call of the front door with arguments that somebody spoiled, and what must come of it.

A trial knows what its arguments mean (`plain`) or why they must be refused (`wrong`). It is made by a random.Random
alone, so a seed and a number make it again.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tilewise as tw
from tests.support import Case, assert_same_bits, assert_within_error_bound, poisoned
from tilewise.arguments import BFLOAT16

CONSTANTS = [(8, 5, 4), (16, 17, 16)]  # D, Dv, bc: few, as each with each panel is a kernel
MARGIN = 3  # elements of poison on every side of an array that is written
NAMES = (
    "q", "k", "v", "causal", "window", "scale", "q_offset", "sinks", "return_lse", "kv_start", "kv_len", "k_offset",
    "out", "lse", "br", "bc", "span", "arena", "pool",
)  # fmt: skip


class Failure(AssertionError):
    """tilewise did what it must not."""


@dataclass
class Trial:
    """`given` is what is handed over, `plain` what it means; `wrong` the reasons for which it must be refused."""

    rng: random.Random
    sizes: dict[str, int]
    given: dict[str, Any]
    plain: dict[str, Any]
    wrong: list[tuple[str, tuple[type[BaseException], ...]]] = field(default_factory=list)
    maybe: list[type[BaseException]] = field(default_factory=list)  # errors that are allowed, if not expected
    what: list[str] = field(default_factory=list)
    rooms: list[tuple[str, Any, Any]] = field(default_factory=list)  # (name, memory around it, its view in there)
    touched: set[str] = field(default_factory=set)

    def give(self, name: str, value: Any, meaning: Any = ...) -> None:
        """Hand over `value`, which means `meaning`: an array's own numbers unless said otherwise."""
        self.given[name] = value
        self.plain[name] = np.array(value) if meaning is ... else meaning

    def refuse(self, why: str, *classes: type[BaseException]) -> None:
        self.wrong.append((why, classes))


def make(rng: random.Random) -> Trial:
    """A good call of a small problem."""
    D, Dv, bc = rng.choice(CONSTANTS)
    B, Hkv = rng.randint(1, 3), rng.randint(1, 2)
    H, Tq, Tk = Hkv * rng.randint(1, 3), rng.choice([0, 1, 1, 2, 5, 9]), rng.choice([0, 1, 3, 8, 17, 20])
    numbers = np.random.default_rng(rng.getrandbits(64))
    shapes = {"q": (B, H, Tq, D), "k": (B, Hkv, Tk, D), "v": (B, Hkv, Tk, Dv)}
    arrays = {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    options: dict[str, Any] = {"q_offset": rng.choice([0, 3, Tk, 40]), "bc": bc, "span": rng.choice([0, bc, 3 * bc])}
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window"] = rng.randint(-2, 9)
    if rng.random() < 0.3:
        options["sinks"] = numbers.standard_normal(H).astype(np.float32)
    if rng.random() < 0.3:
        start = [rng.randint(0, Tk) for _ in range(B)]
        options |= {"kv_start": start, "kv_len": [rng.randint(0, Tk - n) for n in start]}
        options["k_offset"] = rng.choice([0, 5, [rng.randint(0, 30) for _ in range(B)]])
    if rng.random() < 0.2:
        options["scale"] = rng.choice([0.0, 0.25, -0.5])
    sizes = {"B": B, "H": H, "Hkv": Hkv, "Tq": Tq, "Tk": Tk, "D": D, "Dv": Dv, "bc": bc}
    trial = Trial(rng, sizes, {**arrays, **options}, {name: np.array(x) for name, x in arrays.items()} | options)
    trial.given |= {"pool": rng.choice([1, 1, 2, 3]), "br": rng.choice([0, 0, 1, 4])}
    if rng.random() < 0.6:
        add_output(trial, "out", (B, H, Tq, Dv))
    if rng.random() < 0.5:
        add_output(trial, "lse", (B, H, Tq))
    elif rng.random() < 0.5:
        trial.given["return_lse"] = True
    return trial


def add_output(trial: Trial, name: str, shape: tuple[int, ...]) -> None:
    """An array to write into, amid poison."""
    room = poisoned(tuple(n + 2 * MARGIN for n in shape))
    trial.given[name] = room[(slice(MARGIN, -MARGIN),) * len(shape)]
    trial.rooms.append((name, room, trial.given[name]))


def run(trial: Trial) -> str:
    """Make the call and judge it; raises Failure. Returns what came of it: the error's name, or `answer`."""
    given, trial.given = trial.given, {}  # what only the call holds must live as long as it does
    inputs = {
        name: (x, x.tobytes()) for name, x in given.items()
        if isinstance(x, np.ndarray) and name not in ("out", "lse") and x.nbytes < 1 << 20 and x.dtype != object
    }  # fmt: skip
    arena = given.get("arena")
    before = (arena.used, arena.high_water) if isinstance(arena, tw.Arena) else None
    dtype = next((given[name].dtype for name in ("out", "q") if isinstance(given.get(name), np.ndarray)), np.float32)
    kept = [(name, room.copy()) for name, room, _ in trial.rooms]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = tw.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    except BaseException as error:
        judge_error(trial, error)
        for (name, room, _), (_, copy) in zip(trial.rooms, kept, strict=True):
            check(room.tobytes() == copy.tobytes(), f"{name} was written before {error!r}")
        outcome = type(error).__name__
    else:
        check(not trial.wrong, f"not refused: {[why for why, _ in trial.wrong]}")
        judge_answer(trial, result, np.dtype(dtype))
        outcome = "answer"
    for name, (x, data) in inputs.items():
        check(x.tobytes() == data, f"the input {name} was changed")
    if before:
        check(arena.used == before[0], "the arena was not rewound")
    return outcome


def check(fact: bool, what: str) -> None:
    if not fact:
        raise Failure(what)


def judge_error(trial: Trial, error: BaseException) -> None:
    allowed = (*(kind for _, kinds in trial.wrong for kind in kinds), *trial.maybe)
    if not isinstance(error, allowed):
        raise Failure(f"{type(error).__name__}, expected {allowed or 'an answer'}: {error}") from error
    own = getattr(error, "own", False)  # raised by an object of ours, which the front door asked
    check(own or isinstance(error, MemoryError) or any(name in str(error) for name in (*NAMES, "head", "Hkv")),
          f"the message names no argument: {error!r}")  # fmt: skip


def narrow(x: Any, dtype: np.dtype[Any]) -> Any:
    """float32 numbers rounded to a float type, to nearest, ties to even."""
    if dtype != BFLOAT16:
        return x.astype(dtype)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(dtype)


def judge_answer(trial: Trial, result: Any, dtype: np.dtype[Any]) -> None:
    """The bits of the plain call, o rounded to the dtype; on some trials the numbers of the reference too."""
    plain = {**trial.plain}
    q, k, v = (np.ascontiguousarray(plain.pop(name)) for name in "qkv")
    expected = tw.attention(q, k, v, return_lse=True, pool=1, **plain)
    results = result if isinstance(result, tuple) else (result,)
    for name, x, y in zip(("o", "lse"), results, expected, strict=False):
        if name == "o" and dtype != np.float32:
            half = narrow(y, dtype)
            check((x.dtype, x.shape) == (dtype, half.shape), f"o is {x.dtype} {x.shape}, expected {dtype} {half.shape}")
            check(np.array_equal(np.ascontiguousarray(x).view("u2"), half.view("u2")), "the bits of o differ")
            continue
        try:
            assert_same_bits(np.asarray(x), y, name)
        except BaseException as error:  # pytest's own failure is none of Exception
            raise Failure(str(error)) from None
    for name, room, view in trial.rooms:
        inside = np.zeros(room.shape, bool)
        if view.size:
            first = inside.reshape(-1)[(address(view) - address(room)) // 4 :]
            np.lib.stride_tricks.as_strided(first, view.shape, [s // 4 for s in view.strides])[...] = True
        check((room.view(np.uint32)[~inside] == poisoned((1,)).view(np.uint32)[0]).all(), f"a write outside {name}")
    if trial.rng.random() < 0.25 and expected[0].size:  # of nothing, the reference may still take for ever
        try:
            assert_within_error_bound(expected, Case(q, k, v, plain))
        except AssertionError as error:
            raise Failure(f"beyond the error bound: {error}") from None


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])
