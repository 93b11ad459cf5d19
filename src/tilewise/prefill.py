"""Chunked prefill: a long prompt goes into a paged cache piece by piece, between other work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewise import arguments
from tilewise.arguments import Array
from tilewise.cache import PagedKVCache
from tilewise.errors import CacheFull, InvalidArgument, ShapeError
from tilewise.runtime.arena import Arena
from tilewise.runtime.pool import Pool
from tilewise.serving import attention_paged


def prefill_chunks(
    q: Any, k: Any, v: Any, *, cache: PagedKVCache, seq: int, chunks: Any, causal: bool = True,
    window: int | None = None, scale: float | None = None, sinks: Any = None, return_lse: bool = False,
    br: int = 0, bc: int = 0, span: int = 0, arena: Arena | None = None, pool: Pool | int | None = None,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Prefill T tokens of one sequence in chunks: for each, append its keys and values and attend its rows (Sarathi,
    Agrawal et al., 2023).

    The rows take the positions behind the tokens that the sequence has, and see those too. Each row has the bits that
    one `tilewise.attention` over the whole sequence gives it, whatever the chunks. Between two chunks the cache may be
    used for anything but a change of this sequence.

    A chunk is done wholly or not at all: where it raises, `CacheFull` above all, the cache is as it was before the
    chunk, and `next` tries the same chunk again, perhaps after another sequence was freed.

    Parameters
    ----------
    q : array [H, T, D]
    k, v : arrays [Hkv, T, D] and [Hkv, T, Dv], of the cache's dtype
        Read chunk by chunk: do not write to them before the end.
    cache : PagedKVCache
    seq : int
        A sequence of the cache, with tokens or without.
    chunks : int or iterable of ints
        Rows a chunk, the last chunk being what is left; or the rows of each chunk, which add up to T.
    causal : bool
        Where False, rows also see the tokens behind them: all T tokens are appended with the first chunk.
    window, scale, sinks, return_lse, br, bc, span, arena, pool
        As in `tilewise.attention`.

    Returns
    -------
    An iterator of (start, o), or with return_lse (start, o, lse): the chunk's first row in q, o [H, n, Dv] and
    lse [H, n], new arrays.

    Raises
    ------
    From the call, which checks every argument before any token is appended: InvalidArgument, ShapeError (ValueErrors),
    TypeError; CacheFull (a MemoryError) where even an empty cache would be too small. From `next`: CacheFull,
    ArenaExhausted (MemoryErrors), and InvalidArgument where the sequence was changed.
    """
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a tilewise.PagedKVCache, got {type(cache).__name__}")
    q = arguments.tensor("q", q, 3)
    k, v = cache.check_tokens(k, v)
    T = k.shape[1]
    if q.shape[1] != T:
        raise ShapeError(f"q, k and v must have the same tokens on axis 1: q {q.shape}, k {k.shape}, v {v.shape}")
    edges = _edges(chunks, T)
    base = cache.length(seq)
    needed = -(-(base + T) // cache.page_size)
    if needed > cache.pages:
        raise CacheFull(f"the sequence's {base + T} tokens need {needed} pages, the cache has {cache.pages}")
    prefill = _Prefill(q, k, v, cache, seq, base, edges, {
        "causal": causal, "window": window, "scale": scale, "sinks": sinks, "return_lse": return_lse,
        "br": br, "bc": bc, "span": span, "arena": arena, "pool": pool,
    })  # fmt: skip
    prefill.attend(0, 0)  # no rows: nothing but the checks of every option
    return prefill


class _Prefill(Iterator[tuple[Any, ...]]):
    """What is left to do. No generator: that would end at its first error, and a full cache must be tried again."""

    def __init__(
        self, q: Array, k: Array, v: Array, cache: PagedKVCache, seq: int, base: int, edges: list[int],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.cache, self.seq, self.options = q, k, v, cache, seq, options
        self.base = base  # the position of the first row
        self.edges = edges  # where the chunks begin, and the last one ends
        self.done = 0  # chunks
        self.appended = 0  # tokens

    def __next__(self) -> tuple[Any, ...]:
        if self.done + 1 == len(self.edges):
            raise StopIteration
        start, stop = self.edges[self.done : self.done + 2]
        end = stop if self.options["causal"] else self.q.shape[1]
        length = self.cache.length(self.seq)
        if length != self.base + self.appended:
            raise InvalidArgument(
                f"sequence {self.seq} was changed between two chunks: it has {length} tokens, expected "
                f"{self.base + self.appended}"
            )
        self.cache.append(self.seq, self.k[:, self.appended : end], self.v[:, self.appended : end])
        try:
            results = self.attend(start, stop)
        except BaseException:
            self.cache.truncate(self.seq, length)
            raise
        self.done, self.appended = self.done + 1, end
        return start, *results

    def attend(self, start: int, stop: int) -> list[Any]:
        """[o] or [o, lse] of the rows [start, stop)."""
        seqs = [self.seq]
        results = attention_paged(
            self.q[None, :, start:stop], self.cache.k_pages, self.cache.v_pages,
            block_table=self.cache.block_table(seqs), kv_len=self.cache.lengths(seqs), q_offset=self.base + start,
            **self.options,
        )  # fmt: skip
        return [x[0] for x in (results if isinstance(results, tuple) else (results,))]


def _edges(chunks: Any, T: int) -> list[int]:
    """Where the chunks begin, and T."""
    try:
        sizes = iter(chunks)
    except TypeError:
        size = arguments.integer("chunks", chunks)
        if size < 1:
            raise InvalidArgument(f"chunks must be 1 or more rows, got {size}") from None
        return [*range(0, T, size), T]
    edges = [0]
    for x in sizes:
        size = arguments.integer("chunks", x)
        if size < 1:
            raise InvalidArgument(f"chunks must be 1 or more rows each, got {size}")
        edges.append(edges[-1] + size)
        if edges[-1] > T:  # here already: an iterator may have no end
            break
    if edges[-1] != T:
        raise InvalidArgument(f"chunks must add up to the {T} tokens of k, got {edges[-1]}")
    return edges
