"""The debug ladder: each level prints what it says, on stderr, and the result is the same."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import assert_same_bits, inputs
from tilewise.problem import make_problem
from tilewise.runtime import trace
from tilewise.runtime.roof import Roof

LINE = re.compile(
    r"tilewise: attention B 1 H 4 Hkv 2 Tq 5 Tk 40 D 16 Dv 8 causal, window 30: "
    r"\d+\.\d{3} ms  \d+\.\d GFLOP/s  \d+\.\d\d GB/s  (\d+ % of the roof \((arithmetic|reads): .*\)|interpreted)"
)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_shown", set())
    monkeypatch.setattr(trace, "roof_of", lambda target: Roof(1e11, 1e10))


def call() -> Any:
    return tw.attention(*inputs(1, 4, 2, 5, 40, 16, 8), causal=True, window=30, q_offset=35, return_lse=True)


@pytest.mark.parametrize("interpret", [False, True])
def test_each_level_prints_more(capsys: pytest.CaptureFixture[str], interpret: bool) -> None:
    silent = call()
    assert capsys.readouterr() == ("", "")
    texts = []
    for level in range(1, 6):
        trace._shown.clear()
        with tw.config(debug=level, interpret=interpret):
            assert_same_bits(call(), silent)
        out, err = capsys.readouterr()
        assert out == ""
        texts.append(err)
    assert texts[0].startswith("tilewise: target ")
    assert texts[0].count("\n") == 1
    assert LINE.fullmatch(texts[1].splitlines()[1])
    assert "interpreted" in texts[1] if interpret else "% of the roof" in texts[1]
    assert "plan of attention" in texts[2]
    assert "work items" in texts[2]
    assert "def forward_f32_d16x8_bc64" in texts[3]
    assert "define i64" not in texts[3]
    assert "define i64" in texts[4]
    assert ".text" in texts[4]
    for fewer, more in itertools.pairwise(texts):
        assert len(more) > len(fewer)
        assert "target" in more


def test_once_and_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    with tw.config(debug=4):
        call()
        first = capsys.readouterr().err
        call()
        second = capsys.readouterr().err
    assert "def forward" in first
    assert "def forward" not in second
    assert "bit vectors" not in second
    assert LINE.search(second)


def test_level_0_runs_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(trace, "launch", never)
    call()


@pytest.mark.parametrize(
    ("arguments", "rows", "keys"),
    [
        ({}, 5, 40),
        ({"causal": True, "q_offset": 9}, 5, 14),  # positions 9 to 13 see keys 0 to 13
        ({"causal": True, "window": 3, "q_offset": 9}, 5, 7),  # 7 to 13
        ({"causal": True, "window": 3, "q_offset": 90}, 5, 0),
        ({"kv_len": 11}, 5, 11),
        ({"kv_start": 30, "k_offset": 100, "causal": True, "q_offset": 101}, 5, 6),  # 100 to 105
    ],
)
def test_bytes_are_those_that_must_move(arguments: dict[str, Any], rows: int, keys: int) -> None:
    q, k, v = inputs(1, 4, 2, rows, 40, 16, 8)
    problem, _ = make_problem(q, k, v, return_lse=True, **arguments)
    assert trace.bytes_moved(problem) == 4 * (4 * rows * (16 + 8 + 1) + 2 * keys * (16 + 8))


def test_no_rows_move_no_bytes() -> None:
    q, k, v = inputs(2, 4, 2, 0, 40, 16, 8)
    problem, _ = make_problem(q, k, v)
    assert trace.bytes_moved(problem) == 0


def test_share_is_of_the_limit_that_is_nearer() -> None:
    roof = Roof(flops=100e9, read=10e9)
    assert trace.Speed(1.0, int(50e9), int(1e9), 1).share(roof) == (0.5, "arithmetic")
    assert trace.Speed(1.0, int(50e9), int(8e9), 1).share(roof) == (0.8, "reads")
    assert trace.Speed(0.5, int(50e9), int(1e9), 2).share(roof) == (0.5, "arithmetic")
    assert np.isclose(trace.Speed(0.5, int(50e9), int(1e9), 2).gflops, 100)
