"""`tilewise bench`: it measures what it says, believes nobody unchecked, and gives everybody the same chances."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.api.test_bench_report import RUN
from tilewise.bench import machine
from tilewise.bench.measure import Contender, Settings, schedule
from tilewise.bench.runner import Opened
from tilewise.bench.table import GROUPS, WORKLOADS
from tilewise.bench.workloads import Workload, inputs
from tilewise.cli.app import run
from tilewise.config import current
from tilewise.reference import attention32
from tilewise.runtime import roof
from tilewise.runtime.roof import READ_AHEAD, RoofProbe, measure_roof, written_floats
from tilewise.simd.builder import LANES
from tilewise.simd.target import current_target

Command = Callable[..., tuple[int, str, str]]

HEAD = """
import os, sys, time
import numpy as np
from tilewise.bench.peers import Ready
from tilewise.reference import attention32
NEEDS = ()
def start(threads): return f"7.1 with {threads}"
def right(w, q, k, v): return Ready(lambda: attention32(q, k, v, **w.arguments)[0], np.asarray)
def wrong(w, q, k, v): return Ready(lambda: attention32(q, k, v)[0], np.asarray)
def nan(w, q, k, v): return Ready(lambda: q * np.float32(np.nan), np.asarray)
def transposed(w, q, k, v): return Ready(lambda: attention32(q, k, v, **w.arguments)[0].swapaxes(1, 2), np.asarray)
def other(w, q, k, v): return None
def cannot(w, q, k, v): return "not on a Tuesday"
def raises(w, q, k, v): raise ValueError("no\\nsuch shape")
def dies(w, q, k, v): return None if w.tiny else os._exit(3)
"""
PEERS = {
    "a_good": 'NAME = "good"\nVARIANTS = {"reference": right}',
    "b_bad": (
        'NAME = "bad"\nVARIANTS = {"wrong": wrong, "nan": nan, "transposed": transposed, "other": other,'
        ' "cannot": cannot, "raises": raises}'
    ),
    "c_far": (
        'NAME = "far"\nISOLATED = True\nVARIANTS = {"dies": dies, "reference": right}\n'
        'def start(threads):\n    print("noise", flush=True)\n    os.write(1, b"noise")\n    return "7.1"'
    ),
    "c_late": 'NAME = "late"\nISOLATED = True\ndef start(threads): raise OSError("no AVX-9")\nVARIANTS = {"x": right}',
    "d_gone": 'NAME = "gone"\nNEEDS = ("no_such_library",)',
    "e_shut": 'NAME = "shut"\nmissing = lambda: "set SHUT"',
    "f_broken": 'NAME = "broken"\ndef start(threads): raise ImportError("libfoo.so")\nVARIANTS = {"x": right}',
}
TINY = Workload("T1", "tiny prefill", 2, 4, 2, 20, 36, 16, causal=True, q_offset=16)
WINDOW = Workload("T2", "tiny window", 1, 2, 2, 40, 40, 8, causal=True, window=9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "peers"
    folder.mkdir()
    for name, text in PEERS.items():
        (folder / f"{name}.py").write_text(HEAD + text + "\n")
    (folder / "_shared.py").write_text("raise SystemError\n")
    return folder


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Command:
    """Run `tilewise bench` with the peers above and small workloads: (exit code, stdout, stderr)."""
    monkeypatch.setattr(roof, "FMA_STEPS", 1000)
    for w in (TINY, WINDOW):
        monkeypatch.setitem(WORKLOADS, w.name, w)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["bench", "--peers-folder", str(folder), *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


# ---- workloads
def test_workloads_are_those_that_were_asked_for() -> None:
    shapes = {w.name: (w.B, w.H, w.Hkv, w.Tq, w.Tk, w.D, w.causal, w.window, w.q_offset) for w in GROUPS["speed"]}
    assert shapes == {
        "W1": (1, 32, 8, 2048, 2048, 128, True, None, 0),
        "W2": (1, 12, 12, 1024, 1024, 64, True, None, 0),
        "W2n": (1, 12, 12, 1024, 1024, 64, False, None, 0),
        "W3": (1, 32, 8, 128, 4096, 128, True, None, 3968),
        "W4": (1, 32, 8, 1, 8192, 128, True, None, 8191),
        "W4b": (8, 32, 8, 1, 2048, 128, True, None, 2047),
        "W5": (1, 8, 2, 8192, 8192, 64, True, 512, 0),
        "W6": (1, 4, 1, 16384, 16384, 64, True, None, 0),
        "W7": (1, 8, 1, 1, 32768, 128, True, None, 32767),
        "W7b": (1, 64, 8, 1, 32768, 128, True, None, 32767),
        "W8": (4, 12, 12, 512, 512, 32, False, None, 0),
        "call": (1, 8, 8, 1, 16, 64, False, None, 0),
    }
    assert (WORKLOADS["W4"].flops, WORKLOADS["W4"].kv_bytes) == (134_217_728, 67_108_864)
    assert WORKLOADS["call"].arguments == {}  # the call of a user who leaves all at its default


@pytest.mark.parametrize("w", [TINY, WINDOW, *(WORKLOADS[x] for x in ("W2", "W2n", "W3", "W4", "call"))], ids=str)
def test_pairs_are_those_of_the_mask(w: Workload) -> None:
    mask = w.mask()
    assert mask.shape == (w.Tq, w.Tk)
    assert w.pairs == w.B * w.H * int(mask.sum())
    assert w.masked == (not mask.all())
    if w.decode:
        assert mask.all()
    if w.square_causal:
        assert np.array_equal(mask, np.tri(w.Tq, dtype=bool))


def test_mask_is_that_of_the_reference() -> None:
    for w in (TINY, WINDOW):
        q, k, v = inputs(w)
        S = np.where(w.mask(), np.einsum("bhid,bhjd->bhij", q, k.repeat(w.group, 1)) * w.D**-0.5, -np.inf)
        P = np.exp(S - S.max(-1, keepdims=True))
        o = (P / P.sum(-1, keepdims=True)) @ v.repeat(w.group, 1)
        assert np.abs(o - attention32(q, k, v, **w.arguments)[0]).max() < 2e-6


# ---- the roof
@pytest.mark.parametrize("threads", [1, 2])
def test_reads_read_every_byte(threads: int) -> None:
    probe = RoofProbe(current_target(), 300_000, threads)
    assert 300_000 - 512 * threads < probe.nbytes <= 300_000
    for times, ahead in enumerate(READ_AHEAD, start=1):
        before = [x[:LANES].copy() for x in probe._buffers]
        probe.read(ahead)
        for x, old in zip(probe._buffers, before, strict=True):  # all ones but for the sums left by the pass before
            assert np.array_equal(x[:LANES], old + (x.size // LANES - 1)), (times, ahead)
    assert sum(x.nbytes for x in probe._buffers) == probe.nbytes


def test_fma_does_what_it_counts() -> None:
    mr, nr = current_target().register_tile(LANES)
    probe = RoofProbe(current_target(), 1000, fma_steps=100)
    assert probe.flops == 2 * 16 * mr * nr * 100
    for one in (probe.fma, probe.crowded, probe.fma):  # each starts from the same constants
        one()
        # accumulator i starts at i, and goes to 1 by x * 0.999 + 0.001
        starts, shrunk = sum(range(mr * nr)), 0.999**100
        assert probe._constants[0][:LANES] == pytest.approx(starts * shrunk + mr * nr * (1 - shrunk), rel=1e-4)


def test_products_do_what_they_count() -> None:
    mr, nr = current_target().register_tile(LANES)
    probe = RoofProbe(current_target(), 1000, fma_steps=6400)
    assert probe.product_flops == 2 * 16 * mr * nr * 6400
    for _ in range(2):  # the second pass multiplies the same ones
        probe.product()
        assert (probe._products[0][:LANES] == mr * nr * 6400).all()


def test_measured_roof_is_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr(roof.time, "perf_counter", lambda: float(next(clock)))  # every pass takes half a second
    measured = measure_roof(current_target(), 1 << 16, 3)
    probe = RoofProbe(current_target(), 1 << 16)
    assert (measured.flops, measured.read) == (2 * probe.flops, 2 * probe.nbytes)


def test_written_floats() -> None:
    x = written_floats(3, 5, 7)
    assert (x.shape, x.dtype, x.ctypes.data % 64) == ((3, 5, 7), np.float32, 0)
    assert (x == 1).all()


# ---- the machine
def test_disturbance() -> None:
    text = "cpu  1 2 3\ncpu0 100 10 20 900 5 3 2 40 7 0\ncpu1 1000 0 0 0 0 0 0 8 0 0\ncpu10 5 0 0 0\nintr 5\n"
    assert machine.parse_stat(text, [0], 100) == (1.35, 0.4)
    assert machine.parse_stat(text, [0, 1], 100) == (11.35, 0.48)
    assert machine.parse_stat(text, [10], 100) == (0.05, 0.0)
    before = machine.Usage(wall=10, everybody=100, stolen=1, own=50)
    quiet = machine.disturbance(before, machine.Usage(20, 110.2, 1.1, 60))
    assert (quiet["others"], quiet["steal"], quiet["busy"]) == (0.02, 0.01, False)
    assert machine.disturbance(before, machine.Usage(20, 116, 1, 60))["others"] == 0.6
    assert machine.disturbance(before, machine.Usage(20, 111, 1, 60))["busy"]
    assert machine.disturbance(before, machine.Usage(20, 110, 2, 60))["busy"]
    assert not machine.disturbance(None, None)["known"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_own_time_is_not_others() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, alone = machine.usage([child.pid]), machine.usage()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)
        after, later = machine.usage([child.pid]), machine.usage()
    finally:
        child.kill()
        child.wait()
    assert None not in (before, after, alone, later)
    assert after.own - before.own > 0.02 + (later.own - alone.own)
    assert after.everybody > before.everybody


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_peak_growth_sees_what_is_freed_again() -> None:
    kept = []

    def large() -> int:
        return int(np.ones(8 << 20, np.float32)[0])

    def many() -> int:
        blocks = []
        for _ in range(400):
            blocks.append(np.ones(20_000, np.float32))
            kept.append(bytearray(1000))  # between two blocks: malloc keeps those that are free for the next time
        return int(blocks[0][0])

    for call in (large, many) * 2:
        result, growth = machine.peak_growth(call)
        assert result == 1
        assert growth is not None
        # the pages at both ends of a block that is free hold what lies beside it, and stay
        assert 400 * (80_000 - 2 * 4096) < growth < 36e6
    _, none = machine.peak_growth(lambda: None)
    assert none is not None
    assert none < 1e6


# ---- the run
def test_run(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code, out, err = bench("-w", "T1,call", "--repeat", 4, "--json", path)
    assert code == 0, err
    result = json.loads(path.read_text())
    assert result["format"] == 1
    assert result["peers"] == {"good": "7.1 with 1", "bad": "7.1 with 1", "far": "7.1"}
    assert result["missing"] == {
        "gone": "needs no_such_library", "shut": "set SHUT", "broken": "ImportError: libfoo.so",
        "late": "OSError: no AVX-9",
    }  # fmt: skip
    assert result["command"] == "tilewise bench --workload T1,call --threads 1 --repeat 4"
    assert str(tmp_path) not in path.read_text()
    first, small = result["results"]
    assert (first["workload"], small["workload"]) == ("T1", "call")
    assert [(x["peer"], x["variant"]) for x in first["peers"]] == [("good", "reference"), ("far", "reference")]
    reasons = {f"{x['peer']} {x['variant']}": x["reason"] for x in first["skipped"]}
    assert reasons.pop("bad wrong").startswith("wrong: differs from ours by 0.")
    assert reasons == {
        "bad nan": "wrong: differs from ours by nan", "bad transposed": "wrong: differs from ours by nan",
        "bad other": "does not apply", "bad cannot": "not on a Tuesday", "bad raises": "ValueError: no such shape",
        "far dies": "its process ended with code 3",
    }  # fmt: skip
    for x in (first["ours"], *first["peers"]):
        assert 0 < x["best"] <= x["lowest"] <= x["median"] <= x["highest"]
        assert x["max_error"] < 2e-6
        assert 1 <= len(x["rounds"]) <= 4 <= x["calls"] * 4
    assert len(first["ours"]["rounds"]) == 4
    assert first["rounds"] == 4
    rates = "flops", "flops_best", "product", "product_best", "read", "read_best"
    assert min(first["roof"][x] for x in rates) > 0
    assert first["summary"]["product_share"] > 0
    assert len(first["roof"]["crowded_rounds"]) == 4
    assert first["summary"]["crowding"] > 0
    assert small["roof"] is None
    assert first["summary"]["fastest_peer"] in ("good reference", "far reference")
    for words in ("T1 tiny prefill: B2 H4 Hkv2 Tq20 Tk36 D16, causal", "bad raises: ValueError", "missing: shut"):
        assert words in out
    assert "does not apply" not in out


def test_everybody_has_a_turn_in_every_round(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    sample = Contender.sample

    def recorded(self: Contender, seconds: float) -> None:
        turns.append(f"{self.peer} {self.variant}")
        sample(self, seconds)

    monkeypatch.setattr(Contender, "sample", recorded)
    monkeypatch.setattr("tilewise.bench.measure.SLOW", 1e9)
    assert bench("-w", "T1", "-p", "good,far", "--repeat", 3)[0] == 0
    reads = [f"roof read ahead {ahead}" for ahead in READ_AHEAD]
    roofs = ["roof fma", "roof crowded", "roof product", *reads]
    assert turns == [*roofs, "tilewise attention", "good reference", "far reference"] * 3


def test_threads_and_target_are_those_asked_for(
    bench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, real = [], tw.attention

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append((current().threads, current().target, sorted(options)))
        return real(*arguments, **options)

    monkeypatch.setattr(tw, "attention", recorded)
    target = current_target().name
    path = tmp_path / "run.json"
    assert bench("-w", "T2", "-t", "3,1", "-p", "good", "--repeat", 1, "--target", target, "--json", path)[0] == 0
    assert [x for x, before in zip(seen, [None, *seen], strict=False) if x != before] == [
        (3, target, ["causal", "window"]), (1, target, ["causal", "window"]),
    ]  # fmt: skip
    result = json.loads(path.read_text())
    assert [x["threads"] for x in result["results"]] == [3, 1]
    assert [x["peers"][0]["version"] for x in result["results"]] == ["7.1 with 3", "7.1 with 1"]


def test_our_own_mistake_is_noticed(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tw.attention
    monkeypatch.setattr(tw, "attention", lambda *x, **y: real(*x, **y) + np.float32(1e-3))
    code, _, err = bench("-w", "T1", "-p", "none", "--repeat", 1)
    assert (code, "our own result is wrong: T1" in err) == (1, True)


def test_schedule() -> None:
    def contender(peer: str, seconds: float) -> Contender:
        runner: Any = None
        return Contender(peer, "x", runner, Opened(typical_seconds=seconds))

    fast, ours, slow, roof_ = (contender(*x) for x in (("fast", 0.1), ("tilewise", 0.2), ("slow", 1.0), ("roof", 0.01)))
    everybody, rivals = [roof_, ours, fast, slow], [fast, slow]
    rounds, due = schedule(everybody, rivals, Settings(seconds=6.4))
    assert rounds == 10  # a round takes 0.63 s without the slow one
    assert [sorted(x) for x in due] == [list(range(10))] * 3 + [[0, 3, 6]]
    assert schedule(everybody, rivals, Settings(seconds=0.1))[0] == 9
    assert schedule(everybody, rivals, Settings(seconds=0.1, repeat=2))[0] == 2
    _, due = schedule([ours, contender("small", 1e-5)], [], Settings(repeat=9))
    assert [len(x) for x in due] == [9, 9]  # ours is never left out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-w", "W9"], ["--workload", "W9", "W7b", "half"]),
        (["-t", "1,x"], ["--threads", "1,x"]),
        (["-t", "0"], ["--threads"]),
        (["-p", "good,nobody"], ["--peers", "nobody", "far"]),
        (["--json", "no/such/folder.json"], ["--json", "folder"]),
        (["--target", "z80"], ["z80"]),
        (["--table", "no_such_file.json"], ["no_such_file.json"]),
    ],
)
def test_bad_use_is_one_line(bench: Command, arguments: list[str], words: list[str]) -> None:
    code, out, err = bench(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word in err for word in words), err


# ---- what is made of a run
def test_table_of_the_readme(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUN))
    code, out, err = bench("--table", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[2] == "| W4 decode | B1 | 2 | 500 ms | 8.0 GB/s | 0.80 (reads) | p v | 1.50x |"
    assert lines[3] == "| call decode | B1 | 2 | 500 ms |  |  | none |  |"
    assert all(words in out for words in ("A CPU", "p 1.2", "`tilewise bench -w W4`", "busy during W4 (2 threads)"))
    path.write_text('{"format": 2}')
    assert bench("--table", path)[0] == 2


def test_chart(bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUN))
    if importlib.util.find_spec("matplotlib"):
        assert bench("--table", path, "--chart", tmp_path / "speed.svg")[0] == 0
        assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "speed.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = bench("--table", path, "--chart", tmp_path / "speed.svg")
    assert (code, "tilewise[bench]" in err) == (2, True)


def test_importing_is_light() -> None:
    heavy = ("click", "rich", "matplotlib", "torch")
    for module, allowed in (("tilewise", ()), ("tilewise.bench", ("click",))):
        code = f"import sys, {module}; print([x for x in {heavy} if x in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(list(allowed))
