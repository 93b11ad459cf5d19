"""flex_attention means what PyTorch's own does, for its users' functions, and refuses what cannot be traced."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
tt = importlib.import_module("tilewise.torch")
support = importlib.import_module("tests.frontends.support")
same_bits = support.assert_same_bits

B, H, HKV, TQ, TK = 2, 4, 2, 85, 100
LIMIT = 25  # a global that functions read

_random = torch.Generator().manual_seed(0)
DOCUMENT = torch.randint(0, 3, (B, TK), generator=_random).sort().values
PREFIX = torch.tensor([5, 60])
SLOPES = torch.rand(H, generator=_random)
RELATIVE = torch.randn(H, TQ + TK, generator=_random)
DENSE = torch.rand(TQ, TK, generator=_random) < 0.6
CAP = torch.tensor(2.0)  # without axes: a number


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i - j < LIMIT


def packed(b: Any, h: Any, i: Any, j: Any) -> Any:
    return DOCUMENT[b, i] == DOCUMENT[b, j]


MASKS: dict[str, Callable[..., Any] | None] = {
    "all": None,
    "causal": causal,
    "sliding window": lambda b, h, i, j: causal(b, h, i, j) & near(b, h, i, j),
    "prefix-LM": lambda b, h, i, j: (j < PREFIX[b]) | (i >= j),
    "document": packed,
    "dense": lambda b, h, i, j: DENSE[i, j],
    "dense, index by index": lambda b, h, i, j: DENSE[i][j],
    "and_masks": flex.and_masks(causal, packed),
    "or_masks": flex.or_masks(packed, near),
    "noop": flex.noop_mask,
    "by head": lambda b, h, i, j: torch.logical_or(h % 2 == 0, i // 16 == torch.div(j, 16, rounding_mode="floor")),
    "rows that see nothing": lambda b, h, i, j: (i > 10) & (j <= i),
}

SCORES: dict[str, Callable[..., Any] | None] = {
    "as it is": None,
    "ALiBi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "ALiBi by formula": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i),
    "softcap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
    "relative bias": lambda s, b, h, i, j: s + RELATIVE[h, i - j + TK],
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "rows hidden": lambda s, b, h, i, j: torch.where((i > 3) & (j < 70), s, -torch.inf),
    "casts": lambda s, b, h, i, j: (s + (i % 7 == 0).to(s.dtype) * 0.5 + torch.zeros_like(s)).clamp(max=1.0),
    "methods": lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 30, -3.0).tanh() + (j.float() / TK).exp(),
    "functions": lambda s, b, h, i, j: torch.minimum(s, torch.abs(s) * 0.5) - torch.sigmoid(s) + torch.max(i, j) % 3,
}


def inputs(dtype: Any = torch.float32) -> list[Any]:
    return support.tensors(B, H, HKV, TQ, TK, dtype=dtype)


def theirs(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, **options: Any) -> tuple[Any, Any]:
    """PyTorch's own, without its compiler; in the precision of q."""
    return flex.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True, **options)


def masks(mask_mod: Any) -> tuple[Any, Any]:
    """PyTorch's and ours."""
    if mask_mod is None:
        return None, None
    return flex.create_block_mask(mask_mod, B, H, TQ, TK, device="cpu"), tt.create_block_mask(mask_mod, B, H, TQ, TK)


def test_signature_is_pytorchs() -> None:
    ours, other = (inspect.signature(f).parameters for f in (tt.flex_attention, flex.flex_attention))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [(p.name, p.default, p.kind) for p in other.values()]
    ours, other = (inspect.signature(f).parameters for f in (tt.create_block_mask, flex.create_block_mask))
    assert list(ours) == list(other)[: len(ours)]


