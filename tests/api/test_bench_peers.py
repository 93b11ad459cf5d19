"""The adapters of benchmarks/peers: whichever library is installed here gives our result, from the same inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import assert_same_bits
from tilewise.bench.measure import LARGEST_ERROR, largest_error
from tilewise.bench.ours import prepare
from tilewise.bench.peers import Missing, Peer, load_peer
from tilewise.bench.runner import start
from tilewise.bench.table import WORKLOADS, batch
from tilewise.bench.workloads import Workload, inputs

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
KINDS = (
    Workload("chunk", "", 2, 4, 2, 20, 36, 16, causal=True, q_offset=16),
    Workload("window", "", 1, 2, 2, 40, 40, 8, causal=True, window=9),
    Workload("square", "", 1, 4, 2, 65, 65, 64, causal=True), Workload("plain", "", 2, 3, 3, 70, 70, 32),
    Workload("decode", "", 2, 8, 2, 1, 200, 64, causal=True, q_offset=199), WORKLOADS["call"],
)  # fmt: skip
FLOATS = (
    *KINDS,
    batch("pages", "", 8, 2, 64, (200, 1, 77), 1, page=32, shuffled=True, turnover=40),
    batch("ragged", "", 4, 2, 64, (33, 1, 200, 64), 0),
)
HALVES = tuple(replace(w, type=type) for w in (KINDS[2], KINDS[4], FLOATS[-2]) for type in ("bf16", "f16"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of other people's libraries
def test_installed_peer_gives_our_result(path: Path) -> None:
    peer = load_peer(path)
    if isinstance(peer, Missing):
        pytest.skip(peer.reason)
    assert isinstance(peer, Peer)
    runner, done = start(peer, 1), set()
    try:
        assert runner.version
        for w in (*FLOATS, *(x for x in HALVES if x.type in peer.types)):
            ours = prepare(w, *inputs(w))
            expected = ours.fetch(ours.call())
            for variant in peer.variants_for(w):
                opened = runner.open(w, variant)
                if opened.result is not None:
                    done.add((w.type, variant))
                    assert largest_error(opened.result, expected) <= LARGEST_ERROR[w.type], (w, variant)
                    assert len(runner.sample(variant, 0.0)) == 1
            runner.release()
        for w in (x for x in HALVES if x.type not in peer.types):
            assert all("computes nothing in" in runner.open(w, x).reason for x in peer.variants_for(w))
    finally:
        runner.close()
    assert {x for type, x in done if type == "f32"} == {*peer.variants, *peer.batches}


def test_inputs_begin_on_a_cache_line_and_stay_the_same() -> None:
    first = [x.copy() for x in inputs(KINDS[0])]
    inputs.cache_clear()
    for x, y in zip(first, inputs(KINDS[0]), strict=True):
        assert_same_bits(x, y)
        assert y.ctypes.data % 64 == 0
        assert 0.5 < y.std() < 1.5
