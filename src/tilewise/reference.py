"""The specification: exact attention and softmax in plain NumPy, no tiles, nothing clever.

For every sequence b, head h and row i, at position p = q_offset[b] + i:

    s_j = change(scale * q_i . k_j)  for the keys j that the row sees
    o   = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z_h))
    lse = log(sum_j exp(s_j) + exp(z_h))                          natural logarithm

The keys of sequence b are k[b, :, kv_start:kv_start+kv_len], the first of them at position k_offset. A row sees the
key at position c if c <= p (where causal), c > p - window (where window > 0; for a pair, p - left <= c <= p + right,
None without a limit), mask[b, h, i, j] holds, bias[b, h, i, j] is not -inf and keep(b, h, p, c) holds, each where it is
given. The term exp(z_h) is there only with sinks. Head h reads KV head h // (H // Hkv). A row that sees no key gives
o = 0 and lse = -inf, or the sink's logit.

A score changes in this order: softcap * tanh(s / softcap); score(s, b, h, p, c); s - alibi_slopes[h] * |p - c|, or of
[b, h]; s + bias[b, h, i, j]. mask and bias are broadcast to [B, H, Tq, Tk]; score and keep work on NumPy arrays.

What a row cannot see never enters its arithmetic: NaN there changes nothing. What it sees does: a visible NaN gives
NaN, and visible scores that are all -inf give o = 0 / 0 = NaN and lse = log 0 = -inf. Arguments are taken as valid:
problem.py is the place that checks them. Rows go in blocks so that memory stays bounded.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

F = TypeVar("F", np.float32, np.float64)
Results: TypeAlias = tuple[NDArray[F], NDArray[F]]  # o and lse
Mask: TypeAlias = NDArray[np.bool_]

ROWS = 256  # query rows in one block: it holds ROWS x Tk scores


def attention64(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], **options: Any) -> Results[np.float64]:
    """The truth, float64: q [B,H,Tq,D], k [B,Hkv,Tk,D], v [B,Hkv,Tk,Dv] -> o [B,H,Tq,Dv], lse [B,H,Tq].

    Options: causal, window, scale, q_offset, sinks, kv_start, kv_len, k_offset, softcap, score, alibi_slopes, bias,
    mask and keep.
    """
    return _attention(np.float64, q, k, v, **options)


def attention32(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], **options: Any) -> Results[np.float32]:
    """The yardstick of accuracy: the same in float32 throughout, as a user of NumPy would write it."""
    return _attention(np.float32, q, k, v, **options)


def softmax(x: NDArray[F]) -> NDArray[F]:
    """Softmax over the last axis. A row of -inf is 0 / 0 = NaN."""
    with np.errstate(all="ignore"):
        P: NDArray[F] = np.exp(x - _finite_maximum(x.max(axis=-1, keepdims=True, initial=-np.inf)))
        P /= P.sum(axis=-1, keepdims=True)
    return P


def online_softmax(x: NDArray[F], tile: int) -> NDArray[F]:
    """The same, seeing `tile` entries at a time: the denominator l is rescaled when the running maximum m grows."""
    m: NDArray[F] = np.full_like(x, -np.inf, shape=(*x.shape[:-1], 1))
    l: NDArray[F] = np.zeros_like(m)
    with np.errstate(all="ignore"):
        for first in range(0, x.shape[-1], tile):
            part = x[..., first : first + tile]
            M = np.maximum(m, part.max(axis=-1, keepdims=True))
            l = np.exp(m - _finite_maximum(M)) * l + np.exp(part - _finite_maximum(M)).sum(axis=-1, keepdims=True)
            m = M
        P: NDArray[F] = np.exp(x - _finite_maximum(m))
        P /= l
    return P


def _attention(
    dtype: type[F],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    q_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    kv_start: ArrayLike = 0,
    kv_len: ArrayLike | None = None,
    k_offset: ArrayLike = 0,
    **variant: Any,
) -> Results[F]:
    (B, H, Tq, D), (Hkv, Tk, Dv) = q.shape, v.shape[1:]
    sigma = dtype(D**-0.5 if scale is None else scale)
    start, offset, first = (np.broadcast_to(x, B).tolist() for x in (kv_start, q_offset, k_offset))
    length = [Tk - n for n in start] if kv_len is None else np.broadcast_to(kv_len, B).tolist()
    o, lse = np.empty((B, H, Tq, Dv), dtype), np.empty((B, H, Tq), dtype)
    for b, h in np.ndindex(B, H):
        own = slice(start[b], start[b] + length[b])
        K: NDArray[F] = k[b, h // (H // Hkv), own].astype(dtype)
        V: NDArray[F] = v[b, h // (H // Hkv), own].astype(dtype)
        z = None if sinks is None else dtype(np.asarray(sinks)[h])
        c = first[b] + np.arange(length[b])
        for i in range(0, Tq, ROWS):
            rows = slice(i, min(i + ROWS, Tq))
            p = offset[b] + np.arange(rows.start, rows.stop)[:, None]
            visible = _in_range(p, c, causal, window)
            with np.errstate(all="ignore"):
                S = (q[b, h, rows].astype(dtype) @ K.T) * sigma
                S, visible = _vary(S, visible, (b, h, p, c), (B, H, Tq, Tk), (b, h, rows, own), **variant)
                o[b, h, rows], lse[b, h, rows] = _weighted(S, V, visible, z)
    return o, lse


def _in_range(p: NDArray[Any], c: NDArray[Any], causal: bool, window: Any) -> Mask:
    """Which keys c the rows p see by causal and window."""
    visible = np.ones((len(p), len(c)), np.bool_)
    if causal:
        visible &= c <= p
    if isinstance(window, tuple):
        left, right = window
        visible &= (left is None or p - left <= c) & (right is None or c <= p + right)
    elif window and window > 0:
        visible &= c > p - window
    return visible


def _vary(
    S: NDArray[F], visible: Mask, place: tuple[Any, ...], shape: tuple[int, ...], own: tuple[Any, ...], *,
    softcap: float | None = None, score: Any = None, alibi_slopes: Any = None, bias: Any = None, mask: Any = None,
    keep: Any = None,
) -> tuple[NDArray[F], Mask]:  # fmt: skip
    """The scores at `place` (b, h, p, c) changed, and what is still visible. `own`: of arrays of that shape."""
    number = S.dtype.type
    if softcap is not None:
        S = number(softcap) * np.tanh(S / number(softcap))
    if score is not None:
        S = np.asarray(score(S, *place), number)
    if alibi_slopes is not None:
        slope = np.broadcast_to(np.asarray(alibi_slopes, number), shape[:2])[own[:2]]
        S = S - slope * np.abs(place[2] - place[3]).astype(number)
    if bias is not None:
        added = np.broadcast_to(bias, shape)[own].astype(number)
        S, visible = S + added, visible & ~np.isneginf(added)
    if mask is not None:
        visible = visible & np.broadcast_to(mask, shape)[own]
    if keep is not None:
        visible = visible & keep(*place)
    return S, visible


def _weighted(S: NDArray[F], V: NDArray[F], visible: Mask, z: F | None) -> Results[F]:
    """o and lse of a block of rows. A row that sees a value that is not finite sums over its own keys only: 0 * NaN is
    NaN, where a weight of 0 adds nothing to what is finite."""
    S[~visible] = -np.inf
    m = S.max(axis=-1, initial=-np.inf)
    m = _finite_maximum(m if z is None else np.maximum(m, z))
    P = np.exp(S - m[:, None])
    l = P.sum(axis=-1) if z is None else P.sum(axis=-1) + np.exp(z - m)
    odd: Mask = np.asarray(~np.isfinite(V).all(axis=-1))
    o = P @ np.where(odd[:, None], V.dtype.type(0), V)
    for i in np.flatnonzero((visible & odd).any(axis=-1)):
        own = visible[i]
        o[i] = P[i, own] @ V[own]
    o, lse = o / l[:, None], m + np.log(l)
    empty = ~visible.any(axis=-1)
    o[empty], lse[empty] = 0, -np.inf if z is None else z
    return o, lse


def _finite_maximum(m: NDArray[F]) -> NDArray[F]:
    """0 for a maximum of -inf, so that exp(-inf - m) is 0, not NaN."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)
