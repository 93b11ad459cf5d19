"""`tilewise bench`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import tilewise as tw
from tilewise.bench import chart, machine, report
from tilewise.bench.measure import Settings, Step, measure
from tilewise.bench.peers import FOLDER, Missing, Peer, load_peers
from tilewise.bench.runner import PeerFailed, Runner, one_line, start
from tilewise.bench.table import GROUPS, WORKLOADS
from tilewise.bench.workloads import Workload
from tilewise.config import current
from tilewise.runtime.pool import available_cores
from tilewise.simd.target import find_target

QUICK = Settings(seconds=0.5, fewest=3, slow_rounds=1)
DEFAULT = "speed"  # of the groups of workloads
WIDE = 160  # columns where the output is no terminal
OUR_LARGEST_ERROR = 1e-5


def words(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


def chosen_workloads(text: str | None) -> list[Workload]:
    """Of names of workloads and of groups, in their order."""
    chosen: dict[str, Workload] = {}
    for name in words(text or DEFAULT):
        if name not in GROUPS and name not in WORKLOADS:
            raise tw.InvalidArgument(
                f"--workload: got {name}, expected some of {', '.join(GROUPS)}, or of {', '.join(WORKLOADS)}"
            )
        chosen |= {w.name: w for w in GROUPS.get(name) or [WORKLOADS[name]]}
    for w in chosen.values():
        find_target(w.target or None)  # complain before the work
    return list(chosen.values())


def cases(workloads: Sequence[Workload], threads: Sequence[int]) -> dict[int, list[Workload]]:
    """What to measure on how many threads; a workload that says how many itself is measured once."""
    found: dict[int, dict[str, Workload]] = {}
    for count in threads:
        for w in workloads:
            found.setdefault(w.threads or count, {})[w.name] = w
    return {count: list(group.values()) for count, group in found.items()}


def chosen_threads(text: str) -> list[int]:
    try:
        numbers = [int(x) for x in words(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise tw.InvalidArgument(f"--threads: got {text!r}, expected numbers from 1 up, with commas")
    return numbers


def check_writable(option: str, path: Path | None) -> None:
    """Complain before the work, not after it."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise tw.InvalidArgument(f"{option}: {path}: expected the name of a file in a folder that exists")


