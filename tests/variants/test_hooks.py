"""tilewise.hooks: ready keep and score functions mean what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import RUNNABLE, assert_as_accurate_as_naive, assert_same_bits, inputs
from tests.variants.calls import OFFSET, RNG, B, H, call, dense, places, small
from tilewise import hooks

LARGEST = 260
IDS = np.sort(RNG.integers(0, 5, (B, LARGEST)), axis=1)
LENGTHS = np.array([30, 160])


def of(lengths: Any, b: Any) -> Any:
    return np.asarray(lengths)[b]


KEEPS: dict[str, tuple[Any, Any]] = {  # (ours, the same of NumPy's arrays)
    "causal": (hooks.causal, lambda b, h, i, j: j <= i),
    "sliding_window": (hooks.sliding_window(20), lambda b, h, i, j: (j <= i) & (j >= i - 20)),
    "sliding_window, right": (hooks.sliding_window(20, 3), lambda b, h, i, j: (j <= i + 3) & (j >= i - 20)),
    "prefix_lm": (hooks.prefix_lm(150), lambda b, h, i, j: (j < 150) | (j <= i)),
    "prefix_lm, [B]": (hooks.prefix_lm(LENGTHS), lambda b, h, i, j: (j < of(LENGTHS, b)) | (j <= i)),
    "document": (hooks.document(IDS[0]), lambda b, h, i, j: IDS[0][i] == IDS[0][np.maximum(j, 0)]),
    "document, [B]": (hooks.document(IDS), lambda b, h, i, j: IDS[b, i] == IDS[b, np.maximum(j, 0)]),
    "dilated": (hooks.dilated(3), lambda b, h, i, j: abs(i - j) % 3 == 0),
    "dilated, count": (hooks.dilated(3, 5), lambda b, h, i, j: np.isin(abs(i - j), np.arange(6) * 3)),
    "chunked": (hooks.chunked(17), lambda b, h, i, j: np.floor(i / 17) == np.floor(j / 17)),
    "and_": (
        hooks.and_(hooks.causal, hooks.chunked(50), lambda b, h, i, j: h != 2),
        lambda b, h, i, j: (j <= i) & (i // 50 == j // 50) & (h != 2),
    ),
    "or_": (
        hooks.or_(hooks.chunked(16), lambda b, h, i, j: j < 40, lambda *place: False),
        lambda b, h, i, j: (i // 16 == j // 16) | (j < 40),
    ),
    "not_": (
        hooks.not_(hooks.and_(hooks.causal, hooks.not_(hooks.sliding_window(9)))),
        lambda b, h, i, j: ~((j <= i) & (i - j > 9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPS)
def test_keep_functions(name: str) -> None:
    ours, meaning = KEEPS[name]
    mask = dense(meaning)
    assert mask.any()
    assert not mask.all()
    assert_same_bits(call(mask=mask).run(), call().run(keep=ours))


def test_nothing_of_nothing() -> None:
    c = small()
    with tw.config(interpret=True):
        assert_same_bits(c.run(), c.run(keep=hooks.and_()))
        assert (c.run(keep=hooks.or_())[0] == 0).all()
        assert (c.run(keep=hooks.not_(lambda b, h, i, j: True))[0] == 0).all()


def test_ranges_as_options() -> None:
    c = call()
    assert_same_bits(c.run(causal=True), c.run(keep=hooks.causal))
    assert_same_bits(c.run(window=(20, 3)), c.run(keep=hooks.sliding_window(20, 3)))
    assert_same_bits(c.run(window=21, causal=True), c.run(keep=hooks.sliding_window(20)))


# ---- trees
TREE = [-1, 0, 0, 1, 1, 2, -1, 6, 3]
OTHER = [-1, -1, 1, 2, 3, 4, 5, 6, 0]


def seen_by(parents: list[int], prefix: int, keys: int) -> Any:
    """The keys that each token of a tree sees, by walking up to its root."""
    mask = np.zeros((len(parents), keys), np.bool_)
    mask[:, :prefix] = True
    for n in range(len(parents)):
        token = n
        while token >= 0:
            mask[n, prefix + token] = True
            token = parents[token]
    return mask


@pytest.mark.parametrize("parents", [TREE, [TREE, OTHER]], ids=["one", "[B]"])
@pytest.mark.parametrize("prefix", [130, [130, 133]], ids=["int", "[B]"])
def test_tree(parents: Any, prefix: Any) -> None:
    q, k, v = inputs(B, H, 2, len(TREE), 150, 16, 16)
    trees = np.broadcast_to(parents, (B, len(TREE)))
    starts = np.broadcast_to(prefix, B)
    mask = np.stack([seen_by(list(t), n, 150) for t, n in zip(trees, starts, strict=True)])[:, None]
    expected = tw.attention(q, k, v, mask=mask, return_lse=True)
    got = tw.attention(q, k, v, keep=hooks.tree(parents, prefix), q_offset=prefix, return_lse=True)
    assert_same_bits(expected, got)


def test_a_tree_that_is_a_line_is_causal() -> None:
    q, k, v = inputs(1, 2, 1, 8, 40, 16, 16)
    expected = tw.attention(q, k, v, causal=True, q_offset=32, return_lse=True)
    line = hooks.tree(np.arange(-1, 7), 32)
    assert_same_bits(expected, tw.attention(q, k, v, keep=line, q_offset=32, return_lse=True))


def test_a_path_of_a_tree_is_that_path_alone() -> None:
    """Accepting the drafted tokens of a path: their rows have the bits of the rows that plain decoding gives where the
    path lies first, and the tree's other tokens never count."""
    q, k, v = inputs(1, 2, 1, 5, 37, 16, 16)
    tree = hooks.tree([-1, 0, 1, 0, 3], 32)
    o, _ = tw.attention(q, k, v, keep=tree, q_offset=32, return_lse=True)
    plain = tw.attention(q[:, :, :3], k[:, :, :35], v[:, :, :35], causal=True, q_offset=32)
    assert_same_bits(plain, o[:, :, :3].copy())
    k[:, :, 33:35] = np.nan
    assert np.isfinite(tw.attention(q, k, v, keep=tree, q_offset=32)[:, :, 3:]).all()


