"""What the tests of variants share: a call with masks, biases, slopes and hooks, cut in every way, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tests.support import PER_SEQUENCE, RUNNABLE, Result, assert_same_bits, inputs, sinks_for
from tilewise.reference import attention32, attention64

B, H, HKV, TQ, TK, D = 2, 4, 2, 9, 150, 16
# arrays, as calls with lists are not remembered; the last keys are hidden by a causal mask
START, LENGTH, FIRST, OFFSET = np.array([[3, 7], [140, 120], [5, 70], [130, 176]])
END = max(f + n for f, n in zip(FIRST, LENGTH, strict=True))  # of all positions
ELEMENTS = ("mask", "bias")  # [.., row, key]
Hooks = Callable[[NDArray[np.int64]], dict[str, Any]]
RNG = np.random.default_rng(8)
DENSE = RNG.random((B, H, TQ, TK)) < 0.6
DENSE[1, 2, 4] = False  # a row that sees nothing


def no_hooks(order: NDArray[np.int64]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a dense call. `hooks` makes score and keep; they read sequence b of the batch as order[b], so
    that a sequence keeps its own in another batch."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    hooks: Hooks = no_hooks
    order: NDArray[np.int64] = field(default_factory=lambda: np.arange(B))

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {"return_lse": True, **self.options, **self.hooks(self.order), **changes}

    def run(self, **changes: Any) -> Result:
        o, lse = tw.attention(self.q, self.k, self.v, **self.arguments(**changes))
        return o, lse

    def change(self, **changes: Any) -> Call:
        return replace(self, options={**self.options, **changes})

    def hooked(self, hooks: Hooks) -> Call:
        return replace(self, hooks=hooks)

    def rows(self, lo: int, hi: int) -> Call:
        """The same rows [lo, hi), at their own positions."""
        cut = {n: self.options[n][..., lo:hi, :] for n in ELEMENTS if self._spans(n, -2)}
        offset = np.asarray(self.options["q_offset"]) + lo
        return replace(self, q=self.q[:, :, lo:hi], options={**self.options, **cut, "q_offset": offset})

    def sequences(self, order: list[int]) -> Call:
        """The sequences of that order, as a batch."""
        cut: dict[str, Any] = {n: np.ascontiguousarray(self.options[n][order]) for n in ELEMENTS if self._spans(n, -4)}
        if np.ndim(self.options.get("alibi_slopes", 0)) == 2:
            cut["alibi_slopes"] = self.options["alibi_slopes"][order]
        cut |= {n: np.asarray(self.options[n])[order] for n in PER_SEQUENCE}
        q, k, v = self.q[order], self.k[order], self.v[order]
        return Call(q, k, v, {**self.options, **cut}, self.hooks, self.order[order])

    def _spans(self, name: str, axis: int) -> bool:
        shape = np.shape(self.options.get(name))
        return len(shape) >= -axis and shape[axis] > 1

    def varlen(self) -> Result:
        """The same sequences packed one after the other."""
        parts = [(self._keys(self.k, b), self._keys(self.v, b)) for b in range(len(self.q))]
        k, v = (np.concatenate(x) for x in zip(*parts, strict=True))
        ends = np.cumsum([0, *self.options["kv_len"]])
        rows = np.arange(len(self.q) + 1) * self.q.shape[2]
        arguments = {**self._ragged(), "cu_seqlens_q": rows, "cu_seqlens_k": ends}
        return self._dense(tw.attention_varlen(self._packed(), k, v, **arguments))

    def paged(self, page_size: int, packed: bool) -> Result:
        """The same with keys in pages, backwards; NaN where a page holds no key."""
        lengths = self.options["kv_len"]
        most = -(-max(lengths) // page_size)
        table = np.arange(len(self.q) * most)[::-1].reshape(-1, most).astype(np.int32)
        pages = [np.full((table.size, page_size, *x.shape[1:2], x.shape[3]), np.nan, x.dtype) for x in (self.k, self.v)]
        for b in range(len(lengths)):
            for target, x in zip(pages, (self.k, self.v), strict=True):
                for j, row in enumerate(self._keys(x, b)):
                    target[table[b, j // page_size], j % page_size] = row
        arguments = {**self._ragged(), "block_table": table, "kv_len": lengths}
        if packed:
            rows = np.arange(len(self.q) + 1) * self.q.shape[2]
            return self._dense(tw.attention_paged(self._packed(), *pages, cu_seqlens_q=rows, **arguments))
        o, lse = tw.attention_paged(self.q, *pages, **{**arguments, **self._elements(dense=True)})
        return o, lse

    def _keys(self, x: Any, b: int) -> Any:
        """The keys (or values) of a sequence, [n, Hkv, D]."""
        start = self.options["kv_start"][b]
        return x[b, :, start : start + self.options["kv_len"][b]].transpose(1, 0, 2)

    def _packed(self) -> Any:
        return self.q.transpose(0, 2, 1, 3).reshape(-1, self.q.shape[1], self.q.shape[3])

    def _ragged(self) -> dict[str, Any]:
        left_out = ("kv_start", "kv_len", *ELEMENTS)
        return {n: x for n, x in self.arguments().items() if n not in left_out} | self._elements(dense=False)

    def _elements(self, dense: bool) -> dict[str, Any]:
        """mask and bias by the index of the key of a sequence, two keys wider than the longest."""
        found = {}
        for name in ELEMENTS:
            if name in self.options:
                full = np.broadcast_to(self.options[name], (*self.q.shape[:3], self.k.shape[2]))
                target = np.zeros((*full.shape[:3], max(self.options["kv_len"]) + 2), full.dtype)
                for b, (start, n) in enumerate(zip(self.options["kv_start"], self.options["kv_len"], strict=True)):
                    target[b, :, :, :n] = full[b, :, :, start : start + n]
                found[name] = target if dense else np.concatenate(list(target), axis=1)
        return found

    def _dense(self, result: Any) -> Result:
        """Of packed rows: o [B, H, Tq, Dv] and lse [B, H, Tq]."""
        o, lse = result
        batch, heads, rows = self.q.shape[:3]
        return (
            np.ascontiguousarray(o.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3)),
            np.ascontiguousarray(lse.reshape(heads, batch, rows).transpose(1, 0, 2)),
        )

    def exact(self) -> Any:
        return attention64(self.q, self.k, self.v, **self._reference())

    def naive(self) -> Any:
        return attention32(self.q, self.k, self.v, **self._reference())

    def _reference(self) -> dict[str, Any]:
        options = {n: x for n, x in self.arguments().items() if n not in ("return_lse", "br", "bc", "span")}
        return {"scale": float(np.float32(self.q.shape[3] ** -0.5)), **options}


def call(**options: Any) -> Call:
    """Two sequences that begin at other keys and positions, in two spans, two query heads a KV head."""
    own = {"kv_start": START, "kv_len": LENGTH, "k_offset": FIRST, "q_offset": OFFSET, "span": 128}
    return Call(*inputs(B, H, HKV, TQ, TK, D, D), {**own, **options})


def small(**options: Any) -> Call:
    """One sequence of two rows, for the interpreter."""
    return call(**options).sequences([0]).rows(3, 5).change(span=64)


def places(c: Call) -> tuple[Any, Any, Any, Any]:
    """b, h, i, j of the elements [B, H, Tq, Tk] of a mask, as arrays; of all elements of k."""
    b, h = np.arange(len(c.q))[:, None, None, None], np.arange(c.q.shape[1])[:, None, None]
    offset, start, first = (np.array(c.options[name])[b] for name in ("q_offset", "kv_start", "k_offset"))
    return b, h, offset + np.arange(c.q.shape[2])[:, None], first + np.arange(c.k.shape[2]) - start


def dense(keep: Callable[..., Any], c: Call | None = None) -> NDArray[np.bool_]:
    """The elements [B, H, Tq, Tk] that a keep function of arrays lets through."""
    c = c or call()
    return np.array(np.broadcast_to(keep(*places(c)), (*c.q.shape[:3], c.k.shape[2])), order="C")


def cut(result: Result, lo: int, hi: int) -> Result:
    return result[0][:, :, lo:hi], result[1][:, :, lo:hi]


def assert_invariant(c: Call) -> None:
    """Chunks, batch, query tile, strides, layouts, check and targets: the same bits, and the interpreter's on few rows.

    Threads are the eager_workers' business (`assert_same_bits_on_threads`).
    """
    whole = c.run()
    assert np.isfinite(whole[0]).all()
    for lo, hi in ((0, 1), (1, 6), (6, TQ)):
        assert_same_bits(cut(whole, lo, hi), c.rows(lo, hi).run(), f"rows {lo} to {hi}")
    assert_same_bits((whole[0][::-1], whole[1][::-1]), c.sequences([1, 0]).run(), "sequences in another order")
    assert_same_bits((whole[0][1:], whole[1][1:]), c.sequences([1]).run(), "a sequence alone")
    assert_same_bits(whole, c.run(br=4), "br")
    strided = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (c.q, c.k, c.v)]
    assert_same_bits(whole, replace(c, q=strided[0], k=strided[1], v=strided[2]).run(), "strides")
    assert_same_bits(whole, c.varlen(), "varlen")
    assert_same_bits(whole, c.paged(16, packed=False), "paged")
    assert_same_bits(whole, c.paged(7, packed=True), "paged and packed")
    with tw.config(check=2):
        assert_same_bits(whole, c.run(), "checked")
    for target in RUNNABLE:
        with tw.config(target=target):
            assert_same_bits(whole, c.run(), target)


def assert_rings_agree(c: Call) -> None:
    native = c.run()
    with tw.config(interpret=True):
        assert_same_bits(native, c.run(), "interpreted")


def assert_same_bits_on_threads(c: Call) -> None:
    """To be called with eager_workers: spans are work items of their own."""
    alone = c.run(pool=1)
    for threads in (2, 3):
        assert_same_bits(alone, c.run(pool=threads), f"{threads} threads")
    assert_same_bits(alone, c.run(pool=2, br=1), "2 threads, a row a tile")


def assert_what_is_hidden_does_not_count(c: Call, visible: NDArray[np.bool_]) -> None:
    """NaN and infinities in keys and values that no row of their KV head sees; `visible` is [B, H, Tq, Tk]."""
    whole = c.run()
    unseen = ~visible.reshape(B, HKV, H // HKV * TQ, TK).any(axis=2)
    assert unseen.sum() > 20
    for x, y in ((np.nan, np.inf), (np.inf, np.nan), (-np.inf, -np.inf)):
        k, v = c.k.copy(), c.v.copy()
        k[unseen], v[unseen] = x, y
        assert_same_bits(whole, replace(c, k=k, v=v).run(), f"keys {x}, values {y}")


def assert_what_a_row_does_not_see_does_not_count(c: Call, visible: NDArray[np.bool_]) -> None:
    """NaN in a key and a value that some rows see: those become NaN, the others keep their bits."""
    whole = c.run()
    for name in ("k", "v"):
        spoilt = getattr(c, name).copy()
        spoilt[:, :, 60] = np.nan
        o, lse = replace(c, **{name: spoilt}).run()
        seen = visible[..., 60]
        assert seen.any()
        assert not seen.all()
        assert np.isnan(o[seen]).all()
        assert np.isnan(lse[seen]).all() or name == "v"
        assert_same_bits(whole[0][~seen], o[~seen], name)
        assert_same_bits(whole[1][~seen], lse[~seen], name)


def with_sinks(c: Call) -> Call:
    return c.change(sinks=sinks_for(H))
