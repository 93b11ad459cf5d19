"""What `tilewise bench` makes of its measurements."""

from __future__ import annotations

import pytest

from tilewise.bench import report

RECORD = {"peer": "p", "variant": "v", "median": 0.5, "best": 0.25, "growth": 1}
RESULT = {
    "workload": "W4", "title": "decode", "shape": "B1", "threads": 2, "flops": 10e9, "kv_bytes": 4e9, "tiny": False,
    "roof": {"flops": 40e9, "read": 10e9}, "busy": {"busy": True},
    "ours": RECORD, "peers": [RECORD | {"peer": "slow", "median": 0.9}, RECORD | {"median": 0.75}],
}  # fmt: skip
RUN = {
    "format": 1, "command": "tilewise bench -w W4", "target": "x86-64-v4", "peers": {"p": "1.2"}, "missing": {},
    "machine": {"cpu": "A CPU", "caches": "L1 48K", "virtual": True, "tilewise": "0.1"},
    "results": [RESULT, RESULT | {"workload": "call", "tiny": True, "roof": None, "peers": []}],
}  # fmt: skip


def test_figures() -> None:
    assert report.figures(RESULT, RECORD) == {
        "gflops": 20, "gbytes": 8, "fma_share": 0.5, "read_share": 0.8, "share": 0.8,
    }  # fmt: skip
    assert report.figures(RESULT, RECORD, "best")["gflops"] == 40
    assert (report.limit(RESULT), report.ratio(RESULT)) == ("reads", 1.5)
    assert report.limit(RESULT | {"kv_bytes": 1e9}) == "fma"
    assert report.ratio(RESULT | {"peers": []}) is None
    times = (2e-6, 0.0123, 0.9994, 0.9996, 14.92)
    assert [report.duration(x) for x in times] == ["2.0 us", "12.3 ms", "999 ms", "1 s", "14.9 s"]


def test_figures_of_rounds() -> None:
    """A machine that is slower in some rounds: what is compared is what was measured in the same round."""
    ours = RECORD | {"rounds": [0.5, 1.0, 0.5], "median": 0.5}
    peer = RECORD | {"rounds": [0.75, 1.5, 1.5], "median": 1.5}
    few = RECORD | {"rounds": [4.0], "median": 4.0}
    roof = {**RESULT["roof"], "fma_rounds": [1, 2, 2], "fma_flops": 4e10, "read_rounds": [1, 2, 2], "read_bytes": 1e10}
    result = RESULT | {"ours": ours, "peers": [peer, few], "roof": roof}
    assert report.ratio(result) == 1.5  # of the medians it is 3
    assert report.times_ours(result, few) == 8
    shares = report.figures(result, ours)
    work = RESULT["flops"] / 4e10
    assert shares["fma_share"] == pytest.approx(work * 2)  # the roof takes 2, 2 and 4 times our time
    assert report.figures(result, ours, "best")["fma_share"] == report.figures(RESULT, ours, "best")["fma_share"]


def test_a_core_that_is_shared_is_told() -> None:
    """By fma beside other instructions, in the same rounds; older files have no such rounds."""
    roof = {**RESULT["roof"], "fma_rounds": [1, 2, 2]}
    busy = {"known": True, "busy": False, "others": 0.1, "steal": 0.0, "load": 1}
    alone = RESULT | {"busy": busy, "roof": roof | {"crowded_rounds": [1.05, 2.0, 2.9]}}
    shared = RESULT | {"busy": busy, "roof": roof | {"crowded_rounds": [1.5, 3.0, 2.0]}}
    assert (report.crowding(alone), report.crowding(shared)) == (1.05, 1.5)
    assert [report.shared(x) for x in (alone, shared, RESULT, RESULT | {"roof": None})] == [False, True, False, False]
    assert report.busy_line(alone) == "quiet: others used 0.10 cores of ours, the host stole 0.00 (load 1)"
    told = "SHARED with another hardware thread: fma beside others took 1.50 times as long"
    assert report.busy_line(shared).endswith(told)
    unknown = report.busy_line(shared | {"busy": {"known": False, "busy": False, "load": 2}})
    assert unknown.startswith("unknown to this system (load 2); SHARED")
    note = "Another hardware thread shared the core during W4 (1.50)"
    assert note in report.markdown(RUN | {"results": [shared, alone]})
    assert "Another hardware thread" not in report.markdown(RUN | {"results": [alone]})
