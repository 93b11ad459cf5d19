"""Every error: the right class, a message that names the argument and what came, and nothing touched before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_same_bits, case, inputs, poisoned
from tilewise.arguments import BFLOAT16

Q, K, V = inputs(2, 6, 2, 3, 4, 8, 5)
O_SHAPE, LSE_SHAPE = (2, 6, 3, 5), (2, 6, 3)
NATIVE = "float32, float16 or bfloat16 in native byte order"


class ArrayLike:
    """Somebody else's array: it shares its memory by NumPy's protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__


def misaligned(x: Any) -> Any:
    """float32 at an address that is no multiple of 4."""
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    view = raw.view(np.float32).reshape(x.shape)
    view[...] = x
    return view


def odd_stride(x: Any) -> Any:
    """Aligned at the first element, off by 2 bytes at the next row."""
    room = np.zeros(x.size * 8 + 64, np.uint8)
    strides = [x.shape[-1] * 4 + 2, 4]
    for n in reversed(x.shape[1:-1]):
        strides.insert(0, strides[0] * n)
    return np.lib.stride_tricks.as_strided(room.view(np.float32), x.shape, strides[-x.ndim :])


def strided_last(x: Any) -> Any:
    return np.repeat(x, 2, axis=-1)[..., ::2]


Refused = dict[str, tuple[type[Exception], list[str], dict[str, Any]]]

# what is wrong: (class, words of the message, arguments)
ARRAYS: Refused = {}
for _name, _x in (("q", Q), ("k", K), ("v", V)):
    ARRAYS |= {
        f"{_name} missing": (tw.InvalidArgument, [_name, "None"], {_name: None}),
        f"{_name} float64": (TypeError, [_name, NATIVE, "float64"], {_name: _x.astype(np.float64)}),
        f"{_name} int32": (TypeError, [_name, NATIVE, "int32"], {_name: _x.astype(np.int32)}),
        f"{_name} uint16": (TypeError, [_name, NATIVE, "uint16"], {_name: _x.astype(np.int32).astype(np.uint16)}),
        f"{_name} bool": (TypeError, [_name, NATIVE, "bool"], {_name: _x > 0}),
        f"{_name} complex": (TypeError, [_name, NATIVE, "complex64"], {_name: _x.astype(np.complex64)}),
        f"{_name} object": (TypeError, [_name, NATIVE], {_name: _x.astype(object)}),
        f"{_name} of other fields": (
            TypeError, [_name, NATIVE, "half"], {_name: np.zeros(_x.shape, [("half", np.uint16)])},
        ),
        f"{_name} other byte order": (TypeError, [_name, NATIVE], {_name: _x.astype(_x.dtype.newbyteorder())}),
        f"{_name} float16 other byte order": (
            TypeError, [_name, NATIVE], {_name: _x.astype(np.dtype(np.float16).newbyteorder())},
        ),
        f"{_name} bfloat16 other byte order": (
            TypeError, [_name, NATIVE], {_name: np.zeros(_x.shape, BFLOAT16.newbyteorder())},
        ),
        f"{_name} list": (TypeError, [_name, "list"], {_name: _x.tolist()}),
        f"{_name} text": (TypeError, [_name, "str"], {_name: "x"}),
        f"{_name} number": (TypeError, [_name, "float"], {_name: 1.0}),
        f"{_name} 3 axes": (tw.ShapeError, [_name, "4 axes", str(_x[0].shape)], {_name: _x[0]}),
        f"{_name} 5 axes": (tw.ShapeError, [_name, "4 axes"], {_name: _x[None]}),
        f"{_name} last axis strided": (tw.InvalidArgument, [_name, "contiguous"], {_name: strided_last(_x)}),
        f"{_name} last axis reversed": (tw.InvalidArgument, [_name, "contiguous"], {_name: _x[..., ::-1]}),
        f"{_name} last axis broadcast": (
            tw.InvalidArgument, [_name, "contiguous"], {_name: np.broadcast_to(_x[..., :1], _x.shape)},
        ),
        f"{_name} misaligned": (tw.InvalidArgument, [_name, "align"], {_name: misaligned(_x)}),
        f"{_name} odd stride": (tw.InvalidArgument, [_name, "align"], {_name: odd_stride(_x)}),
        f"{_name} batch": (tw.ShapeError, ["batch", str(_x[:1].shape)], {_name: _x[:1]}),
    }  # fmt: skip

