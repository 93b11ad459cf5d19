"""`tilewise bench`, the groups: types, pages, ragged batches, and ours beside ours."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.bench import machine, report
from tilewise.bench.command import cases, chosen_workloads
from tilewise.bench.measure import half_unit, open_side, spot_error
from tilewise.bench.ours import OURS, pages, prepare
from tilewise.bench.peers import Ready
from tilewise.bench.runner import Local
from tilewise.bench.table import GROUPS, WORKLOADS, batch
from tilewise.bench.workloads import SEED, Batch, Startup, Workload, inputs
from tilewise.cli.app import run
from tilewise.config import current
from tilewise.runtime import roof
from tilewise.simd.target import current_target
from tilewise.verify.halves import rounded, wide

DENSE = Workload("G1", "dense", 1, 4, 2, 30, 30, 16, causal=True)
HALF = replace(DENSE, name="G2", type="bf16", beside=DENSE)
PAGED = batch("G3", "paged", 4, 2, 16, (40, 1, 23), 1, page=8, shuffled=True, turnover=6, beside=DENSE)
RAGGED = batch("G4", "ragged", 4, 2, 16, (5, 70, 1), 0)
ALONE = replace(DENSE, name="G5", alone=True)
THREADS = replace(DENSE, name="G6", threads=3, alone=True, beside=replace(DENSE, threads=1))
START = Startup("G7", "start", 1, 4, 2, 3, 40, 16, causal=True, q_offset=37, tiny=True, alone=True)
PEER = """
import numpy as np
from tilewise.bench.peers import Ready
from tilewise.reference import attention32
NAME, NEEDS = "good", ()
def start(threads): return "7.1"
def right(w, q, k, v): return Ready(lambda: attention32(q, k, v, **w.arguments)[0], np.asarray)
def wrong(w, q, k, v): return Ready(lambda: np.zeros_like(q), np.asarray)
VARIANTS, BATCHES = {"reference": right}, {"wrong": wrong}
"""


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Run `tilewise bench` on workloads from above beside the peer above: (what it writes as JSON, what it prints)."""
    monkeypatch.setattr(roof, "FMA_STEPS", 1000)
    for w in (DENSE, HALF, PAGED, RAGGED, ALONE, THREADS, START):
        monkeypatch.setitem(WORKLOADS, w.name, w)
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "good.py").write_text(PEER)

    def call(names: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "run.json"
        options = ["--peers-folder", str(tmp_path / "peers"), "--repeat", "2", "--json", str(path)]
        assert run(["bench", "-w", names, *options]) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return call


# ---- what the groups hold
def test_half_is_beside_the_same_in_float32() -> None:
    half = GROUPS["half"]
    assert [(w.beside.name, w.type) for w in half if w.beside] == [
        (name, type) for name in ("W1", "W2", "W3", "W4", "W4x4", "W4b", "P16") for type in ("bf16", "f16")
    ]
    for w in half:
        assert w.beside is not None
        assert (w.shapes, w.arguments, w.flops) == (w.beside.shapes, w.beside.arguments, w.beside.flops)
        assert 2 * w.kv_bytes == w.beside.kv_bytes
    assert half[8].kv_bytes == 4 * half[6].kv_bytes


def test_pages_are_beside_one_piece_and_uneven_beside_even() -> None:
    group = {w.name: w for w in GROUPS["serving"]}
    for name in ("P1", "P16", "P128", "P1s", "P16s"):
        w = group[name]
        assert isinstance(w, Batch)
        assert w.beside is WORKLOADS["W4"]
        assert (w.page, w.shuffled) == (int(name[1:].rstrip("s")), name.endswith("s"))
        assert (w.flops, w.kv_bytes) == (w.beside.flops, w.beside.kv_bytes)
    step, uneven = group["step"], group["uneven"]
    assert isinstance(step, Batch)
    assert isinstance(uneven, Batch)
    assert (step.B, step.rows, min(step.lengths), max(step.lengths)) == (64, 64, 16, 4096)
    assert len({x.tobytes() for x in islice(step.steps(), 512)}) == 512  # more than any call remembers
    totals = [int(step.lengths_at(call).sum()) for call in range(512)]
    assert max(totals) - min(totals) < 64 * 8
    assert abs(np.mean(totals) - step.keys) < 64
    assert (min(uneven.lengths), max(uneven.lengths), uneven.beside) == (1, 32768, group["even"])


def test_other_groups_compare_one_thing() -> None:
    for w in GROUPS["shapes"]:
        assert w.beside is not None
        assert replace(w, name=w.beside.name, D=128, beside=None) == w.beside
    assert [w.D for w in GROUPS["shapes"]] == [80, 96, 112, 256] * 2
    assert [(w.Tk, w.Hkv, w.beside and w.beside.Tk) for w in GROUPS["flat"]] == [
        (1024, 1, None), (4096, 1, 1024), (16384, 1, 1024), (65536, 1, 1024)
    ]  # fmt: skip
    for w in GROUPS["threads"]:
        assert w.beside is not None
        assert (w.threads, w.beside.threads, w.shapes == w.beside.shapes) == (2, 1, True)
    assert {(w.target, w.beside and w.beside.target) for w in GROUPS["targets"]} == {("x86-64-v3", "")}
    assert [(w.name, w.Tk) for w in GROUPS["memory"]] == [
        ("M1k", 1024), ("M131k", 131072), ("Md1k", 1024), ("Md131k", 131072)
    ]  # fmt: skip
    assert [(w.name, getattr(w, "cached", None)) for w in GROUPS["fixed"]] == [
        ("call", None), ("start", False), ("startc", True), ("start1", False), ("start1c", True)
    ]  # fmt: skip
    for name in ("flat", "threads", "targets", "memory"):
        assert all(w.alone for w in GROUPS[name])


def test_names_are_workloads_or_groups() -> None:
    assert [w.name for w in chosen_workloads("W8,flat,T4k")] == ["W8", "T1k", "T4k", "T16k", "T64k"]
    assert chosen_workloads(None) == list(GROUPS["speed"])
    assert len(WORKLOADS) == len({w for group in GROUPS.values() for w in group})  # no name means two things
    w1, twice = WORKLOADS["W1"], WORKLOADS["W1.x2"]
    assert cases([w1, twice], [1, 2]) == {1: [w1], 2: [twice, w1]}


# ---- batches
def test_cost_of_a_batch() -> None:
    q, k, v = inputs(RAGGED)
    assert [x.shape for x in (q, k, v)] == [(76, 4, 16), (76, 2, 16), (76, 2, 16)]
    assert RAGGED.pairs == 4 * sum(int(np.tri(n).sum()) for n in (5, 70, 1))
    assert (RAGGED.flops, RAGGED.out_bytes) == (4 * 16 * RAGGED.pairs, q.nbytes)
    mean = np.mean([PAGED.lengths_at(call).sum() for call in range(6)])
    assert PAGED.pairs == 4 * PAGED.keys
    assert abs(PAGED.keys - mean) < 1
    assert PAGED.kv_bytes == 2 * 2 * 16 * 4 * PAGED.keys
    assert all((PAGED.lengths_at(call) <= np.diff(PAGED.starts)).all() for call in range(20))


def test_pages_hold_the_keys() -> None:
    _, k, _ = inputs(PAGED)
    table, array = PAGED.block_table(8), pages(PAGED, k)
    used = [row[: -(-(b - a) // 8)] for row, (a, b) in zip(table, pairwise(PAGED.starts), strict=True)]
    assert sorted(np.concatenate(used)) == list(range(len(array)))
    assert np.concatenate(used).tolist() != list(range(len(array)))  # shuffled
    assert array.strides[1] < array.strides[2] < array.strides[0]  # [pages, Hkv, page, D] in memory
    for row, (a, b) in zip(used, pairwise(PAGED.starts), strict=True):
        assert np.array_equal(np.concatenate(array[row])[: b - a], k[a:b])


@pytest.mark.parametrize("w", [HALF, PAGED, RAGGED, *(replace(x, type="f16") for x in (PAGED, RAGGED))], ids=str)
def test_our_result_is_near_float64_and_a_mistake_is_not(w: Workload) -> None:
    ready = prepare(w, *inputs(w))
    o = ready.fetch(ready.call())
    assert (o.dtype, o.shape) == (np.float32, w.shapes[0])
    assert spot_error(w, o) < 1e-6
    for index, _, _ in w.spots():
        wrong = o.copy()
        wrong[index] *= 1 + (2**-6 if w.type == "bf16" else 2**-9)
        assert spot_error(w, wrong) > 1e-4


def test_each_call_has_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], tw.attention_paged

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options["kv_len"].tolist())
        return real(*arguments, **options)

    monkeypatch.setattr(tw, "attention_paged", recorded)
    ready = prepare(PAGED, *inputs(PAGED))
    for _ in range(6):
        ready.call()
    assert seen == [PAGED.lengths_at(call).tolist() for call in range(6)]
    assert len({tuple(x) for x in seen}) == 6


def test_half_inputs_are_the_rounded_ones() -> None:
    floats = np.random.default_rng(SEED).standard_normal(DENSE.shapes[0], np.float32)
    for type in ("bf16", "f16"):
        q = inputs(replace(DENSE, type=type))[0]
        assert np.array_equal(wide(q, type), wide(rounded(floats, type), type))
        assert q.ctypes.data % 64 == 0


def test_half_unit() -> None:
    x = np.array([1.0, 1.99, 2.0, -0.3])
    assert half_unit("f16", x).tolist() == [2**-11, 2**-11, 2**-10, 2**-13]
    assert half_unit("bf16", x).tolist() == [2**-8, 2**-8, 2**-7, 2**-10]


# ---- runs
def test_run_beside(bench: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    result, out = bench("G1,G2,G3,G4,G5")
    dense, half, paged, ragged, alone = result["results"]
    assert [x["peer"] for x in dense["peers"]] == ["good"]
    assert (dense["beside"], dense["summary"]["beside"]) == (None, None)
    assert {x["reason"] for x in half["skipped"]} == {"computes nothing in bfloat16"}
    assert {(x["variant"], x["reason"][:5]) for x in ragged["skipped"]} == {("wrong", "wrong")}
    assert alone["peers"] == alone["skipped"] == []
    for x in (half, paged):
        beside = x["beside"]
        assert (beside["workload"], beside["threads"], beside["target"]) == ("G1", 1, x["target"])
        assert len(beside["ours"]["rounds"]) == len(x["ours"]["rounds"]) == 2
        assert beside["roof"]["read"] != x["roof"]["read"]  # of as many bytes as each one has
        rounds = zip(beside["ours"]["rounds"], x["ours"]["rounds"], strict=True)
        times = statistics.median(theirs / own for theirs, own in rounds)
        assert x["summary"]["beside"] == pytest.approx(x["flops"] / beside["flops"] * times)
    assert (half["type"], half["kv_bytes"]) == ("bf16", DENSE.kv_bytes // 2)
    for words in ("beside: G1: B1 H4 Hkv2 T30 D16", "pages of 8, shuffled", "D16, causal, bf16"):
        assert words in out
    assert "Bfloat16, float32, medians" in report.markdown(result)


def test_threads_and_their_roof(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real, probe = set(), tw.attention, roof.RoofProbe
    monkeypatch.setattr(tw, "attention", lambda *x, **y: (seen.add(current().threads), real(*x, **y))[1])
    probes = []
    monkeypatch.setattr("tilewise.bench.measure.RoofProbe", lambda *x: (probes.append(x[2]), probe(*x))[1])
    result, out = bench("G6")
    (x,) = result["results"]
    assert seen == {1, 3}
    assert probes == [3, 1]
    assert (x["threads"], x["beside"]["threads"]) == (3, 1)
    assert "x G1 x1 (roof " in out


def test_target_is_that_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], tw.attention
    monkeypatch.setattr(tw, "attention", lambda *x, **y: (seen.append(current().target), real(*x, **y))[1])
    name = current_target().name
    side, _ = open_side(replace(DENSE, target=name), 1, current_target())
    assert (side.target.name, set(seen)) == (name, {name})
    with pytest.raises(tw.TargetError):
        open_side(replace(DENSE, target="z80"), 1, current_target())


def test_our_mistake_beside_is_noticed(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tw.attention
    monkeypatch.setattr(
        tw, "attention", lambda q, *x, **y: real(q, *x, **y) + (np.float32(1e-3) if q.dtype == np.float32 else 0)
    )
    with pytest.raises(AssertionError):
        bench("G3")
    assert "our own result is wrong: G1" in capsys.readouterr().err


def test_first_call_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(START, *inputs(START))
    begin = time.perf_counter()
    answer = ready.call()
    wall = time.perf_counter() - begin
    assert ready.seconds is not None
    assert 0 < ready.seconds(answer) < wall
    assert spot_error(START, ready.fetch(answer)) < 1e-6
    children, real = [], subprocess.run
    monkeypatch.setattr(
        "subprocess.run", lambda *x, **y: (children.append(y["env"]["TILEWISE_CACHE"]), real(*x, **y))[1]
    )
    cached = prepare(replace(START, cached=True), *inputs(START))
    cached.call()
    assert (len(children), len(set(children))) == (2, 1)  # the second one finds what the first one compiled


def test_result_is_that_of_the_first_call() -> None:
    out = np.zeros(1, np.float32)

    def call() -> Any:
        out[:] += 1
        return out

    opened = Local(OURS, 1).add("x", Ready(call, np.asarray), 0)
    assert opened.result is not None
    assert opened.result.tolist() == [1]


def test_a_call_may_time_itself() -> None:
    runner = Local(OURS, 1)
    runner.add("x", Ready(lambda: 7.0, np.asarray, seconds=lambda x: x), 0)
    assert set(runner.sample("x", 0.0)) == {7.0}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_children_that_ended_are_ours() -> None:
    before = machine.usage()
    subprocess.run([sys.executable, "-c", "x = sum(range(5_000_000))"], check=True)
    after = machine.usage()
    assert before is not None
    assert after is not None
    assert after.own - before.own > 0.05


# ---- what is made of a run
def test_beside_in_figures_and_tables() -> None:
    record = {"peer": "tilewise", "variant": "attention", "median": 0.5, "best": 0.25, "growth": 1}
    beside = {
        "workload": "W1", "title": "prefill", "shape": "B1", "type": "f32", "threads": 1, "target": "v4",
        "flops": 10e9, "kv_bytes": 4e9, "tiny": False, "roof": {"flops": 40e9, "read": 10e9}, "ours": record,
    }  # fmt: skip
    result = beside | {
        "workload": "W1.x2", "threads": 2, "flops": 18e9, "roof": {"flops": 76e9, "read": 10e9},
        "peers": [], "beside": beside, "busy": {"busy": False},
    }  # fmt: skip
    assert report.relative(result) == pytest.approx(1.8)
    assert report.limit(result) == "reads"
    assert report.beside_text(result) == "1.80x W1 x1 (roof 1.00x)"
    result["kv_bytes"] = 1e9
    assert report.beside_text(result) == "1.80x W1 x1 (roof 1.90x)"
    assert (
        report.beside_text(result | {"beside": beside | {"threads": 2, "target": "v3"}}) == "1.80x W1 v3 (roof 1.90x)"
    )
    assert report.beside_text(result | {"beside": beside | {"threads": 2}}) == "1.80x W1"
    assert report.beside_text(beside) == ""
    run = {
        "command": "c", "target": "v4", "peers": {}, "results": [result],
        "machine": {"cpu": "A CPU", "caches": "L1", "virtual": False, "tilewise": "0.1"},
    }  # fmt: skip
    lines = report.markdown(run).splitlines()
    assert lines[0].endswith("| ratio | beside |")
    assert lines[2].endswith("| none |  | 1.80x W1 x1 (roof 1.90x) |")
