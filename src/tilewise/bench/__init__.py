"""`tilewise bench`: ours beside every peer that is installed, in one run, and beside the machine's own limits.

    workloads.py   what a workload is; table.py all of them, in groups
    ours.py        how we run one
    peers.py       loads the adapters of benchmarks/peers
    runner.py      runs a peer here or in a process of its own
    measure.py     checks, then times everybody in turn, round by round
    machine.py     facts, how busy the machine was, peak memory
    report.py      figures, tables, JSON; chart.py the chart
    command.py     the command line

rich and matplotlib are imported only when they are used.
"""

from __future__ import annotations

from tilewise.bench.command import bench_command

__all__ = ["bench_command"]
