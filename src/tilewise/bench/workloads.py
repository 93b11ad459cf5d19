"""What a workload is: shapes with a mask, their cost, and their inputs. table.py lists those that are measured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import BFLOAT16, SIZE, Array, I64Array
from tilewise.runtime.arena import aligned
from tilewise.runtime.roof import written_floats
from tilewise.verify.halves import rounded
from tilewise.visibility import bounds, visible_pairs

FLOAT = 4  # bytes
SEED = 0
TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """q [B,H,Tq,D], k and v [B,Hkv,Tk,D] of a type of TYPES; query row i is at position q_offset + i."""

    name: str
    title: str
    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    D: int
    causal: bool = False
    window: int | None = None
    q_offset: int = 0
    tiny: bool = False  # a fixed cost is what counts: there is no roof
    type: str = "f32"
    threads: int = 0  # always so many; 0: as many as are asked for
    target: str = ""  # always this one; empty: the one that is asked for
    alone: bool = False  # it compares us with ourselves: no peer takes part
    beside: Workload | None = None  # ours on this one is timed in the same rounds, for the ratio

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def decode(self) -> bool:
        """One query row a sequence, which sees every key: no mask is needed."""
        return self.Tq == 1 and self.window is None and (not self.causal or self.q_offset == self.Tk - 1)

    @property
    def masked(self) -> bool:
        """Some row does not see some key."""
        return self.pairs < self.B * self.H * self.Tq * self.Tk

    @property
    def square_causal(self) -> bool:
        """Causal from position 0 on, as many keys as rows, no window: what libraries mean by is_causal."""
        return self.causal and self.window is None and self.q_offset == 0 and self.Tq == self.Tk

    @property
    def rows(self) -> int:
        """Query rows of a head, in all sequences."""
        return self.B * self.Tq

    @property
    def keys(self) -> int:
        """Keys of a KV head, in all sequences."""
        return self.B * self.Tk

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs."""
        left, right = bounds(self.causal, self.window)
        return self.B * self.H * int(visible_pairs(self.Tq, self.q_offset, 0, self.Tk, left, right))

    @property
    def flops(self) -> int:
        """Operations of both products over visible pairs."""
        return 4 * self.D * self.pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.Hkv * self.keys * self.D * SIZE[self.type]

    @property
    def out_bytes(self) -> int:
        return self.H * self.rows * self.D * SIZE[self.type]

    @property
    def type_name(self) -> str:
        return TYPES[self.type]

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """Of q, k and v."""
        keys = self.B, self.Hkv, self.Tk, self.D
        return (self.B, self.H, self.Tq, self.D), keys, keys

    @property
    def arguments(self) -> dict[str, Any]:
        """What `tilewise.attention` is told besides q, k and v; nothing where the defaults say it."""
        chosen: dict[str, Any] = {"causal": self.causal, "window": self.window, "q_offset": self.q_offset}
        return {name: x for name, x in chosen.items() if x}

    @property
    def shape(self) -> str:
        rows = f"T{self.Tq}" if self.Tq == self.Tk else f"Tq{self.Tq} Tk{self.Tk}"
        parts = [f"B{self.B} H{self.H} Hkv{self.Hkv} {rows} D{self.D}"]
        parts += ["causal"] * (self.causal and not self.decode) + [f"window {self.window}"] * (self.window is not None)
        return ", ".join([*parts, *[self.type] * (self.type != "f32")])

    def mask(self) -> NDArray[np.bool_]:
        """[Tq, Tk], true where the row sees the key: for peers that know no better."""
        left, right = bounds(self.causal, self.window)
        p, c = self.q_offset + np.arange(self.Tq)[:, None], np.arange(self.Tk)
        return np.asarray((c >= p - left) & (c <= p + right))

    def spots(self) -> Iterator[tuple[Shape, tuple[Any, ...], int]]:
        """A few rows to check: (index of the row in q and o, of its keys in k and v, its position)."""
        for b, h in {(0, 0), (self.B - 1, self.H - 1)}:
            for i in sorted({0, self.Tq // 2, self.Tq - 1}):
                yield (b, h, i), (b, h // self.group), self.q_offset + i


@dataclass(frozen=True)
class Batch(Workload):
    """Causal, sequences of many lengths: q [rows,H,D], k and v [capacity,Hkv,D], one sequence after the other.

    With Tq 1 a sequence's row is the one behind its last key; with Tq 0 each of its tokens is a row. Tk is the largest
    of the lengths.

    At call number n, sequence b has (n + its phase) % turnover more keys than lengths[b]: each grows by a token a call
    and begins anew now and then, each at another time, so that the work of a call stays what it is.
    """

    lengths: tuple[int, ...] = ()
    page: int = 0  # tokens a page; 0: the keys of a sequence are in one piece
    shuffled: bool = False  # the pages of a sequence lie anywhere, as after a while of serving
    turnover: int = 1

    def lengths_at(self, call: int) -> I64Array:
        """Keys of each sequence at call number `call`."""
        phase = np.arange(self.B) * self.turnover // self.B
        return np.asarray(np.array(self.lengths, np.int64) + (call + phase) % self.turnover)

    def steps(self) -> Iterator[I64Array]:
        """The lengths of call after call, for ever."""
        return itertools.cycle([self.lengths_at(call) for call in range(self.turnover)])

    @property
    def starts(self) -> I64Array:
        """Where each sequence's keys begin in k and v, and the last one's end: room for all that it grows to."""
        return np.cumsum([0, *(n + self.turnover - 1 for n in self.lengths)])

    @property
    def rows(self) -> int:
        return self.B if self.Tq else sum(self.lengths)

    @property
    def keys(self) -> int:  # of a call on average
        return sum(self.lengths) + self.B * (self.turnover - 1) // 2

    @property
    def pairs(self) -> int:
        return self.H * (self.keys if self.Tq else sum(n * (n + 1) // 2 for n in self.lengths))

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        keys = int(self.starts[-1]), self.Hkv, self.D
        return (self.rows, self.H, self.D), keys, keys

    @property
    def shape(self) -> str:
        low, high = min(self.lengths), max(self.lengths)
        keys = f"Tk{low}" if low == high else f"Tk{low}-{high}"
        parts = [f"B{self.B} H{self.H} Hkv{self.Hkv} {'Tq1 ' * self.Tq}{keys} D{self.D}"]
        parts += [f"pages of {self.page}"] * (self.page > 0) + ["shuffled"] * self.shuffled
        return ", ".join([*parts, *[self.type] * (self.type != "f32")])

    def block_table(self, page: int) -> NDArray[np.int32]:
        """The pages of each sequence, int32 [B, max_pages]; 0 behind the last."""
        counts = -(-np.diff(self.starts) // page)
        pages = np.arange(counts.sum(), dtype=np.int32)
        if self.shuffled:
            pages = np.random.default_rng(SEED).permutation(pages)
        table = np.zeros((self.B, counts.max()), np.int32)
        table[np.arange(counts.max()) < counts[:, None]] = pages
        return table

    def spots(self) -> Iterator[tuple[Shape, tuple[Any, ...], int]]:
        lengths, rows = self.lengths_at(0), [0, *itertools.accumulate(self.lengths)]
        for b in sorted({0, int(np.argmax(lengths)), self.B - 1}):
            n = int(lengths[b])
            for i in [n - 1] if self.Tq else sorted({0, n // 2, n - 1}):
                for h in (0, self.H - 1):
                    keys = slice(self.starts[b], self.starts[b] + n), h // self.group
                    yield (b if self.Tq else rows[b] + i, h), keys, i


@dataclass(frozen=True)
class Startup(Workload):
    """Import and first call in a new process, which says how long both took; its start is not part of it."""

    cached: bool = False  # the compiled kernels are on disk already


@functools.lru_cache(maxsize=2)  # a workload and the one beside it
def inputs(w: Workload) -> tuple[Array, Array, Array]:
    """(q, k, v), standard normal, rounded to the workload's type, on cache lines; the same in every process."""
    rng = np.random.default_rng(SEED)
    q, k, v = (_normal(rng, shape, w.type) for shape in w.shapes)
    return q, k, v


def _normal(rng: np.random.Generator, shape: Shape, type: str) -> Array:
    floats = written_floats(*shape)
    rng.standard_normal(out=floats, dtype=np.float32)
    if type == "f32":
        return floats
    array = empty(shape, type)
    array[...] = rounded(floats, type)
    return array


def empty(shape: Shape, type: str) -> Array:
    """An array that begins on a cache line, to be filled."""
    dtype = BFLOAT16 if type == "bf16" else np.dtype(TYPES[type])
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return aligned(nbytes)[:nbytes].view(dtype).reshape(shape)
