"""block_mask: a keep function with its arrays as they were, for many calls of any layout."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_same_bits, inputs
from tests.variants.calls import RNG, B, H, assert_rings_agree, assert_same_bits_on_threads, call, small
from tilewise.kernels.variants import FULL, KINDS, PARTIAL, SKIP
from tilewise.plan import make_plan
from tilewise.problem import make_problem
from tilewise.simd.target import current_target

LARGEST = 260
DOCUMENTS = np.sort(RNG.integers(0, 4, (B, LARGEST)), axis=1)


def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) | (j // 16 == h)


MASK = tw.block_mask(keep)


def test_as_the_function() -> None:
    for c in (call(), call(causal=True), call(bc=33, span=66), call(bc=160, span=160), call().rows(2, 3)):
        for _ in range(2):
            assert_same_bits(c.run(keep=keep), c.run(keep=MASK))


def test_rings_agree() -> None:
    assert_rings_agree(small().hooked(lambda order: {"keep": MASK}))


@pytest.mark.usefixtures("eager_workers")
def test_threads() -> None:
    assert_same_bits_on_threads(call().hooked(lambda order: {"keep": MASK}))


def test_arrays_are_those_of_its_making() -> None:
    documents = DOCUMENTS.copy()
    mask = tw.block_mask(lambda b, h, i, j: documents[b, i] == documents[b, j])
    c = call()
    first = c.run(keep=mask)
    documents[:] = 0
    assert_same_bits(first, c.run(keep=mask))
    assert_same_bits(first, c.rows(0, 9).run(keep=mask))
    other_layout = c.rows(4, 6).run(keep=mask)
    assert_same_bits((first[0][:, :, 4:6], first[1][:, :, 4:6]), other_layout)


def test_layouts_in_turn() -> None:
    """Other rows, offsets, lengths, heads, tiles: a block mask that was computed for one is not used for another."""
    mask = tw.block_mask(keep)
    c = call()
    layouts = [
        c, c.rows(0, 5), c.rows(4, 9), c.change(q_offset=[0, 3]), c.change(kv_len=[20, 110]),
        c.change(k_offset=[64, 0]), c.change(kv_start=[10, 0]), c.change(bc=16), c.sequences([0]), c.change(br=4),
    ]  # fmt: skip
    expected = [x.run(keep=keep) for x in layouts]
    for _ in range(2):
        for x, y in zip(layouts, expected, strict=True):
            assert_same_bits(y, x.run(keep=mask))


def test_sequences_at_other_places_of_the_batch() -> None:
    """The sequences of few rows are a problem of their own, of the same layout wherever they are in the batch."""
    mask = tw.block_mask(lambda b, h, i, j: j // 64 % 3 == b)
    rng = np.random.default_rng(2)
    k = rng.standard_normal((600, 1, 16), np.float32)
    for rows in ([20, 1, 1], [1, 20, 1], [1, 1, 20]):
        q = rng.standard_normal((22, 1, 16), np.float32)
        sequence = np.repeat(np.arange(3), rows)[:, None]
        arguments = {
            "cu_seqlens_q": np.cumsum([0, *rows]), "cu_seqlens_k": np.array([0, 200, 400, 600]), "q_offset": 0,
            "return_lse": True,
        }  # fmt: skip
        expected = tw.attention_varlen(q, k, k, mask=np.arange(200) // 64 % 3 == sequence, **arguments)
        assert_same_bits(expected, tw.attention_varlen(q, k, k, keep=mask, **arguments), f"{rows}")


def test_entry_points_share_one() -> None:
    c = call().hooked(lambda order: {"keep": MASK})
    whole = c.run()
    for _ in range(2):
        assert_same_bits(whole, c.varlen())
        assert_same_bits(whole, c.paged(16, packed=True))
        assert_same_bits(whole, c.paged(7, packed=False))


def test_a_decode_loop() -> None:
    """More layouts than are kept."""
    q, k, v = inputs(1, 2, 1, 40, 120, 16, 16)
    mask = tw.block_mask(lambda b, h, i, j: (j <= i) & ((i - j < 30) | (j < 4)))
    whole = tw.attention(q, k, v, keep=mask, q_offset=80, return_lse=True)
    for step in range(40):
        n = 81 + step
        o, lse = tw.attention(
            q[:, :, step : step + 1], k[:, :, :n], v[:, :, :n], keep=mask, q_offset=n - 1, return_lse=True
        )
        assert_same_bits((whole[0][:, :, step : step + 1], whole[1][:, :, step : step + 1]), (o, lse), f"step {step}")


def test_calls_in_several_threads() -> None:
    """One block mask, and functions that write the same kernel with arrays of their own."""
    mask = tw.block_mask(keep)
    tables = [DOCUMENTS[0] % (n + 2) for n in range(4)]
    calls: list[Any] = [lambda: call().run(keep=mask)]
    calls += [lambda t=t: call().run(keep=lambda b, h, i, j: t[i] == t[j]) for t in tables]
    expected = [one() for one in calls]
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(10):
                which = (first + n) % len(calls)
                assert_same_bits(expected[which], calls[which]())
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


# ---- what it says of tiles
def tables(function: Any, Tq: int, Tk: int, heads: int = 1, **options: Any) -> Any:
    q, k, v = (np.zeros((1, heads, n, 16), np.float32) for n in (Tq, Tk, Tk))
    problem, _ = make_problem(q, k, v, q_offset=options.pop("q_offset", 0), **options)
    plan = make_plan(problem, current_target(), 1)
    return tw.block_mask(function).tables(problem, plan.shape)


def kinds(*arguments: Any, **options: Any) -> Any:
    """[B, Hkv, panel, tile]: (kind, first group, last group)"""
    found = tables(*arguments, **options)["kinds"]
    return np.stack([found % KINDS, found // KINDS % 8, found // (KINDS * 8)], axis=-1)


def test_kinds_of_a_causal_mask() -> None:
    """16 rows a panel, 64 keys a tile, rows from position 48 on: [48, 64), [64, 80), ..."""
    found = kinds(lambda b, h, i, j: j <= i, 48, 192, q_offset=48)
    assert found.shape == (1, 1, 3, 3, 3)
    nothing = [SKIP, 0, 0]
    assert found[0, 0, 0].tolist() == [[PARTIAL, 0, 3], nothing, nothing]
    assert found[0, 0, 1].tolist() == [[FULL, 0, 3], [PARTIAL, 0, 0], nothing]
    assert found[0, 0, 2].tolist() == [[FULL, 0, 3], [PARTIAL, 0, 1], nothing]


def test_kinds_of_groups() -> None:
    found = kinds(lambda b, h, i, j: (j >= 20) & (j < 101) | (j == 191), 16, 192)[0, 0, 0]
    assert found.tolist() == [[PARTIAL, 1, 3], [PARTIAL, 0, 2], [PARTIAL, 3, 3]]
    assert kinds(lambda b, h, i, j: j < 33, 16, 99, bc=33)[0, 0, 0].tolist() == [
        [FULL, 0, 2],
        [SKIP, 0, 0],
        [SKIP, 0, 0],
    ]


def test_tiles_that_a_panel_sees() -> None:
    function = lambda b, h, i, j: (j // 64 == 1) & (i < 16) | (j // 64 >= 3) & (i >= 32)  # noqa: E731
    assert tables(function, 48, 320)["tiles"][0, 0].tolist() == [[1, 2], [0, 0], [3, 5]]


def test_kinds_depend_on_what_the_function_reads() -> None:
    assert kinds(lambda b, h, i, j: j <= i, 16, 64, heads=3).shape[:2] == (1, 1)
    by_head = kinds(lambda b, h, i, j: j < 64 * h, 16, 128, heads=3)
    assert by_head[0, :, 0, :, 0].tolist() == [[SKIP, SKIP], [FULL, SKIP], [FULL, FULL]]


@pytest.mark.parametrize("x", [3, "causal", [True], np.ones((4, 4), np.bool_)])
def test_what_is_no_function_is_refused(x: Any) -> None:
    with pytest.raises(TypeError, match="keep must be a function"):
        tw.block_mask(x)
    with pytest.raises(TypeError, match="keep must be a function"):
        call().run(keep=x)


def test_it_is_no_score() -> None:
    with pytest.raises(TypeError, match="score must be a function, got BlockMask"):
        call().run(score=MASK)
    assert H == 4
