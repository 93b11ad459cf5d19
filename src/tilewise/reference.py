"""The specification: exact attention and softmax in plain NumPy, no tiles, nothing clever.

For every sequence b, head h and row i, at position p = q_offset[b] + i:

    s_j = scale * q_i . k_j          for the keys j that the row sees
    o   = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z_h))
    lse = log(sum_j exp(s_j) + exp(z_h))                          natural logarithm

The keys of sequence b are k[b, :, kv_start:kv_start+kv_len], the first of them at position k_offset. A row sees the
key at position c if c <= p (where causal) and c > p - window (where window > 0). The term exp(z_h) is there only with
sinks. Head h reads KV head h // (H // Hkv). A row that sees no key gives o = 0 and lse = -inf, or the sink's logit.

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


def attention64(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    q_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    kv_start: ArrayLike = 0,
    kv_len: ArrayLike | None = None,
    k_offset: ArrayLike = 0,
) -> Results[np.float64]:
    """The truth, float64: q [B,H,Tq,D], k [B,Hkv,Tk,D], v [B,Hkv,Tk,Dv] -> o [B,H,Tq,Dv], lse [B,H,Tq]."""
    return _attention(np.float64, q, k, v, causal, window, scale, q_offset, sinks, kv_start, kv_len, k_offset)


def attention32(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    q_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    kv_start: ArrayLike = 0,
    kv_len: ArrayLike | None = None,
    k_offset: ArrayLike = 0,
) -> Results[np.float32]:
    """The yardstick of accuracy: the same in float32 throughout, as a user of NumPy would write it."""
    return _attention(np.float32, q, k, v, causal, window, scale, q_offset, sinks, kv_start, kv_len, k_offset)


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
    causal: bool,
    window: int | None,
    scale: float | None,
    q_offset: ArrayLike,
    sinks: ArrayLike | None,
    kv_start: ArrayLike,
    kv_len: ArrayLike | None,
    k_offset: ArrayLike,
) -> Results[F]:
    (B, H, Tq, D), (Hkv, Tk, Dv) = q.shape, v.shape[1:]
    sigma = dtype(D**-0.5 if scale is None else scale)
    start, offset, first = (np.broadcast_to(x, B).tolist() for x in (kv_start, q_offset, k_offset))
    length = [Tk - n for n in start] if kv_len is None else np.broadcast_to(kv_len, B).tolist()
    o, lse = np.empty((B, H, Tq, Dv), dtype), np.empty((B, H, Tq), dtype)
    for b, h in np.ndindex(B, H):
        own = (b, h // (H // Hkv), slice(start[b], start[b] + length[b]))
        K: NDArray[F] = k[own].astype(dtype)
        V: NDArray[F] = v[own].astype(dtype)
        z = None if sinks is None else dtype(np.asarray(sinks)[h])
        c = first[b] + np.arange(length[b])
        for i in range(0, Tq, ROWS):
            Q = q[b, h, i : i + ROWS].astype(dtype)
            p = offset[b] + np.arange(i, i + len(Q))[:, None]
            visible = np.ones((len(Q), len(c)), np.bool_)
            if causal:
                visible &= c <= p
            if window and window > 0:
                visible &= c > p - window
            with np.errstate(all="ignore"):
                o[b, h, i : i + ROWS], lse[b, h, i : i + ROWS] = _rows(Q, K, V, visible, sigma, z)
    return o, lse


def _rows(Q: NDArray[F], K: NDArray[F], V: NDArray[F], visible: Mask, scale: F, z: F | None) -> Results[F]:
    """o and lse of a block of rows. A row that sees something not finite is computed alone, over its own keys only."""
    odd = ~(np.isfinite(K).all(axis=-1) & np.isfinite(V).all(axis=-1))
    tame_K, tame_V = K.copy(), V.copy()
    tame_K[odd] = tame_V[odd] = 0
    o, lse = _weighted(Q, tame_K, tame_V, visible, scale, z)
    for i in np.flatnonzero((visible & odd).any(axis=-1)):
        own = visible[i]
        o[i : i + 1], lse[i : i + 1] = _weighted(Q[i : i + 1], K[own], V[own], visible[i : i + 1, own], scale, z)
    return o, lse


def _weighted(Q: NDArray[F], K: NDArray[F], V: NDArray[F], visible: Mask, scale: F, z: F | None) -> Results[F]:
    """o and lse by the formulas. K and V are finite where some row does not see them: a weight of 0 adds nothing."""
    S = (Q @ K.T) * scale
    S[~visible] = -np.inf
    m = S.max(axis=-1, initial=-np.inf)
    m = _finite_maximum(m if z is None else np.maximum(m, z))
    P = np.exp(S - m[:, None])
    l = P.sum(axis=-1) if z is None else P.sum(axis=-1) + np.exp(z - m)
    o, lse = (P @ V) / l[:, None], m + np.log(l)
    empty = ~visible.any(axis=-1)
    o[empty], lse[empty] = 0, -np.inf if z is None else z
    return o, lse


def _finite_maximum(m: NDArray[F]) -> NDArray[F]:
    """0 for a maximum of -inf, so that exp(-inf - m) is 0, not NaN."""
    return np.where(np.isneginf(m), np.zeros_like(m), m)
