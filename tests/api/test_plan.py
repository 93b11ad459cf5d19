"""What is chosen for a problem: rows a query tile, panel, work items, workers. Worked out by hand from the rules.

None of it moves a bit, so no test of results would notice a wrong choice: it would only be slow, or take more memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise.plan import Plan, make_plan
from tilewise.problem import make_problem
from tilewise.simd.target import TARGETS

WIDE, NARROW = TARGETS["x86-64-v4"], TARGETS["x86-64-v3"]


def plan(
    B: int = 1, H: int = 1, Hkv: int = 1, Tq: int = 1, Tk: int = 1, D: int = 16, Dv: int = 16, threads: int = 1,
    target: Any = WIDE, **options: Any,
) -> Plan:  # fmt: skip
    room = np.zeros(1024, np.float32)  # every row is the same memory: only the shapes count here
    shapes = (B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)
    q, k, v = (np.lib.stride_tricks.as_strided(room, shape, (0, 0, 0, 4)) for shape in shapes)
    problem, _ = make_problem(q, k, v, **{"q_offset": 0, **options})
    return make_plan(problem, target, threads)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ({"Tq": 1}, 1),
        ({"Tq": 7}, 7),
        ({"Tq": 511}, 511),
        ({"Tq": 512}, 512),
        ({"Tq": 1000}, 512),  # 1 / 512 of the products
        ({"Tq": 1000, "D": 128, "Dv": 128}, 512),  # 3 * 2^16 floats of q, a and the total: 3 * 2^16 / (128 + 2 * 128)
        ({"Tq": 1000, "D": 512, "Dv": 256}, 192),
        ({"Tq": 1000, "D": 96, "Dv": 192}, 416),  # 409, in whole panels
        ({"Tq": 1000, "D": 1024, "Dv": 1024}, 64),
        ({"Tq": 3, "H": 4}, 12),  # all heads of a group
        ({"Tq": 200, "H": 6, "Hkv": 2}, 512),
        ({"Tq": 100, "H": 6, "Hkv": 2}, 300),
        ({"Tq": 100, "br": 3}, 4),  # in whole panels
        ({"Tq": 100, "br": 16}, 16),
        ({"Tq": 100, "br": 17}, 32),
        ({"Tq": 100, "br": 3, "H": 4}, 16),
        ({"Tq": 100, "br": 5, "H": 4}, 32),
        ({"Tq": 5, "br": 8}, 5),
        ({"Tq": 1000, "br": 1000}, 1000),  # what is asked for, whatever the cache
        ({"Tq": 0}, 1),
        ({"Tq": 5, "H": 0, "Hkv": 0}, 1),
    ],
    ids=str,
)
def test_rows(sizes: dict[str, int], rows: int) -> None:
    chosen = plan(**sizes).rows
    assert chosen == rows
    assert type(chosen) is int


@pytest.mark.parametrize(
    ("rows", "panel"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 16), (300, 16)],
)
@pytest.mark.parametrize("target", [WIDE, NARROW], ids=lambda target: target.name)
def test_panel_and_register_tile(rows: int, panel: int, target: Any) -> None:
    shape = plan(Tq=rows, D=24, Dv=40, bc=7, target=target).shape
    assert (shape.D, shape.Dv, shape.Bc, shape.panel) == (24, 40, 7, panel)
    assert (shape.mr, shape.nr) == target.register_tile(panel)
    assert plan(Tq=rows, target=target).target is target


def test_work_items() -> None:
    """3 sequences of 40 rows of a group of 2, in tiles of 32: 3 tiles for each of 2 KV heads."""
    p = plan(B=3, H=4, Hkv=2, Tq=40, Tk=9, br=16)
    assert p.first_item.tolist() == [0, 6, 12, 18]
    assert (p.items, p.units) == (18, 1)
    assert plan(B=2, Tq=0).first_item.tolist() == [0, 0, 0]
    for threads in (1, 2):
        assert plan(B=0, Tq=4, threads=threads).first_item.tolist() == [0]


SPLIT = {"Tq": 4, "br": 1, "bc": 4, "span": 8}  # 4 tiles


@pytest.mark.usefixtures("eager_workers")
@pytest.mark.parametrize(
    ("sizes", "threads", "units"),
    [
        ({"Tk": 64}, 1, 1),  # one thread: nothing to share
        ({"Tk": 64}, 2, 8),  # 4 tiles < 4 a thread; 64 keys are 8 spans of 8
        ({"Tk": 57}, 2, 8),
        ({"Tk": 58}, 2, 8),
        ({"Tk": 2}, 2, 1),
        ({"Tk": 1}, 2, 1),
        ({"Tk": 0}, 2, 1),
        ({"Tk": 0, "bc": 1, "span": 1}, 2, 1),
        # a tile of 32 rows of 3 heads holds rows of 11 positions, which see 18 keys; all see 53 to 79: 2 spans of 17
        (
            {"Tk": 99, "H": 3, "Tq": 20, "br": 6, "window": 8, "causal": True, "q_offset": 60, "bc": 17, "span": 17},
            2,
            2,
        ),
        ({"Tk": 64, "Tq": 7}, 2, 8),
        ({"Tk": 64, "Tq": 8}, 2, 1),  # 8 tiles are enough for 2 threads
        ({"Tk": 64, "Tq": 8}, 3, 8),
        ({"Tk": 64, "H": 2, "Hkv": 2}, 2, 1),  # tiles of both heads count
        ({"Tk": 64, "B": 2}, 2, 1),
        ({"Tk": 640, "window": 3}, 2, 80),  # a row sees what comes after it
        ({"Tk": 640, "window": 3, "causal": True, "q_offset": 100}, 2, 1),  # keys 98 to 103: one span
        ({"Tk": 640, "window": 10, "causal": True, "q_offset": 100}, 2, 2),  # keys 91 to 103
        ({"Tk": 640, "window": 9, "causal": True, "q_offset": 100}, 2, 2),
        ({"Tk": 640, "window": 8, "causal": True, "q_offset": 100}, 2, 2),
        ({"Tk": 640, "window": 8, "causal": True, "br": 2, "q_offset": 100}, 2, 2),  # keys 93 to 103
        ({"Tk": 640, "window": 7, "causal": True, "br": 2, "q_offset": 100}, 2, 2),
        (
            {"Tk": 640, "window": 7, "causal": True, "br": 2, "H": 2, "q_offset": 100},
            2,
            2,
        ),  # 4 rows of 2 heads are 2 positions
        ({"Tk": 64, "kv_len": 10}, 2, 2),
        ({"Tk": 640, "causal": True}, 2, 1),  # the last row sees 4 keys: one span
        ({"Tk": 640, "causal": True, "q_offset": 6}, 2, 2),  # 10
        ({"Tk": 640, "causal": True, "q_offset": 16, "k_offset": 10}, 2, 2),  # 10 of those that are left
        ({"Tk": 640, "causal": True, "q_offset": 15, "k_offset": 10}, 2, 2),
        ({"Tk": 640, "window": 30, "q_offset": 660}, 2, 2),  # 9 keys, the last ones
        ({"Tk": 640, "window": 30, "q_offset": 659}, 2, 2),  # 10
        ({"Tk": 640, "window": 30, "q_offset": 700}, 2, 1),  # none
        ({"B": 2, "Tk": 64, "Tq": 2, "kv_len": [3, 20]}, 2, 3),  # the longest sequence counts
    ],
    ids=str,
)
def test_spans_become_work_items(sizes: dict[str, Any], threads: int, units: int) -> None:
    p = plan(threads=threads, **{**SPLIT, **sizes})
    assert p.units == units
    tiles = -(-sizes.get("Tq", SPLIT["Tq"]) * sizes.get("H", 1) // sizes.get("Hkv", 1) // p.rows)
    assert p.items == sizes.get("B", 1) * sizes.get("Hkv", 1) * tiles * units


@pytest.mark.parametrize(("keys", "units"), [(312_500_000, 1), (312_500_001, 305_176)])
def test_a_tile_that_takes_too_long_is_split(keys: int, units: int) -> None:
    """Also for one thread: 64 flops a key, and a signal waits for 2 * 10^10 of them at most."""
    p = plan(Tk=keys)
    assert p.units == p.items == units
    assert plan(Tq=2, Tk=keys, br=1).units == units  # it is the flops of a tile that count, not of the call
    assert plan(Tq=2, Tk=keys // 2, br=2).units == 1


# 1000 rows see 1000 keys, D 16, Dv 16: 64 million flops; 512 rows a tile: 2 tiles
@pytest.mark.parametrize(
    ("sizes", "threads", "workers"),
    [
        ({}, 1, 1),
        ({}, 2, 2),
        ({}, 64, 16),  # tiles of 64 rows, the smallest
        ({"span": 64}, 64, 33),  # 51 items; a worker for every 2 million flops, and one
        ({"Tq": 31, "H": 1, "Tk": 1000, "br": 1, "span": 64}, 64, 1),  # 1,984,000 flops
        ({"Tq": 32, "H": 1, "Tk": 1000, "br": 1, "span": 64}, 64, 2),  # 2,048,000
        ({"Tq": 0}, 4, 1),
    ],
    ids=str,
)
def test_workers(sizes: dict[str, int], threads: int, workers: int) -> None:
    p = plan(threads=threads, **{"Tq": 1000, "Tk": 1000, **sizes})
    assert p.workers == workers
    assert p.threads == threads
    assert p.scratch_bytes == threads * p.worker_bytes  # also of those that are not woken
    assert p.worker_bytes == p.shape.worker_bytes(p.rows)


def test_batch() -> None:
    """A run of the kernel ends after about 10^9 flops, to let signals in, or when all items are done."""
    assert plan(Tq=1000, Tk=1000).batch == 2  # 2 items of 64 million together
    assert plan(Tq=10_000, Tk=100_000, br=16).batch == 9  # 625 items of 64,000 million together
    assert plan(Tq=1000, Tk=600_000).batch == 1  # 2 items of 19,200 million each
    assert plan(Tq=0).batch == 1
    assert plan(Tk=0).batch == 1


def test_long_tiles_are_split() -> None:
    """A tile of more than 2 * 10^10 flops is cut at its spans, also for one thread: a signal must not wait for it."""
    assert plan(Tq=1000, Tk=600_000).units == 1
    split = plan(Tq=1000, Tk=700_000)  # 2 tiles of 22,400 million
    assert (split.units, split.items) == (684, 2 * 684)
    assert split.batch == 30


def test_flops_of_the_masks() -> None:
    """Only visible pairs cost anything: so a causal problem wakes fewer workers."""
    sizes = {"Tq": 64, "Tk": 1000, "br": 1, "threads": 64}
    assert plan(**sizes).workers == 3  # 4,096,000 flops
    assert plan(**sizes, causal=True).workers == 1  # rows at 0 to 63


@pytest.mark.usefixtures("eager_workers")
def test_explanation() -> None:
    target, *lines = plan(Tq=4, Tk=64, br=1, bc=4, span=8, threads=2).explain().splitlines()
    assert target == "target x86-64-v4: 32 registers of 512 bits, a register tile of 1 x 8"  # that `plan` asks for
    assert lines == [
        "rows 1 a query tile: packing K and V costs 1 / rows of the products; all fit the cache",
        "panel 1 rows go through a tile of Bc 4 keys together",
        "32 work items, 8 a query tile: fewer than 4 tiles a thread or tiles too long, so each span is one",
        "at least 1 flops for each of 2 workers (of 2 threads), 1 items between two looks at signals",
        f"scratch {plan(Tq=4, Tk=64, br=1, bc=4, span=8).worker_bytes} bytes a worker, whatever Tk is",
    ]
    assert plan(Tq=4, Tk=64, br=1, bc=4, span=8).explain().splitlines()[3] == "4 work items, 1 a query tile"
    two = plan(Tq=4, Tk=9, br=1, bc=4, span=8, threads=2).explain().splitlines()[3]
    assert two == "8 work items, 2 a query tile: fewer than 4 tiles a thread or tiles too long, so each span is one"