SHAPES: Refused = {
    "6 heads on 4": (tw.ShapeError, ["H = 6", "Hkv = 4"], dict(zip("qkv", inputs(2, 6, 4, 3, 4, 8, 5), strict=True))),
    "2 heads on 4": (tw.ShapeError, ["H = 2", "Hkv = 4"], dict(zip("qkv", inputs(2, 2, 4, 3, 4, 8, 5), strict=True))),
    "heads without KV heads": (tw.ShapeError, ["H = 6", "Hkv = 0"], {"k": K[:, :0], "v": V[:, :0]}),
    "KV heads of k and v": (tw.ShapeError, ["k and v", str(V[:, :1].shape)], {"v": V[:, :1]}),
    "keys of k and v": (tw.ShapeError, ["k and v", str(V[:, :, :2].shape)], {"v": V[:, :, :2]}),
    "D of q and k": (tw.ShapeError, ["q and k", "D"], {"q": Q[..., :7]}),
    "D 0": (tw.ShapeError, ["D", "1 ... 1024"], {"q": Q[..., :0], "k": K[..., :0]}),
    "Dv 0": (tw.ShapeError, ["Dv", "1 ... 1024"], {"v": V[..., :0]}),
    "D 1025": (
        tw.ShapeError, ["D", "1025"],
        {"q": np.zeros((2, 6, 3, 1025), np.float32), "k": np.zeros((2, 2, 4, 1025), np.float32)},
    ),
    "Dv 1025": (tw.ShapeError, ["Dv", "1025"], {"v": np.zeros((2, 2, 4, 1025), np.float32)}),
}  # fmt: skip