@contextmanager
def progress(total: int) -> Iterator[Step]:
    """A bar on a terminal. It is drawn between two timings only: its own thread would take time from them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)

        def step(done: float, text: str) -> None:
            bar.update(task, completed=done, description=f"{text:<28}", refresh=console.is_terminal)

        yield step


def start_peers(
    peers: Sequence[Peer], threads: int, isolate: bool, missing: dict[str, str]
) -> list[tuple[Peer, Runner]]:
    """Those that start; the others join the missing."""
    started = []
    for peer in peers:
        try:
            started.append((peer, start(peer, threads, isolate)))
        except (Exception, SystemExit) as error:
            missing[peer.name] = str(error) if isinstance(error, PeerFailed) else one_line(error)
    return started


def command_line(arguments: dict[str, Any]) -> str:
    """The command that repeats a run; files and folders are not part of it."""
    parts = ["tilewise bench"]
    for name in ("workload", "threads", "target", "peers", "seconds", "repeat"):
        if arguments[name] is not None:
            parts.append(f"--{name} {arguments[name]}")
    return " ".join(parts + ["--quick"] * arguments["quick"] + ["--isolate"] * arguments["isolate"])


def run_all(
    workloads: dict[int, list[Workload]], peers: Sequence[Peer], settings: Settings, isolate: bool,
    run: dict[str, Any], json_file: Path | None,
) -> None:  # fmt: skip
    """Measure, adding to `run` and to the file as results come."""
    target = find_target(run["target"])
    with progress(sum(map(len, workloads.values()))) as step:
        for count, group in workloads.items():
            wanted = [] if all(w.alone for w in group) else peers
            started = start_peers(wanted, count, isolate, run["missing"])
            run["peers"] |= {peer.name: runner.version for peer, runner in started}
            try:
                for w in group:

                    def report_step(part: float, text: str, name: str = f"{w.name} x{count}") -> None:
                        step(len(run["results"]) + part, f"{name} {text}")

                    result = measure(w, count, target, started, settings, report_step)
                    run["results"].append(result | {"summary": report.summary(result)})
                    if json_file:
                        report.save(run, json_file)
            finally:
                for _, runner in started:
                    runner.close()


def print_run(run: dict[str, Any]) -> None:
    from rich.console import Console

    width = Console().width if sys.stdout.isatty() else WIDE
    for result in run["results"]:
        report.print_result(result, sys.stdout, width)
        click.echo()
    if run["results"]:
        report.print_summary(run["results"], sys.stdout, width)
    for line in report.facts_lines(run):
        click.echo(line)


@click.command()
@click.option(
    "-w", "--workload",
    help=f"Which, or groups of them, with commas. Groups: {', '.join(GROUPS)}. Default: {DEFAULT}.",
)  # fmt: skip
@click.option("-t", "--threads", default="1", show_default=True, help="Numbers of threads, with commas: 1,2.")
@click.option("--target", help="Ours and the roof for this target, such as x86-64-v3.")
@click.option("-p", "--peers", help="Which peers, with commas; none: only ours. Default: all that are installed.")
@click.option(
    "--peers-folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where their adapters are. Default: benchmarks/peers of the checkout.",
)  # fmt: skip
@click.option("--isolate", is_flag=True, help="Every peer in a process of its own.")
@click.option("--quick", is_flag=True, help="A few rounds only: to see that it works, not how fast it is.")
@click.option("--seconds", type=click.FloatRange(min=0.1), help="Of timing a workload (10).")
@click.option("--repeat", type=click.IntRange(min=1), help="Rounds; by default as many as fit into --seconds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all that was measured to this file.")
@click.option("--chart", "chart_file", type=click.Path(path_type=Path), help="Draw it, as PNG and as SVG.")
@click.option(
    "--table", type=click.Path(path_type=Path),
    help="Measure nothing: print the README's table from this file of --json (and --chart it).",
)  # fmt: skip
def bench_command(
    json_file: Path | None, chart_file: Path | None, table: Path | None, peers_folder: Path | None, **arguments: Any
) -> int:
    """Time attention beside every peer that is installed, in turn, and beside the machine's own limits."""
    if chart_file:
        check_writable("--chart", chart_file)
    if table is not None:
        run = report.load(table)
        click.echo(report.markdown(run), nl=False)
        if chart_file:
            chart.draw(run, chart_file)
        return 0
    check_writable("--json", json_file)
    workloads = cases(chosen_workloads(arguments["workload"]), chosen_threads(arguments["threads"]))
    if current().interpret:
        raise tw.InvalidArgument("bench: TILEWISE_INTERPRET is set: nobody measures the speed of an interpreter")
    target = find_target(arguments["target"] or current().target)
    peers, missing = installed_peers(arguments["peers"], peers_folder)
    if max(workloads) > available_cores():
        click.echo(f"tilewise bench: {max(workloads)} threads share {available_cores()} cores here", err=True)
    settings = QUICK if arguments["quick"] else Settings()
    settings = settings.changed(arguments["seconds"], arguments["repeat"])
    run = {
        "format": report.FORMAT, "when": time.strftime("%Y-%m-%d"), "command": command_line(arguments),
        "machine": machine.facts(), "target": target.name, "peers": {},
        "missing": {x.name: x.reason for x in missing}, "results": [],
    }  # fmt: skip
    try:
        run_all(workloads, peers, settings, arguments["isolate"], run, json_file)
    finally:  # an interrupted run shows what it has
        print_run(run)
    if chart_file:
        click.echo("chart " + ", ".join(str(x) for x in chart.draw(run, chart_file)))
    sides = [side for x in run["results"] for side in (x, x["beside"]) if side]
    wrong = list(dict.fromkeys(x["workload"] for x in sides if not x["ours"]["max_error"] <= OUR_LARGEST_ERROR))
    if wrong:
        click.echo(f"tilewise bench: our own result is wrong: {', '.join(wrong)}", err=True)
    return 1 if wrong else 0


def installed_peers(chosen: str | None, folder: Path | None) -> tuple[list[Peer], list[Missing]]:
    if chosen == "none":
        return [], []
    folder = folder or FOLDER
    if not folder.is_dir():
        if chosen:
            raise tw.InvalidArgument("--peers: their adapters are in benchmarks/ of a checkout: give --peers-folder")
        return [], [Missing("all peers", "their adapters are in benchmarks/peers of a checkout: --peers-folder")]
    return load_peers(folder, words(chosen or ""))
