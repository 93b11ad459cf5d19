"""ONNX's Attention: its own node cases through the ReferenceEvaluator, and the function against the definition."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tilewise as tw
import tilewise.onnx as to
from tests.support import assert_same_bits, inputs
from tilewise.arguments import BFLOAT16

HAS_ONNX = importlib.util.find_spec("onnx") is not None
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx is not installed")
U = 2.0**-24
ROUNDED = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the largest value, by the output's type
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "onnx.md"


class Exact(NamedTuple):
    """What the operator's definition gives in float64: Y, how far float32 may be from it, and the qk outputs."""

    Y: Any
    bound: Any
    qk: Any  # [4, B, H, Tq, N], by mode


def definition(
    Q: Any, K: Any, V: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, q_num_heads: Any = None, kv_num_heads: Any = None,
    left_window_size: int = -1, right_window_size: int = -1, scale: Any = None, softcap: float = 0.0, **_: Any,
) -> Exact:  # fmt: skip
    """The specification's text, row by row, and only over what a row sees."""
    three = Q.ndim == 3
    heads = (q_num_heads, kv_num_heads, kv_num_heads) if three else (0, 0, 0)
    q, k, v = (by_head(x.astype(float), n) if n else x.astype(float) for x, n in zip((Q, K, V), heads, strict=True))
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = np.concatenate([past_key.astype(float), k], 2), np.concatenate([past_value.astype(float), v], 2)
    (B, H, Tq, D), (Hkv, N, Dv) = q.shape, v.shape[1:]
    scale = D**-0.5 if scale is None else scale
    allowed, bias = np.ones((B, H, Tq, N), bool), np.zeros((B, H, Tq, N))
    if attn_mask is not None:
        width = attn_mask.shape[-1]
        allowed[..., width:] = False
        if attn_mask.dtype == bool:
            allowed[..., :width] = attn_mask
        else:
            bias[..., :width] = attn_mask.astype(float)
            allowed &= bias > -np.inf
    Y, bound, qk = np.zeros((B, H, Tq, Dv)), np.zeros((B, H, Tq, Dv)), np.zeros((4, B, H, Tq, N))
    for b, h, i in np.ndindex(B, H, Tq):
        keys, values = k[b, h // (H // Hkv)], v[b, h // (H // Hkv)]
        n = N if nonpad_kv_seqlen is None else int(nonpad_kv_seqlen[b])
        p, j = (past if nonpad_kv_seqlen is None else n - Tq) + i, np.arange(N)
        sees = allowed[b, h, i] & (j < n)
        sees &= (j <= p) | (not is_causal)
        sees &= (j >= p - left_window_size) | (left_window_size < 0)
        sees &= (j <= p + right_window_size) | (right_window_size < 0)
        with np.errstate(invalid="ignore"):
            raw = keys @ q[b, h, i] * scale
            capped = softcap * np.tanh(raw / softcap) if softcap else raw
        s = capped[sees] + bias[b, h, i, sees]
        masked, P = np.full(N, -np.inf), np.zeros(N)
        masked[sees] = s
        if sees.any():
            P[sees] = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
            sizes = abs(scale) * (np.abs(keys[sees]) @ np.abs(q[b, h, i])) + np.abs(bias[b, h, i, sees])
            weight = np.expm1((D + 12) * U * (sizes + sizes.max()) + 8 * U * softcap).max() + 16 * U
            Y[b, h, i] = P[sees] @ values[sees]
            bound[b, h, i] = (2 * weight + (len(s) + 8) * U) * (P[sees] @ np.abs(values[sees])) + 1e-37
        qk[:, b, h, i] = raw, capped, masked, P
    if three:
        Y, bound = (x.transpose(0, 2, 1, 3).reshape(B, Tq, H * Dv) for x in (Y, bound))
    return Exact(Y, bound, qk)


def by_head(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def by_token(x: Any) -> Any:
    """[B, H, T, D] as [B, T, H * D]."""
    B, H, T, D = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(B, T, H * D)


def assert_near(Y: Any, exact: Exact) -> None:
    assert Y.shape == exact.Y.shape
    rounding = ROUNDED[Y.dtype.name] * np.abs(exact.Y).max(initial=0)
    over = np.abs(Y.astype(float) - exact.Y) - exact.bound - rounding
    assert (over <= 0).all(), f"an error passes its bound by {np.nanmax(over)}, or is NaN"


# The node cases of onnx


class NodeCase(NamedTuple):
    name: str
    model: Any
    feeds: dict[str, Any]  # by the graph's names
    given: dict[str, Any]  # by the operator's names, its attributes among them
    outputs: list[Any]
    rtol: float
    atol: float


def node_cases() -> list[NodeCase]:
    if not HAS_ONNX:
        return []
    from onnx import helper, numpy_helper
    from onnx.backend.test.case.node import collect_testcases

    def array(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else numpy_helper.to_array(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cases of other operators
        collected = collect_testcases("Attention")
    cases = []
    for case in collected:
        node = case.model.graph.node[0]
        if node.op_type != "Attention" or case.name.endswith("_expanded"):
            continue
        ((fed, expected),) = case.data_sets
        feeds = dict(zip([x.name for x in case.model.graph.input], map(array, fed), strict=True))
        given = {key: feeds[name] for key, name in zip(INPUTS, node.input, strict=False) if name}
        given |= {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        cases.append(NodeCase(case.name, case.model, feeds, given, list(map(array, expected)), case.rtol, case.atol))
    return cases


CASES = node_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)  # none: skipped


@needs_onnx
def test_no_case_is_missing() -> None:
    onnx = pytest.importorskip("onnx")
    if onnx.__version__ != "1.23.2":
        pytest.skip("the cases are counted in onnx 1.23.2")
    assert Counter(case.outputs[0].dtype.name for case in CASES) == {"float32": 82, "float16": 6, "bfloat16": 5}


@each_case
def test_node_case(case: NodeCase, seen: list[dict[str, Any]]) -> None:
    from onnx.backend.test.runner import Runner
    from onnx.reference import ReferenceEvaluator

    got = ReferenceEvaluator(case.model, new_ops=[to.Attention]).run(None, case.feeds)
    assert len(seen) == 1  # it is the core that answers
    Runner.assert_similar_outputs(case.outputs, got, case.rtol, case.atol)


@each_case
def test_node_case_against_the_definition(case: NodeCase) -> None:
    exact = definition(**case.given)
    assert_near(to.attention(**case.given).Y, exact)


@needs_onnx
def test_errors_beside_those_of_onnx() -> None:
    """The largest error over all float32 cases is at most twice that of onnx's own results, which are naive float32."""
    ours = theirs = 0.0
    for case in CASES:
        if case.outputs[0].dtype == np.float32:
            exact = definition(**case.given).Y
            ours = max(ours, np.abs(to.attention(**case.given).Y - exact).max())
            theirs = max(theirs, np.abs(case.outputs[0] - exact).max())
    assert ours <= 2 * theirs


@needs_onnx
def test_operator_takes_any_layout_and_computes_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    q, k, v = inputs(1, 2, 2, 5, 70, 16, 16)
    names = ["Q", "K", "V"]

    def run(outputs: list[str], *arrays: Any) -> Any:
        node = helper.make_node("Attention", names, outputs, qk_matmul_output_mode=3)
        values = [
            [helper.make_tensor_value_info(x, TensorProto.FLOAT, None) for x in group]
            for group in (names, list(filter(None, outputs)))
        ]
        model = helper.make_model(helper.make_graph([node], "g", *values), opset_imports=[helper.make_opsetid("", 25)])
        evaluator = ReferenceEvaluator(model, new_ops=[to.Attention])
        return evaluator.run(None, dict(zip(names, arrays, strict=True)))

    turned = [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)]
    (Y,) = run(["Y"], *turned)
    assert_same_bits(Y, tw.attention(q, k, v))
    assert len(run(["Y", "present_key"], q, k, v)) == 2
    Y, P = run(["Y", "", "", "P"], q, k, v)
    np.testing.assert_allclose(P.sum(-1), 1, rtol=1e-6)
    monkeypatch.setattr("tilewise.frontends.onnx._qk_matmul_output", None)  # which cannot be called
    run(["Y", "", "", ""], q, k, v)


def test_onnx_is_imported_for_the_operator_alone() -> None:
    code = "import sys, tilewise.onnx as to; from tilewise.onnx import *; attention; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        to.attend  # noqa: B018
    if HAS_ONNX:
        assert to.Attention is to.Attention


@needs_onnx
def test_evaluator_of_the_page_runs() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", PAGE.read_text(), re.S)
    assert any("ReferenceEvaluator" in block for block in blocks)
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


# The function


def draw(seed: int) -> dict[str, Any]:
    """A problem: any layout, cache, mask, window; sizes around those of tiles."""
    rng = np.random.default_rng([23, seed])
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    B, Hkv, group, Tq = pick(1, 2, 3), pick(1, 2), pick(1, 3), pick(1, 2, 7, 9)
    H, Tk, (D, Dv) = Hkv * group, pick(0, 1, 6, 63, 64, 65, 130), pick((17, 6), (1, 16))
    q, k, v = inputs(B, H, Hkv, Tq, Tk, D, Dv, seed)
    given: dict[str, Any] = {"Q": q, "K": k, "V": v, "is_causal": pick(0, 1)}
    N, cache = Tk, pick("none", "past", "nonpad")
    if cache == "past":
        _, given["past_key"], given["past_value"] = inputs(B, H, Hkv, Tq, pick(0, 3, 70), D, Dv, seed + 1)
        N += given["past_key"].shape[2]
    if cache == "nonpad":
        given["nonpad_kv_seqlen"] = rng.integers(0, Tk + 1, B)
    if pick(0, 1):
        given |= {"left_window_size": pick(-1, 0, 2, 66), "right_window_size": pick(-1, 0, 2, 5)}
    if pick(0, 1):
        given |= {"softcap": 1.5, "scale": 0.7}
    if kind := pick(None, None, "bool", "float"):
        shape = [*(pick(1, n) for n in (B, H, Tq)), pick(N, N, rng.integers(N + 1))]
        for _ in range(pick(0, 3)):
            if shape[0] == 1 and len(shape) > 1:
                shape = shape[1:]
        mask = rng.standard_normal(shape).astype(np.float32)
        given["attn_mask"] = mask > -0.5 if kind == "bool" else np.where(mask > 1, np.float32(-np.inf), mask)
    if pick(0, 1):
        given |= {"q_num_heads": H, "kv_num_heads": Hkv, "Q": by_token(q), "K": by_token(k), "V": by_token(v)}
    return given


@pytest.mark.parametrize("seed", range(60))
def test_the_definition(seed: int) -> None:
    given = draw(seed)
    exact = definition(**given)
    for mode in range(4):
        got = to.attention(**given, qk_matmul_output_mode=mode)
        assert_near(got.Y, exact)
        np.testing.assert_allclose(got.qk_matmul_output, exact.qk[mode], rtol=2e-5, atol=2e-5)
    assert (got.qk_matmul_output[exact.qk[3] == 0] == 0).all()  # weights of what is not seen are 0, not nearly 0


PLAIN = dict(zip("QKV", inputs(2, 4, 2, 150, 150, 16, 24), strict=True))


def test_bits_are_those_of_the_core() -> None:
    q, k, v = PLAIN.values()
    assert_same_bits(to.attention(**PLAIN, is_causal=1).Y, tw.attention(q, k, v, causal=True))
    assert_same_bits(
        to.attention(**PLAIN, left_window_size=20, is_causal=1).Y, tw.attention(q, k, v, causal=True, window=21)
    )
    three = to.attention(*map(by_token, (q, k, v)), q_num_heads=4, kv_num_heads=2, softmax_precision=11)
    assert_same_bits(three.Y, by_token(tw.attention(q, k, v)))


@pytest.mark.parametrize("masks", [{"is_causal": 1}, {"left_window_size": 70, "right_window_size": 3}], ids=str)
def test_rows_before_all_keys_move_no_bit(masks: dict[str, Any]) -> None:
    """With 40 rows more than keys offsets are -40, -140 and 0; the last rows are what they are without the others."""
    q, k, v = inputs(3, 2, 1, 190, 190, 16, 16)
    keys = np.array([150, 50, 190])
    got = to.attention(q, k, v, nonpad_kv_seqlen=keys, **masks).Y
    for b, n in enumerate(keys):
        own = to.attention(q[b : b + 1, :, 190 - n :], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **masks).Y
        assert_same_bits(np.ascontiguousarray(got[b : b + 1, :, 190 - n :]), own)
    if "is_causal" in masks:
        assert (got[0, :, :40] == 0).all()
        assert (got[1, :, :140] == 0).all()


def test_masks_of_every_kind_give_the_same_bits() -> None:
    keep = np.random.default_rng(3).random((4, 150, 150)) > 0.3
    bias = np.where(keep, np.float32(0), np.float32(-np.inf))
    expected = to.attention(**PLAIN, attn_mask=keep).Y
    for same in (bias, bias.astype(np.float16), (bias.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)):
        assert_same_bits(to.attention(**PLAIN, attn_mask=same).Y, expected)
    short, padded = keep[..., :70], keep.copy()
    padded[..., 70:] = False
    assert_same_bits(to.attention(**PLAIN, attn_mask=short).Y, to.attention(**PLAIN, attn_mask=padded).Y)


@pytest.mark.parametrize("mode", [None, 2, 3])
def test_what_is_not_seen_moves_no_bit(mode: int | None) -> None:
    """NaN in keys and values past the lengths, past the mask, masked by it, or after every row."""
    q, k, v = inputs(2, 2, 1, 3, 100, 16, 16)
    mask = np.ones((3, 90), bool)
    mask[:, 5:70] = False
    mask[1] = False
    given = {"attn_mask": mask, "nonpad_kv_seqlen": np.array([80, 95]), "is_causal": 1, "qk_matmul_output_mode": mode}
    clean = to.attention(q, k, v, **given)
    for b, n in enumerate((80, 90)):
        for x in (k, v):
            x[b, :, n:] = x[b, :, 5:70] = np.nan
    dirty = to.attention(q, k, v, **given)
    assert_same_bits(dirty.Y, clean.Y)
    assert (dirty.Y[:, :, 1] == 0).all()
    if mode is not None:
        assert np.array_equal(dirty.qk_matmul_output, clean.qk_matmul_output)  # no NaN is equal
        assert (dirty.qk_matmul_output[:, :, 1] == (0 if mode == 3 else -np.inf)).all()


def test_present() -> None:
    q, k, v = PLAIN.values()
    alone = to.attention(q, k, v)
    assert alone.present_key is k
    assert alone.present_value is v
    three = {"Q": by_token(q), "K": by_token(k), "V": by_token(v), "q_num_heads": 4, "kv_num_heads": 2}
    viewed = to.attention(**three)
    assert np.shares_memory(viewed.present_key, three["K"])
    assert_same_bits(viewed.present_key, k)
    later = to.attention(q[:, :, 90:], k[:, :, 90:], v[:, :, 90:], None, k[:, :, :90], v[:, :, :90], is_causal=1)
    assert_same_bits(later.present_key, k)
    assert_same_bits(later.present_value, v)
    assert_same_bits(later.Y, to.attention(**PLAIN, is_causal=1).Y[:, :, 90:])


HALF = np.zeros((2, 2, 3, 16), np.float16)
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "rank": (tw.ShapeError, "Q must have 3 or 4 axes", {"Q": PLAIN["Q"][0, 0]}),
    "mixed ranks": (tw.ShapeError, "K must have 4 axes", {"K": PLAIN["K"][0]}),
    "double": (TypeError, "V must be float32, float16 or bfloat16", {"V": PLAIN["V"].astype(float)}),
    "last axis": (tw.InvalidArgument, "the last axis of Q must be contiguous", {"Q": PLAIN["Q"][..., ::2]}),
    "heads missing": (tw.InvalidArgument, "q_num_heads must be given", {n: by_token(x) for n, x in PLAIN.items()}),
    "heads do not divide": (
        tw.ShapeError, "q_num_heads must divide the last axis of Q", {n: by_token(x) for n, x in PLAIN.items()} |
        {"q_num_heads": 3, "kv_num_heads": 2},
    ),
    "heads disagree": (tw.ShapeError, "kv_num_heads must be None or 2", {"kv_num_heads": 3}),
    "past alone": (tw.InvalidArgument, "past_value must be given together", {"past_key": PLAIN["K"]}),
    "past of another type": (TypeError, "past_key must be float32", {"past_key": HALF, "past_value": HALF}),
    "past of other heads": (
        tw.ShapeError, "past_key must have shape", {"past_key": PLAIN["Q"], "past_value": PLAIN["V"]},
    ),
    "pasts of two lengths": (
        tw.ShapeError, "must have one length", {"past_key": PLAIN["K"], "past_value": PLAIN["V"][:, :, :3]},
    ),
    "past and lengths": (
        tw.InvalidArgument, "nonpad_kv_seqlen must be None",
        {"past_key": PLAIN["K"], "past_value": PLAIN["V"], "nonpad_kv_seqlen": np.array([1, 1])},
    ),
    "too long": (tw.InvalidArgument, "must not pass the 150 keys", {"nonpad_kv_seqlen": np.array([1, 151])}),
    "negative length": (tw.InvalidArgument, "nonpad_kv_seqlen must lie in", {"nonpad_kv_seqlen": np.array([1, -1])}),
    "mask of integers": (TypeError, "attn_mask must be .* of bool", {"attn_mask": np.ones((150, 150), np.int64)}),
    "mask of doubles": (TypeError, "attn_mask must be .* of bool", {"attn_mask": np.ones((150, 150))}),
    "mask too wide": (tw.ShapeError, "the last at most 150", {"attn_mask": np.ones(151, bool)}),
    "mask of other heads": (tw.ShapeError, "broadcastable", {"attn_mask": np.ones((3, 150, 150), bool)}),
    "window": (tw.InvalidArgument, "must be -1 .all keys. or more", {"left_window_size": -2}),
    "softcap": (tw.InvalidArgument, "softcap must be positive", {"softcap": -1.0}),
    "causal": (tw.InvalidArgument, "is_causal must be 0 or 1", {"is_causal": 2}),
    "mode": (tw.InvalidArgument, "qk_matmul_output_mode must be", {"qk_matmul_output_mode": 4}),
    "precision": (tw.InvalidArgument, "softmax_precision must be", {"softmax_precision": 7}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, message, changes = REFUSED[name]
    with pytest.raises(error, match=message):
        to.attention(**{**PLAIN, **changes})