OPTIONS: Refused = {
    "causal 1": (TypeError, ["causal", "1"], {"causal": 1}),
    "causal None": (TypeError, ["causal", "None"], {"causal": None}),
    "causal text": (TypeError, ["causal", "yes"], {"causal": "yes"}),
    "return_lse 1": (TypeError, ["return_lse", "1"], {"return_lse": 1}),
    "window float": (TypeError, ["window", "2.0"], {"window": 2.0}),
    "window True": (TypeError, ["window", "True"], {"window": True}),
    "window array": (TypeError, ["window"], {"window": np.array([3, 4])}),
    "scale nan": (tw.InvalidArgument, ["scale", "nan"], {"scale": float("nan")}),
    "scale inf": (tw.InvalidArgument, ["scale", "inf"], {"scale": float("inf")}),
    "scale beyond float32": (tw.InvalidArgument, ["scale", "1e+39"], {"scale": 1e39}),
    "scale that rounds to inf": (tw.InvalidArgument, ["scale", "3.40282357"], {"scale": 3.40282357e38}),
    # FAILS UNTIL FIXED: an OverflowError
    "scale beyond float64": (tw.InvalidArgument, ["scale"], {"scale": 10**400}),
    "scale text": (TypeError, ["scale", "0.5"], {"scale": "0.5"}),
    "scale True": (TypeError, ["scale", "True"], {"scale": True}),
    "scale complex": (TypeError, ["scale", "complex"], {"scale": 1j}),
    "scale array": (TypeError, ["scale"], {"scale": np.ones(6, np.float32)}),
    "br negative": (tw.InvalidArgument, ["br", "-1"], {"br": -1}),
    "br float": (TypeError, ["br", "2.0"], {"br": 2.0}),
    "br None": (TypeError, ["br", "None"], {"br": None}),
    "bc negative": (tw.InvalidArgument, ["bc", "-1"], {"bc": -1}),
    "bc 513": (tw.InvalidArgument, ["bc", "512", "513"], {"bc": 513}),
    "bc True": (TypeError, ["bc", "True"], {"bc": True}),
    "span negative": (tw.InvalidArgument, ["span", "-64"], {"span": -64}),
    "span no multiple": (tw.InvalidArgument, ["span", "bc = 64", "100"], {"span": 100}),
    "span less than bc": (tw.InvalidArgument, ["span", "bc = 16", "8"], {"span": 8, "bc": 16}),
    "q_offset negative": (tw.InvalidArgument, ["q_offset", "-1"], {"q_offset": -1}),
    "q_offset negative in a list": (tw.InvalidArgument, ["q_offset", "-3"], {"q_offset": [0, -3]}),
    "q_offset far": (tw.InvalidArgument, ["q_offset", str(1 << 57)], {"q_offset": 1 << 57}),
    "q_offset beyond 64 bits": (tw.InvalidArgument, ["q_offset", str(1 << 70)], {"q_offset": 1 << 70}),
    "q_offset beyond int64": (
        tw.InvalidArgument, ["q_offset", str(1 << 63)], {"q_offset": np.array([0, 1 << 63], np.uint64)},
    ),
    "q_offset float": (TypeError, ["q_offset", "1.0"], {"q_offset": 1.0}),
    "q_offset floats": (TypeError, ["q_offset", "float64"], {"q_offset": np.zeros(2)}),
    "q_offset flags": (TypeError, ["q_offset", "bool"], {"q_offset": np.zeros(2, bool)}),
    "q_offset text": (TypeError, ["q_offset"], {"q_offset": "0"}),
    "q_offset for 3": (tw.ShapeError, ["q_offset", "(2,)", "(3,)"], {"q_offset": [0, 0, 0]}),
    "q_offset matrix": (tw.ShapeError, ["q_offset", "(2, 1)"], {"q_offset": np.zeros((2, 1), int)}),
    "q_offset needed": (tw.InvalidArgument, ["q_offset", "top-left", "bottom-right"], {"causal": True}),
    "q_offset needed for a window": (tw.InvalidArgument, ["q_offset", "Tk - Tq"], {"window": 2}),
    "q_offset needed for one sequence": (
        tw.InvalidArgument, ["q_offset", "sequence 1"], {"causal": True, "kv_len": [3, 2]},
    ),
    "q_offset needed for moved keys": (
        tw.InvalidArgument, ["q_offset", "position 5"], {"causal": True, "kv_len": 3, "k_offset": 5},
    ),
    "kv_start negative": (tw.InvalidArgument, ["kv_start", "-1"], {"kv_start": -1}),
    "kv_start past the end": (tw.InvalidArgument, ["kv_start", "Tk = 4", "5"], {"kv_start": [5, 0]}),
    "kv_start float": (TypeError, ["kv_start"], {"kv_start": 0.0}),
    "kv_len negative": (tw.InvalidArgument, ["kv_len", "-1"], {"kv_len": [-1, 4]}),
    "kv_len past the end": (tw.InvalidArgument, ["kv_len", "Tk = 4", "5"], {"kv_len": 5}),
    "kv_start + kv_len past the end": (
        tw.InvalidArgument, ["kv_start", "kv_len", "sequence 1"], {"kv_start": [0, 2], "kv_len": [4, 3]},
    ),
    "kv_len for 1": (tw.ShapeError, ["kv_len", "(2,)"], {"kv_len": [4]}),
    "k_offset negative": (tw.InvalidArgument, ["k_offset", "-1"], {"k_offset": -1}),
    "k_offset float": (TypeError, ["k_offset"], {"k_offset": 0.5}),
    "sinks list": (TypeError, ["sinks", "list"], {"sinks": [0.0] * 6}),
    "sinks float64": (TypeError, ["sinks", "float64"], {"sinks": np.zeros(6)}),
    "sinks float16": (TypeError, ["sinks must be float32 in native", "float16"], {"sinks": np.zeros(6, np.float16)}),
    "sinks for KV heads": (tw.ShapeError, ["sinks", "(6,)", "(2,)"], {"sinks": np.zeros(2, np.float32)}),
    "sinks matrix": (tw.ShapeError, ["sinks"], {"sinks": np.zeros((2, 6), np.float32)}),
    "sinks strided": (tw.InvalidArgument, ["sinks", "contiguous"], {"sinks": np.zeros(12, np.float32)[::2]}),
    "arena number": (TypeError, ["arena", "int"], {"arena": 1}),
    "pool 0": (tw.InvalidArgument, ["pool", "0"], {"pool": 0}),
    "pool True": (TypeError, ["pool", "True"], {"pool": True}),
    "pool text": (TypeError, ["pool"], {"pool": "4"}),
}  # fmt: skip
for _name, _shape, _native in (("out", O_SHAPE, NATIVE), ("lse", LSE_SHAPE, "lse must be float32 in native")):
    _right = np.zeros(_shape, np.float32)
    _fixed = _right.copy()
    _fixed.flags.writeable = False
    OPTIONS |= {
        f"{_name} list": (TypeError, [_name, "list"], {_name: _right.tolist()}),
        f"{_name} int32": (TypeError, [_name, _native, "int32"], {_name: _right.astype(np.int32)}),
        f"{_name} float64": (TypeError, [_name, "float64"], {_name: _right.astype(np.float64)}),
        f"{_name} other byte order": (
            TypeError, [_name, _native], {_name: _right.astype(_right.dtype.newbyteorder())},
        ),
        f"{_name} array-like": (TypeError, [_name, "ArrayLike"], {_name: ArrayLike(_right)}),
        f"{_name} wrong shape": (tw.ShapeError, [_name, str(_shape)], {_name: _right[:1].copy()}),
        f"{_name} read-only": (tw.InvalidArgument, [_name, "read-only"], {_name: _fixed}),
        f"{_name} misaligned": (tw.InvalidArgument, [_name, "align"], {_name: misaligned(_right)}),
        f"{_name} odd stride": (tw.InvalidArgument, [_name, "align"], {_name: odd_stride(_right)}),
    }  # fmt: skip
