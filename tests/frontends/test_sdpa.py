"""scaled_dot_product_attention means what PyTorch's own does, and is as exact as naive float32."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tt = importlib.import_module("tilewise.torch")
support = importlib.import_module("tests.frontends.support")
theirs = torch.nn.functional.scaled_dot_product_attention

# query, key, value, and whether heads are grouped
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    "4-D": ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), False),
    "more rows than keys": ((2, 3, 9, 16), (2, 3, 4, 16), (2, 3, 4, 16), False),
    "longer than a tile": ((1, 2, 130, 16), (1, 2, 130, 16), (1, 2, 130, 16), False),
    "Dv is not D": ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 24), False),
    "2-D": ((5, 16), (7, 16), (7, 24), False),
    "3-D": ((3, 5, 16), (3, 7, 16), (3, 7, 16), False),
    "5-D": ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 8), False),
    "6-D": ((2, 1, 3, 2, 5, 16), (2, 1, 3, 2, 7, 16), (2, 1, 3, 2, 7, 16), False),
    "grouped": ((2, 6, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), True),
    "grouped 3-D": ((6, 5, 16), (2, 7, 16), (2, 7, 16), True),
    "grouped 5-D": ((3, 2, 6, 5, 16), (3, 2, 2, 7, 16), (3, 2, 2, 7, 16), True),
    "one head for all": ((2, 3, 5, 16), (2, 1, 7, 16), (2, 1, 7, 16), False),
    "one key head, three value heads": ((2, 3, 5, 16), (2, 1, 7, 16), (2, 3, 7, 16), False),
    "one query head": ((2, 1, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), False),
    "one batch of keys": ((4, 3, 5, 16), (1, 3, 7, 16), (1, 3, 7, 16), False),
    "one batch of queries": ((1, 3, 5, 16), (4, 3, 7, 16), (4, 3, 7, 16), False),
    "axes of two kinds": ((2, 1, 3, 5, 16), (1, 4, 3, 7, 16), (2, 4, 3, 7, 16), False),
    "no row": ((2, 3, 0, 16), (2, 3, 7, 16), (2, 3, 7, 16), False),
    "no batch": ((0, 3, 5, 16), (0, 3, 7, 16), (0, 3, 7, 16), False),
}


def given(shape: str) -> tuple[list[Any], dict[str, Any]]:
    *shapes, grouped = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(s, generator=generator) for s in shapes], {"enable_gqa": grouped}


def naive(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None, enable_gqa: bool) -> Any:
    """The definition in float32, a matrix at a time."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(s, -1) @ v


def test_signature_is_pytorchs() -> None:
    # theirs has no signature that `inspect` could read; this is the documented one
    assert str(inspect.signature(tt.scaled_dot_product_attention)) == (
        "(query: 'Any', key: 'Any', value: 'Any', attn_mask: 'Any' = None, dropout_p: 'float' = 0.0, "
        "is_causal: 'bool' = False, scale: 'float | None' = None, enable_gqa: 'bool' = False) -> 'Any'"
    )


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_meaning_of_pytorchs(shape: str, is_causal: bool, scale: float | None) -> None:
    tensors, options = given(shape)
    options.update(is_causal=is_causal, scale=scale)
    o = tt.scaled_dot_product_attention(*tensors, **options)
    exact = theirs(*(x.double() for x in tensors), **options)
    assert theirs(*tensors, **options).shape == o.shape
    support.assert_as_accurate_as_naive(o, exact, naive(*tensors, **options))


# attn_mask of a call [2, 3, 130, 16] x [2, 3, 90, 16]: shapes that are broadcast, and how they lie
MASKS: dict[str, tuple[tuple[int, ...], Any]] = {
    "rows and keys": ((130, 90), None),
    "all axes": ((2, 3, 130, 90), None),
    "sequences": ((2, 1, 1, 90), None),
    "heads": ((3, 1, 90), None),
    "rows only": ((130, 1), None),
    "one": ((1, 1), None),
    "expanded": ((1, 90), lambda x: x.expand(2, 3, 130, 90)),
    "part": ((2, 3, 140, 100), lambda x: x[..., 5:135, 7:97]),
    "heads inside rows": ((2, 130, 3, 90), lambda x: x.transpose(1, 2)),
    "rows backwards": ((90, 2, 3, 130), lambda x: x.permute(1, 2, 3, 0).contiguous()),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, dtype: Any, seen: list[dict[str, Any]]) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, T, 16, generator=generator) for T in (130, 90, 90))
    shape, layout = MASKS[kind]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    hidden = (numbers > 0.8) | (numbers.cumsum(-1) > 7)
    mask = ~hidden if dtype is torch.bool else numbers.masked_fill(hidden, -torch.inf).to(dtype)
    mask = layout(mask) if layout else mask
    o = tt.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wide = mask if dtype is torch.bool else mask.double()
    exact = theirs(q.double(), k.double(), v.double(), attn_mask=wide)
    plain = theirs(q, k, v, attn_mask=mask if dtype is torch.bool else mask.float())
    support.assert_as_accurate_as_naive(o, exact, plain)
    (call,) = seen
    array = call["mask" if dtype is torch.bool else "bias"]
    assert array.__array_interface__["data"][0] == mask.data_ptr(), "the mask was copied"
    if dtype is torch.bool:  # one meaning, the same bits
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        support.assert_same_bits(tt.scaled_dot_product_attention(q, k, v, attn_mask=bias), o)


