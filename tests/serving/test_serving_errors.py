"""Every error of ragged and paged calls: class, words that say which argument, nothing touched before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.api.test_errors import misaligned, odd_stride, strided_last
from tests.serving.batches import poisoned, untouched

H, HKV, D, DV = 4, 2, 8, 5
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


# three sequences: 2, 0 and 3 rows on 5, 7 and 3 keys
STARTS_Q, STARTS_K = np.array([0, 2, 2, 5]), np.array([0, 5, 12, 15])
VARLEN: dict[str, Any] = {
    "q": numbers(5, H, D), "k": numbers(15, HKV, D), "v": numbers(15, HKV, DV),
    "cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K,
}  # fmt: skip
# the same in 6 pages of 4 slots
TABLE = np.array([[5, 0, -1], [2, 4, 99], [1, -7, 1 << 40]])
PAGES: dict[str, Any] = {
    "k_pages": numbers(6, 4, HKV, D), "v_pages": numbers(6, 4, HKV, DV), "block_table": TABLE,
    "kv_len": np.array([5, 7, 3]),
}  # fmt: skip
RAGGED: dict[str, Any] = {"q": VARLEN["q"], **PAGES, "cu_seqlens_q": STARTS_Q}
DENSE: dict[str, Any] = {"q": numbers(3, H, 2, D), **PAGES}

Refused = dict[str, tuple[type[Exception], list[str], dict[str, Any]]]
Invalid, Shape = tw.InvalidArgument, tw.ShapeError


def arrays(name: str, x: Any, axes: int) -> Refused:
    """What is wrong with any array of floats."""
    return {
        f"{name} missing": (Invalid, [name, "None"], {name: None}),
        f"{name} float64": (TypeError, [name, "float32, float16 or bfloat16", "float64"], {name: x.astype(float)}),
        f"{name} int16": (TypeError, [name, "int16"], {name: x.astype(np.int16)}),
        f"{name} uint16": (TypeError, [name, "uint16"], {name: x.astype(np.uint16)}),
        f"{name} other byte order": (TypeError, [name, "byte order"], {name: x.astype(x.dtype.newbyteorder())}),
        f"{name} list": (TypeError, [name, "list"], {name: x.tolist()}),
        f"{name} masked": (TypeError, [name, "mask"], {name: np.ma.masked_array(x)}),
        f"{name} fewer axes": (Shape, [name, f"{axes} axes"], {name: x[0]}),
        f"{name} more axes": (Shape, [name, f"{axes} axes"], {name: x[None]}),
        f"{name} last axis strided": (Invalid, [name, "contiguous"], {name: strided_last(x)}),
        f"{name} misaligned": (Invalid, [name, "align"], {name: misaligned(x)}),
        f"{name} odd stride": (Invalid, [name, "align"], {name: odd_stride(x)}),
    }


def starts(name: str, x: Any, total: int) -> Refused:
    """What is wrong with cumulative lengths."""

    def changed(index: int, value: int) -> Any:
        y = x.copy()
        y[index] = value
        return y

    return {
        f"{name} None": (TypeError, [name, "NoneType"], {name: None}),
        f"{name} number": (TypeError, [name, "int"], {name: 3}),
        f"{name} text": (TypeError, [name, "str"], {name: "0"}),
        f"{name} floats": (TypeError, [name, "float64"], {name: x.astype(float)}),
        f"{name} a list of floats": (TypeError, [name], {name: x.astype(float).tolist()}),
        f"{name} flags": (TypeError, [name, "bool"], {name: x.astype(bool)}),
        f"{name} matrix": (Shape, [name, "[B + 1]"], {name: x[None]}),
        f"{name} of no sequence at all": (Shape, [name, "(0,)"], {name: x[:0]}),
        f"{name} a number in an array": (Shape, [name, "()"], {name: np.array(5)}),
        f"{name} not from 0": (Invalid, [name, "from 0", "1"], {name: changed(0, 1)}),
        f"{name} not to the end": (Invalid, [name, f"to {total}"], {name: changed(-1, total - 1)}),
        f"{name} past the end": (Invalid, [name, f"to {total}"], {name: changed(-1, total + 1)}),
        f"{name} decreasing": (Invalid, [name, "decrease"], {name: changed(1, int(x[2]) + 1)}),
        f"{name} negative": (Invalid, [name, "-1"], {name: changed(1, -1)}),
        f"{name} beyond int64": (Invalid, [name, str(1 << 63)], {name: np.array([0, 1 << 63, 0, total], np.uint64)}),
        f"{name} unsigned, decreasing": (Invalid, [name, "decrease"], {name: changed(1, total).astype(np.uint8)}),
        f"{name} a list with None": (TypeError, [name], {name: [0, None, 2, total]}),
    }


OPTIONS: Refused = {
    "causal 1": (TypeError, ["causal"], {"causal": 1}),
    "return_lse None": (TypeError, ["return_lse"], {"return_lse": None}),
    "window float": (TypeError, ["window"], {"window": 2.0}),
    "scale nan": (Invalid, ["scale"], {"scale": float("nan")}),
    "br negative": (Invalid, ["br"], {"br": -1}),
    "bc 513": (Invalid, ["bc"], {"bc": 513}),
    "span no multiple": (Invalid, ["span", "64"], {"span": 100}),
    "q_offset negative": (Invalid, ["q_offset", "-1"], {"q_offset": [0, -1, 0]}),
    "q_offset float": (TypeError, ["q_offset"], {"q_offset": 0.0}),
    "q_offset True": (TypeError, ["q_offset"], {"q_offset": True}),
    "q_offset for 2": (Shape, ["q_offset", "(3,)", "(2,)"], {"q_offset": [0, 0]}),
    "k_offset negative": (Invalid, ["k_offset", "-2"], {"k_offset": -2}),
    "k_offset floats": (TypeError, ["k_offset"], {"k_offset": np.zeros(3)}),
    "k_offset for 4": (Shape, ["k_offset", "(4,)"], {"k_offset": np.zeros(4, int)}),
    "sinks for KV heads": (Shape, ["sinks", "(4,)", "(2,)"], {"sinks": np.zeros(2, np.float32)}),
    "sinks float16": (TypeError, ["sinks", "float32", "float16"], {"sinks": np.zeros(4, np.float16)}),
    "arena number": (TypeError, ["arena"], {"arena": 1}),
    "pool True": (TypeError, ["pool"], {"pool": True}),
    "kv_start": (TypeError, ["kv_start"], {"kv_start": 0}),
}


def outputs(o_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> Refused:
    refused: Refused = {}
    for name, shape in (("out", o_shape), ("lse", lse_shape)):
        right = np.zeros(shape, np.float32)
        fixed = right.copy()
        fixed.flags.writeable = False
        refused |= {
            f"{name} list": (TypeError, [name, "list"], {name: right.tolist()}),
            f"{name} float64": (TypeError, [name, "float64"], {name: right.astype(float)}),
            f"{name} axes in another order": (Shape, [name], {name: np.zeros((*shape[1:], shape[0]), np.float32)}),
            f"{name} one row less": (Shape, [name, str(shape)], {name: right[:-1].copy()}),
            f"{name} one row more": (Shape, [name], {name: np.zeros((shape[0] + 1, *shape[1:]), np.float32)}),
            f"{name} read-only": (Invalid, [name, "read-only"], {name: fixed}),
        }
        one = np.zeros((1, *shape[1:]), np.float32)
        itself = np.lib.stride_tricks.as_strided(one, shape, (0, *one.strides[1:]))
        refused[f"{name} overlaps itself"] = (Invalid, [name, "itself"], {name: itself})
    refused["lse float16"] = (TypeError, ["lse", "float32", "float16"], {"lse": np.zeros(lse_shape, np.float16)})
    return refused


def overlapping(
    given: dict[str, Any], names: tuple[str, ...], o_shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> Refused:
    """out and lse over the memory of an input, or of each other."""
    refused: Refused = {}
    for name in names:
        for mine, shape in (("out", o_shape), ("lse", lse_shape)):
            n = int(np.prod(shape))
            memory = np.zeros(n + given[name].size, np.float32)
            view = memory[n - 1 : n - 1 + given[name].size].reshape(given[name].shape)
            view[...] = given[name]
            refused[f"{mine} overlaps {name}"] = (
                Invalid, [f"{mine} overlaps {name[0]}"], {mine: memory[:n].reshape(shape), name: view},
            )  # fmt: skip
    memory = np.zeros(int(np.prod(o_shape)) + int(np.prod(lse_shape)) - 1, np.float32)
    out, lse = memory[: np.prod(o_shape)].reshape(o_shape), memory[-np.prod(lse_shape) :].reshape(lse_shape)
    return refused | {"out overlaps lse": (Invalid, ["out overlaps lse"], {"out": out, "lse": lse})}


def entry(index: tuple[int, int], value: int, kind: Any = np.int64) -> Any:
    table = np.where((TABLE < 0) | (TABLE > 6), 0, TABLE).astype(kind)
    table[index] = value
    return table


TABLES: Refused = {
    "block_table None": (TypeError, ["block_table", "NoneType"], {"block_table": None}),
    "block_table list": (TypeError, ["block_table", "list"], {"block_table": TABLE.tolist()}),
    "block_table number": (TypeError, ["block_table", "int"], {"block_table": 0}),
    "block_table floats": (TypeError, ["block_table", "float64"], {"block_table": TABLE.astype(float)}),
    "block_table flags": (TypeError, ["block_table", "bool"], {"block_table": TABLE > 0}),
    "block_table objects": (TypeError, ["block_table", "object"], {"block_table": TABLE.astype(object)}),
    "block_table vector": (Shape, ["block_table", "[3, max_pages]", "(3,)"], {"block_table": TABLE[:, 0]}),
    "block_table 3 axes": (Shape, ["block_table"], {"block_table": TABLE[None]}),
    "block_table of 2 sequences": (Shape, ["block_table", "(2, 3)"], {"block_table": TABLE[:2]}),
    "block_table of 4 sequences": (Shape, ["block_table", "(4, 3)"], {"block_table": TABLE[[0, 1, 2, 2]]}),
    "block_table too short": (Invalid, ["kv_len", "5 keys", "1 pages of 4"], {"block_table": TABLE[:, :1]}),
    "block_table without pages": (Invalid, ["kv_len", "0 pages"], {"block_table": TABLE[:, :0]}),
    "page past the last": (Invalid, ["block_table", "page 6", "[1, 1]", "6 pages"], {"block_table": entry((1, 1), 6)}),
    "page far away": (Invalid, ["block_table", str(1 << 62)], {"block_table": entry((2, 0), 1 << 62)}),
    "page negative": (Invalid, ["block_table", "page -1", "[0, 1]"], {"block_table": entry((0, 1), -1)}),
    "page negative, int32": (Invalid, ["page -1"], {"block_table": entry((0, 0), -1, np.int32)}),
    "page negative, int8": (Invalid, ["page -128"], {"block_table": entry((0, 0), -128, np.int8)}),
    "page beyond int64": (Invalid, ["page", str(1 << 63)], {"block_table": entry((0, 0), 1 << 63, np.uint64)}),
    "page 2^64 - 1": (Invalid, ["page", str((1 << 64) - 1)], {"block_table": entry((0, 0), (1 << 64) - 1, np.uint64)}),
    "page 2^32, whose low half is good": (Invalid, [str(1 << 32)], {"block_table": entry((0, 0), 1 << 32)}),
    "kv_len None": (TypeError, ["kv_len", "None"], {"kv_len": None}),
    "kv_len float": (TypeError, ["kv_len", "3.0"], {"kv_len": 3.0}),
    "kv_len True": (TypeError, ["kv_len", "True"], {"kv_len": True}),
    "kv_len floats": (TypeError, ["kv_len", "float64"], {"kv_len": np.ones(3)}),
    "kv_len flags": (TypeError, ["kv_len"], {"kv_len": [True, False, True]}),
    "kv_len for 2": (Shape, ["kv_len", "(2,)"], {"kv_len": [3, 3]}),
    "kv_len matrix": (Shape, ["kv_len", "(3, 1)"], {"kv_len": np.ones((3, 1), int)}),
    "kv_len negative": (Invalid, ["kv_len", "-1"], {"kv_len": [3, -1, 3]}),
    "kv_len beyond the table": (Invalid, ["kv_len", "sequence 1", "13 keys", "3 pages of 4"], {"kv_len": [3, 13, 3]}),
    "kv_len of 2^56": (Invalid, ["kv_len", str(1 << 56)], {"kv_len": 1 << 56}),
    "kv_len beyond int64": (Invalid, ["kv_len"], {"kv_len": np.array([3, 1 << 63, 3], np.uint64)}),
    "pages of k and v": (Shape, ["k_pages and v_pages"], {"v_pages": PAGES["v_pages"][:5]}),
    "page sizes of k and v": (Shape, ["k_pages and v_pages"], {"v_pages": PAGES["v_pages"][:, :3]}),
    "KV heads of k and v": (Shape, ["k_pages and v_pages"], {"v_pages": PAGES["v_pages"][:, :, :1]}),
    "pages of no key": (Shape, ["page"], {"k_pages": PAGES["k_pages"][:, :0], "v_pages": PAGES["v_pages"][:, :0]}),
    "no pages": (Invalid, ["0 pages"], {"k_pages": PAGES["k_pages"][:0], "v_pages": PAGES["v_pages"][:0]}),
    "D of q and k": (Shape, ["D"], {"k_pages": PAGES["k_pages"][..., :7]}),
    "4 heads on 3": (Shape, ["H = 4", "Hkv = 3"], {"k_pages": numbers(6, 4, 3, D), "v_pages": numbers(6, 4, 3, DV)}),
}  # fmt: skip

# Masks of NumPy are refused in arrays of floats; in arrays of integers they must not be ignored either.
MASKED: Refused = {
    "block_table masked": (
        TypeError, ["block_table", "mask"], {"block_table": np.ma.masked_array(entry((0, 0), 1), mask=True)},
    ),
    "kv_len masked": (TypeError, ["kv_len", "mask"], {"kv_len": np.ma.masked_array([5, 7, 3], mask=[1, 0, 0])}),
}  # fmt: skip

SHAPES: Refused = {
    "q with 4 axes": (Shape, ["q", "3 axes"], {"q": DENSE["q"]}),
    "keys of k and v": (Shape, ["k and v"], {"v": VARLEN["v"][:14]}),
    "KV heads of k and v": (Shape, ["k and v"], {"v": VARLEN["v"][:, :1]}),
    "D of q and k": (Shape, ["D"], {"q": VARLEN["q"][..., :7]}),
    "4 heads on 3": (Shape, ["H = 4", "Hkv = 3"], {"k": numbers(15, 3, D), "v": numbers(15, 3, DV)}),
    "sequences of q and of k": (Shape, ["cu_seqlens_q", "cu_seqlens_k 2"], {"cu_seqlens_k": STARTS_K[[0, 1, 3]]}),
    "q_offset unclear": (Invalid, ["q_offset", "sequence 0", "2 query rows", "5 keys"], {"causal": True}),
    "q_offset unclear for a window": (Invalid, ["q_offset"], {"window": 2}),
    "cu_seqlens_q masked": (TypeError, ["cu_seqlens_q"], {"cu_seqlens_q": np.ma.masked_array(STARTS_Q, mask=True)}),
}  # fmt: skip

Call = Callable[..., Any]
CALLS: dict[str, tuple[Call, dict[str, Any], tuple[int, ...], tuple[int, ...], Refused]] = {}


def add(
    name: str, call: Call, given: dict[str, Any], o_shape: tuple[int, ...], lse_shape: tuple[int, ...], *tables: Refused
) -> None:
    refused = OPTIONS | outputs(o_shape, lse_shape)
    for table in tables:
        refused = refused | table
    CALLS[name] = (call, given, o_shape, lse_shape, refused)


add(
    "varlen", tw.attention_varlen, VARLEN, (5, H, DV), (H, 5), SHAPES, *(arrays(n, VARLEN[n], 3) for n in "qkv"),
    starts("cu_seqlens_q", STARTS_Q, 5), starts("cu_seqlens_k", STARTS_K, 15),
    overlapping(VARLEN, ("q", "k", "v"), (5, H, DV), (H, 5)),
)  # fmt: skip
_pages = [arrays(n, PAGES[n], 4) for n in ("k_pages", "v_pages")]
add(
    "paged", tw.attention_paged, DENSE, (3, H, 2, DV), (3, H, 2), TABLES, MASKED, arrays("q", DENSE["q"], 4), *_pages,
    {
        "q with 3 axes": (Shape, ["q", "4 axes"], {"q": VARLEN["q"]}),
        "more rows than keys": (Invalid, ["q_offset", "sequence 2", "2 query rows", "1 keys"], {"kv_len": [5, 7, 1]}),
        "rows end past all positions": (Invalid, ["q_offset"], {"k_offset": 1 << 56}),
    },
    overlapping(DENSE, ("q", "k_pages", "v_pages"), (3, H, 2, DV), (3, H, 2)),
)  # fmt: skip
add(
    "paged, ragged", tw.attention_paged, RAGGED, (5, H, DV), (H, 5), TABLES, MASKED, arrays("q", RAGGED["q"], 3),
    *_pages,
    {
        **{k: x for k, x in starts("cu_seqlens_q", STARTS_Q, 5).items() if k != "cu_seqlens_q None"},
        "without cu_seqlens_q": (Shape, ["q", "4 axes"], {"cu_seqlens_q": None}),
        "q with 4 axes": (Shape, ["q", "3 axes"], {"q": DENSE["q"]}),
        "more rows than keys": (Invalid, ["q_offset", "sequence 2", "3 query rows", "2 keys"], {"kv_len": [5, 7, 2]}),
        "sequences of rows and of pages": (Shape, ["(3,)"], {"cu_seqlens_q": np.array([0, 2, 5])}),
    },
    overlapping(RAGGED, ("q", "k_pages", "v_pages"), (5, H, DV), (H, 5)),
)  # fmt: skip

EVERY = [(name, wrong) for name, (*_, refused) in CALLS.items() for wrong in refused]
# (call, what is wrong) that are not refused yet
refused_cases = pytest.mark.parametrize(("name", "wrong"), EVERY)


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name: str) -> None:
    """What every refused call below differs from in one thing."""
    call, given, o_shape, lse_shape, _ = CALLS[name]
    out, lse = poisoned(o_shape), poisoned(lse_shape)
    call(**given, out=out, lse=lse)
    assert not untouched(out)
    assert not untouched(lse)


@refused_cases
def test_refused(name: str, wrong: str) -> None:
    call, given, o_shape, lse_shape, table = CALLS[name]
    kind, words, changes = table[wrong]
    out, lse, arena = poisoned(o_shape), poisoned(lse_shape), tw.Arena()
    arena.alloc(100)
    before = (arena.used, arena.high_water, arena.capacity)
    copies = {name: x.copy() for name, x in changes.items() if isinstance(x, np.ndarray)}
    with pytest.raises(kind) as error:
        call(**{**given, "out": out, "lse": lse, "arena": arena, **changes})
    assert type(error.value) is kind, "neither a subclass nor a base of it"
    for word in words:
        assert word in str(error.value)
    assert untouched(out)
    assert untouched(lse)
    assert (arena.used, arena.high_water, arena.capacity) == before
    for name, copy in copies.items():
        np.testing.assert_array_equal(changes[name], copy)


@refused_cases
def test_refused_again(name: str, wrong: str) -> None:
    """What is remembered of good calls lets no bad one pass."""
    call, given, _, _, table = CALLS[name]
    kind, _, changes = table[wrong]
    if wrong.split()[0] in ("arena", "pool"):
        changes = {"pool": 1, **changes}
    for good in ({}, {"br": 1, "bc": 1}, {"q_offset": 1, "causal": True, "window": 2}):
        call(**given, **good)
    for _ in range(2):
        with pytest.raises(kind):
            call(**{**given, **changes})


@pytest.mark.parametrize("name", CALLS)
def test_arena_too_small(name: str) -> None:
    call, given, o_shape, lse_shape, _ = CALLS[name]
    out, lse, arena = poisoned(o_shape), poisoned(lse_shape), tw.Arena(limit=64)
    with pytest.raises(tw.ArenaExhausted):
        call(**given, out=out, lse=lse, arena=arena)
    assert untouched(out)
    assert untouched(lse)
    assert arena.used == 0


@pytest.mark.parametrize("name", CALLS)
def test_unknown_options(name: str) -> None:
    call, given, *_ = CALLS[name]
    for option in ("is_causal", "dropout_p", "block_size", "max_seqlen_q"):
        with pytest.raises(TypeError, match=option):
            call(**given, **{option: 1})