OPTIONS["lse float16"] = (
    TypeError, ["lse must be float32 in native", "float16"], {"lse": np.zeros(LSE_SHAPE, np.float16)},
)  # fmt: skip
OPTIONS["out last axis strided"] = (tw.InvalidArgument, ["out", "contiguous"], {"out": strided_last(poisoned(O_SHAPE))})

REFUSED = {**ARRAYS, **SHAPES, **OPTIONS}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong: str) -> None:
    kind, words, arguments = REFUSED[wrong]
    out, lse, arena = poisoned(O_SHAPE), poisoned(LSE_SHAPE), tw.Arena()
    arena.alloc(100)
    before = (arena.used, arena.high_water, arena.capacity)
    given = {"out": out, "lse": lse, "arena": arena, **arguments}
    copies = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(kind) as error:
        tw.attention(given.pop("q", Q), given.pop("k", K), given.pop("v", V), **given)
    assert type(error.value) is kind, "neither a subclass nor a base of it"
    for word in words:
        assert word in str(error.value)
    assert_same_bits((out, lse), (poisoned(O_SHAPE), poisoned(LSE_SHAPE)), "out and lse after an error")
    assert (arena.used, arena.high_water, arena.capacity) == before
    for name, copy in copies.items():
        np.testing.assert_array_equal(arguments[name], copy)


@pytest.mark.parametrize("wrong", [name for name in REFUSED if name.split()[0] not in ("arena", "pool")])
def test_refused_again(wrong: str) -> None:
    """What is remembered of good calls lets no bad one pass: the same arguments without out, twice."""
    kind, _, arguments = REFUSED[wrong]
    given = dict(arguments)
    for good in ({}, {"causal": True, "window": 2, "q_offset": 1}, {"br": 1, "bc": 1}):
        tw.attention(Q, K, V, **good)
    for _ in range(2):
        with pytest.raises(kind):
            tw.attention(given.get("q", Q), given.get("k", K), given.get("v", V), **{
                name: x for name, x in given.items() if name not in ("q", "k", "v")
            })  # fmt: skip


