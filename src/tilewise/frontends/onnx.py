"""ONNX's Attention operator, by the names of its specification (opsets 23 to 25), on NumPy arrays.

Key j is at position j. Row i is at position offset + i, where offset is the length of past_key; or, with
nonpad_kv_seqlen, the keys that a sequence has minus its rows; or 0. is_causal and the window sizes compare positions.
More rows than keys make an offset negative: then it is the keys that start later, for no position of the core is
negative, by whole spans, so that tiles cut the keys where they always do and no bit moves.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tilewise
from tilewise import arguments
from tilewise.arguments import Array, F32Array, I64Array, Window
from tilewise.errors import InvalidArgument, ShapeError
from tilewise.problem import DEFAULT_SPAN
from tilewise.visibility import bounds, visible_range

PRECISIONS = (1, 10, 11, 16)  # of softmax, by ONNX's numbers of types: FLOAT, FLOAT16, DOUBLE, BFLOAT16
RAW, CAPPED, MASKED, WEIGHTS = range(4)  # qk_matmul_output_mode
ROWS = 256  # query rows whose scores are held at a time, where scores are an output


class Results(NamedTuple):
    """The operator's outputs, in its order."""

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None


def attention(
    Q: Any, K: Any, V: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, kv_num_heads: int | None = None,
    left_window_size: int = -1, q_num_heads: int | None = None, qk_matmul_output_mode: int | None = None,
    right_window_size: int = -1, scale: float | None = None, softcap: float = 0.0,
    softmax_precision: int | None = None, arena: Any = None, pool: Any = None,
) -> Results:  # fmt: skip
    """The operator with its inputs and attributes, in tilewise's bits.

    Parameters
    ----------
    Q, K, V : float32, float16 or bfloat16 arrays
        [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv]; or, with q_num_heads = H and kv_num_heads = Hkv,
        [B, Tq, H * D], [B, Tk, Hkv * D] and [B, Tk, Hkv * Dv]. The last axis contiguous.
    attn_mask : array, broadcast to [B, H, Tq, N], N <= past + Tk, optional
        bool: a key where it is False is not seen. float32, float16 or bfloat16: added to the scores; a key where it is
        -inf is not seen. Nor are the keys past its last axis, which is the only one that is not broadcast: a last axis
        of 1 is about the first key. Any strides, but the last axis is contiguous, or one element (stride 0).
    past_key, past_value : arrays [B, Hkv, past, D] and [B, Hkv, past, Dv] of K's and V's types, optional
        Both or none. They are copied, as the outputs hold the past and the new keys in one array. A cache that is
        updated outside, with nonpad_kv_seqlen, is not.
    nonpad_kv_seqlen : int array [B], optional
        How many of its Tk keys each sequence has; what lies behind them is never read for Y. Not with a past.
    is_causal : 0 or 1
        1: a row sees no key after its own position.
    left_window_size, right_window_size : int
        How many keys a row sees before and after its own position; -1: all.
    qk_matmul_output_mode : None, 0, 1, 2 or 3
        None: that output is not computed. 0: scale * Q K^T, 1: that after softcap, 2: with the mask added, -inf where
        a key is not seen, 3: the weights, 0 there. Computed beside Y, by NumPy in float32, ROWS rows at a time; these
        are not the bits that Y is made of.
    scale : float, optional
        D ** -0.5 by default.
    softcap : float
        Scores s become softcap * tanh(s / softcap), before any mask. 0: they do not.
    softmax_precision : None, 1, 10, 11 or 16
        Moves no bit: softmax is computed in float32, which is at least FLOAT (1), FLOAT16 (10) and BFLOAT16 (16). For
        DOUBLE (11), which a node case of onnx asks for, it is float32 all the same.
    arena, pool
        As in `tilewise.attention`.

    Returns
    -------
    Results: Y of Q's type and number of axes; present_key [B, Hkv, past + Tk, D] and present_value, views of K and V
    where there is no past; qk_matmul_output [B, H, Tq, past + Tk] of Q's type, or None. A row that sees no key is 0.

    Raises
    ------
    InvalidArgument, ShapeError, TypeError: what the operator does not allow; float64; masks of integers; otherwise as
    `tilewise.attention`.
    """
    if softmax_precision is not None and softmax_precision not in PRECISIONS:
        raise InvalidArgument(f"softmax_precision must be None or one of {PRECISIONS}, got {softmax_precision!r}")
    if qk_matmul_output_mode not in (None, RAW, CAPPED, MASKED, WEIGHTS):
        raise InvalidArgument(f"qk_matmul_output_mode must be None, 0, 1, 2 or 3, got {qk_matmul_output_mode!r}")
    q, k, v = _by_head(Q, K, V, q_num_heads, kv_num_heads)
    past, k, v = _with_past(k, v, past_key, past_value)
    sight = Sight(
        *_offset_and_keys(q.shape[0], q.shape[2], k.shape[2], past, nonpad_kv_seqlen), _flag("is_causal", is_causal),
        _window(left_window_size, right_window_size), _mask(attn_mask, (*q.shape[:3], k.shape[2])),
    )  # fmt: skip
    options = {"scale": scale, "softcap": softcap or None}
    Y = _attend(q, k, v, sight, Q.ndim == 3, arena=arena, pool=pool, **options)
    mode, scores = qk_matmul_output_mode, None
    if mode is not None:
        scores = _qk_matmul_output(mode, q, k, sight, **options)
    return Results(Y, k, v, scores)


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys the rows see."""

    offset: I64Array  # [B], the position of the first row; may be negative
    keys: I64Array  # [B], how many there are
    causal: bool
    window: Window
    mask: Array | None  # [B, H, Tq, N]

    def arguments(self) -> dict[str, Any]:
        """The same for `tilewise.attention`, of as many keys as the mask has."""
        k_offset = np.maximum(0, -(self.offset // DEFAULT_SPAN) * DEFAULT_SPAN)
        given: dict[str, Any] = {
            "causal": self.causal, "q_offset": self.offset + k_offset, "k_offset": k_offset, "kv_len": self.keys,
            "window": self.window,
        }  # fmt: skip
        if self.mask is not None:
            given["mask" if self.mask.dtype == bool else "bias"] = self.mask
            given["kv_len"] = np.minimum(self.keys, self.mask.shape[-1])
        return given

    def of_rows(self, b: int, h: int, first: int, end: int, Tk: int) -> tuple[NDArray[np.bool_], F32Array | None]:
        """(visible [rows, Tk], what is added to the scores of the first keys) of rows first ... end - 1 of a head."""
        p = self.offset[b] + np.arange(first, end)[:, None]
        lo, hi = visible_range(p, 0, self.keys[b], *bounds(self.causal, self.window), np.minimum, np.maximum)
        j = np.arange(Tk)
        visible: NDArray[np.bool_] = (lo <= j) & (j < hi)
        if self.mask is None:
            return visible, None
        N = self.mask.shape[-1]
        visible[:, N:] = False
        mask = self.mask[b, h, first:end]
        if mask.dtype == bool:
            visible[:, :N] &= mask
            return visible, None
        bias = _float32(mask)
        visible[:, :N] &= ~np.isneginf(bias)
        return visible, bias


def _by_head(Q: Any, K: Any, V: Any, heads: Any, kv_heads: Any) -> tuple[Array, Array, Array]:
    """The inputs as views [B, heads, T, D]."""
    rank = np.ndim(Q)
    if rank not in (3, 4):
        raise ShapeError(f"Q must have 3 or 4 axes, got shape {np.shape(Q)}")
    given = (("Q", Q, "q_num_heads", heads), ("K", K, "kv_num_heads", kv_heads), ("V", V, "kv_num_heads", kv_heads))
    q, k, v = (_split(name, arguments.tensor(name, x, rank), attribute, n) for name, x, attribute, n in given)
    return q, k, v


def _split(name: str, x: Array, attribute: str, heads: Any) -> Array:
    """x [B, T, heads * D], or [B, heads, T, D] already, as [B, heads, T, D]."""
    if x.ndim == 4:
        if heads is not None and heads != x.shape[1]:
            raise ShapeError(f"{attribute} must be None or {x.shape[1]}, as {name} has shape {x.shape}, got {heads!r}")
        return x
    if heads is None:
        raise InvalidArgument(f"{attribute} must be given where {name} has 3 axes, got None and shape {x.shape}")
    heads = arguments.integer(attribute, heads)
    if heads < 1 or x.shape[2] % heads:
        raise ShapeError(f"{attribute} must divide the last axis of {name} {x.shape}, got {heads}")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _with_past(k: Array, v: Array, past_key: Any, past_value: Any) -> tuple[int | None, Array, Array]:
    """The length of the past, and all keys and values."""
    if (past_key is None) != (past_value is None):
        missing, other = ("past_key", "past_value") if past_key is None else ("past_value", "past_key")
        raise InvalidArgument(f"{missing} must be given together with {other}, got None")
    if past_key is None:
        return None, k, v
    pasts = []
    for name, given, x in (("past_key", past_key, k), ("past_value", past_value, v)):
        past = arguments.tensor(name, given, 4)
        if past.dtype != x.dtype:
            raise TypeError(f"{name} must be {x.dtype}, as the new ones are, got {past.dtype}")
        arguments.expect_shape(name, past, (*x.shape[:2], past.shape[2], x.shape[3]))
        pasts.append(past)
    if pasts[0].shape[2] != pasts[1].shape[2]:
        raise ShapeError(f"past_key and past_value must have one length: {pasts[0].shape}, {pasts[1].shape}")
    return pasts[0].shape[2], np.concatenate([pasts[0], k], 2), np.concatenate([pasts[1], v], 2)


def _offset_and_keys(B: int, Tq: int, Tk: int, past: int | None, nonpad_kv_seqlen: Any) -> tuple[I64Array, I64Array]:
    if nonpad_kv_seqlen is None:
        return np.full(B, past or 0, np.int64), np.full(B, Tk, np.int64)
    if past is not None:
        raise InvalidArgument("nonpad_kv_seqlen must be None where past_key is given, got both")
    keys = arguments.per_sequence("nonpad_kv_seqlen", nonpad_kv_seqlen, B)
    if (keys > Tk).any():
        raise InvalidArgument(f"nonpad_kv_seqlen must not pass the {Tk} keys of K, got {keys.max()}")
    return keys - Tq, keys


def _mask(x: Any, shape: tuple[int, ...]) -> Any:
    """attn_mask, broadcast to `shape` but for its last axis, which may be shorter."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray) or not (x.dtype == bool or arguments.float_type(x.dtype)):
        came = repr(x.dtype) if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"attn_mask must be a NumPy array of bool, {arguments.FLOATS}, got {came}")
    if not 1 <= x.ndim <= 4 or x.shape[-1] > shape[-1]:
        raise ShapeError(f"attn_mask must have 1 to 4 axes, the last at most {shape[-1]}, got shape {x.shape}")
    try:
        return np.broadcast_to(x, (*shape[:3], x.shape[-1]))
    except ValueError:
        raise ShapeError(f"attn_mask must be broadcastable to {(*shape[:3], x.shape[-1])}, got {x.shape}") from None


