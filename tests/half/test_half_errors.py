"""What half types refuse: the class, the words, and nothing touched before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.half.halves import BF16, F16, HALVES, ml_dtypes
from tests.serving.batches import assert_same, poisoned, untouched
from tests.support import inputs
from tilewise.arguments import BFLOAT16

Q, K, V = inputs(1, 2, 1, 3, 4, 8, 5)
O_SHAPE, LSE_SHAPE = (1, 2, 3, 5), (1, 2, 3)
every_half = pytest.mark.parametrize("half", HALVES, ids=lambda t: t.name)


def dense(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return tw.attention(q, k, v, **options)


def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
    arrays = [x[0].swapaxes(0, 1) if isinstance(x, np.ndarray) else x for x in (q, k, v)]
    return tw.attention_varlen(*arrays, cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 4], **options)


def paged(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The four keys are four pages."""
    k, v = (x.transpose(2, 0, 1, 3) if isinstance(x, np.ndarray) else x for x in (k, v))
    return tw.attention_paged(q, k, v, block_table=np.arange(4)[None], kv_len=4, **options)


def partial(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return tw.attention_partial(q, k, v, k_offset=0, **options).finish()[0]


CALLS = {"dense": dense, "varlen": varlen, "paged": paged, "partial": partial}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


def at_odd_address(x: Any) -> Any:
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


OTHERS: dict[str, Any] = {
    "float64": lambda x: x.astype(np.float64),
    "longdouble": lambda x: x.astype(np.longdouble),
    "int16": lambda x: x.astype(np.int16),
    "uint16": lambda x: x.astype(np.float16).view(np.uint16),
    "2 bytes": lambda x: x.astype(np.float16).view("V2"),
    "float16 in the other byte order": lambda x: x.astype(np.float16).astype(np.dtype(np.float16).newbyteorder()),
    "bits in the other byte order": lambda x: x.astype(np.float16).view(
        [("bfloat16", np.dtype(np.uint16).newbyteorder())]
    ),
    "bits under another name": lambda x: x.astype(np.float16).view([("float16", np.uint16)]),
    "signed bits": lambda x: x.astype(np.float16).view([("bfloat16", np.int16)]),
    "two fields": lambda x: x.view([("bfloat16", np.uint16), ("rest", np.uint16)]),
    "objects": lambda x: x.astype(object),
    "text": lambda x: x.astype("S2"),
    "list": lambda x: x.astype(np.float16).tolist(),
}  # fmt: skip
if ml_dtypes is not None:
    OTHERS |= {
        "float8": lambda x: x.astype(ml_dtypes.float8_e4m3fn),
        "bfloat16 in the other byte order": lambda x: x.astype(ml_dtypes.bfloat16).astype(
            np.dtype(ml_dtypes.bfloat16).newbyteorder()
        ),
    }


@every_call
@pytest.mark.parametrize("wrong", OTHERS)
@pytest.mark.parametrize("name", "qkv")
def test_other_types(call: Any, wrong: str, name: str) -> None:
    given = {"q": Q, "k": K, "v": V, name: OTHERS[wrong]({"q": Q, "k": K, "v": V}[name])}
    with pytest.raises(TypeError, match=rf"{name}.* must be a?\s?float32, float16 or bfloat16"):
        call(given["q"], given["k"], given["v"])


@every_half
def test_signs_of_float32_alone(half: Any) -> None:
    """sinks and lse are float32, whatever the others are."""
    q, k, v = (half.rounded(x) for x in (Q, K, V))
    out = poisoned(O_SHAPE, half.dtype)
    for name, x in (
        ("sinks", half.rounded(np.zeros(2, np.float32))),
        ("lse", half.rounded(np.zeros(LSE_SHAPE, np.float32))),
    ):
        with pytest.raises(TypeError, match=f"{name} must be float32"):
            tw.attention(q, k, v, out=out, **{name: x})
        assert untouched(out)
    whole = tw.attention_partial(q, k, v, k_offset=0)
    with pytest.raises(TypeError, match="sinks must be"):
        tw.merge([whole], sinks=half.rounded(np.zeros(2, np.float32)))


@pytest.mark.parametrize("wrong", [name for name in OTHERS if name != "list"])
def test_types_of_out(wrong: str) -> None:
    out = OTHERS[wrong](np.ones(O_SHAPE, np.float32))
    before, lse = out.tobytes(), poisoned(LSE_SHAPE)
    with pytest.raises(TypeError, match="out must be float32, float16 or bfloat16 in native byte order"):
        tw.attention(*(F16.rounded(x) for x in (Q, K, V)), out=out, lse=lse)
    assert out.tobytes() == before
    assert untouched(lse)


@every_half
@pytest.mark.parametrize("name", "qkv")
def test_layouts_that_are_refused(half: Any, name: str) -> None:
    arrays = {n: half.rounded(x) for n, x in (("q", Q), ("k", K), ("v", V))}
    x, out = arrays[name], poisoned(O_SHAPE, half.dtype)
    for wrong, words in (
        (np.repeat(x, 2, 3)[..., ::2], f"last axis of {name} must be contiguous .stride 2 bytes, got 4"),
        (x[..., ::-1], f"last axis of {name} must be contiguous"),
        (x[0], f"{name} must have 4 axes"),
        (np.ma.masked_array(x), f"{name} is a masked array"),
    ):
        with pytest.raises((tw.InvalidArgument, tw.ShapeError, TypeError), match=words):
            tw.attention(**{**arrays, name: wrong}, out=out)
        assert untouched(out)


@pytest.mark.parametrize("half", HALVES, ids=lambda t: t.name)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_odd_addresses(half: Any, name: str) -> None:
    arrays = {n: half.rounded(x) for n, x in (("q", Q), ("k", K), ("v", V), ("out", np.zeros(O_SHAPE, np.float32)))}
    with pytest.raises(tw.InvalidArgument, match=f"{name} is not aligned to its 2-byte elements"):
        tw.attention(**{**arrays, name: at_odd_address(arrays[name])})


@every_half
def test_odd_strides(half: Any) -> None:
    """Rows 5 elements and a byte apart."""
    room = np.zeros(200, np.uint8).view(half.dtype)
    q = np.lib.stride_tricks.as_strided(room, (1, 2, 3, 8), (0, 51, 17, 2))
    with pytest.raises(tw.InvalidArgument, match="q is not aligned to its 2-byte elements"):
        tw.attention(q, half.rounded(K), half.rounded(V))


@every_half
def test_overlaps_of_other_types(half: Any) -> None:
    """out of one type over an input of another, or over half of one."""
    memory = np.zeros(64, np.float32)
    q = memory[:48].reshape(1, 2, 3, 8)
    q[...] = Q
    before = memory.tobytes()
    for start in (0, 20, 95 - 29, 95):
        out = memory.view(half.dtype)[start : start + 30].reshape(O_SHAPE)
        with pytest.raises(tw.InvalidArgument, match="out overlaps q"):
            tw.attention(q, half.rounded(K), half.rounded(V), out=out)
        assert memory.tobytes() == before
    out = memory.view(half.dtype)[96 : 96 + 30].reshape(O_SHAPE)
    assert tw.attention(q, half.rounded(K), half.rounded(V), out=out) is out


@every_half
def test_good_types_after_others(half: Any) -> None:
    """What is remembered of a call is of its types: float32, then half, then float32, in arrays of the same shapes."""
    q, k, v = (half.rounded(x) for x in (Q, K, V))
    wide = [half.values(x).reshape(x.shape) for x in (q, k, v)]
    expected = tw.attention(*wide)
    for _ in range(2):
        assert_same(tw.attention(q, k, v), half.rounded(expected))
        assert_same(tw.attention(*wide), expected)
        assert_same(tw.attention(wide[0], k, v), expected)
        assert_same(tw.attention(q, wide[1], v), half.rounded(expected))
        other = BF16 if half is F16 else F16
        mixed = other.rounded(wide[1])
        assert_same(
            tw.attention(q, mixed, v),
            half.rounded(tw.attention(wide[0], other.values(mixed).reshape(mixed.shape), wide[2])),
        )


@pytest.mark.skipif(ml_dtypes is None, reason="needs ml_dtypes")
def test_partials_of_one_bfloat16_in_two_dtypes() -> None:
    """from_bytes gives the dtype of ml_dtypes where that is loaded; it is the same type."""
    q, k, v = (np.ascontiguousarray(x).astype(ml_dtypes.bfloat16).view(BFLOAT16) for x in (Q, K, V))
    first = tw.attention_partial(q, k[:, :, :2], v[:, :, :2], k_offset=0, bc=2, span=2)
    second = tw.attention_partial(q, k[:, :, 2:], v[:, :, 2:], k_offset=2, bc=2, span=2)
    merged = tw.merge([first, tw.Partial.from_bytes(second.to_bytes())])
    assert (merged.finish()[0].view(np.uint16) == tw.attention(q, k, v, bc=2, span=2).view(np.uint16)).all()