def test_good_values_equal_to_bad_ones() -> None:
    """1 == True == 1.0, and equal keys of a dictionary: each must still be judged by its own type."""
    for good in ({"causal": True, "q_offset": 0}, {"window": 1, "q_offset": 0}, {"br": 1}, {"return_lse": True}):
        tw.attention(Q, K, V, **good)
    for bad in (
        {"causal": 1, "q_offset": 0}, {"causal": True, "q_offset": False}, {"window": True, "q_offset": 0},
        {"window": 1.0, "q_offset": 0}, {"window": 1, "q_offset": 0.0}, {"br": 1.0}, {"br": True}, {"return_lse": 1},
    ):  # fmt: skip
        with pytest.raises(TypeError):
            tw.attention(Q, K, V, **bad)


@pytest.mark.parametrize("name", ["unknown", "is_causal", "dropout_p"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        tw.attention(Q, K, V, **{name: 0})
    with pytest.raises(TypeError, match=name):
        tw.scratch_bytes(Q, K, V, **{name: 0})


def test_scratch_bytes_refuses_what_attention_refuses() -> None:
    for wrong in (*SHAPES, "scale nan", "q_offset negative", "bc 513", "out list", "pool 0"):
        kind, _, arguments = REFUSED[wrong]
        given = dict(arguments)
        with pytest.raises(kind):
            tw.scratch_bytes(given.pop("q", Q), given.pop("k", K), given.pop("v", V), **given)


def test_array_likes_share_their_memory() -> None:
    """An object with NumPy's protocol is an array; its memory is not copied (what is changed in it is seen)."""
    c = case(1, 2, 1, 3, 4, 8, 5)
    liked = [ArrayLike(x) for x in (c.q, c.k, c.v)]
    assert_same_bits(tw.attention(*liked), c.run()[0])
    c.v[...] *= 2
    assert_same_bits(tw.attention(*liked), c.run()[0])
    sinks = np.zeros(2, np.float32)
    assert_same_bits(tw.attention(*liked, sinks=ArrayLike(sinks)), c.run(sinks=sinks)[0])


class Subclass(np.ndarray):
    pass


def test_subclasses_of_arrays() -> None:
    c = case(1, 2, 1, 3, 4, 8, 5)
    assert_same_bits(np.asarray(tw.attention(c.q.view(Subclass), c.k, c.v.view(Subclass))), c.run()[0])


# ---- overlaps


def test_outputs_that_overlap_inputs() -> None:
    room = np.zeros((2, 6, 4, 16), np.float32)
    q, k, v = room[:, :, :3, :8], room[:, :2, :, :8], room[:, 4:, :, 8:13]
    for x in (q, k, v):
        x[...] = np.random.default_rng(1).standard_normal(x.shape)
    sinks, before = room[0, 0, 3, 10:16], room.copy()
    overlapping = {
        "out overlaps q": {"out": room[:, :, :3, 3:8]},
        "out overlaps k": {"out": room[:, :, 1:, 3:8], "q": q.copy()},
        "out overlaps v": {"out": room[:, :, :3, 11:]},
        "out overlaps sinks": {"out": room[:, :, 1:, 10:15], "v": v.copy(), "sinks": sinks},
        "lse overlaps q": {"lse": room[:, :, :3, 0]},
        "lse overlaps v": {"lse": room[:, :, :3, 9]},
        "lse overlaps sinks": {"lse": room[:, :, 1:, 13], "sinks": sinks},
    }
    for message, arguments in overlapping.items():
        with pytest.raises(tw.InvalidArgument, match=message):
            tw.attention(arguments.pop("q", q), k, arguments.pop("v", v), **arguments)
        assert_same_bits(room, before, message)
    # neighbours that interleave and share no element are fine
    expected = tw.attention(q, k, v.copy(), return_lse=True)
    out, lse = room[:, :, :3, 8:13], room[:, :, :3, 14]
    assert_same_bits(tw.attention(q, k, v.copy(), out=out, lse=lse), expected)


def test_out_that_overlaps_lse() -> None:
    room = poisoned((2, 6, 3, 6))
    with pytest.raises(tw.InvalidArgument, match="out overlaps lse"):
        tw.attention(Q, K, V, out=room[..., :5], lse=room[..., 4])
    assert_same_bits(room, poisoned(room.shape))
    expected = tw.attention(Q, K, V, return_lse=True)
    assert_same_bits(tw.attention(Q, K, V, out=room[..., :5], lse=room[..., 5]), expected)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_that_overlap_themselves(name: str) -> None:
    shape = O_SHAPE if name == "out" else LSE_SHAPE
    strides = {"one sequence for all": (0, 72, 24, 4), "a sequence begins inside another": (396, 72, 24, 4)}
    memory = poisoned((2 * 6 * 3 * 6,))
    for one in strides.values():
        view = np.lib.stride_tricks.as_strided(memory, shape, one[: len(shape)])
        with pytest.raises(tw.InvalidArgument, match=f"{name} overlaps itself"):
            tw.attention(Q, K, V, **{name: view})
    assert_same_bits(memory, poisoned(memory.shape))


def test_inputs_may_overlap() -> None:
    x = inputs(1, 2, 2, 4, 4, 8, 8)[1]
    assert_same_bits(tw.attention(x, x, x), tw.attention(x, x.copy(), x.copy()))


# ---- failures after the checks


def test_arena_exhausted_half_way() -> None:
    """Somebody else's scratch fills the arena up to its limit: nothing is written, and what is theirs stays."""
    need = tw.scratch_bytes(Q, K, V, pool=1)
    arena = tw.Arena(limit=need + 640)
    theirs = arena.alloc(1000)
    theirs[:] = 7
    before = (arena.used, arena.high_water, arena.capacity)
    out, lse = poisoned(O_SHAPE), poisoned(LSE_SHAPE)
    for _ in range(3):
        with pytest.raises(tw.ArenaExhausted, match=f"{need}.*limit") as error:
            tw.attention(Q, K, V, out=out, lse=lse, arena=arena, pool=1)
        assert isinstance(error.value, MemoryError)
        assert (arena.used, arena.high_water, arena.capacity) == before
    assert_same_bits((out, lse), (poisoned(O_SHAPE), poisoned(LSE_SHAPE)))
    assert (theirs == 7).all()


def test_closed_pool_leaves_everything_alone() -> None:
    pool = tw.Pool(2)
    pool.close()
    out, lse, arena = poisoned(O_SHAPE), poisoned(LSE_SHAPE), tw.Arena()
    with pytest.raises(tw.InvalidArgument, match="pool"):
        tw.attention(Q, K, V, out=out, lse=lse, arena=arena, pool=pool)
    assert_same_bits((out, lse), (poisoned(O_SHAPE), poisoned(LSE_SHAPE)))
    assert (arena.used, arena.high_water, arena.capacity) == (0, 0, 0)


def test_closed_pool_is_refused_for_nothing_too() -> None:
    pool = tw.Pool(2)
    pool.close()
    with pytest.raises(tw.InvalidArgument, match="pool"):
        tw.attention(Q[:, :, :0], K, V, pool=pool)


def test_output_that_no_machine_can_hold() -> None:
    """Huge shapes of stride 0 pass every check; the output that they ask for cannot be allocated."""
    rows = np.broadcast_to(Q[:, :, :1], (2, 6, 1 << 45, 8))
    arena = tw.Arena()
    with pytest.raises(MemoryError):
        tw.attention(rows, K, V, arena=arena)
    assert (arena.used, arena.high_water, arena.capacity) == (0, 0, 0)


def test_unknown_target() -> None:
    with tw.config(target="pdp-11"), pytest.raises(tw.TargetError, match="pdp-11"):
        tw.attention(Q, K, V)


def test_errors_are_those_of_python() -> None:
    assert issubclass(tw.InvalidArgument, ValueError)
    assert issubclass(tw.ShapeError, ValueError)
    assert issubclass(tw.ArenaExhausted, MemoryError)
    assert not issubclass(tw.ShapeError, tw.InvalidArgument)
