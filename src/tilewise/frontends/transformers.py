"""`attn_implementation="tilewise"` for the models of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import AttentionInterface, AttentionMaskInterface

from tilewise.errors import InvalidArgument
from tilewise.frontends.hf_launch import attend
from tilewise.frontends.hf_masks import RangeMask, bias_of, calls_of_tensor, hides, range_mask
from tilewise.frontends.hf_ranges import Block, Calls, blocks
from tilewise.frontends.tensors import array, torch

NAME = "tilewise"
PAGED = "paged|eager"  # of the names that continuous batching accepts, the one that nothing else uses


def register() -> None:
    """Make `attn_implementation="tilewise"` known to transformers, for all models in this process.

    Needed once, before a model is loaded with it or `model.set_attn_implementation("tilewise")` is called. Both parts
    are registered: the attention function, and the mask function that tells it of padding, caches, windows and packed
    sequences without a mask in memory.

    What a model asks for and tilewise does not have, such as dropout, gradients or the weights as an output, raises
    NotImplementedError when the layer is called; nothing is left out and nothing falls back to another implementation.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, range_mask)


@contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Let `model.generate_batch` and `model.continuous_batching_context_manager` compute attention with tilewise.

        with tilewise.transformers.continuous_batching(model):
            outputs = model.generate_batch(inputs, generation_config=...)

    transformers takes a fixed list of implementations there. Within the block, that of "paged|eager", which only
    continuous batching uses, is ours, and the model has it; afterwards both are as before. The registry is the
    process's, so this is not for several threads at once. What the layers refuse is raised at the end of the block.
    """
    before, implementation = AttentionInterface()[PAGED], model.config._attn_implementation
    failures: list[Exception] = []

    def compute(*arrays: Any, **options: Any) -> tuple[Any, None]:
        try:
            return paged_attention(*arrays, **options)
        except Exception as failure:
            failures.append(failure)
            raise

    AttentionInterface.register(PAGED, compute)
    try:
        model.set_attn_implementation(PAGED)
        yield model
        if failures:  # transformers only logs them and returns what it has
            raise failures[0]
    finally:
        AttentionInterface.register(PAGED, before)
        model.set_attn_implementation(implementation)


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, s_aux: Any = None, softcap: float | None = None,
    position_bias: Any = None, **options: Any,
) -> tuple[Any, None]:  # fmt: skip
    """The attention function of a layer: query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv], any strides.

    In eager attention's order: scores times scaling, softcap, position_bias (broadcastable to [B, H, Tq, Tk]), the
    mask, and s_aux [H], a logit of each head without a value.

    Returns
    -------
    (o [B, Tq, H, Dv], None): weights are never made. Rows that see no key, such as those of padding, are 0.
    """
    if dropout or not _MAYBE_UNSUPPORTED.isdisjoint(options):  # asked here: a layer has no time for a call
        _refuse(module, dropout, options)
    if type(attention_mask) is RangeMask:
        calls = attention_mask.calls
    else:
        (B, H, Tq, _), (Bk, _, Tk, _) = query.shape, key.shape
        shape = (max(B, Bk) if B == 1 else B, Tq, Tk)  # one sequence of learned queries is that of all sequences
        if attention_mask is not None:
            calls = calls_of_tensor(attention_mask, shape, H)
        else:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            calls = _unmasked(shape, bool(causal), options.get("sliding_window"), type(module).__name__)
    if (sequences := options.get("cu_seq_lens_q")) is not None and calls.starts() != set(sequences[:-1].tolist()):
        raise InvalidArgument(
            f"{type(module).__name__}: cu_seq_lens_q is {sequences.tolist()}, but the mask has sequences from rows "
            f"{sorted(calls.starts())}: pass the position_ids of packed sequences, and no attention_mask"
        )
    bias = calls.bias
    if position_bias is not None:
        if bias is not None:  # a mask that adds as well
            position_bias = attention_mask + position_bias.masked_fill(hides(position_bias), -torch.inf)
        bias = bias_of(position_bias)
    sinks = None if s_aux is None else _sinks(s_aux)
    return attend(calls, query, key, value, scaling, softcap, sinks, bias), None


def paged_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, s_aux: Any = None, sliding_window: int | None = None, softcap: float | None = None, *,
    cu_seq_lens_q: Any, cu_seq_lens_k: Any, position_ids: Any = None, **options: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attention of continuous batching: query [1, H, sum of Tq, D], key and value [1, Hkv, sum of Tk, D].

    The sequences lie one after the other, the rows of each at the end of its keys. The dense mask that transformers
    makes says the same, and is not read. Without position_ids, a sliding layer's keys count from the first one kept.
    """
    if options.get("position_bias") is not None:
        _not_yet(module, "a bias on the scores (position_bias) in continuous batching")
    _refuse(module, dropout, options)
    rows, keys, starts = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist(), []
    if position_ids is not None and position_ids.ndim == 2:  # else of images and text, which count otherwise
        starts = [position_ids[0, row].item() if row < query.shape[2] else 0 for row in rows[:-1]]
    calls = _packed((1, query.shape[2], key.shape[2]), tuple(rows), tuple(keys), tuple(starts), sliding_window)
    sinks = None if s_aux is None else _sinks(s_aux)
    return attend(calls, query, key, value, scaling, softcap, sinks), None


