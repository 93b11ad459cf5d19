"""PyTorch's FlexAttention, by its own signature: its score_mod and mask_mod functions, traced into our kernel."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

import tilewise
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.frontends.tensors import torch
from tilewise.frontends.torch import attention
from tilewise.kernels.hooks import trace

ROWS = 128  # query rows of which a mask is in memory while the blocks of PyTorch's BlockMask are checked
_ANY_LENGTH = 1 << 30  # the block size of a BlockMask that PyTorch makes where none is given
_known: WeakKeyDictionary[Any, BlockMask] = WeakKeyDictionary()  # ours of PyTorch's block masks


class BlockMask(tilewise.BlockMask):
    """A mask_mod, traced, for queries and keys of these lengths. Made by `create_block_mask`.

    It may also be given as `keep` to `attention`.
    """

    def __init__(self, mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> None:
        super().__init__(*trace("keep", mask_mod))
        self.shape = (B or 1, H or 1, Q_LEN, KV_LEN)

    def same(self, other: BlockMask) -> bool:
        """Whether the functions do the same, to arrays of the same contents."""
        pairs = zip(self.arrays, other.arrays, strict=False)
        return self.hook == other.hook and self.shape == other.shape and all(np.array_equal(*pair) for pair in pairs)


def create_block_mask(
    mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128, _compile: bool = False,
) -> BlockMask:  # fmt: skip
    """torch.nn.attention.flex_attention.create_block_mask, for `flex_attention`; the mask is never in memory.

    Parameters
    ----------
    mask_mod : function mask_mod(b, h, q_idx, kv_idx) -> bool
        Whether query row q_idx of query head h sees key kv_idx. See `tilewise.hooks` for what it may compute with.
        Tensors that it captured are copied; an index beyond an end means the end: none counts backwards from there.
    B, H : int or None
        Sequences and query heads; None or 1: any.
    Q_LEN, KV_LEN : int
        The numbers of query rows and keys.
    device : "cpu"
    BLOCK_SIZE, _compile
        Change nothing: the kernel's tiles are looked at, at the first call of each layout, in compiled code.

    Raises
    ------
    InvalidArgument, naming the line, for a function that cannot be traced.
    """
    if torch.device(device or "cpu").type != "cpu":
        raise InvalidArgument(f"device must be the CPU, got {device}")
    return BlockMask(mask_mod, B, H, Q_LEN, KV_LEN)


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """torch.nn.attention.flex_attention.flex_attention with its arguments and their meaning, in tilewise's bits.

    Nothing needs torch.compile or a C++ compiler: the functions are traced into a kernel, which is compiled in a few
    tenths of a second and kept on disk.

    Parameters
    ----------
    query, key, value : float32, bfloat16 or float16 tensors [B, H, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev]
        On the CPU, any strides, the last axis contiguous. Keys and values of one sequence serve all of B.
    score_mod : function score_mod(score, b, h, q_idx, kv_idx) -> score, optional
        What becomes of a score, in float32. See `create_block_mask` for what it may do. -inf hides the key.
    block_mask : BlockMask of `create_block_mask`, of `tilewise.block_mask` or of PyTorch, optional
        Of PyTorch's, the mask_mod is used; one whose blocks say something else than that is refused.
    scale : float, optional
        E ** -0.5 by default.
    enable_gqa : bool
        Hkv may be less than H: head h reads head h // (H // Hkv).
    return_lse, return_aux : bool, and PyTorch's AuxRequest of lse
        Also return the log-sum-exp of every row's scores, a natural logarithm. return_aux's max_scores is refused.
    kernel_options : dict, optional
        How PyTorch's kernels are tuned; changes nothing here.

    Returns
    -------
    o [B, H, L, Ev]; with return_lse (o, lse), lse float32 [B, H, L]; with return_aux (o, AuxOutput). A row that sees no
    key is 0, its lse -inf.

    Raises
    ------
    InvalidArgument, naming the line, for a function that cannot be traced. NotImplementedError: a function while
    PyTorch traces the call, max_scores, a BlockMask whose blocks say something else than its mask_mod, a gradient. Else
    as `tilewise.torch.attention`.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor of PyTorch, got {type(x).__name__}")
        if x.ndim != 4:
            raise ShapeError(f"{name} must have 4 axes, got shape {tuple(x.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(f"query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True")
    if return_lse and return_aux is not None:
        raise InvalidArgument("return_lse and return_aux cannot be given together")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("max_scores of return_aux is not supported by tilewise")
    keys = [x.expand(len(query), *x.shape[1:]) if len(x) == 1 else x for x in (key, value)]
    options = {"q_offset": 0, "scale": scale, "score": score_mod, "keep": _keep(block_mask, query, key)}
    if not (return_lse or return_aux or score_mod):
        return attention(query, *keys, **options)
    o, lse = attention(query, *keys, return_lse=True, **options)
    if score_mod is not None:
        _hide(o, lse)
    if return_aux is not None:
        return o, sys.modules[type(return_aux).__module__].AuxOutput(lse=lse if return_aux.lse else None)
    return (o, lse) if return_lse else o


def _hide(o: Any, lse: Any) -> None:
    """Make rows 0 whose scores all became -inf: FlexAttention's meaning, where the definition says 0 / 0."""
    blind = lse == -torch.inf
    if blind.any():
        o[blind] = 0


def _keep(block_mask: Any, query: Any, key: Any) -> Any:
    """The keep function of a block mask, whose lengths must be those of the call."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(block_mask, flex.BlockMask):
        if block_mask.BLOCK_SIZE == (_ANY_LENGTH, _ANY_LENGTH):
            return None
        mask = _of_pytorch(block_mask, flex)
    elif block_mask is None or type(block_mask) is tilewise.BlockMask:
        return block_mask
    elif isinstance(block_mask, BlockMask):
        mask = block_mask
    else:
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}: create_block_mask makes one")
    B, H, *lengths = mask.shape
    if B not in (1, len(query)) or H not in (1, query.shape[1]) or lengths != [query.shape[2], key.shape[2]]:
        wanted = (len(query), query.shape[1], query.shape[2], key.shape[2])
        raise ShapeError(f"block_mask was made for [B, H, L, S] = {list(mask.shape)}, not for {list(wanted)}")
    return mask


def _of_pytorch(block_mask: Any, flex: Any) -> BlockMask:
    """Ours of PyTorch's BlockMask: remembered while its mask_mod does the same to the same contents of tensors."""
    mask = BlockMask(block_mask.mask_mod, *block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths)
    known = _known.get(block_mask)
    if known is not None and known.same(mask):
        return known
    _check_blocks(block_mask, flex)
    _known[block_mask] = mask
    return mask


def _check_blocks(block_mask: Any, flex: Any) -> None:
    """Refuse a BlockMask whose blocks hide or show what its mask_mod does not."""
    (B, H), (Tq, Tk), (rows, columns) = (
        block_mask.kv_num_blocks.shape[:2],
        block_mask.seq_lengths,
        block_mask.BLOCK_SIZE,
    )
    shape = (-(-Tq // rows), -(-Tk // columns))
    full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, (B, H, *shape))
    some = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, (B, H, *shape)) | full
    for start in range(0, Tq, ROWS):
        count = min(ROWS, Tq - start)

        def later(b: Any, h: Any, i: Any, j: Any, start: int = start) -> Any:
            return block_mask.mask_mod(b, h, i + start, j)

        seen = flex.create_mask(later, B, H, count, Tk, "cpu")
        of_row, of_key = (torch.arange(start, start + count) // rows)[:, None], torch.arange(Tk) // columns
        if (seen & ~some[:, :, of_row, of_key]).any() or (~seen & full[:, :, of_row, of_key]).any():
            raise NotImplementedError(
                "the blocks of block_mask say something else than its mask_mod: make a mask_mod that says all"
            )


def _dense(counts: Any, indices: Any, shape: tuple[int, ...]) -> Any:
    """Bool [B, H, rows, columns]: which blocks are listed."""
    listed = torch.zeros(*shape[:-1], shape[-1] + 1, dtype=torch.bool)
    if counts is not None:
        valid = torch.arange(indices.shape[-1]) < counts[..., None]
        listed.scatter_(-1, torch.where(valid, indices, shape[-1]).long(), True)
    return listed[..., :-1]
