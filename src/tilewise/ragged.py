"""Ragged batches: sequences of any lengths in one call, their keys one after the other or in pages. Checked here."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import arguments
from tilewise.arguments import Array, I64Array
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.problem import (
    DENSE,
    Axes,
    Operands,
    Problem,
    check_heads,
    check_operands,
    check_options,
    check_variants,
    layout,
    positions_matter,
    query_offset,
    view,
)

RAGGED = Axes(sequence=0, row=0, head=1)  # [total, H, D]
RAGGED_LSE = Axes(sequence=1, row=1, head=0)  # [H, total_q]
PAGED = Axes(sequence=0, row=1, head=2)  # [pages, page_size, Hkv, D]


def make_varlen_problem(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, q_offset: Any = None, k_offset: Any = None,
    sinks: Any = None, alibi_slopes: Any = None, bias: Any = None, mask: Any = None, out: Any = None, lse: Any = None,
    hooks: bool = False, **options: Any,
) -> tuple[Problem, Operands]:  # fmt: skip
    """Check every argument of `tilewise.attention_varlen`; see there for their meaning and the errors."""
    q, k, v = (arguments.tensor(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v)))
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape[:2] != v.shape[:2]:
        raise ShapeError(f"k and v must have the same keys and KV heads on axes 0 and 1: {shapes}")
    (total_q, H, D), (total_k, Hkv, Dv) = q.shape, v.shape
    check_heads(H, Hkv, D, k.shape[2], Dv, shapes)
    chosen = check_options(D, lse=lse, **options)
    q_start = arguments.offsets("cu_seqlens_q", cu_seqlens_q, total_q)
    k_start = arguments.offsets("cu_seqlens_k", cu_seqlens_k, total_k)
    if len(q_start) != len(k_start):
        raise ShapeError(f"cu_seqlens_q has {len(q_start) - 1} sequences and cu_seqlens_k {len(k_start) - 1}")
    rows, length = np.diff(q_start), np.diff(k_start)
    k_offset = arguments.per_sequence("k_offset", 0 if k_offset is None else k_offset, len(rows))
    matters = positions_matter(chosen, alibi_slopes, hooks)
    q_offset = query_offset(q_offset, rows, length, k_offset, matters)
    o_shape, lse_shape = (total_q, H, Dv), (H, total_q)
    operands = check_operands(q, k, v, sinks, out, lse, o_shape, lse_shape)
    most = int(length.max(initial=0))
    variants, operands = check_variants(operands, alibi_slopes, bias, mask, len(rows), (H, total_q), most, exact=False)
    layouts = layout(operands, RAGGED, RAGGED_LSE, q_start[:-1], o_shape, lse_shape, chosen)
    problem = Problem(
        H, Hkv, D, Dv, **chosen, **layouts, **variants,
        k_view=view(k, RAGGED), k_base=k_start[:-1] * k.strides[0],
        v_view=view(v, RAGGED), v_base=k_start[:-1] * v.strides[0],
        rows=rows, q_offset=q_offset, k_offset=k_offset, kv_len=length, first_row=q_start[:-1],
        first_column=np.zeros_like(rows), index=np.arange(len(rows)),
    )  # fmt: skip
    return problem, operands


def make_paged_problem(
    q: Any, k_pages: Any, v_pages: Any, *, block_table: Any, kv_len: Any, cu_seqlens_q: Any = None,
    q_offset: Any = None, k_offset: Any = None, sinks: Any = None, alibi_slopes: Any = None, bias: Any = None,
    mask: Any = None, out: Any = None, lse: Any = None, hooks: bool = False, **options: Any,
) -> tuple[Problem, Operands]:  # fmt: skip
    """Check every argument of `tilewise.attention_paged`; see there for their meaning and the errors."""
    q = arguments.tensor("q", q, 4 if cu_seqlens_q is None else 3)
    k, v = arguments.tensor("k_pages", k_pages, 4), arguments.tensor("v_pages", v_pages, 4)
    shapes = f"q {q.shape}, k_pages {k.shape}, v_pages {v.shape}"
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"k_pages and v_pages must have the same pages, page size and KV heads: {shapes}")
    (H, D), (pages, page_size, Hkv, Dv) = (q.shape[1], q.shape[-1]), v.shape
    if page_size == 0:
        raise ShapeError(f"a page must hold at least one key: {shapes}")
    check_heads(H, Hkv, D, k.shape[3], Dv, shapes)
    chosen = check_options(D, lse=lse, **options)
    if cu_seqlens_q is None:
        B, Tq = q.shape[0], q.shape[2]
        start, rows = np.arange(B, dtype=np.int64), np.full(B, Tq, np.int64)
        axes, lse_axes = DENSE, DENSE
        o_shape: tuple[int, ...] = (B, H, Tq, Dv)
        lse_shape: tuple[int, ...] = (B, H, Tq)
    else:
        q_start = arguments.offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        start, rows = q_start[:-1], np.diff(q_start)
        axes, lse_axes = RAGGED, RAGGED_LSE
        o_shape, lse_shape = (q.shape[0], H, Dv), (H, q.shape[0])
    length = arguments.per_sequence("kv_len", kv_len, len(rows))
    k_offset = arguments.per_sequence("k_offset", 0 if k_offset is None else k_offset, len(rows))
    q_offset = _rows_at_the_end(rows, length, k_offset) if q_offset is None else q_offset
    q_offset = arguments.per_sequence("q_offset", q_offset, len(rows))
    blocks = check_blocks(block_table, length, pages, page_size)
    operands = check_operands(q, k, v, sinks, out, lse, o_shape, lse_shape)._replace(blocks=blocks)
    leading = o_shape[:-1] if cu_seqlens_q is None else lse_shape
    most = int(length.max(initial=0))
    variants, operands = check_variants(operands, alibi_slopes, bias, mask, len(rows), leading, most, exact=False)
    nowhere = np.zeros(len(rows), np.int64)  # the pages of all sequences lie in the same arrays
    layouts = layout(operands, axes, lse_axes, start, o_shape, lse_shape, chosen)
    problem = Problem(
        H, Hkv, D, Dv, **chosen, **layouts, **variants,
        k_view=view(k, PAGED, page=0), k_base=nowhere, v_view=view(v, PAGED, page=0), v_base=nowhere,
        rows=rows, q_offset=q_offset, k_offset=k_offset, kv_len=length,
        first_row=nowhere if cu_seqlens_q is None else start, first_column=nowhere, index=np.arange(len(rows)),
        page_size=page_size, blocks_base=np.arange(len(rows)) * blocks.strides[0], blocks_bytes=blocks.nbytes,
    )  # fmt: skip
    return problem, operands


def _rows_at_the_end(rows: I64Array, kv_len: I64Array, k_offset: I64Array) -> I64Array:
    """The position of the first of the rows that are the last of a sequence's keys."""
    short = kv_len < rows
    if short.any():
        b = int(np.argmax(short))
        raise InvalidArgument(
            f"q_offset must be given: its default, the end of the keys less the query rows, is for rows whose keys are "
            f"in the cache already, but sequence {b} has {rows[b]} query rows and {kv_len[b]} keys"
        )
    ends: I64Array = k_offset + kv_len - rows
    return ends