def _sinks(s_aux: Any) -> Any:
    """A logit of each head, which the core adds in float32, whatever the model's dtype."""
    return array("s_aux", s_aux if s_aux.dtype is torch.float32 else s_aux.float())


@functools.lru_cache(maxsize=64)
def _unmasked(shape: tuple[int, int, int], causal: bool, window: int | None, layer: str) -> Calls:
    """The calls of a layer whose model made no mask."""
    B, Tq, Tk = shape
    causal = causal and Tq > 1
    if causal and Tq != Tk:
        raise InvalidArgument(
            f"{layer} is causal and has {Tq} query rows for {Tk} keys, but its model made no mask: "
            f"tilewise cannot know the positions of the rows"
        )
    if not causal and window is not None and Tk > window:
        raise NotImplementedError(f"{layer} has a sliding window of {window}, but its model made no mask for it")
    rows = np.arange(Tq)
    hi = rows + 1 if causal else np.full(Tq, Tk)
    lo = np.maximum(0, hi - window) if causal and window is not None else np.zeros_like(hi)
    return Calls(shape, [block for b in range(B) for block in blocks(lo, hi, b, 0)])


@functools.lru_cache(maxsize=16)
def _packed(
    shape: tuple[int, int, int], rows: tuple[int, ...], keys: tuple[int, ...], starts: tuple[int, ...],
    window: int | None,
) -> Calls:  # fmt: skip
    """The calls of sequences that lie one after the other; starts: the position of each one's first row, or none."""
    parts = []
    for i, (row, row_end, begin, end) in enumerate(zip(rows, rows[1:], keys, keys[1:], strict=False)):
        Tq, Tk = row_end - row, end - begin
        if not Tq:
            continue
        q_offset = starts[i] if starts else Tk - Tq
        parts.append(Block(0, row, Tq, begin, Tk, q_offset + Tq - Tk, q_offset, True, window))
    return Calls(shape, parts)


_UNSUPPORTED = {
    "indices": "sparse attention to selected keys (indices)",
    "block_indices": "sparse attention to selected blocks (block_indices)",
    "sinks": "sinks of its own kind (sinks)",
}


_MAYBE_UNSUPPORTED = frozenset((*_UNSUPPORTED, "output_attentions"))


def _refuse(module: Any, dropout: float, options: dict[str, Any]) -> None:
    """The one place where features of models are refused by name."""
    if dropout and getattr(module, "training", True):
        _not_yet(module, f"dropout of attention weights ({dropout}): call model.eval()")
    if options.get("output_attentions"):
        _not_yet(module, "the attention weights as an output (output_attentions): they are never made")
    for name in options:
        if name in _UNSUPPORTED and options[name] is not None:
            _not_yet(module, _UNSUPPORTED[name])


def _not_yet(module: Any, what: str) -> None:
    raise NotImplementedError(
        f'{type(module).__name__} needs {what}, which attn_implementation="tilewise" does not support yet'
    )