def _float32(x: Array) -> F32Array:
    if x.dtype == arguments.BFLOAT16:  # the upper halves of float32
        return (x["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def _attend(q: Array, k: Array, v: Array, sight: Sight, by_token: bool, **options: Any) -> Array:
    """Y [B, H, Tq, Dv]; or [B, Tq, H * Dv], written as it shall lie."""
    if sight.mask is not None:  # padding a short mask would copy it
        k, v = (x[:, :, : sight.mask.shape[-1]] for x in (k, v))
    if not by_token:
        Y: Array = tilewise.attention(q, k, v, **options, **sight.arguments())
        return Y
    B, H, Tq, Dv = (*q.shape[:3], v.shape[3])
    Y = np.empty((B, Tq, H, Dv), q.dtype)
    tilewise.attention(q, k, v, out=Y.transpose(0, 2, 1, 3), **options, **sight.arguments())
    return Y.reshape(B, Tq, H * Dv)


def _qk_matmul_output(mode: int, q: Array, k: Array, sight: Sight, scale: float | None, softcap: float | None) -> Array:
    """The fourth output [B, H, Tq, Tk], of shapes and options that are known to be right."""
    if arguments.BFLOAT16 in (q.dtype, k.dtype):
        raise TypeError("qk_matmul_output of bfloat16 needs the dtype of ml_dtypes, with which NumPy can compute")
    (B, H, Tq, D), (_, Hkv, Tk, _) = q.shape, k.shape
    out: Array = np.empty((B, H, Tq, Tk), q.dtype)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(B, H):
            K = k[b, h * Hkv // H].astype(np.float32)
            for first in range(0, Tq, ROWS):
                Q = q[b, h, first : first + ROWS].astype(np.float32)
                s = Q @ K.T * np.float32(arguments.scale(scale, D))
                if mode != RAW and softcap:
                    s = np.float32(softcap) * np.tanh(s / np.float32(softcap))
                if mode in (MASKED, WEIGHTS):
                    visible, bias = sight.of_rows(b, h, first, first + len(Q), Tk)
                    if bias is not None:
                        s[:, : bias.shape[-1]] += bias
                    s[~visible] = -np.inf
                    s = _weights(s, visible) if mode == WEIGHTS else s
                out[b, h, first : first + ROWS] = s
    return out


def _weights(s: F32Array, visible: NDArray[np.bool_]) -> F32Array:
    """Softmax over what is visible; 0 in rows that see nothing."""
    M = s.max(axis=-1, keepdims=True, initial=-np.inf)
    P: F32Array = np.exp(s - np.where(np.isneginf(M), np.float32(0), M))
    P /= P.sum(axis=-1, keepdims=True)
    return np.where(visible, P, np.float32(0))


def _flag(name: str, x: Any) -> bool:
    if x not in (0, 1):
        raise InvalidArgument(f"{name} must be 0 or 1, got {x!r}")
    return bool(x)


def _window(left: Any, right: Any) -> Window:
    sizes = [arguments.integer(name, x) for name, x in (("left_window_size", left), ("right_window_size", right))]
    if min(sizes) < -1:
        raise InvalidArgument(f"left_window_size and right_window_size must be -1 (all keys) or more, got {sizes}")
    before, after = (None if size == -1 else size for size in sizes)
    return None if before is None and after is None else (before, after)


@functools.cache
def attention_op() -> Any:
    """The operator as a class for `new_ops` of onnx's ReferenceEvaluator, which finds it by its name."""
    from onnx.reference.op_run import OpRun

    class Attention(OpRun):  # type: ignore[misc]
        """ONNX's Attention, opsets 23 to 25. A graph does not say how tensors lie: last axes are made contiguous."""

        op_domain = ""

        def _run(self, *inputs: Any, qk_matmul_output_mode: int | None = 0, **attributes: Any) -> tuple[Any, ...]:
            names = list(self.output)  # that of an output that is not wanted is missing or empty
            mode = qk_matmul_output_mode if len(names) == len(Results._fields) and names[-1] else None
            results = attention(*map(_by_rows, inputs), qk_matmul_output_mode=mode, **attributes)
            return results if mode is not None else results[:-1]

    return Attention


def _by_rows(x: Any) -> Any:
    """A tensor or None, copied where its last axis is not contiguous."""
    return x if x is None or not x.ndim or x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