def check_blocks(block_table: Any, kv_len: I64Array, pages: int, page_size: int) -> I64Array:
    """The page numbers [B, max_pages] as int64; those of pages past a sequence's length may be anything."""
    arguments.refuse_mask("block_table", block_table)
    if not isinstance(block_table, np.ndarray):
        raise TypeError(f"block_table must be an array of integers [B, max_pages], got {type(block_table).__name__}")
    if block_table.dtype.kind not in "iu":
        raise TypeError(f"block_table must be an array of integers, got dtype {block_table.dtype}")
    if block_table.ndim != 2 or len(block_table) != len(kv_len):
        raise ShapeError(f"block_table must have shape [{len(kv_len)}, max_pages], got {block_table.shape}")
    used = (kv_len + (page_size - 1)) // page_size
    if len(used) and used.max() > block_table.shape[1]:
        b = int(np.argmax(used))
        raise InvalidArgument(
            f"kv_len must fit the pages of block_table: sequence {b} has {kv_len[b]} keys and "
            f"{block_table.shape[1]} pages of {page_size}"
        )
    inside = np.arange(block_table.shape[1]) < used[:, None]
    blocks: Array = np.where(inside, block_table, 0)
    wrong = inside & ((blocks < 0) | (blocks >= pages))
    if wrong.any():
        b, page = np.argwhere(wrong)[0]
        raise InvalidArgument(
            f"block_table names page {block_table[b, page]} at [{b}, {page}], but k_pages has {pages} pages"
        )
    return np.ascontiguousarray(blocks, np.int64)