def test_prefixes_share_a_kernel() -> None:
    """A number of the prefix is no constant of the kernel: a decode loop compiles once."""
    from tilewise.kernels.hooks import trace

    for make in (lambda n: hooks.tree(TREE, n), hooks.prefix_lm, lambda n: hooks.prefix_lm([n, n])):
        assert trace("keep", make(5))[0] == trace("keep", make(77))[0]
    assert trace("keep", hooks.chunked(8))[0] != trace("keep", hooks.chunked(9))[0]


# ---- scores
def test_alibi() -> None:
    slopes = RNG.random((B, H)).astype(np.float32)
    for x in (slopes, slopes[0]):
        assert_same_bits(call(alibi_slopes=x).run(), call().run(score=hooks.alibi(x)))
        assert_same_bits(call(alibi_slopes=x).run(), call().run(score=hooks.alibi(x.tolist())))


def test_relative_bias() -> None:
    table = RNG.standard_normal((H, 61)).astype(np.float32)
    _, h, i, j = places(call())
    bias = table[h, np.clip(j - i + 30, 0, 60)]
    assert_same_bits(call(bias=bias).run(), call().run(score=hooks.relative_bias(table)))
    assert min(OFFSET) > 30


def test_words() -> None:
    """exp, log and tanh of scores against NumPy's, in float64."""
    c = small()
    for word, meaning in (
        (hooks.exp, np.exp), (hooks.exp2, np.exp2), (hooks.tanh, np.tanh),
        (lambda s: hooks.log(abs(s) + 0.5), lambda s: np.log(abs(s) + 0.5)), (np.tanh, np.tanh),
        (lambda s: hooks.log2(s * s + 1), lambda s: np.log2(s * s + 1)),
        (lambda s: hooks.maximum(hooks.minimum(s, 0.5), -0.25), lambda s: np.clip(s, -0.25, 0.5)),
        (lambda s: hooks.where(s > 0, s, 0.1 * s), lambda s: np.where(s > 0, s, 0.1 * s)),
    ):  # fmt: skip
        own = c.hooked(lambda order, word=meaning: {"score": lambda s, *_: word(s)})
        with tw.config(interpret=True):
            o, lse = c.run(score=lambda s, b, h, i, j, word=word: word(s))
        assert_as_accurate_as_naive((o, lse), own)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e30])
def test_exponentials_of_large_scores(scale: float, target: str) -> None:
    """A sigmoid is a step where exp is beyond float32, and so is exp itself under a minimum."""
    with tw.config(target=target):
        sigmoid = call(scale=scale).run(score=lambda s, *_: 1 / (1 + hooks.exp(-1000 * s)))
        capped = call(scale=scale).run(score=lambda s, *_: hooks.minimum(hooks.exp2(s * 2000), 1.0))
        step = call(scale=scale).run(score=lambda s, *_: hooks.where(s > 0, 1.0, 0.0))
    for got in (sigmoid, capped):
        assert all(np.isfinite(x).all() for x in got)
        np.testing.assert_allclose(got[1], step[1], atol=0.02)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: hooks.sliding_window(-1), tw.InvalidArgument, "left must lie in 0"),
        (lambda: hooks.sliding_window(1, -2), tw.InvalidArgument, "right must lie in 0"),
        (lambda: hooks.sliding_window(1.5), TypeError, "left must be an integer"),
        (lambda: hooks.chunked(0), tw.InvalidArgument, "size must be at least 1, got 0"),
        (lambda: hooks.dilated(0), tw.InvalidArgument, "step must be at least 1, got 0"),
        (lambda: hooks.dilated(2, -1), tw.InvalidArgument, "count must lie in 0"),
        (lambda: hooks.document([0.5, 1]), TypeError, "ids must be integers, got float64"),
        (lambda: hooks.document(np.zeros((2, 2, 2), int)), tw.ShapeError, "ids must have 1 or 2 axes"),
        (lambda: hooks.document(np.zeros(0, int)), tw.ShapeError, "ids must have 1 or 2 axes and an element"),
        (lambda: hooks.prefix_lm(2.0), TypeError, "lengths must be integers"),
        (lambda: hooks.prefix_lm([[1]]), tw.ShapeError, "lengths must have 1 axes"),
        (lambda: hooks.tree([-1, 1], 4), tw.InvalidArgument, "parents must be -1 or the number of an earlier token"),
        (lambda: hooks.tree([-2], 4), tw.InvalidArgument, "parents must be -1 or the number of an earlier token"),
        (lambda: hooks.tree([0], 4), tw.InvalidArgument, "parents must be -1 or the number of an earlier token"),
        (lambda: hooks.tree([-1], 4.0), TypeError, "prefix must be integers"),
        (lambda: hooks.alibi(1.0), tw.ShapeError, r"slopes must have shape \[H\] or \[B, H\], got \(\)"),
        (lambda: hooks.softcap(None), tw.InvalidArgument, "cap must be a positive number"),
        (lambda: hooks.softcap(-1), tw.InvalidArgument, "softcap must be positive"),
        (lambda: hooks.relative_bias(np.zeros((2, 4))), tw.ShapeError, "table must have shape"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
