"""Words for score and keep functions, and ready ones.

A function score(s, b, h, i, j) -> score, or keep(b, h, i, j) -> whether the row sees the key, is called while a kernel
is written, with values that stand for the score s, sequence b, query head h, and the absolute positions of row i and
key j. It may use

- arithmetic + - * / // % abs ** 2, comparisons, & | ^ ~ on truth values, and the words below, in float32 and int32;
- numbers that it captured, which become constants of the kernel: another number is another kernel;
- arrays that it captured (in a closure, a global, a default, functools.partial, or in a function that it calls), at
  indices made of b, h, i and j: x[h, i - j]. An index beyond an end of an axis means that end. The arrays are read as
  they are at the call, or at `tilewise.block_mask`; they hold float32, int32 or bool, or are rounded to these.

It may not branch on a value (`if`, `and`, `or`, `not`: say where, &, |, ~), loop over one, or call another library.
Division of integers rounds down as Python's does, and is 0 where the divisor is 0.

Words
-----
where, minimum, maximum, exp, exp2, log, log2, tanh. np.where, np.tanh and so on mean the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arguments
from tilewise.arguments import MAX_POSITION, Array
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.kernels.traced import exp, exp2, log, log2, maximum, minimum, tanh, where

__all__ = [
    "alibi", "and_", "causal", "chunked", "dilated", "document", "exp", "exp2", "log", "log2", "maximum", "minimum",
    "not_", "or_", "prefix_lm", "relative_bias", "sliding_window", "softcap", "tanh", "tree", "where",
]  # fmt: skip

Keep = Callable[[Any, Any, Any, Any], Any]
Score = Callable[[Any, Any, Any, Any, Any], Any]


# ---- keep functions made of others


def and_(*keeps: Keep) -> Keep:
    """What all of these keep functions let a row see."""
    return lambda b, h, i, j: functools.reduce(np.logical_and, [keep(b, h, i, j) for keep in keeps], True)


def or_(*keeps: Keep) -> Keep:
    """What any of these keep functions lets a row see."""
    return lambda b, h, i, j: functools.reduce(np.logical_or, [keep(b, h, i, j) for keep in keeps], False)


def not_(keep: Keep) -> Keep:
    """What this keep function hides."""
    return lambda b, h, i, j: np.logical_not(keep(b, h, i, j))


# ---- ready keep functions


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A row sees the keys up to its own position. As causal=True, which costs less."""
    return j <= i


def sliding_window(left: int, right: int = 0) -> Keep:
    """A row sees `left` keys before its own and `right` after it (Beltagy et al., 2020, Longformer).

    As window=(left, right), which costs less.
    """
    left, right = (arguments.size(name, x, MAX_POSITION) for name, x in (("left", left), ("right", right)))
    return lambda b, h, i, j: (i - j <= left) & (j - i <= right)


def prefix_lm(lengths: Any) -> Keep:
    """All rows see the prefix, keys [0, lengths), and each row the keys up to its own (Raffel et al., 2020, T5).

    lengths : int, or int array [B]
    """
    table = _integers("lengths", np.atleast_1d(lengths), axes=(1,))
    batched = np.ndim(lengths) > 0
    return lambda b, h, i, j: (j < table[b if batched else 0]) | (j <= i)


def document(ids: Any) -> Keep:
    """A row sees the keys of its own document: several packed into one sequence do not see each other (Krell et al.,
    2021). With a causal mask: causal=True beside it.

    ids : int array [positions], or [B, positions]
        The document at each position.
    """
    table = _integers("ids", ids, axes=(1, 2))
    if table.ndim == 1:
        return lambda b, h, i, j: table[i] == table[j]
    return lambda b, h, i, j: table[b, i] == table[b, j]


def dilated(step: int, count: int | None = None) -> Keep:
    """A row sees every step-th key before and after its own, at most `count` of them on each side (Child et al., 2019,
    Sparse Transformers; Beltagy et al., 2020, Longformer)."""
    step = _at_least_one("step", step)
    if count is None:
        return lambda b, h, i, j: (i - j) % step == 0
    reach = step * arguments.size("count", count, MAX_POSITION)
    return lambda b, h, i, j: ((i - j) % step == 0) & (abs(i - j) <= reach)


