"""Attention of tensors: the core's bits, the tensors' own memory, clear refusals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.arguments import BFLOAT16
from tilewise.runtime.pool import pool_for

torch = pytest.importorskip("torch")
tt = importlib.import_module("tilewise.torch")
support = importlib.import_module("tests.frontends.support")
assert_same_bits, pages_of, tensors = support.assert_same_bits, support.pages_of, support.tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CAUSAL = {"causal": True, "q_offset": 65}


def as_array(x: Any) -> Any:
    """The same bits as an array of NumPy, by way of integers and a copy: not as the frontend does it."""
    if x.dtype is torch.bfloat16:
        return np.array(x.view(torch.uint16).tolist(), np.uint16).view(BFLOAT16)
    return np.array(x.tolist(), {torch.float32: np.float32, torch.float16: np.float16}[x.dtype])


def as_tensor(x: Any) -> Any:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)


def by_core(function: str, *given: Any, **options: Any) -> Any:
    """What the core makes of copies."""
    result = getattr(tw, function)(*map(as_array, given), **options)
    return tuple(map(as_tensor, result)) if isinstance(result, tuple) else as_tensor(result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        CAUSAL,
        {"causal": True, "window": 9, "q_offset": [65, 20]},
        {"causal": True, "q_offset": [30, 20], "kv_start": [3, 0], "kv_len": [40, 25], "k_offset": [0, 2]},
        {"causal": False, "scale": 0.3, "br": 2, "bc": 32, "span": 64, "sinks": True},
    ],
    ids="-".join,
)
def test_bits_of_the_core(dtype: Any, options: dict[str, Any]) -> None:
    given, options = tensors(dtype=dtype), dict(options)
    if options.pop("sinks", False):
        options["sinks"] = np.linspace(-2, 4, 4, dtype=np.float32)
    expected = by_core("attention", *given, return_lse=True, **options)
    lists = {name: x for name, x in options.items() if isinstance(x, list)}
    options["sinks"] = torch.from_numpy(options["sinks"]) if "sinks" in options else None
    for kind in (list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        numbers = {name: kind(x) for name, x in lists.items()}
        o, lse = tt.attention(*given, return_lse=True, **{**options, **numbers})
        assert o.dtype == dtype
        assert lse.dtype == torch.float32
        assert_same_bits((o, lse), expected)
    assert_same_bits(tt.attention(*given, **options), expected[0])


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "by token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads inside rows": lambda x: torch.stack([x, -x], 3)[:, :, :, 0],
    "every second": lambda x: x.repeat_interleave(2, 0).repeat_interleave(3, 2)[::2, :, 1::3],
    "offset": lambda x: torch.cat([x.new_full((1,), 7.0), x.flatten()])[1:].view(x.shape),
    "one batch": lambda x: x[1:].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_and_no_copy(layout: str, dtype: Any, seen: list[dict[str, Any]]) -> None:
    given = [LAYOUTS[layout](x) for x in tensors(dtype=dtype)]
    expected = by_core("attention", *given, **CAUSAL)
    assert_same_bits(tt.attention(*given, **CAUSAL), expected)
    for name, x in zip("qkv", given, strict=True):
        array = seen[-1][name]
        assert array.__array_interface__["data"][0] == x.data_ptr()
        assert array.strides == tuple(stride * x.itemsize for stride in x.stride())


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_written_in_place(dtype: Any) -> None:
    given = tensors(dtype=dtype)
    memory = torch.zeros((2, 5, 4, 24), dtype=dtype)
    out, lse = memory.transpose(1, 2), torch.zeros((2, 4, 5))
    versions = memory._version, lse._version
    o, l = tt.attention(*given, out=out, lse=lse, **CAUSAL)
    assert o is out
    assert l is lse
    assert_same_bits((o, l), by_core("attention", *given, return_lse=True, **CAUSAL))
    assert memory._version > versions[0], "autograd could use a value that is no longer there"
    assert lse._version > versions[1], "autograd could use a value that is no longer there"
    assert tt.attention(*given, out=out, **CAUSAL) is out


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 1, 5), (2, 4, 1)])
def test_by_token(shape: tuple[int, int, int], seen: list[dict[str, Any]]) -> None:
    B, H, Tq = shape
    given = tensors(B, H, 1, Tq)
    o, lse = tt.attention_by_token(*given, return_lse=True, **CAUSAL)
    if 1 not in (H, Tq):
        assert seen[0]["out"].__array_interface__["data"][0] == o.data_ptr(), "the output was copied"
    expected, expected_lse = tt.attention(*given, return_lse=True, **CAUSAL)
    assert o.is_contiguous()
    assert_same_bits((o, lse), (expected.transpose(1, 2), expected_lse))
    assert_same_bits(tt.attention_by_token(*given, **CAUSAL), o)


VARIANTS: list[dict[str, Any]] = [
    {"softcap": 2.0},
    {"alibi_slopes": torch.linspace(0, 1, 4)},
    {"alibi_slopes": torch.linspace(0, 1, 16).view(4, 4)[::2]},
    {"mask": torch.arange(700).view(2, 5, 70)[:, None] % 3 > 0},
    {"mask": (torch.arange(70) % 3 > 0).expand(2, 4, 5, 70)},
    {"bias": torch.linspace(-2, 2, 5)[:, None]},
    {"bias": torch.linspace(-2, 2, 1400).view(4, 5, 70).to(torch.bfloat16)},
    {"bias": torch.linspace(-2, 2, 350).view(5, 70).half(), "window": (9, 2)},
    {"window": (None, 2)},
    {"score": lambda s, b, h, i, j: s * 0.5 + SHIFT[h, j], "keep": lambda b, h, i, j: j % 5 != b},
]
SHIFT = torch.linspace(-1, 3, 280).view(4, 70)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_variants(variant: dict[str, Any], seen: list[dict[str, Any]]) -> None:
    given = tensors()
    result = tt.attention(*given, q_offset=60, return_lse=True, **variant)
    for name, x in variant.items():
        if isinstance(x, torch.Tensor):
            assert seen[-1][name].__array_interface__["data"][0] == x.data_ptr(), f"{name} was copied"
    arrays = {n: as_any_array(x) if isinstance(x, torch.Tensor) else x for n, x in variant.items()}
    assert_same_bits(result, by_core("attention", *given, q_offset=60, return_lse=True, **arrays))
    plain = tt.attention(*given, q_offset=60)
    assert not torch.equal(result[0], plain)
    assert_same_bits(tt.attention_by_token(*given, q_offset=60, **variant), result[0].transpose(1, 2).contiguous())
    # the same rows and keys in a ragged batch, and in pages
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in given)
    wide = {}
    for name, x in variant.items():
        wide[name] = x
        if name in ("mask", "bias"):  # [H, total_q, keys]
            wide[name] = x.expand(2, 4, 5, x.shape[-1]).transpose(0, 1).flatten(1, 2)
    ends = {"cu_seqlens_q": [0, 5, 10], "cu_seqlens_k": [0, 70, 140]}
    ragged = tt.attention_varlen(q, k, v, **ends, q_offset=60, **wide)
    assert_same_bits(ragged.unflatten(0, (2, 5)).transpose(1, 2).contiguous(), result[0])
    (k_pages, table), (v_pages, _) = pages_of(given[1]), pages_of(given[2])
    paged = {"block_table": table, "kv_len": 70, "q_offset": 60, "return_lse": True}
    assert_same_bits(tt.attention_paged(given[0], k_pages, v_pages, **paged, **variant), result)


def as_any_array(x: Any) -> Any:
    """A copy of any tensor."""
    return np.array(x.tolist()) if x.dtype is torch.bool else as_array(x)


def test_variants_are_checked() -> None:
    given = tensors()
    with pytest.raises(TypeError, match=r"^mask must be bool, got torch\.float32"):
        tt.attention(*given, mask=torch.ones(5, 70))
    with pytest.raises(TypeError, match=r"^bias must be float32, bfloat16 or float16, got torch\.bool"):
        tt.attention(*given, bias=torch.ones(5, 70) > 0)
    with pytest.raises(NotImplementedError, match=r"^bias requires a gradient"):
        tt.attention(*given, bias=torch.nn.Parameter(torch.zeros(5, 70)))
    with pytest.raises(ValueError, match="the last axis of mask must be contiguous"):
        tt.attention(*given, mask=torch.ones(70, 5).T > 0)
    elsewhere = torch.zeros(70, device="meta")
    with pytest.raises(ValueError, match="keep cannot be traced: a captured tensor must be dense and on the CPU"):
        tt.attention(*given, q_offset=0, keep=lambda b, h, i, j: elsewhere[j] > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen(dtype: Any) -> None:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in tensors(dtype=dtype))
    starts = {"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 30, 140]}
    options = {"causal": True, "q_offset": [27, 103], "return_lse": True}
    expected = by_core("attention_varlen", q, k, v, **{n: np.array(x) for n, x in starts.items()}, **options)
    result = tt.attention_varlen(
        q, k, v, **{n: torch.tensor(x, dtype=torch.int32) for n, x in starts.items()}, **options
    )
    assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged(dtype: Any) -> None:
    q, k, v = tensors(dtype=dtype)
    (k_pages, table), (v_pages, _) = pages_of(k), pages_of(v)
    expected = tt.attention(q, k, v, causal=True, q_offset=65, return_lse=True)
    options = {"block_table": table, "kv_len": torch.tensor([70, 70]), "causal": True, "return_lse": True}
    assert_same_bits(tt.attention_paged(q, k_pages, v_pages, **options), expected)
    rows = q.transpose(1, 2).flatten(0, 1)
    o, lse = tt.attention_paged(rows, k_pages, v_pages, cu_seqlens_q=torch.tensor([0, 5, 10]), **options)
    assert_same_bits(o, expected[0].transpose(1, 2).flatten(0, 1))
    assert_same_bits(lse, expected[1].transpose(0, 1).flatten(1))


def test_threads(seen: list[dict[str, Any]]) -> None:
    given, before = tensors(), torch.get_num_threads()
    pool = tw.Pool(2)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            tt.attention(*given)
            assert pool_for(seen[-1]["pool"]).threads == threads
            torch.ops.tilewise.attention(*given)
            assert pool_for(seen[-1]["pool"]).threads == threads
        torch.ops.tilewise.attention(*given, threads=2)
        assert seen[-1]["pool"] == 2
        with tw.config(threads=5):
            tt.attention(*given)
        tt.attention(*given, pool=2)
        tt.attention(*given, pool=pool)
        assert pool_for(seen[-3]["pool"]).threads == 5
        assert [call["pool"] for call in seen[-2:]] == [2, pool]
    finally:
        torch.set_num_threads(before)
        pool.close()


class Subclass(torch.Tensor):
    """A tensor that may mean something else."""


def sparse(x: Any) -> Any:
    return x.to_sparse()


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no tensor": (lambda x: x.numpy(), TypeError, "must be a tensor of PyTorch, got ndarray"),
    "device": (lambda x: x.to("meta"), ValueError, "must be on the CPU, got a tensor on meta"),
    "sparse": (sparse, ValueError, "must be dense, got the layout torch.sparse_coo"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), ValueError, "must be dense, got the layout nested"),
    "complex": (lambda x: x.to(torch.complex64).conj(), TypeError, "got torch.complex64"),
    "negated": (lambda x: torch.complex(x, x).conj().imag, ValueError, "resolve_neg"),
    "float64": (lambda x: x.double(), TypeError, "got torch.float64"),
    "quantised": (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), TypeError, "got torch.qint8"),
    "subclass": (lambda x: x.as_subclass(Subclass), TypeError, "subclass Subclass"),
    "gradient": (lambda x: x.clone().requires_grad_(), NotImplementedError, "no backward pass yet"),
    "parameter": (torch.nn.Parameter, NotImplementedError, "no_grad"),
    "last axis": (lambda x: x.repeat_interleave(2, -1)[..., ::2], ValueError, "last axis of {name} must be contiguous"),
}


@pytest.mark.filterwarnings("ignore")  # of nested and quantised tensors, about themselves
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str, name: str) -> None:
    make, error, words = REFUSED[kind]
    given = dict(zip("qkv", tensors(), strict=True))
    given[name] = make(given[name])
    out, lse = torch.full((2, 4, 5, 24), 7.0), torch.full((2, 4, 5), 7.0)
    with pytest.raises(error, match=words.format(name=name)) as raised:
        tt.attention(**given, **CAUSAL, out=out, lse=lse)
    assert name in str(raised.value).split()
    assert (out == 7).all()
    assert (lse == 7).all()


def test_sinks_and_outputs_are_checked_as_well() -> None:
    given = tensors()
    with pytest.raises(NotImplementedError, match=r"^sinks requires a gradient"):
        tt.attention(*given, sinks=torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(NotImplementedError, match=r"^out requires a gradient"):
        tt.attention(*given, out=torch.zeros((2, 4, 5, 24), requires_grad=True))
    with pytest.raises(TypeError, match=r"^kv_len must be integers on the CPU, got a tensor of torch\.float32"):
        tt.attention(*given, kv_len=torch.ones(2))
    with pytest.raises(ValueError, match="out overlaps q"):
        tt.attention(given[0], given[1], given[1], out=given[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func, about torch.jit
def test_transforms_are_refused() -> None:
    q, k, v = tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match=r"^q has a tangent"):
            tt.attention(dual, k, v)
        tt.attention(q, k, v)
    with pytest.raises(ValueError, match=r"^q has no memory to read, as inside a transform of torch\.func"):
        torch.vmap(lambda x: tt.attention(x, k, v))(q[None])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_nobody_wants(mode: Any) -> None:
    given = tensors()
    expected = tt.attention(*given)
    parameters = [torch.nn.Parameter(x) for x in given]
    with mode():
        o = tt.attention(*parameters, sinks=torch.nn.Parameter(torch.full((4,), -1e30)))
        assert not o.requires_grad
        assert_same_bits(o, expected)
        tt.attention(*given, out=torch.empty_like(o))  # one that inference mode made has no version