@pytest.mark.filterwarnings("ignore")  # of theirs, which is not compiled, and of the compiler about itself
@pytest.mark.parametrize(
    ("score", "mask"), [(score, "all") for score in SCORES] + [(s, m) for m in MASKS for s in ("as it is", "ALiBi")][1:]
)
def test_the_meaning_of_pytorchs(score: str, mask: str) -> None:
    q, k, v = inputs()
    other, own = masks(MASKS[mask])
    o, lse = tt.flex_attention(q, k, v, SCORES[score], own, enable_gqa=True, return_lse=True)
    exact = theirs(*(x.double() for x in (q, k, v)), SCORES[score], other)
    naive = theirs(q, k, v, SCORES[score], other)
    support.assert_as_accurate_as_naive(o, exact[0], naive[0])
    support.assert_as_accurate_as_naive(lse, exact[1], naive[1])  # theirs and ours are natural logarithms
    same_bits(tt.flex_attention(q, k, v, SCORES[score], other, enable_gqa=True, return_lse=True), (o, lse))
    same_bits(tt.flex_attention(q, k, v, SCORES[score], own, enable_gqa=True), o)


@pytest.mark.filterwarnings("ignore")
def test_other_arguments() -> None:
    q, k, v = inputs(torch.bfloat16)
    o, lse = tt.flex_attention(
        q,
        k[:1],
        v[:1],
        scale=0.3,
        enable_gqa=True,
        kernel_options={"BLOCK_M": 16},
        return_aux=flex.AuxRequest(lse=True),
    )
    expected = tt.attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), scale=0.3, return_lse=True)
    same_bits((o, lse.lse), expected)
    assert o.dtype == torch.bfloat16
    assert lse.max_scores is None
    with pytest.raises(NotImplementedError, match="max_scores of return_aux"):
        tt.flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True))


def test_bits_of_ranges() -> None:
    """A mask_mod hides what an argument of attention would, bit by bit."""
    q, k, v = inputs()
    own = tt.create_block_mask(MASKS["sliding window"], None, None, TQ, TK)
    same_bits(tt.flex_attention(q, k, v, block_mask=own, enable_gqa=True), tt.attention(q, k, v, q_offset=0, keep=own))
    same_bits(tt.attention(q, k, v, q_offset=0, keep=own), tt.attention(q, k, v, causal=True, window=LIMIT, q_offset=0))
    plain = tw.block_mask(causal)
    same_bits(
        tt.flex_attention(q, k, v, block_mask=plain, enable_gqa=True), tt.attention(q, k, v, causal=True, q_offset=0)
    )


