"""How a problem describes its arrays: strides, bases and extents, worked out by hand.

The extents are what checks of native code compare with, so a wrong one shows only when something else is wrong too.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.problem import Problem, View, make_problem

B, H, HKV, TQ, TK, D, DV = 2, 6, 3, 5, 7, 8, 4
FLOATS = "float32, float16 or bfloat16"


def arrays() -> dict[str, Any]:
    shapes = {"q": (B, H, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, DV)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def problem(**changes: Any) -> Problem:
    return make_problem(**{**arrays(), "q_offset": 0, **changes})[0]


def test_contiguous_arrays() -> None:
    p = problem()
    assert p.views == {
        "q": View("f32", D, TQ * D, 0, 0, 4 * B * H * TQ * D),
        "k": View("f32", D, TK * D, 0, 0, 4 * B * HKV * TK * D),
        "v": View("f32", DV, TK * DV, 0, 0, 4 * B * HKV * TK * DV),
        "o": View("f32", DV, TQ * DV, 0, 0, 4 * B * H * TQ * DV),
    }
    assert p.q_base.tolist() == [0, 4 * H * TQ * D]
    assert p.k_base.tolist() == [0, 4 * HKV * TK * D]
    assert p.v_base.tolist() == [0, 4 * HKV * TK * DV]
    assert p.o_base.tolist() == [0, 4 * H * TQ * DV]
    assert p.lse_base.tolist() == [0, 4 * H * TQ]
    assert (p.out_shape, p.lse_shape) == ((B, H, TQ, DV), (B, H, TQ))
    assert (p.B, p.H, p.Hkv, p.D, p.Dv, p.group) == (B, H, HKV, D, DV, 2)
    assert (p.out_dtype, p.page_size, p.blocks_base, p.blocks_bytes, p.partial) == (np.float32, 0, None, 0, False)
    assert [x.tolist() for x in (p.rows, p.q_offset, p.k_offset, p.kv_len)] == [[TQ] * 2, [0, 0], [0, 0], [TK] * 2]
    assert (p.causal, p.window, p.return_lse, p.br, p.bc, p.span) == (False, None, False, 0, 64, 1024)
    assert p.scale == float(np.float32(8**-0.5))
    for view in p.views.values():
        assert all(type(number) is int for number in view[1:6]), "a float is no stride, though it is equal to one"


def test_operands_are_the_arrays_themselves() -> None:
    given = {**arrays(), "sinks": np.zeros(H, np.float32), "lse": np.zeros((B, H, TQ), np.float32)}
    given["out"] = np.zeros((B, H, TQ, DV), np.float32)
    operands = make_problem(**given, q_offset=0)[1]
    for name, x in given.items():
        assert getattr(operands, name) is x
    none = make_problem(**arrays(), q_offset=0)[1]
    assert (none.sinks, none.out, none.lse) == (None, None, None)


def test_lse_and_sinks() -> None:
    p = problem(return_lse=True, sinks=np.zeros(H, np.float32))
    assert p.views["lse"] == View("f32", 1, TQ, 0, 0, 4 * B * H * TQ)
    assert (p.views["sinks"].lo, p.views["sinks"].hi) == (0, 4 * H)
    assert p.return_lse
    lse = np.zeros((B, H, TQ, 3), np.float32)[..., 1]
    p = problem(lse=lse)
    assert p.return_lse
    assert p.views["lse"] == View("f32", 3, 3 * TQ, 0, 0, 4 * (3 * (B * H * TQ - 1) + 1))
    assert p.lse_base.tolist() == [0, 12 * H * TQ]


def test_views() -> None:
    """k reversed in time, v with heads inside, out in the middle of something wider."""
    k = arrays()["k"][:, :, ::-1]
    v = np.zeros((B, TK, HKV, DV), np.float32).swapaxes(1, 2)
    out = np.zeros((B, H, TQ, DV + 6), np.float32)[..., 3 : 3 + DV]
    p = problem(k=k, v=v, out=out, kv_start=[0, 2])
    assert p.views["k"] == View("f32", -D, TK * D, 0, -4 * (TK - 1) * D, 4 * ((B * HKV - 1) * TK * D + D))
    assert p.views["v"] == View("f32", HKV * DV, DV, 0, 0, v.nbytes)
    assert p.views["o"] == View("f32", DV + 6, TQ * (DV + 6), 0, 0, 4 * ((B * H * TQ - 1) * (DV + 6) + DV))
    assert p.k_base.tolist() == [0, 4 * HKV * TK * D - 2 * 4 * D]
    assert p.v_base.tolist() == [0, 4 * TK * HKV * DV + 2 * 4 * HKV * DV]
    assert p.o_base.tolist() == [0, out.strides[0]]
    assert p.kv_len.tolist() == [TK, TK - 2]


def test_no_elements() -> None:
    """What is cut to nothing keeps its strides, but has no bytes."""
    given = arrays()
    p = problem(q=given["q"][:, :, :0], k=given["k"][:, :, 3:3], v=given["v"][:, :, ::-1][:, :, :0], return_lse=True)
    assert p.views["q"].row == D
    for view in p.views.values():
        assert (view.lo, view.hi) == (0, 0)
    assert p.visible_pairs() == p.flops() == 0
    assert problem(**{name: x[:0] for name, x in given.items()}).flops() == 0


def test_pairs_and_flops() -> None:
    assert problem().visible_pairs() == B * H * TQ * TK
    assert problem().flops() == 2 * (D + DV) * B * H * TQ * TK
    assert problem(causal=True).visible_pairs() == B * H * (1 + 2 + 3 + 4 + 5)
    assert problem(causal=True, window=2, q_offset=[0, 2]).visible_pairs() == H * ((1 + 2 * 4) + 2 * 5)
    assert problem(kv_len=[3, 7], k_offset=[1, 0], causal=True).visible_pairs() == H * ((0 + 1 + 2 + 3 + 3) + 15)


@pytest.mark.parametrize(
    ("asked", "bc", "span"),
    [
        ({}, 64, 1024), ({"bc": 100}, 100, 1000), ({"bc": 512}, 512, 1024), ({"bc": 7}, 7, 1022),
        ({"bc": 1}, 1, 1024), ({"bc": 7, "span": 7}, 7, 7), ({"span": 64}, 64, 64), ({"span": 1 << 40}, 64, 1 << 40),
    ],
    ids=str,
)  # fmt: skip
def test_tiles(asked: dict[str, int], bc: int, span: int) -> None:
    p = problem(**asked)
    assert (p.bc, p.span, p.br) == (bc, span, 0)
    assert problem(br=3).br == 3


@pytest.mark.parametrize(("asked", "window"), [(None, None), (0, None), (-1, None), (1, 1), (9, 9), (1 << 56, None)])
def test_window(asked: Any, window: Any) -> None:
    assert problem(window=asked).window == window
    assert problem(window=(1 << 56) - 1).window == (1 << 56) - 1


def test_limits_are_inclusive() -> None:
    far = 1 << 56
    p = problem(q_offset=far, k_offset=[far, 0], br=far, kv_start=[7, 0], kv_len=[0, 7])
    assert p.q_offset.tolist() == [far, far]
    assert p.k_offset.tolist() == [far, 0]
    assert (p.br, p.kv_len.tolist()) == (far, [0, 7])
    assert problem(span=far).span == far
    wide = {"q": np.zeros((1, 1, 1, 1024), np.float32), "k": np.zeros((1, 1, 1, 1024), np.float32)}
    assert problem(**wide, v=np.zeros((1, 1, 1, 1024), np.float32)).D == 1024
    largest = float(np.finfo(np.float32).max)
    assert problem(scale=largest).scale == largest
    assert problem(scale=-largest).scale == -largest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": None}, f"q is missing: expected a {FLOATS} array of 4 axes, got None"),
        ({"k": np.zeros((B, HKV, TK, D + 1), np.float32)},
         "q and k must have the same head dimension D on their last axis: "
         "q (2, 6, 5, 8), k (2, 3, 7, 9), v (2, 3, 7, 4)"),
        ({"v": np.zeros((B, HKV, TK + 1, DV), np.float32)},
         "k and v must have the same KV heads and keys on axes 1 and 2: "
         "q (2, 6, 5, 8), k (2, 3, 7, 8), v (2, 3, 8, 4)"),
        ({"q": np.zeros((1, H, TQ, D), np.float32)},
         "q, k and v must have the same batch size on axis 0: q (1, 6, 5, 8), k (2, 3, 7, 8), v (2, 3, 7, 4)"),
        ({"q": np.zeros((B, 4, TQ, D), np.float32)},
         "the query heads must be a multiple of the KV heads: H = 4, Hkv = 3"),
        ({"sinks": np.zeros(5, np.float32)}, "sinks must have shape (6,), got (5,)"),
        ({"lse": np.zeros((B, H), np.float32)}, "lse must have shape (2, 6, 5), got (2, 6)"),
        ({"kv_start": 8}, "kv_start must lie in 0 ... Tk = 7, got 8"),
        ({"kv_start": [1, 2], "kv_len": [6, 6]},
         "kv_start + kv_len must not pass Tk = 7, got 2 + 6 (sequence 1)"),
        ({"kv_start": [6, 1], "kv_len": [1, 9]},
         "kv_start + kv_len must not pass Tk = 7, got 1 + 9 (sequence 1)"),
        *(({name: None}, f"{name} is missing: expected a {FLOATS} array of 4 axes, got None") for name in "kv"),
        ({"sinks": np.zeros((1, 6), np.float32)}, "sinks must have 1 axes, got shape (1, 6)"),
        *(({name: -1}, f"{name} must lie in 0 ... {1 << 56} (0 picks the default), got -1") for name in ("br", "span")),
        *(({name: -1}, f"{name} must lie in 0 ... {1 << 56}, got -1") for name in ("kv_start", "kv_len", "k_offset")),
        *(({name: 1}, f"{name} must be True or False, got int 1") for name in ("causal", "return_lse")),
        ({"window": 2.5}, "window must be an integer, got float 2.5"),
        ({"kv_len": "7"}, "kv_len must be an integer, got str '7'"),
        ({"q": np.zeros((B, H, TQ, 1025), np.float32), "k": np.zeros((B, HKV, TK, 1025), np.float32)},
         "the head dimension D must lie in 1 ... 1024: q (2, 6, 5, 1025), k (2, 3, 7, 1025), v (2, 3, 7, 4)"),
        ({"v": np.zeros((B, HKV, TK, 0), np.float32)},
         "the head dimension Dv must lie in 1 ... 1024: q (2, 6, 5, 8), k (2, 3, 7, 8), v (2, 3, 7, 0)"),
        ({"bc": 16, "span": 24}, "span must be a multiple of bc = 16, got 24"),
        ({"bc": 513}, "bc must lie in 0 ... 512 (0 picks the default), got 513"),
        ({"q_offset": -1}, f"q_offset must lie in 0 ... {1 << 56}, got -1"),
        ({"k_offset": [0, (1 << 56) + 1]}, f"k_offset must lie in 0 ... {1 << 56}, got {(1 << 56) + 1}"),
        ({"q_offset": [0, 0, 0]}, "q_offset must be an integer or have shape (2,), got (3,)"),
        ({"scale": float("inf")}, "scale must be finite in float32, got inf"),
        ({"causal": True, "q_offset": None},
         "q_offset must be given: sequence 0 has 5 query rows and 7 keys from position 0, so causal, window, ALiBi, "
         "score or keep needs the position of its first query row. Common answers: q_offset = 0 (top-left: rows and "
         "keys both start at position 0), q_offset = Tk - Tq (bottom-right: the rows are the last of the keys)"),
    ],
    ids=lambda x: "" if isinstance(x, str) else " ".join(x),
)  # fmt: skip
def test_messages(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((tw.InvalidArgument, tw.ShapeError, TypeError), match=f"^{re.escape(message)}$"):
        problem(**wrong)


def test_head_dimensions_of_one() -> None:
    p = problem(q=np.zeros((B, H, TQ, 1), np.float32), k=np.zeros((B, HKV, TK, 1), np.float32),
                v=np.zeros((B, HKV, TK, 1), np.float32))  # fmt: skip
    assert (p.D, p.Dv) == (1, 1)


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_every_overlap_is_refused(name: str, result: str) -> None:
    """The result lies in the memory of that input, and of no other."""
    room = np.zeros(4000, np.float32)
    shapes = {"q": (B, H, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, DV), "sinks": (H,)}
    written = (B, H, TQ, DV) if result == "out" else (B, H, TQ)

    def at(start: int, shape: tuple[int, ...]) -> Any:
        return room[start : start + int(np.prod(shape))].reshape(shape)

    given = {other: at(1000 if other == name else 2000 + 400 * i, shape) for i, (other, shape) in
             enumerate(shapes.items())}  # fmt: skip
    with pytest.raises(tw.InvalidArgument, match=f"^{result} overlaps {name}$"):
        problem(**given, **{result: at(1005, written)})
    problem(**given, **{result: at(0, written)})


def test_message_of_overlaps() -> None:
    room = np.zeros((B, H, TQ, D), np.float32)
    with pytest.raises(tw.InvalidArgument, match=r"^out overlaps q$"):
        problem(q=room, out=room[..., :DV])
    v = np.zeros((B, HKV, TK, DV), np.float32)
    with pytest.raises(tw.InvalidArgument, match=r"^lse overlaps v$"):
        problem(v=v, lse=v.reshape(-1)[: B * H * TQ].reshape(B, H, TQ))
    with pytest.raises(tw.InvalidArgument, match=r"^out overlaps lse$"):
        problem(out=room[..., :DV], lse=room[..., 1])
    assert problem(out=room[..., :DV], lse=room[..., DV]).return_lse  # beside each other in one array is no overlap
