"""The masks of transformers as ranges of keys, and as a dense mask or bias only where that is not the same.

transformers asks a mask function for the mask of a forward pass, once for all layers of a kind. Ours returns a
`RangeMask`: a tensor of the mask's shape without its memory, which says by rule which keys each row sees. A mask that
a user made arrives at the attention function as it is, and is read here row by row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import masking_utils

from tilewise.arguments import Array
from tilewise.errors import ShapeError
from tilewise.frontends.hf_ranges import Block, Calls, blocks, covering
from tilewise.frontends.tensors import array, booleans, torch
from tilewise.visibility import UNBOUNDED, visible_range

Bools = NDArray[np.bool_]
Positions = NDArray[np.int64]

ROWS = 256  # query rows of a mask that are looked at together: to see that it is ranges takes no memory of its size


class RangeMask(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """The mask of a forward pass as calls: a tensor of its shape [B, 1, Tq, Tk], whose elements take no memory."""

    calls: Calls

    @classmethod
    def of(cls, calls: Calls) -> RangeMask:
        B, Tq, Tk = calls.shape
        mask: RangeMask = _ONE.expand(B, 1, Tq, Tk).as_subclass(cls)
        mask.calls, calls.of_one_pass = calls, True
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A model may ask what the mask is like, and crop, move or cast it to what it is; more would lose its calls."""
        name = getattr(func, "__name__", str(func))
        if name in _QUESTIONS or name in _CHANGES or (name == "__getitem__" and _crops(args[1])):
            with torch._C.DisableTorchFunctionSubclass():
                result, mask = func(*args, **(kwargs or {})), args[0]
                if not isinstance(result, torch.Tensor):
                    return result
                if (result.shape, result.dtype, result.device) == (mask.shape, mask.dtype, mask.device):
                    return mask
        raise NotImplementedError(
            f"this model, or a compiler, computes with its attention mask ({name}), but "
            f'attn_implementation="tilewise" makes none, only ranges of keys: use another implementation for it'
        )


_ONE = torch.ones((), dtype=torch.bool)
_QUESTIONS = {"__get__", "__len__", "__repr__", "dim", "ndimension", "size", "numel", "stride", "is_floating_point"}
_CHANGES = {"to", "bool", "cpu", "contiguous", "detach", "expand"}


