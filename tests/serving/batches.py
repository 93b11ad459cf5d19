"""Ragged batches for the tests of serving: sequences of any lengths, what each gives alone, and their keys in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw

Array = NDArray[Any]
PAGE_SIZES = (1, 7, 16, 64, 100, 128, 256)
GARBAGE = (-1, -(1 << 31), (1 << 31) - 1, 1 << 20)  # in block tables, where nobody looks
_POISON = {4: np.uint32(0xFFC0DEAD), 2: np.uint16(0x7DED)}  # NaNs that no kernel makes


def bits(x: Array) -> Array:
    """The bits of an array, whatever its float type: what is compared."""
    return np.ascontiguousarray(x).view({4: np.uint32, 2: np.uint16}[x.dtype.itemsize])


def assert_same(got: Any, expected: Any, what: object = "") -> None:
    """Two arrays, or two (nested) sequences of them such as (o, lse): the same types, shapes and bits."""
    if isinstance(got, tuple | list):
        assert len(got) == len(expected), what
        for i, (x, y) in enumerate(zip(got, expected, strict=True)):
            assert_same(x, y, f"{what} [{i}]")
        return
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} and {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} and {expected.shape}"
    differ = np.argwhere(bits(got) != bits(expected))
    assert not len(differ), f"{what}: {len(differ)} of {got.size} elements differ in bits, the first at {differ[0]}"


def poisoned(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An array to be written: what remains of the poison was not."""
    kind = np.dtype(dtype)
    poison = _POISON[kind.itemsize]
    return np.full(shape, poison).view(kind)


def untouched(x: Array) -> bool:
    return bool((bits(x) == _POISON[x.dtype.itemsize]).all())


def assert_written(x: Array) -> None:
    left = np.argwhere(bits(x) == _POISON[x.dtype.itemsize])
    assert not len(left), f"{len(left)} of {x.size} elements were never written, the first at {left[0]}"


@dataclass(frozen=True, eq=False)
class Sequence:
    """q [H, Tq, D], k [Hkv, n, D], v [Hkv, n, Dv], and the positions of its first row and first key."""

    q: Array
    k: Array
    v: Array
    q_offset: int
    k_offset: int = 0

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences, and the options that they share."""

    sequences: list[Sequence]
    options: dict[str, Any]

    def alone(self, **changes: Any) -> list[tuple[Array, Array]]:
        """(o [H, Tq, Dv], lse [H, Tq]) of each sequence by `attention`, on one thread."""
        return [
            tuple(
                x[0]
                for x in tw.attention(
                    s.q[None],
                    s.k[None],
                    s.v[None],
                    q_offset=s.q_offset,
                    k_offset=s.k_offset,
                    return_lse=True,
                    pool=1,
                    **{**self.options, **changes},
                )
            )
            for s in self.sequences
        ]

    def starts(self, what: str, dtype: Any = np.int64) -> Array:
        return np.cumsum([0, *(getattr(s, what) for s in self.sequences)]).astype(dtype)

    def each(self, what: str) -> Array:
        return np.array([getattr(s, what) for s in self.sequences], np.int64)

    def packed(self, what: str) -> Array:
        """[total, heads, D] of q, k or v."""
        return np.concatenate([getattr(s, what) for s in self.sequences], 1).swapaxes(0, 1).copy()

    def split(self, result: tuple[Array, Array]) -> list[tuple[Array, Array]]:
        """A ragged (o, lse), as `alone` gives it."""
        (o, lse), at = result, self.starts("rows")
        return [(o[i:j].swapaxes(0, 1), lse[:, i:j]) for i, j in pairwise(at)]

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of o and lse of a ragged call."""
        total, H, Dv = int(self.starts("rows")[-1]), self.sequences[0].q.shape[0], self.sequences[0].v.shape[2]
        return (total, H, Dv), (H, total)

    def varlen(self, lay: Callable[[Array], Array] = np.asarray, index: Any = np.int64, **changes: Any) -> Any:
        """`attention_varlen`, each sequence's own (o, lse)."""
        q, k, v = (lay(self.packed(name)) for name in "qkv")
        given = {
            "cu_seqlens_q": self.starts("rows", index), "cu_seqlens_k": self.starts("keys", index),
            "q_offset": self.each("q_offset"), "k_offset": self.each("k_offset"), **self.options, **changes,
        }  # fmt: skip
        return self.split(tw.attention_varlen(q, k, v, return_lse=True, **given))

    def paged(self, pages: Pages, **changes: Any) -> Any:
        """`attention_paged` with ragged rows, each sequence's own (o, lse)."""
        given = {
            "block_table": pages.table, "kv_len": self.each("keys"), "cu_seqlens_q": self.starts("rows"),
            "q_offset": self.each("q_offset"), "k_offset": self.each("k_offset"), **self.options, **changes,
        }  # fmt: skip
        return self.split(tw.attention_paged(self.packed("q"), pages.k, pages.v, return_lse=True, **given))

    def pages(self, size: int, layout: str = "slots first", seed: int = 0, table: Any = np.int64) -> Pages:
        return in_pages(self.sequences, size, layout, seed, table)

    def of(self, sequences: list[Sequence]) -> Batch:
        return replace(self, sequences=sequences)


