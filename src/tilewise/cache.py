"""The keys and values of many sequences that grow, fork and end, in pages of one allocation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise import arguments
from tilewise.arguments import FLOATS, Array, I64Array
from tilewise.errors import CacheFull, InvalidArgument, ShapeError
from tilewise.problem import MAX_HEAD_DIM
from tilewise.runtime.arena import aligned

MAX_COUNT = (1 << 31) - 1  # a block table is int32
_SLOT_BITS = 24  # of an id: the low bits are a row of the tables, the others count the sequences that had it before
_SLOT = (1 << _SLOT_BITS) - 1
_FEW = 8  # rows and columns of the tables at first


class Usage(NamedTuple):
    """What a cache holds."""

    sequences: int
    tokens: int  # of all sequences: one that two forks share counts twice
    pages_used: int
    pages_free: int
    pages_shared: int  # in more than one sequence
    nbytes: int  # of all pages
    nbytes_used: int  # of the pages in use


class PagedKVCache:
    """The keys and values of sequences that grow, in pages of `page_size` tokens (PagedAttention, Kwon et al., 2023).

    Its arrays are what `tilewise.attention_paged` takes:

        tw.attention_paged(q, cache.k_pages, cache.v_pages, block_table=cache.block_table(seqs),
                           kv_len=cache.lengths(seqs), causal=True)

    Forks share pages; a shared page is copied before a token is written to it. Every method does all that it was asked,
    or raises and leaves the cache as it was. No bit of a result depends on which pages a sequence has. Not for several
    threads at once.

    Parameters
    ----------
    pages, page_size : int
        Number of pages, and tokens in each; 1 or more.
    kv_heads, head_dim, v_head_dim : int
        Hkv, D and Dv (D by default).
    dtype : dtype
        Of keys and values: float32, float16 or bfloat16.

    Attributes
    ----------
    k_pages : array [pages, page_size, Hkv, D]
    v_pages : array [pages, page_size, Hkv, Dv]
        Uninitialised where no token was written.
    pages, page_size, kv_heads, head_dim, v_head_dim, dtype : as given

    Raises
    ------
    InvalidArgument (a ValueError): a size out of its range. TypeError: a size that is no integer, another dtype.
    MemoryError: more than the system gives.
    """

    def __init__(
        self, pages: int, page_size: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None, *,
        dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        self.pages = _count("pages", pages, MAX_COUNT)
        self.page_size = _count("page_size", page_size, MAX_COUNT)
        self.kv_heads = _count("kv_heads", kv_heads, MAX_COUNT)
        self.head_dim = _count("head_dim", head_dim, MAX_HEAD_DIM)
        self.v_head_dim = self.head_dim if v_head_dim is None else _count("v_head_dim", v_head_dim, MAX_HEAD_DIM)
        self.dtype = _float_dtype(dtype)
        self.k_pages, self.v_pages = self._new_pages(self.head_dim), self._new_pages(self.v_head_dim)
        self._references = np.zeros(self.pages, np.int32)  # sequences that a page is in
        self._free = np.arange(self.pages, dtype=np.int32)[::-1].copy()  # a stack: the first _free_count are free
        self._free_count = self.pages
        # A row for each sequence, so that one index looks up a batch. A row's entry of _ids is the id of its sequence;
        # without a sequence it is ~id of the next one, which is negative and so equal to no id.
        self._ids = ~np.arange(_FEW, dtype=np.int64)
        self._lengths = np.zeros(_FEW, np.int64)
        self._tables = np.zeros((_FEW, _FEW), np.int32)  # 0 behind a sequence's pages
        self._vacant = list(range(_FEW))[::-1]  # rows without a sequence

    def _new_pages(self, dim: int) -> Array:
        # In memory [pages, Hkv, page_size, D]: the kernel walks all keys of one KV head in order, and so reads a page
        # as one run, like a contiguous cache. With heads inside tokens it would read page_size rows that lie apart.
        shape = self.pages, self.kv_heads, self.page_size, dim
        nbytes = math.prod(shape) * self.dtype.itemsize
        return aligned(nbytes)[:nbytes].view(self.dtype).reshape(shape).swapaxes(1, 2)

    def add(self) -> int:
        """A new sequence without tokens. Returns its id, which no other sequence ever has, not even after `free`."""
        if not self._vacant:
            rows = len(self._ids)
            if rows > _SLOT:
                raise CacheFull(f"the cache has {rows} sequences, as many as there can be")
            ids = np.concatenate([self._ids, ~np.arange(rows, 2 * rows, dtype=np.int64)])
            lengths, tables = _longer(self._lengths, 2 * rows), _longer(self._tables, 2 * rows)
            self._ids, self._lengths, self._tables = ids, lengths, tables
            self._vacant = list(range(rows, 2 * rows))[::-1]
        slot = self._vacant.pop()
        self._ids[slot] = ~self._ids[slot]
        return int(self._ids[slot])

    def append(self, seq: int, k: Any, v: Any) -> None:
        """Append n tokens to a sequence: k [Hkv, n, D] and v [Hkv, n, Dv] of the cache's dtype, with any strides.

        Raises
        ------
        CacheFull (a MemoryError): there are too few free pages. ShapeError (a ValueError), TypeError: k or v.
        InvalidArgument (a ValueError), TypeError: seq is not the id of a sequence.
        """
        slot = self._slot(seq)
        k, v = self.check_tokens(k, v)
        self._append(np.array([slot]), k[None], v[None])

    def append_batch(self, seqs: Any, k: Any, v: Any) -> None:
        """Append n tokens to each of B different sequences: k [B, Hkv, n, D], v [B, Hkv, n, Dv]; errors as in `append`.

        With n = 1 it is the write of a decode step: no Python runs for each sequence.
        """
        slots = self._slots(seqs)
        ordered = np.sort(slots)
        if (ordered[1:] == ordered[:-1]).any():
            raise InvalidArgument(f"seqs must be different sequences, got {seqs!r}")
        self._append(slots, *self.check_tokens(k, v, len(slots)))

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens, in the same pages: no key is copied. Returns its id.

        Of the shared pages only a last, partly filled one is ever copied, at the next append of either.
        """
        old = self._slot(seq)
        fork = self.add()
        new = self._slot(fork)
        self._references[self._tables[old, : self._held(old)]] += 1
        self._tables[new] = self._tables[old]
        self._lengths[new] = self._lengths[old]
        return fork

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence, such as those that a speculative step accepted.

        Raises
        ------
        InvalidArgument (a ValueError): length is not in 0 ... the sequence's length, or seq is not a sequence's id.
        TypeError: one of them is not an integer.
        """
        slot, length = self._slot(seq), arguments.integer("length", length)
        if not 0 <= length <= self._lengths[slot]:
            raise InvalidArgument(f"length must lie in 0 ... {self._lengths[slot]}, the sequence's, got {length}")
        self._release(slot, -(-length // self.page_size))
        self._lengths[slot] = length

    def free(self, seq: int) -> None:
        """Forget a sequence: its id is refused from now on, and pages that no other sequence has are free again."""
        slot = self._slot(seq)
        self._release(slot, 0)
        self._lengths[slot] = 0
        self._ids[slot] = ~(self._ids[slot] + (1 << _SLOT_BITS))
        self._vacant.append(slot)

    def block_table(self, seqs: Any) -> NDArray[np.int32]:
        """The pages of sequences, in order: int32 [B, max_pages], a copy; 0 behind a sequence's last page.

        `seqs` is an integer array or a list of ids; an array costs no Python for each sequence.
        """
        slots = self._slots(seqs)
        width = -(-int(self._lengths[slots].max(initial=0)) // self.page_size)
        return self._tables[slots, :width]

    def length(self, seq: int) -> int:
        """Tokens in a sequence."""
        return int(self._lengths[self._slot(seq)])

    def lengths(self, seqs: Any) -> I64Array:
        """Tokens in each of the sequences: int64 [B], a copy."""
        return self._lengths[self._slots(seqs)]

    def usage(self) -> Usage:
        """How full the cache is."""
        used = self.pages - self._free_count
        nbytes = self.k_pages.nbytes + self.v_pages.nbytes
        return Usage(
            sequences=len(self._ids) - len(self._vacant), tokens=int(self._lengths.sum()),
            pages_used=used, pages_free=self._free_count, pages_shared=int((self._references > 1).sum()),
            nbytes=nbytes, nbytes_used=nbytes // self.pages * used,
        )  # fmt: skip

    def __repr__(self) -> str:
        sizes = ", ".join(f"{x}={getattr(self, x)}" for x in ("page_size", "kv_heads", "head_dim", "v_head_dim"))
        return f"PagedKVCache(pages={self.pages}, {sizes}, dtype={self.dtype}) with {self.usage()}"

    def check_tokens(self, k: Any, v: Any, batch: int | None = None) -> tuple[Array, Array]:
        """k and v of `append`, or of `append_batch` with `batch` sequences: checked, as arrays over the same memory."""
        k, v = self._array("k", k), self._array("v", v)
        lead = (self.kv_heads,) if batch is None else (batch, self.kv_heads)
        n = k.shape[-2] if k.ndim > 1 else 0
        if k.shape != (*lead, n, self.head_dim) or v.shape != (*lead, n, self.v_head_dim):
            shape = ", ".join(map(str, lead))
            raise ShapeError(
                f"k and v must have shapes ({shape}, n, {self.head_dim}) and ({shape}, n, {self.v_head_dim}), "
                f"got {k.shape} and {v.shape}"
            )
        return k, v

    def _array(self, name: str, x: Any) -> Array:
        if x is None:
            raise InvalidArgument(f"{name} is missing: expected an array of {self.dtype}, got None")
        array: Array = x if type(x) is np.ndarray else arguments._as_array(name, x, str(self.dtype))
        if array.dtype != self.dtype:
            raise TypeError(f"{name} must be {self.dtype} like the cache, got {array.dtype!r}")
        return array

    def _slot(self, seq: Any) -> int:
        """The row of a sequence."""
        number = arguments.integer("seq", seq)
        slot = number & _SLOT
        if number < 0 or slot >= len(self._ids) or int(self._ids[slot]) != number:
            raise InvalidArgument(f"seq must be an id that add or fork gave and free did not take, got {number}")
        return slot

    def _slots(self, seqs: Any) -> I64Array:
        ids = _ids(seqs)
        slots: I64Array = np.minimum(ids & _SLOT, len(self._ids) - 1)
        unknown = (ids < 0) | (self._ids[slots] != ids)
        if unknown.any():
            wrong = ids[unknown.argmax()]
            raise InvalidArgument(f"seqs must be ids that add or fork gave and free did not take, got {wrong}")
        return slots

    def _held(self, slot: int) -> int:
        """Pages of a sequence."""
        return -(-int(self._lengths[slot]) // self.page_size)

    def _append(self, slots: I64Array, k: Array, v: Array) -> None:
        """Append k [B, Hkv, n, D] and v [B, Hkv, n, Dv]: first the tokens, where no sequence sees them, then the books.

        Tokens go to free pages, or behind the tokens of a page that is in one sequence only.
        """
        n, size = k.shape[2], self.page_size
        if not n or not len(slots):
            return
        lengths = self._lengths[slots]
        held, needed = -(-lengths // size), -(-(lengths + n) // size)
        copied = self._tails_to_copy(slots, lengths)
        fresh = int((needed - held).sum())
        taken = self._peek(fresh + len(copied), n)
        # The columns of the tables that a sequence's tokens may fall into; which begin with its last page, if partial.
        columns = (lengths // size)[:, None] + np.arange((n + size - 2) // size + 1)
        if columns[:, -1].max() >= self._tables.shape[1]:
            self._tables = _longer(self._tables.T, 2 * int(columns[:, -1].max())).T.copy()
        table = self._tables[slots[:, None], columns]
        table[(columns >= held[:, None]) & (columns < needed[:, None])] = taken[:fresh]
        shared = table[copied, 0]
        table[copied, 0] = taken[fresh:]
        token = (lengths % size)[:, None] + np.arange(n)  # counted from the start of the first of the columns
        where = table[np.arange(len(slots))[:, None], token // size], token % size
        for pages, x in ((self.k_pages, k), (self.v_pages, v)):
            pages[taken[fresh:]] = pages[shared]
            pages[where] = x.swapaxes(1, 2)
        np.subtract.at(self._references, shared, 1)
        self._references[taken] = 1
        self._free_count -= len(taken)
        self._tables[slots[:, None], columns] = table
        self._lengths[slots] = lengths + n

    def _tails_to_copy(self, slots: I64Array, lengths: I64Array) -> I64Array:
        """Which of the sequences end inside a page that they must not write to, because others have it too."""
        partial = np.flatnonzero(lengths % self.page_size)
        pages = self._tables[slots[partial], lengths[partial] // self.page_size]
        references = self._references[pages]
        if not (references > 1).any():
            return partial[:0]
        # Where all sequences of a page are in this batch the last of them keeps it, as if they came one after another.
        order = np.argsort(pages, kind="stable")
        earlier = np.arange(len(order)) - np.searchsorted(pages[order], pages[order])
        return partial[order[earlier < references[order] - 1]]

    def _peek(self, count: int, n: int) -> NDArray[np.int32]:
        """The next `count` free pages."""
        if count > self._free_count:
            raise CacheFull(
                f"the cache is full: {n} more tokens a sequence need {count} pages of {self.page_size}, "
                f"{self._free_count} of {self.pages} are free"
            )
        return self._free[self._free_count - count : self._free_count][::-1].copy()

    def _release(self, slot: int, keep: int) -> None:
        """Take all pages but the first `keep` from a sequence."""
        pages = self._tables[slot, keep : self._held(slot)]
        self._references[pages] -= 1
        unused = pages[self._references[pages] == 0][::-1]  # so that they are handed out again in their order
        self._free[self._free_count : self._free_count + len(unused)] = unused
        self._free_count += len(unused)
        pages[:] = 0


def _count(name: str, x: Any, limit: int) -> int:
    count = arguments.integer(name, x)
    if not 1 <= count <= limit:
        raise InvalidArgument(f"{name} must lie in 1 ... {limit}, got {count}")
    return count


def _float_dtype(x: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(x)
    except TypeError:
        raise TypeError(f"dtype must be {FLOATS}, got {x!r}") from None
    if arguments.float_type(dtype) is None:
        raise TypeError(f"dtype must be {FLOATS} in native byte order, got {x!r}")
    return dtype


def _ids(seqs: Any) -> I64Array:
    """Ids from an integer array or a list of integers."""
    expected = "seqs must be an integer array or a list of integers [B]"
    if isinstance(seqs, (list, tuple)):
        if not {bool, np.bool_}.isdisjoint(map(type, seqs)):  # of which NumPy would make 0 and 1
            raise TypeError(f"{expected}, got {seqs!r}")
        try:
            seqs = np.array(seqs, None if len(seqs) else np.int64)
        except (ValueError, OverflowError):
            raise TypeError(f"{expected}, got {seqs!r}") from None
    if not isinstance(seqs, np.ndarray):
        raise TypeError(f"{expected}, got {type(seqs).__name__}")
    if seqs.dtype.kind not in "iu":
        raise TypeError(f"{expected}, got dtype {seqs.dtype}")
    if seqs.ndim != 1:
        raise ShapeError(f"{expected}, got shape {seqs.shape}")
    return np.asarray(seqs, np.int64)


def _longer(x: Array, rows: int) -> Array:
    """A copy of x that has `rows` rows: its own, and zeros."""
    longer = np.zeros((rows, *x.shape[1:]), x.dtype)
    longer[: len(x)] = x
    return longer
