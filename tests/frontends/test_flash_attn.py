"""FlashAttention's functions have its signatures and its documented meaning."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
fa = importlib.import_module("tilewise.flash_attn")
tt = importlib.import_module("tilewise.torch")
support = importlib.import_module("tests.frontends.support")
same_bits = support.assert_same_bits

SLOPES = torch.tensor([0.0, 0.02, 0.3, 1.5])
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (3, -1)},
    {"causal": True, "window_size": (3, 5)},  # causal makes the right 0
    {"window_size": (3, 0)},
    {"window_size": (3, -1)},
    {"window_size": (-1, 0)},
    {"window_size": (0, 0)},
    {"window_size": (3, 5)},
    {"window_size": (-1, 2)},
    {"window_size": (0, 40)},
    {"softcap": 0.7},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES.expand(2, 4) * torch.tensor([[1.0], [-2.0]]), "causal": True},
    {"alibi_slopes": SLOPES, "softcap": 0.7, "window_size": (30, 2)},
]
SIZES = [(5, 5), (1, 70), (5, 70), (9, 4), (70, 70), (3, 0), (130, 5)]  # Tq, Tk


def by_token(Tq: int, Tk: int, B: int = 2, dtype: Any = torch.float32) -> list[Any]:
    """q [B, Tq, H, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv]."""
    return [x.transpose(1, 2).contiguous() for x in support.tensors(B=B, Tq=Tq, Tk=Tk, dtype=dtype)]


def of_sequence(mask: dict[str, Any], b: int, B: int = 1) -> dict[str, Any]:
    """The mask of sequence b, or, of `b` counted on without an end, of B of them."""
    slopes = mask.get("alibi_slopes")
    if slopes is None or slopes.ndim == 1:
        return mask
    return {**mask, "alibi_slopes": slopes[torch.arange(b, b + B) % len(slopes)].contiguous()}


def visible(Tq: int, Tk: int, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Any:
    """[Tq, Tk], as flash_attn documents it: keys i + Tk - Tq - left to i + Tk - Tq + right, both included."""
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)[None]
    left, right = (x if x >= 0 else 10**6 for x in window_size)
    right = 0 if causal else right
    return (i + Tk - Tq - left <= j) & (j <= i + Tk - Tq + right)


def by_definition(
    q: Any, k: Any, v: Any, dtype: Any, softcap: float = 0.0, alibi_slopes: Any = None, **mask: Any
) -> tuple[Any, Any]:  # fmt: skip
    """(o, lse) as flash_attn documents it, in `dtype`; a row that sees nothing is 0, its lse -inf."""
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    Tq, Tk = q.shape[2], k.shape[2]
    s = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        distance = (torch.arange(Tq)[:, None] + Tk - Tq - torch.arange(Tk)).abs()
        s = s - (alibi_slopes.to(dtype)[..., None, None] * distance)
    s = s.masked_fill(~visible(Tq, Tk, **mask), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)


def assert_right(o: Any, lse: Any, q: Any, k: Any, v: Any, **mask: Any) -> None:
    """o [B, Tq, H, Dv] and lse [B, H, Tq] are those of the definition."""
    exact, naive = (by_definition(q, k, v, dtype, **mask) for dtype in (torch.float64, torch.float32))
    support.assert_as_accurate_as_naive(o, exact[0].transpose(1, 2), naive[0].transpose(1, 2))
    support.assert_as_accurate_as_naive(lse, exact[1], naive[1])


SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_version_2_8(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    shown = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(", ", ",")  # without its annotation
        for p in parameters
    ]
    assert " ".join(shown) == SIGNATURES[name]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("Tq", "Tk"), SIZES)
def test_the_documented_meaning(Tq: int, Tk: int, mask: dict[str, Any]) -> None:
    q, k, v = by_token(Tq, Tk)
    o, lse, probabilities = fa.flash_attn_func(q, k, v, return_attn_probs=True, **mask)
    assert o.is_contiguous()
    assert probabilities.shape == (0,)
    assert_right(o, lse, q, k, v, **mask)
    same_bits(fa.flash_attn_func(q, k, v, **mask), o)


def test_rows_that_see_no_key() -> None:
    q, k, v = by_token(5, 2)
    o, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (o[:, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_attention(dtype: Any) -> None:
    q, k, v = by_token(5, 70, dtype=dtype)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    for mask, options in (
        ({"causal": True}, {"causal": True, "q_offset": 65}),
        ({"window_size": (3, 0)}, {"causal": True, "q_offset": 65, "window": 4}),
        ({"window_size": (3, 2)}, {"q_offset": 65, "window": (3, 2)}),
        ({"softcap": 2.0, "alibi_slopes": SLOPES}, {"q_offset": 65, "softcap": 2.0, "alibi_slopes": SLOPES}),
        ({}, {}),
    ):
        o, lse, _ = fa.flash_attn_func(q, k, v, softmax_scale=0.3, return_attn_probs=True, **mask)
        expected, expected_lse = tt.attention(*heads, scale=0.3, return_lse=True, **options)
        same_bits((o, lse), (expected.transpose(1, 2), expected_lse))


def test_rows_beyond_the_keys_move_no_bit_where_no_position_matters() -> None:
    q, k, v = by_token(130, 70)
    same_bits(fa.flash_attn_func(q, k, v)[:, -3:].contiguous(), fa.flash_attn_func(q[:, -3:], k, v))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed(mask: dict[str, Any]) -> None:
    qkv = torch.randn(2, 9, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.unbind(2)
    expected = fa.flash_attn_func(q, k, v, 0.0, 0.3, return_attn_probs=True, **mask)
    same_bits(fa.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, return_attn_probs=True, **mask), expected)
    same_bits(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, 0.3, return_attn_probs=True, **mask), expected)
    with pytest.raises(ValueError, match=r"qkv must have 3 on axis 2, got shape \(2, 9, 2, 4, 16\)"):
        fa.flash_attn_qkvpacked_func(qkv[:, :, 1:])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen(mask: dict[str, Any], paged: bool) -> None:
    parts = [by_token(Tq, Tk, B=1) for Tq, Tk in SIZES]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    starts = [torch.tensor([0, *(size[i] for size in SIZES)]).cumsum(0).to(torch.int32) for i in (0, 1)]
    options: dict[str, Any] = {"return_attn_probs": True, **of_sequence(mask, 0, len(SIZES))}
    if paged:
        k, v, options["block_table"] = paged_cache([part[1][0] for part in parts], [part[2][0] for part in parts])
    o, lse, _ = fa.flash_attn_varlen_func(q, k, v, *starts, 130, 70, **options)
    for b, (part, begin, end) in enumerate(zip(parts, starts[0][:-1], starts[0][1:], strict=True)):
        expected, expected_lse, _ = fa.flash_attn_func(*part, return_attn_probs=True, **of_sequence(mask, b))
        same_bits(o[begin:end], expected[0])
        same_bits(lse[:, begin:end], expected_lse[0])
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the longest sequence, 130, got 129"):
        fa.flash_attn_varlen_func(q, k, v, *starts, 129, 70, **options)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest sequence, 70, got 69"):
        fa.flash_attn_varlen_func(q, k, v, *starts, 130, 69, **options)


def paged_cache(keys: list[Any], values: list[Any], page_size: int = 16, room: int = 0) -> tuple[Any, Any, Any]:
    """Pages of keys and of values, in no order, NaN where there is none; and the block table, with room for more."""
    counts = [-(-(len(x) + room) // page_size) for x in keys]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
    table = torch.full((len(keys), max(counts)), -1, dtype=torch.int32)
    pages = [torch.full((sum(counts), page_size, *x[0].shape[1:]), torch.nan) for x in (keys, values)]
    first = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[first : first + count]
        for page, x in zip(pages, (keys[b], values[b]), strict=True):
            for j in range(len(x)):
                page[table[b, j // page_size], j % page_size] = x[j]
        first += count
    return *pages, table


LENGTHS = [40, 17, 0]
LEFT = [3, 17, 0]


class Cache:
    """A cache of sequences of LENGTHS, 3 new tokens for each, and what it must hold afterwards."""

    def __init__(self, kind: str, new: int = 3) -> None:
        self.q, self.k, self.v = by_token(4, new, B=3)
        _, k, v = by_token(1, 48, B=3)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        self.options: dict[str, Any] = {"cache_seqlens": self.lengths}
        old = [[x[b, :n] for b, n in enumerate(LENGTHS)] for x in (k, v)]
        left = LEFT if kind == "leftpad" else [0, 0, 0]
        self.whole = [
            [torch.cat([x[b], fresh[b]])[left[b] :] for b in range(3)]
            for x, fresh in zip(old, (self.k, self.v), strict=True)
        ]
        for x in (k, v):
            for b, n in enumerate(LENGTHS):
                x[b, n:], x[b, : left[b]] = torch.nan, torch.nan
        self.k_cache, self.v_cache = k, v
        if kind == "paged":
            self.k_cache, self.v_cache, self.options["block_table"] = paged_cache(*old, room=new)
        elif kind == "batch_idx":
            self.k_cache, self.v_cache = (torch.cat([x[:1] * torch.nan, x.flip(0)]) for x in (k, v))
            self.options["cache_batch_idx"] = torch.tensor([3, 2, 1], dtype=torch.int32)
        elif kind == "leftpad":
            self.options["cache_leftpad"] = torch.tensor(left, dtype=torch.int32)

    def held(self, lengths: Any) -> list[list[Any]]:
        """The tokens of each sequence, read one by one."""
        found = []
        left = self.options.get("cache_leftpad", torch.zeros(3, dtype=torch.int32)).tolist()
        for cache in (self.k_cache, self.v_cache):
            rows = []
            for b, n in enumerate(lengths):
                table, idx = self.options.get("block_table"), self.options.get("cache_batch_idx")
                one = [
                    cache[table[b, j // 16], j % 16] if table is not None else cache[b if idx is None else idx[b], j]
                    for j in range(left[b], n)
                ]
                rows.append(torch.stack(one))
            found.append(rows)
        return found


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["dense", "paged", "batch_idx", "leftpad"])
def test_cache_with_new_tokens(kind: str, mask: dict[str, Any]) -> None:
    cache = Cache(kind)
    before = cache.k_cache.clone()
    o, lse = fa.flash_attn_with_kvcache(
        cache.q, cache.k_cache, cache.v_cache, cache.k, cache.v, return_softmax_lse=True, **cache.options,
        **of_sequence(mask, 0, 3),
    )  # fmt: skip
    assert o.is_contiguous()
    assert cache.held([n + 3 for n in LENGTHS])[0][0].isfinite().all()
    for b, (k, v) in enumerate(zip(*cache.whole, strict=True)):
        expected, expected_lse, _ = fa.flash_attn_func(
            cache.q[b : b + 1], k[None], v[None], return_attn_probs=True, **of_sequence(mask, b)
        )
        same_bits((o[b], lse[b]), (expected[0], expected_lse[0]))
    for held, whole in zip(cache.held([n + 3 for n in LENGTHS]), cache.whole, strict=True):
        for x, y in zip(held, whole, strict=True):
            same_bits(x, y)
    changed = (cache.k_cache.view(torch.int32) != before.view(torch.int32)).any(-1).any(-1)
    assert int(changed.sum()) == 3 * 3, "something else in the cache was written"
    # and without new tokens: the same cache, read again
    cache.options["cache_seqlens"] = cache.lengths + 3
    again = fa.flash_attn_with_kvcache(
        cache.q, cache.k_cache, cache.v_cache, return_softmax_lse=True, **cache.options, **of_sequence(mask, 0, 3)
    )
    same_bits(again, (o, lse))


def test_cache_of_one_length() -> None:
    q, k, v = by_token(2, 70)
    expected = fa.flash_attn_func(q, k[:, :30], v[:, :30], causal=True)
    same_bits(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=30, causal=True), expected)
    fresh = k[:, 28:30].clone(), v[:, 28:30].clone()
    k[:, 28:], v[:, 28:] = torch.nan, torch.nan
    same_bits(fa.flash_attn_with_kvcache(q, k, v, *fresh, cache_seqlens=28, causal=True), expected)
    q, k, v = by_token(2, 64)
    full = fa.flash_attn_func(q, k, v, causal=True)
    same_bits(fa.flash_attn_with_kvcache(q, k, v, causal=True), full)
    pages = [x.reshape(8, 16, *x.shape[2:]) for x in (k, v)]
    table = torch.arange(8).view(2, 4)
    same_bits(fa.flash_attn_with_kvcache(q, *pages, block_table=table, causal=True), full)


@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"softmax_scale": float("nan")}, ValueError, "scale must be finite"),  # found by the core, after the writing
        ({"cache_seqlens": torch.tensor([46, 46, 46])}, ValueError, "cache_seqlens must leave room for 3 new tokens"),
        ({"cache_seqlens": torch.tensor([0, -1, 0])}, ValueError, "cache_seqlens must leave room for 3 new tokens"),
        ({"cache_seqlens": None}, ValueError, "k, v and cache_seqlens must be given together"),
        ({"v": None}, ValueError, "k, v and cache_seqlens must be given together"),
        ({"k": torch.ones(3, 3, 2, 15)}, ValueError, r"k must have shape \(3, 'new', 2, 16\), got \(3, 3, 2, 15\)"),
        ({"v": torch.ones(3, 2, 2, 24)}, ValueError, r"v must have shape .* got \(3, 2, 2, 24\)"),
        ({"v": torch.ones(3, 3, 2, 24).half()}, TypeError, "v must be a tensor of torch.float32"),
        ({"k": torch.ones(3, 3, 2, 16).requires_grad_()}, NotImplementedError, "k requires a gradient"),
        ({"rotary_cos": torch.ones(3)}, NotImplementedError, "rotary_cos is not supported"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must have shape \(4,\) or \(3, 4\), got \(3,\)"),
    ],
)
def test_a_call_that_fails_leaves_the_cache(
    kind: str, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    cache = Cache(kind)
    before = cache.k_cache.clone(), cache.v_cache.clone()
    given = {"k": cache.k, "v": cache.v, **cache.options, **changes}
    with pytest.raises(error, match=words):
        fa.flash_attn_with_kvcache(cache.q, cache.k_cache, cache.v_cache, **given)
    same_bits((cache.k_cache, cache.v_cache), before)


def test_pages_that_are_not_there() -> None:
    cache = Cache("paged")
    before = cache.k_cache.clone(), cache.v_cache.clone()
    for page in (-1, len(cache.k_cache)):
        cache.options["block_table"][2, 0] = page
        with pytest.raises(ValueError, match="a page of a new token must lie in"):
            fa.flash_attn_with_kvcache(cache.q, cache.k_cache, cache.v_cache, cache.k, cache.v, **cache.options)
    same_bits((cache.k_cache, cache.v_cache), before)


def test_tables_that_cannot_be_combined() -> None:
    cache = Cache("paged")
    with pytest.raises(NotImplementedError, match="cannot be given together"):
        fa.flash_attn_with_kvcache(
            cache.q, cache.k_cache, cache.v_cache, cache_leftpad=torch.zeros(3, dtype=torch.int32), **cache.options
        )
    with pytest.raises(TypeError, match=r"block_table must be an int32 or int64 tensor, got torch\.float32"):
        fa.flash_attn_with_kvcache(
            cache.q, cache.k_cache, cache.v_cache, cache_seqlens=1, block_table=cache.options["block_table"].float()
        )
    with pytest.raises(TypeError, match="cache_seqlens must be an int or a tensor of integers, got float"):
        fa.flash_attn_with_kvcache(cache.q, cache.k_cache, cache.v_cache, cache_seqlens=1.0)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"dropout_p": 0.1}, NotImplementedError),
        ({"softcap": -30.0}, ValueError),
        ({"alibi_slopes": torch.ones(3)}, ValueError),
        ({"alibi_slopes": torch.ones(4).double()}, TypeError),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, NotImplementedError),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_refused_by_name(name: str, option: dict[str, Any], error: type[Exception]) -> None:
    q, k, v = by_token(5, 5)
    given: list[Any] = [q, k, v]
    if name == "flash_attn_varlen_func":
        given = [x.flatten(0, 1) for x in given] + [torch.tensor([0, 5, 10])] * 2 + [5, 5]
    if name == "flash_attn_with_kvcache" and "dropout_p" in option:
        pytest.skip("it has no dropout")
    (argument,) = option
    with pytest.raises(error, match=argument):
        getattr(fa, name)(*given, **option)


def test_axes_are_named() -> None:
    q, k, v = by_token(5, 5)
    with pytest.raises(ValueError, match=r"k must have 4 axes, got shape \(5, 2, 16\)"):
        fa.flash_attn_func(q, k[0], v)
    with pytest.raises(TypeError, match="v must be a tensor of PyTorch, got ndarray"):
        fa.flash_attn_func(q, k, v.numpy())
    with pytest.raises(ValueError, match="the last axis of q must be contiguous"):
        fa.flash_attn_func(q.repeat_interleave(2, -1)[..., ::2], k, v)


def test_what_changes_nothing() -> None:
    q, k, v = by_token(5, 70)
    same_bits(fa.flash_attn_func(q, k, v, deterministic=True), fa.flash_attn_func(q, k, v))
    expected = fa.flash_attn_with_kvcache(q, k, v)
    same_bits(fa.flash_attn_with_kvcache(q, k, v, num_splits=3, rotary_interleaved=False), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about itself
def test_compiles_as_one_graph() -> None:
    q, k, v = by_token(5, 70)
    starts = torch.tensor([0, 5, 10]), torch.tensor([0, 70, 140])

    def layer(q: Any, k: Any, v: Any) -> Any:
        dense = fa.flash_attn_func(q, k, v, window_size=(7, 2), softcap=3.0, alibi_slopes=SLOPES)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        ragged = fa.flash_attn_varlen_func(*rows, *starts, 5, 70, causal=True)
        cached = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([30, 4]), causal=True)
        return dense, ragged, cached

    torch.compiler.reset()
    same_bits(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v), layer(q, k, v))
    torch.compiler.reset()