class Bias(torch.nn.Module):
    """A score_mod that reads a parameter where it is called, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(RELATIVE.clone())
        self.factor = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, attend: Any, q: Any, k: Any, v: Any) -> Any:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * self.factor + self.table[h, i - j + TK]

        return attend(q, k, v, score_mod=score_mod, enable_gqa=True)


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_a_module() -> None:
    module, given = Bias(), inputs()
    with torch.no_grad():
        o = module(tt.flex_attention, *given)
        torch.testing.assert_close(o, module(flex.flex_attention, *given))
        module.table += SLOPES[:, None] * torch.arange(TQ + TK) * 0.1  # and its contents are read at every call
        again = module(tt.flex_attention, *given)
        torch.testing.assert_close(again, module(flex.flex_attention, *given))
    assert float((again - o).abs().max()) > 0.01
    with pytest.raises(ValueError, match=r"line \d+ .*self\.factor.* requires a gradient"):
        module(tt.flex_attention, *given)


def test_what_was_captured_is_read_as_it_is() -> None:
    """Half types, bool, other strides, NumPy; in a default, a tuple, a partial."""
    q, k, v = inputs()

    def by(table: Any) -> Any:
        return tt.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j], enable_gqa=True)

    table = torch.randn(H, TK, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = tt.attention(q, k, v, bias=table.float()[None, :, None])
    for same in (table, table.float(), table.T.contiguous().T, table.double(), table.float().numpy()):
        same_bits(by(same), expected)
    hidden = torch.arange(TK) % 3 == 0
    options = {"block_mask": tt.create_block_mask(lambda b, h, i, j, x=hidden: ~x[j], 1, 1, TQ, TK), "enable_gqa": True}
    same_bits(tt.flex_attention(q, k, v, **options), tt.attention(q, k, v, mask=~hidden))
    before = tt.flex_attention(q, k, v, **options)
    hidden[:] = False  # a block mask keeps what was captured when it was made
    same_bits(tt.flex_attention(q, k, v, **options), before)


@pytest.mark.filterwarnings("ignore")
def test_pytorchs_block_mask_is_remembered_by_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    limit = torch.tensor([30, 30])
    other = flex.create_block_mask(lambda b, h, i, j: j < limit[b], B, H, TQ, TK, device="cpu", BLOCK_SIZE=16)
    module = importlib.import_module("tilewise.frontends.flex")
    looked: list[Any] = []
    check = module._check_blocks
    monkeypatch.setattr(module, "_check_blocks", lambda *x: (looked.append(x), check(*x)))
    first = tt.flex_attention(q, k, v, block_mask=other, enable_gqa=True)
    same_bits(first, tt.attention(q, k, v, kv_len=30))
    same_bits(tt.flex_attention(q, k, v, block_mask=other, enable_gqa=True), first)
    assert len(looked) == 1
    limit[:] = 27  # the same blocks, but other keys
    same_bits(tt.flex_attention(q, k, v, block_mask=other, enable_gqa=True), tt.attention(q, k, v, kv_len=27))
    assert len(looked) == 2
    limit[:] = 60
    with pytest.raises(NotImplementedError, match="say something else than its mask_mod"):
        tt.flex_attention(q, k, v, block_mask=other, enable_gqa=True)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_say_more_than_the_function(whole: bool) -> None:
    q, k, v = inputs()
    listed = flex.create_block_mask(causal, 1, 1, TQ, TK, device="cpu", BLOCK_SIZE=16)
    full = listed.full_kv_num_blocks, listed.full_kv_indices
    blocks = [listed.kv_num_blocks, listed.kv_indices, *(full if whole else (None, None))]
    mask = flex.BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=16, mask_mod=None if whole else causal, seq_lengths=(TQ, TK)
    )
    with pytest.raises(NotImplementedError, match="say something else than its mask_mod"):
        tt.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    shown = listed.kv_num_blocks, listed.kv_indices
    more = flex.BlockMask.from_kv_blocks(*full, *shown, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(TQ, TK))
    with pytest.raises(NotImplementedError, match="say something else than its mask_mod"):
        tt.flex_attention(q, k, v, block_mask=more, enable_gqa=True)


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "unknown function": (lambda s, b, h, i, j: torch.cumsum(s, 0), "cumsum of PyTorch is not a word of hooks"),
    "unknown method": (lambda s, b, h, i, j: s.cumsum(0), r"\.cumsum is not a word of hooks"),
    "unknown option": (lambda s, b, h, i, j: torch.add(s, s, alpha=2), "add of PyTorch is not a word of hooks with"),
    "rounding": (lambda s, b, h, i, j: s + torch.div(i, 2, rounding_mode="trunc"), "rounding_mode='trunc'"),
    "truncation": (lambda s, b, h, i, j: s + s.int(), "a value of float32 cannot become int32"),
    "precision": (lambda s, b, h, i, j: s.double(), r"\.double is not a word of hooks"),
    "branch": (lambda s, b, h, i, j: s if i > j else 0 * s, "use where, &, |, ~"),
    "no index": (lambda s, b, h, i, j: s + SLOPES, "has no place in a kernel|index"),
    "made inside": (lambda s, b, h, i, j: s * torch.ones(4)[h], "make it before, and capture it"),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_that_cannot_be_traced(kind: str) -> None:
    function, words = FUNCTIONS[kind]
    q, k, v = inputs()
    with pytest.raises(ValueError, match=rf"(?s)score cannot be traced: line \d+ of .*test_flex\.py: .*: .*{words}"):
        tt.flex_attention(q, k, v, function, enable_gqa=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "query has 4 heads and key 2: pass enable_gqa=True"),
        (
            {"block_mask": causal},
            TypeError,
            "block_mask must be a BlockMask, got function: create_block_mask makes one",
        ),
        ({"score_mod": 3}, TypeError, "score must be a function, got int"),
        ({"return_lse": True, "return_aux": flex.AuxRequest(lse=True)}, ValueError, "cannot be given together"),
        (
            {"block_mask": tt.create_block_mask(causal, 1, 1, TQ, TK + 1)},
            ValueError,
            r"block_mask was made for \[B, H, L, S\] = \[1, 1, 85, 101\], not for \[2, 4, 85, 100\]",
        ),
        ({"block_mask": tt.create_block_mask(causal, 3, 1, TQ, TK)}, ValueError, r"= \[3, 1, 85, 100\], not for"),
        ({"block_mask": tt.create_block_mask(causal, 1, 2, TQ, TK)}, ValueError, r"= \[1, 2, 85, 100\], not for"),
    ],
)
def test_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = inputs()
    if options:
        options = {"enable_gqa": True, **options}
    with pytest.raises(error, match=words):
        tt.flex_attention(q, k, v, **options)


def test_tensors_are_named() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match="value must be a tensor of PyTorch, got ndarray"):
        tt.flex_attention(q, k, v.numpy())
    with pytest.raises(ValueError, match=r"key must have 4 axes, got shape \(2, 100, 16\)"):
        tt.flex_attention(q, k[0], v)
    with pytest.raises(ValueError, match="device must be the CPU, got meta"):
        tt.create_block_mask(causal, 1, 1, TQ, TK, device="meta")
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        tt.flex_attention(q.requires_grad_(), k, v, enable_gqa=True)


@pytest.mark.filterwarnings("ignore")
def test_in_a_compiled_function() -> None:
    """Without functions it is an operator; functions are refused by name."""
    given = [x[:, :2] for x in inputs()]
    torch.compiler.reset()
    run = torch.compile(lambda *x: tt.flex_attention(*x, scale=0.3), fullgraph=True, backend="aot_eager")
    same_bits(run(*given), tt.flex_attention(*given, scale=0.3))
    own = tt.create_block_mask(causal, 1, 1, TQ, TK)
    for name, options in (("score", {"score_mod": SCORES["ALiBi"]}), ("keep", {"block_mask": own})):
        torch.compiler.reset()
        with pytest.raises(NotImplementedError, match=f"{name} cannot be given while PyTorch traces a call"):
            torch.compile(lambda *x, options=options: tt.flex_attention(*x, **options), backend="eager")(*given)
    torch.compiler.reset()
    apart = torch.compiler.disable(lambda *x: tt.flex_attention(*x, block_mask=own))
    run = torch.compile(lambda q, k, v: apart(q * 2, k, v) + 1, backend="eager")
    same_bits(run(*given), tt.flex_attention(given[0] * 2, *given[1:], block_mask=own) + 1)
    torch.compiler.reset()


def test_threads_move_no_bit() -> None:
    q, k, v = inputs()
    own = tt.create_block_mask(packed, B, None, TQ, TK)
    options = {"score": SCORES["relative bias"], "keep": own, "return_lse": True}
    same_bits(*(tt.attention(q, k, v, q_offset=0, pool=threads, **options) for threads in (1, 3)))
    rows = [tt.attention(q[:, :, i : i + 1], k, v, q_offset=i, **options) for i in range(TQ)]
    same_bits(torch.cat([row[0] for row in rows], 2), tt.attention(q, k, v, q_offset=0, **options)[0])
    assert np.isfinite(rows[0][1].numpy()).all()