def _crops(index: Any) -> bool:
    """Whether an index leaves every element in its place, relative to the others."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or (isinstance(part, slice) and part.step in (None, 1)) for part in parts)


def range_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None,
    use_vmap: bool = False, **_: Any,
) -> RangeMask:  # fmt: skip
    """The mask function that `register` gives to transformers; see `transformers.masking_utils.sdpa_mask`.

    The other keywords say how a dense mask is to be made, and when it can be left out.
    """
    q_offset, kv_offset = int(q_offset), int(kv_offset)  # at once: a StaticCache counts on in the same tensor
    shape, end = (batch_size, q_length, kv_length), kv_offset + kv_length
    reach: Any = None if use_vmap else _reach(mask_function)
    tokens = _tokens(attention_mask, kv_offset, end)
    if tokens is None and reach and q_length == 1:  # a decode step, which has no time for arrays
        lo, hi = visible_range(q_offset, kv_offset, end, reach[0], reach[1])
        alike = [Block(0, 0, 1, lo - kv_offset, hi - lo, lo, hi - 1, False, None)] if lo < hi else []
        return RangeMask.of(Calls(shape, [block._replace(sequence=b) for b in range(batch_size) for block in alike]))
    first, begin, stop, gaps = tokens or (_ZERO, np.array([[kv_offset]]), np.array([[end]]), False)
    anchors: list[int | None] = (first - kv_offset).tolist()
    if reach is None or gaps:
        sizes = (*shape, q_offset, kv_offset)
        return RangeMask.of(_evaluated(sizes, mask_function, attention_mask, use_vmap, anchors))
    positions: Any = q_offset + np.arange(q_length)
    left, right = reach
    lo, hi = visible_range(positions, begin, stop, left, right, np.minimum, np.maximum)
    return RangeMask.of(Calls(shape, _blocks_of(batch_size, lo - kv_offset, hi - kv_offset, anchors)))


def _reach(mask_function: Any) -> tuple[int, int] | None:
    """(left, right): the keys before and after its own that a row sees by a mask function; None for an unknown one."""
    if mask_function is masking_utils.causal_mask_function:
        return UNBOUNDED, 0
    if mask_function is masking_utils.bidirectional_mask_function:
        return UNBOUNDED, UNBOUNDED
    code, content = _closure(mask_function)
    if code is _WINDOW:
        return content - 1, UNBOUNDED
    if code is _BOTH_SIDES:
        return content, content
    reaches = [_reach(part) for part in content] if code is _AND else [None]
    known = [reach for reach in reaches if reach]
    if len(known) < len(reaches):
        return None
    lefts, rights = zip(*known, strict=True)
    return min(lefts), min(rights)


def _closure(function: Any) -> tuple[CodeType | None, Any]:
    """The code of a function and the one thing that it closes over: so are mask functions that depend on something."""
    cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    return getattr(function, "__code__", None), cells[0].cell_contents if len(cells) == 1 else None


def _names(mask_function: Any, code: CodeType) -> bool:
    """Whether a mask function is of that code, or an intersection with one that is."""
    own, content = _closure(mask_function)
    return own is code or (own is _AND and any(_names(part, code) for part in content))


_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__


_ZERO = np.zeros(1, np.int64)


def _tokens(attention_mask: Any, begin: int, end: int) -> tuple[Positions, Positions, Positions, bool] | None:
    """The first token of each sequence [B] by its 2-D mask, begin and end of those in [begin, end) [B, 1], and whether
    any of these has gaps; None where no token is padding."""
    real = None if attention_mask is None else attention_mask.cpu().numpy()[:, :end] != 0
    if real is None or (real.shape[1] == end and real.all()):
        return None
    lo, hi, whole = _ranges(real[:, begin:])
    first = _ranges(real)[0]
    return first, lo[:, None] + begin, hi[:, None] + begin, not whole.all()


def _ranges(visible: Bools) -> tuple[Positions, Positions, Bools]:
    """[lo, hi) around the true elements of the last axis, and whether all in between are true; (0, 0) if none is."""
    count = visible.sum(-1)
    sees = count > 0
    lo = np.where(sees, visible.argmax(-1), 0) if visible.shape[-1] else np.zeros_like(count)
    hi = np.where(sees, visible.shape[-1] - visible[..., ::-1].argmax(-1), 0) if visible.shape[-1] else lo
    return lo, hi, count == hi - lo


def _evaluated(
    sizes: tuple[int, int, int, int, int], mask_function: Any, attention_mask: Any, use_vmap: bool,
    anchors: list[int | None],
) -> Calls:  # fmt: skip
    """The calls for [B, Tq, Tk], q_offset, kv_offset by the values of a mask function that is not known here."""
    B, Tq, Tk, q_offset, kv_offset = sizes

    def evaluate(row: int, rows: int) -> Any:
        return masking_utils.sdpa_mask(
            B,
            rows,
            Tk,
            q_offset + row,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
        )

    lo, hi, exact = _rows(evaluate(row, min(ROWS, Tq - row)) for row in range(0, Tq, ROWS))
    if _names(mask_function, _PACKED):
        anchors = [None]
    if exact:
        return Calls((B, Tq, Tk), _blocks_of(B, lo, hi, anchors))
    return Calls((B, Tq, Tk), _covering(B, lo, hi, anchors), mask=_dense(evaluate(0, Tq)))


def _rows(slices: Iterator[Any]) -> tuple[Positions, Positions, bool]:
    """[lo, hi) around what each row sees [B, Tq] by a mask [B, H or 1, Tq, Tk] that comes a slice of rows at a time,
    and whether it sees all of that, the same for all heads."""
    los, his, exact = [], [], True
    for tensor in slices:
        visible = tensor.numpy()
        exact &= visible.shape[1] == 1 or not (visible != visible[:, :1]).any()
        lo, hi, whole = _ranges(visible[:, 0] if exact else visible.any(1))
        exact &= bool(whole.all())
        los.append(lo)
        his.append(hi)
    return np.concatenate(los, 1), np.concatenate(his, 1), exact


def _blocks_of(B: int, lo: Positions, hi: Positions, anchors: list[int | None]) -> list[Block]:
    """The blocks of a batch from [lo, hi) [B or 1, Tq]; anchors, of all or one: see `blocks`."""
    if len(lo) == 1 == len(anchors):  # all sequences are alike
        alike = list(blocks(lo[0], hi[0], 0, anchors[0]))
        return [block._replace(sequence=b) for b in range(B) for block in alike]
    return [block for b, one in enumerate(_each(B, lo, hi, anchors)) for block in blocks(one[0], one[1], b, one[2])]


def _covering(B: int, lo: Positions, hi: Positions, anchors: list[int | None]) -> list[Block]:
    """The blocks of a batch whose mask is dense."""
    return [block for b, one in enumerate(_each(B, lo, hi, anchors)) for block in covering(one[0], one[1], b, one[2])]


def _each(B: int, lo: Positions, hi: Positions, anchors: list[int | None]) -> Iterator[tuple[Any, Any, int | None]]:
    lo, hi = (np.broadcast_to(x, (B, x.shape[1])) for x in (lo, hi))
    return zip(lo, hi, anchors * B if len(anchors) == 1 else anchors, strict=True)


def calls_of_tensor(mask: Any, shape: tuple[int, int, int], heads: int) -> Calls:
    """The calls for a 4-D mask that a user made, broadcastable to [B, H, Tq, Tk]: bool, True where a key is seen, or
    float, added to the scores. See `hides` for what of a float mask hides a key."""
    B, Tq, Tk = shape
    if mask.ndim != 4 or any(n not in (1, m) for n, m in zip(mask.shape, (B, heads, Tq, Tk), strict=True)):
        raise ShapeError(f"attention_mask must have shape [{B}, 1 or {heads}, {Tq}, {Tk}], got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention_mask must be bool or float, got {mask.dtype}")
    calls: Calls | None = _remembered(mask, "calls", lambda: _calls_of_tensor(mask, shape))
    assert calls is not None
    return calls if calls.shape == shape else _calls_of_tensor(mask, shape)


def _calls_of_tensor(mask: Any, shape: tuple[int, int, int]) -> Calls:
    B, Tq, Tk = shape
    wide = mask.expand(-1, -1, -1, Tk)
    adds = False

    def slices() -> Iterator[Any]:
        nonlocal adds
        for row in range(0, mask.shape[2], ROWS):
            part = wide[:, :, row : row + ROWS]
            visible = part if mask.dtype == torch.bool else ~hides(part)
            adds = adds or (mask.dtype != torch.bool and bool((visible & (part != 0)).any()))
            yield visible

    lo, hi, exact = _rows(slices())
    lo, hi = (np.broadcast_to(x, (len(x), Tq)) for x in (lo, hi))
    if exact and not adds:
        return Calls(shape, _blocks_of(B, lo, hi, [None]))
    parts = _covering(B, lo, hi, [None])
    if adds:
        return Calls(shape, parts, bias=_additive(mask))
    return Calls(shape, parts, mask=_dense(mask if mask.dtype == torch.bool else ~hides(mask)))


def hides(mask: Any) -> Any:
    """Where a float mask hides a key: at or below half of its dtype's minimum, -inf included.

    In eager attention such a key has a weight of exactly 0 beside any key that is not hidden, as the exponential of its
    score underflows. So it has here; where all keys of a row are hidden, eager averages keys that the row must not see,
    or gives NaN, and tilewise gives 0. Half, because masks are made as the minimum, and added to others or to scores.
    """
    return mask <= torch.finfo(mask.dtype).min / 2


def bias_of(x: Any) -> Array | None:
    """A tensor that is added to the scores, broadcastable to [B, H, Tq, Tk], as a bias of the core; None for zeros."""
    found: Array | None = _remembered(x, "bias", lambda: _additive(x) if bool(x.any()) else None)
    return found


def _additive(x: Any) -> Array:
    """-inf where a key is hidden. The tensor's own memory where that says it already, else a copy."""
    hidden = hides(x)
    if bool((hidden & (x != -torch.inf)).any()):
        x = x.masked_fill(hidden, -torch.inf)
    return array("bias", _by_keys(x if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x.float()))


def _dense(x: Any) -> Array:
    return booleans("mask", _by_keys(x))


def _by_keys(x: Any) -> Any:
    """The tensor with its last axis contiguous, as the core reads it; a copy if need be."""
    return x if x.shape[-1] == 1 or x.stride(-1) in (0, 1) else x.contiguous()


def _remembered(x: Any, what: str, make: Callable[[], Any]) -> Any:
    """What was made of a tensor: the next layer brings the same one again."""
    try:
        version = x._version
    except RuntimeError:  # in inference mode, where changes are not counted
        return make()
    key = id(x), what
    known = _last.get(key)
    if known is None or known[0]() is not x or known[1] != version:
        _last.pop(key, None)
        known = weakref.ref(x), version, make()
        for oldest in list(_last)[: max(0, len(_last) + 1 - _REMEMBERED)]:  # not all: a layer has a mask and a bias
            _last.pop(oldest, None)
        _last[key] = known
    return known[2]


_REMEMBERED = 8  # a model has a mask, or a bias, for each kind of layer
_last: dict[tuple[int, str], Any] = {}