@dataclass(frozen=True, eq=False)
class Pages:
    """k [pages, page_size, Hkv, D], v likewise, and the block table."""

    k: Array
    v: Array
    table: Array


def room(shape: tuple[int, ...], dtype: Any, layout: str) -> Array:
    """NaN in the shape [pages, page_size, Hkv, D] of pages, in memory as the layout says."""
    pages, size, heads, width = shape
    # NaN of any float type: all bits set. (A structured bfloat16 has no fill value of its own.)
    unsigned = {4: np.uint32, 2: np.uint16}[np.dtype(dtype).itemsize]
    if layout == "slots first":
        raw = np.full(shape, -1, np.int64).astype(unsigned)
        return raw.view(dtype)
    if layout == "heads first":
        return np.full((pages, heads, size, width), -1, np.int64).astype(unsigned).view(dtype).swapaxes(1, 2)
    assert layout == "backwards with gaps"
    raw = np.full((heads, pages, size, width + 3), -1, np.int64).astype(unsigned).view(dtype)
    return raw.transpose(1, 2, 0, 3)[::-1, ::-1, :, :width]


LAYOUTS = ("slots first", "heads first", "backwards with gaps")


def in_pages(
    sequences: list[Sequence], size: int, layout: str = "slots first", seed: int = 0, table: Any = np.int64
) -> Pages:
    """Their keys in shuffled pages: NaN in every slot and page without a key, garbage in the table past each end."""
    rng = np.random.default_rng([seed, size])
    counts = [-(-s.keys // size) for s in sequences]
    total = sum(counts) + 3
    order = rng.permutation(total)
    blocks = rng.choice(np.array(GARBAGE), (len(sequences), max(counts, default=0) + 2)).astype(table)
    first = sequences[0]
    k = room((total, size, first.k.shape[0], first.k.shape[2]), first.k.dtype, layout)
    v = room((total, size, first.v.shape[0], first.v.shape[2]), first.v.dtype, layout)
    taken = 0
    for b, s in enumerate(sequences):
        for page in range(counts[b]):
            blocks[b, page] = number = order[taken]
            taken += 1
            for pages, x in ((k, s.k), (v, s.v)):
                part = x[:, page * size : (page + 1) * size].swapaxes(0, 1)
                pages[number, : len(part)] = part
    return Pages(k, v, blocks)


def sequence(
    rng: np.random.Generator, rows: int, keys: int, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (16, 24),
    q_offset: int | None = None, k_offset: int = 0, dtypes: tuple[Any, Any, Any] = (np.float32,) * 3,
) -> Sequence:  # fmt: skip
    """Normal numbers, later keys longer, so that a row's maximum keeps growing; rows at the end of the keys."""
    (H, Hkv), (D, Dv) = heads, widths
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((H, rows, D), (Hkv, keys, D), (Hkv, keys, Dv)))
    k *= (0.5 + np.linspace(0, 1, keys, dtype=np.float32))[:, None]
    q_offset = max(0, k_offset + keys - rows) if q_offset is None else q_offset
    q, k, v = (x.astype(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
    return Sequence(q, k, v, q_offset, k_offset)


def mixed(options: dict[str, Any], heads: tuple[int, int] = (6, 2), widths: tuple[int, int] = (17, 24)) -> Batch:
    """Decode rows, chunks of prefills, a whole prefill, sequences without rows, without keys, and of a moved cache."""
    rng = np.random.default_rng(len(options) + 7 * heads[0] + widths[0])
    kinds = (
        (1, 700), (70, 300), (40, 40), (0, 5), (3, 0), (0, 0), (1, 1), (2, 129, None, 37), (20, 33, 3), (1, 1025),
        (5, 64, 70, 64), (17, 200, 190),
    )  # fmt: skip
    sequences = []
    for rows, keys, *offsets in kinds:
        q_offset, k_offset = [*offsets, *(None, 0)[len(offsets) :]]
        sequences.append(sequence(rng, rows, keys, heads, widths, q_offset, k_offset or 0))
    if options.get("sinks"):
        options = {**options, "sinks": np.linspace(-2, 4, heads[0], dtype=np.float32)}
    return Batch(sequences, options)


# what sequences share: masks, sinks, scale, and the recipe's two numbers, odd ones too
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 50},
    "window without causal": {"window": 9, "sinks": True},
    "sinks": {"causal": True, "sinks": True, "scale": 0.3},
    "odd tiles": {"causal": True, "bc": 33, "span": 99},
    "small tiles": {"causal": True, "window": 70, "sinks": True, "bc": 5, "span": 15},
}
