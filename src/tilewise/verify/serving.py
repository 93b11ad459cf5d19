"""The invariances of serving: ragged batches, pages, partial results and half types give the bits of one call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import tilewise as tw
from tilewise.verify.findings import Array, Check, Findings, inputs
from tilewise.verify.halves import rounded, wide

ROWS_KEYS = ((1, 1300), (40, 300), (65, 65), (0, 9), (3, 0), (1, 1))  # decode rows, chunks, a prompt, nothing
PAGE_SIZES = (1, 7, 16, 64, 100, 128, 256)

Sequences = list[tuple[Array, ...]]  # q [H, Tq, D], k [Hkv, n, D], v [Hkv, n, Dv] of each


def _sequences() -> tuple[Sequences, list[tuple[Array, Array]]]:
    """A batch of very different sequences, and what each gives alone: o [H, Tq, Dv], lse [H, Tq]."""
    sequences = [tuple(x[0] for x in inputs(20 + i, 1, 6, 2, rows, n, 64, 48)) for i, (rows, n) in enumerate(ROWS_KEYS)]
    alone = []
    for q, k, v in sequences:
        o, lse = tw.attention(
            q[None], k[None], v[None], causal=True, q_offset=max(0, k.shape[1] - q.shape[1]), return_lse=True, pool=1
        )
        alone.append((o[0], lse[0]))
    return sequences, alone


def _packed(sequences: Sequences, index: int) -> tuple[Array, Array]:
    """q, k or v [total, heads, D] of all, and where each begins."""
    arrays = [each[index] for each in sequences]
    return np.concatenate(arrays, 1).swapaxes(0, 1), np.cumsum([0, *(x.shape[1] for x in arrays)])


def _pages(sequences: Sequences, size: int, heads_first: bool) -> tuple[Array, Array, Array]:
    """Shuffled pages and their table; NaN where no key lies, numbers of no page past the end of a sequence."""
    counts = [-(-k.shape[1] // size) for _, k, _ in sequences]
    order = np.random.default_rng(size).permutation(sum(counts) + 2)
    table = np.full((len(sequences), max(counts) + 1), -1)
    pages = []
    for index in (1, 2):
        heads, _, width = sequences[0][index].shape
        shape = (len(order), heads, size, width) if heads_first else (len(order), size, heads, width)
        room = np.full(shape, np.nan, np.float32)
        pages.append(room.swapaxes(1, 2) if heads_first else room)
    taken = iter(order)
    for b, (_, k, v) in enumerate(sequences):
        for page in range(counts[b]):
            table[b, page] = number = next(taken)
            for room, x in zip(pages, (k, v), strict=True):
                part = x[:, page * size : (page + 1) * size].swapaxes(0, 1)
                room[number, : len(part)] = part
    return pages[0], pages[1], table


def _same_as_alone(found: Findings, what: str, result: Any, starts: Array, alone: list[tuple[Array, Array]]) -> None:
    o, lse = result
    for b, (i, j) in enumerate(pairwise(starts)):
        found.same(f"{what}, sequence {b}", (o[i:j].swapaxes(0, 1), lse[:, i:j]), alone[b])


def _offsets() -> Array:
    return np.array([max(0, n - rows) for rows, n in ROWS_KEYS])


def _varlen(found: Findings) -> None:
    sequences, alone = _sequences()
    (q, q_starts), (k, k_starts), (v, _) = (_packed(sequences, i) for i in range(3))
    for threads in (1, 4):
        result = tw.attention_varlen(
            q, k, v, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, q_offset=_offsets(), causal=True, return_lse=True,
            pool=threads,
        )  # fmt: skip
        _same_as_alone(found, f"{threads} threads", result, q_starts, alone)


def _paged(found: Findings) -> None:
    sequences, alone = _sequences()
    q, q_starts = _packed(sequences, 0)
    keys = [n for _, n in ROWS_KEYS]
    for size in PAGE_SIZES:
        for heads_first in (False, True):
            k, v, table = _pages(sequences, size, heads_first)
            result = tw.attention_paged(
                q, k, v, block_table=table, kv_len=keys, cu_seqlens_q=q_starts, q_offset=_offsets(), causal=True,
                return_lse=True,
            )  # fmt: skip
            _same_as_alone(found, f"pages of {size}{', heads first' * heads_first}", result, q_starts, alone)


def _partial(found: Findings) -> None:
    q, k, v = inputs(30, 2, 4, 2, 21, 500, 40, 24)
    arguments: dict[str, Any] = {"causal": True, "q_offset": 479, "bc": 33, "span": 66}
    sinks = np.array([2, -1, 0, 1], np.float32)
    whole = tw.attention(q, k, v, return_lse=True, sinks=sinks, **arguments)

    def part(lo: int, hi: int) -> tw.Partial:
        computed = tw.attention_partial(q, k[:, :, lo:hi], v[:, :, lo:hi], k_offset=lo, **arguments)
        return tw.Partial.from_bytes(computed.to_bytes())

    borders = range(66, 500, 66)
    for border in borders:
        merged = tw.merge([part(0, border), part(border, border), part(border, 500)], sinks=sinks)
        found.same(f"parts that meet at {border}", merged.finish(), whole)
    merged = tw.merge([part(lo, hi) for lo, hi in pairwise([0, *borders, 500])], sinks=sinks)
    found.same("a part for each span", merged.finish(), whole)
    found.raises("parts out of order", tw.InvalidArgument, lambda: tw.merge([part(66, 132), part(0, 66)]))
    damaged = bytearray(part(0, 66).to_bytes())
    damaged[len(damaged) // 2] ^= 1
    found.raises("damaged bytes", tw.InvalidArgument, lambda: tw.Partial.from_bytes(bytes(damaged)))


def _half(found: Findings) -> None:
    for rows in (1, 50):
        arrays = inputs(31, 1, 4, 2, rows, 300, 40, 24)
        for types in (("f16",) * 3, ("bf16",) * 3, ("f16", "bf16", "f32")):
            q, k, v = (rounded(x, type) for x, type in zip(arrays, types, strict=True))
            floats = [wide(x, type) for x, type in zip((q, k, v), types, strict=True)]
            o, lse = tw.attention(q, k, v, causal=True, q_offset=300 - rows, return_lse=True)
            expected, expected_lse = tw.attention(*floats, causal=True, q_offset=300 - rows, return_lse=True)
            once = wide(rounded(expected, types[0]), types[0])
            found.same(f"{rows} rows of {' '.join(types)}", (wide(o, types[0]), lse), (once, expected_lse))


SERVING = (
    Check("varlen", "a ragged batch = each sequence alone", _varlen),
    Check("paged", "keys in pages of 1 to 256, in two layouts = in one piece", _paged),
    Check("partial", "parts merged at every border of a span = one call", _partial),
    Check("half", "float16 and bfloat16 = float32 on the same numbers, rounded once", _half),
)
