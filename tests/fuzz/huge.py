"""Sizes that overflow products of 64 bits: views of stride 0, which take no memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import tilewise as tw
from tests.fuzz.trial import Trial, make

# From 2^45 rows on no address space holds an output, so nothing can be computed by mistake.
EXPONENTS = (45, 48, 53, 57, 60)


def stretched(x: Any, axis: int, n: int) -> Any:
    """x with its first element along `axis` n times; None where NumPy itself refuses."""
    shape = list(x.shape)
    shape[axis] = n
    try:
        return np.broadcast_to(x[(slice(None),) * axis + (slice(0, 1),)], shape)
    except ValueError:
        return None


def many_keys(t: Trial, n: int) -> None:
    """2^45 keys and more, of which the rows see a few by their length, their start or a causal window."""
    k, v = (stretched(t.given[name], 2, n) for name in "kv")
    if k is None or v is None or not t.sizes["Tk"]:
        return
    for name in ("kv_start", "kv_len", "k_offset", "causal", "window", "q_offset"):
        t.given.pop(name, None)
        t.plain.pop(name, None)
    few: dict[str, Any]
    start, length = t.rng.choice([0, 5, n - 20]), t.rng.choice([0, 1, 17])
    kind = t.rng.choice(["length", "causal", "window"])
    if kind == "length":
        few = {"kv_start": start, "kv_len": length, "q_offset": 3}
        keys, plain = length, {"q_offset": 3}
    elif kind == "causal":
        few = {"causal": True, "q_offset": 3}
        keys, plain = 3 + t.sizes["Tq"], {"causal": True, "q_offset": 3}
    else:  # far out, where the position is near the end of what is allowed
        position = min(n, 1 << 56) - 40
        few = {"causal": True, "window": 7, "q_offset": position}
        first = position - 7
        keys, plain = 7 + t.sizes["Tq"], {"causal": True, "window": 7, "q_offset": position, "k_offset": first}
    t.given |= {"k": k, "v": v, **few}
    t.plain |= {"k": np.array(k[:, :, :keys]), "v": np.array(v[:, :, :keys]), **plain}


def many_rows(t: Trial, n: int) -> None:
    q = stretched(t.given["q"], 2, n)
    if q is None or not t.sizes["Tq"]:
        return
    t.given["q"] = q
    kinds = (tw.ShapeError,) if "out" in t.given or "lse" in t.given else ()
    t.refuse(f"{n} rows", MemoryError, *kinds)


def many_heads(t: Trial, n: int) -> None:
    n = n // t.sizes["Hkv"] * t.sizes["Hkv"]
    q = stretched(t.given["q"], 1, n)
    if q is None:
        return
    t.given["q"] = q
    t.maybe.append(tw.ShapeError)  # sinks, out, lse of the former heads
    if t.sizes["Tq"]:
        t.refuse(f"{n} heads", MemoryError, tw.ShapeError)
    else:
        given = t.given.keys() & {"sinks", "out", "lse"}
        if given:
            t.refuse(f"{n} heads", tw.ShapeError)
        else:
            t.plain["q"] = q


def many_sequences(t: Trial, n: int) -> None:
    q, k, v = (stretched(t.given[name], 0, n) for name in "qkv")
    if q is None or k is None or v is None:
        return
    t.given |= {"q": q, "k": k, "v": v}
    t.refuse(f"{n} sequences", MemoryError, tw.ShapeError)


def many_threads(t: Trial, n: int) -> None:
    """Scratch is asked for each thread, however few are woken."""
    t.given["pool"] = t.rng.choice([n, n << 30])
    t.given.pop("arena", None)
    t.refuse(f"{n} threads", MemoryError, tw.InvalidArgument)


def make_huge(rng: random.Random) -> Trial:
    t = make(rng)
    change = rng.choice([many_keys, many_rows, many_heads, many_sequences, many_threads])
    t.what.append(change.__name__)
    change(t, 1 << rng.choice(EXPONENTS))
    return t