def test_a_row_that_a_mask_hides_is_0() -> None:
    (q, k, v), _ = given("4-D")
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    o = tt.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (o[:, :, 2] == 0).all()
    support.assert_as_accurate_as_naive(o, theirs(q.double(), k.double(), v.double(), attn_mask=mask), o)
    v[:, :, 3], mask[:, 3] = torch.nan, False  # and what is hidden enters no arithmetic
    assert tt.scaled_dot_product_attention(q, k, v, attn_mask=mask).isfinite().all()


@pytest.mark.parametrize(
    "shape", ["3-D", "2-D", "5-D", "grouped", "grouped 5-D", "one head for all", "axes of two kinds"]
)
@pytest.mark.parametrize("axes", ["all", "last"])
def test_masks_of_other_ranks(shape: str, axes: str) -> None:
    tensors, options = given(shape)
    weights = (*theirs(*tensors, **options).shape[:-1], tensors[1].shape[-2])
    mask = torch.rand(weights if axes == "all" else weights[-2:], generator=torch.Generator().manual_seed(4)) < 0.7
    o = tt.scaled_dot_product_attention(*tensors, attn_mask=mask, **options)
    exact = theirs(*(x.double() for x in tensors), attn_mask=mask, **options)
    support.assert_as_accurate_as_naive(o, exact, theirs(*tensors, attn_mask=mask, **options))


def test_no_key() -> None:
    o = tt.scaled_dot_product_attention(torch.ones(2, 3, 5, 16), torch.ones(2, 3, 0, 16), torch.ones(2, 3, 0, 8))
    assert torch.equal(o, torch.zeros(2, 3, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_attention(dtype: Any) -> None:
    q, k, v = support.tensors(dtype=dtype)
    o = tt.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    support.assert_same_bits(o, tt.attention(q, k, v, causal=True, q_offset=0, scale=0.3))


@pytest.mark.parametrize(("shape", "calls"), [("5-D", 1), ("grouped 5-D", 1), ("axes of two kinds", 2)])
def test_axes_are_folded_where_they_can_be_views(shape: str, calls: int, seen: list[dict[str, Any]]) -> None:
    tensors, options = given(shape)
    tt.scaled_dot_product_attention(*tensors, **options)
    assert len(seen) == calls
    memory = [x.untyped_storage() for x in tensors]
    for call in seen:
        for name, storage in zip("qkv", memory, strict=True):
            address = call[name].__array_interface__["data"][0]
            assert storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes(), f"{name} was copied"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 0.1}, "^dropout_p must be 0"),
        ({"attn_mask": torch.zeros(5, 7, requires_grad=True)}, "^attn_mask requires a gradient"),
        (
            {"attn_mask": torch.zeros(5, 7).double()},
            "^attn_mask must be bool, float32, .* got torch.float64",
        ),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.uint8)}, "^attn_mask must be bool, .* got torch.uint8"),
        ({"attn_mask": [[True]]}, "^attn_mask must be a tensor of PyTorch, got list"),
        ({"attn_mask": torch.zeros(5, 7), "is_causal": True}, "^attn_mask and is_causal cannot be given together"),
        (
            {"attn_mask": torch.zeros(7, 5).T},
            r"^the last axis of attn_mask .* strides \(1, 5\): .*contiguous\(\)",
        ),
        ({"attn_mask": torch.zeros(5, 6)}, r"^attn_mask must be broadcastable to \(2, 3, 5, 7\), got shape \(5, 6\)"),
        ({"attn_mask": torch.zeros(2, 2, 3, 5, 7)}, "^attn_mask must be broadcastable to"),
    ],
)
def test_refused_by_name(options: dict[str, Any], words: str) -> None:
    tensors, _ = given("4-D")
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=words):
        tt.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)), {"enable_gqa": True}),  # 3 is no multiple of 2
        (((2, 6, 5, 16), (2, 2, 7, 16), (2, 3, 7, 16)), {"enable_gqa": True}),
        (((2, 6, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)), {}),  # not grouped
        (((2, 3, 5, 16), (4, 3, 7, 16), (4, 3, 7, 16)), {}),
        (((2, 3, 5, 16), (2, 3, 7, 8), (2, 3, 7, 16)), {}),
        (((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 6, 16)), {}),
        (((16,), (7, 16), (7, 16)), {}),
    ],
)
def test_axes_that_do_not_fit(shapes: tuple[Any, ...], options: dict[str, Any]) -> None:
    tensors = [torch.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=r"\(\d+,"):  # the shapes that came
        tt.scaled_dot_product_attention(*tensors, **options)


def test_gradients_are_refused() -> None:
    tensors, _ = given("5-D")
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        tt.scaled_dot_product_attention(tensors[0].requires_grad_(), *tensors[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about itself
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", ["3-D", "grouped 5-D", "axes of two kinds"])
def test_compiles_as_one_graph(shape: str, masked: bool) -> None:
    tensors, options = given(shape)
    options.update({"attn_mask": torch.ones(5, 7).tril() > 0} if masked else {"is_causal": True})
    torch.compiler.reset()
    run = torch.compile(lambda *x: tt.scaled_dot_product_attention(*x, **options), fullgraph=True, backend="aot_eager")
    support.assert_same_bits(run(*tensors), tt.scaled_dot_product_attention(*tensors, **options))
    torch.compiler.reset()