def chunked(size: int) -> Keep:
    """A row sees the keys of its own chunk of `size` positions: with causal=True, the local layers of Llama 4."""
    size = _at_least_one("size", size)
    return lambda b, h, i, j: i // size == j // size


def tree(parents: Any, prefix: Any) -> Keep:
    """A tree of drafted tokens: each sees the shared prefix, its ancestors and itself (Miao et al., 2023, SpecInfer).

    Token n of the tree is the query row, and the key, at position prefix + n: give q_offset=prefix.

    parents : int array [N] or [B, N]
        The token that each token continues, an earlier one; -1 for one that continues the prefix.
    prefix : int, or int array [B]
        Keys of the shared prefix.
    """
    parents = _integers("parents", parents, axes=(1, 2))
    count = parents.shape[-1]
    order = np.arange(count)
    if ((parents < -1) | (parents >= order)).any():
        raise InvalidArgument("each of parents must be -1 or the number of an earlier token")
    sees = np.zeros((*parents.shape, count), np.bool_)
    for n in range(count):  # a token sees what its parent sees, and itself
        parent = parents[..., n, None, None]
        above = np.take_along_axis(sees, np.broadcast_to(np.maximum(parent, 0), (*parents.shape[:-1], 1, count)), -2)
        sees[..., n, :] = np.where(parent < 0, False, above)[..., 0, :]
        sees[..., n, n] = True
    first = _integers("prefix", np.atleast_1d(prefix), axes=(1,))
    batched, trees = np.ndim(prefix) > 0, parents.ndim == 2

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        start = first[b if batched else 0]
        row, key = i - start, j - start
        seen = sees[b, row, key] if trees else sees[row, key]
        return (key < 0) | (key < count) & seen

    return keep


# ---- ready score functions


def alibi(slopes: Any) -> Score:
    """s - slope * |i - j| (Press et al., 2022), the bits of alibi_slopes.

    slopes : float array [H] or [B, H]
    """
    slopes = np.asarray(slopes, np.float32)
    if slopes.ndim not in (1, 2):
        raise ShapeError(f"slopes must have shape [H] or [B, H], got {slopes.shape}")
    if slopes.ndim == 1:
        return lambda s, b, h, i, j: s - slopes[h] * abs(i - j)
    return lambda s, b, h, i, j: s - slopes[b, h] * abs(i - j)


def softcap(cap: float) -> Score:
    """cap * tanh(s / cap) (Gemma Team, 2024, Gemma 2), the bits of softcap=cap."""
    checked = arguments.softcap(cap)
    if checked is None:
        raise InvalidArgument("cap must be a positive number, got None")
    inverse = 1 / checked
    return lambda s, b, h, i, j: checked * tanh(s * inverse)


def relative_bias(table: Any) -> Score:
    """s + table[h, j - i + R]: a learned number for each distance (Shaw et al., 2018; Raffel et al., 2020, T5).

    table : float array [H, 2 R + 1]
        For the distances j - i = -R ... R; those beyond have that of the end.
    """
    table = np.asarray(table, np.float32)
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ShapeError(f"table must have shape [H, 2 R + 1], got {table.shape}")
    reach = table.shape[1] // 2
    return lambda s, b, h, i, j: s + table[h, j - i + reach]


def _integers(name: str, x: Any, axes: tuple[int, ...]) -> Array:
    array = np.asarray(x)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim not in axes or not array.size:
        raise ShapeError(f"{name} must have {' or '.join(map(str, axes))} axes and an element, got {array.shape}")
    return array


def _at_least_one(name: str, x: Any) -> int:
    if arguments.size(name, x, MAX_POSITION) == 0:
        raise InvalidArgument(f"{name} must be at least 1, got 0")
    return int(x)
