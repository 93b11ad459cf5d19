"""What the measurements say: figures, the tables on the terminal, the table of the README."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import tilewise as tw
from tilewise.bench.runner import NOT_FOR_IT
from tilewise.bench.workloads import TYPES

FORMAT = 1  # of the JSON file; benchmarks/README.md describes it
SHARED = 1.1  # times as long for fma beside other instructions, from where on the core is not ours alone
Result = Mapping[str, Any]
Record = Mapping[str, Any]


def paired(x: Sequence[float], y: Sequence[float]) -> float | None:
    """How many times y's seconds x's are: the median over rounds, as a machine may be slower in some; None where the
    two did not take part in the same rounds."""
    if not x or len(x) != len(y):
        return None
    return float(statistics.median(a / b for a, b in zip(x, y, strict=True)))


def figures(result: Result, x: Record, which: str = "median") -> dict[str, float]:
    """Speed of a contender by its median or best time: GFLOP/s, GB/s of keys and values, shares of the roofs.

    `share` is of the roof that is the lower one for this workload: the least time that the machine needs / the time.
    By the median, it is of the roof in the same rounds.
    """
    seconds, roof = x[which], result["roof"]
    found = {"gflops": result["flops"] / seconds / 1e9, "gbytes": result["kv_bytes"] / seconds / 1e9}
    if roof:
        for name, work, kernel, of_kernel, rate in (
            ("fma_share", "flops", "fma_rounds", "fma_flops", "flops"),
            ("product_share", "flops", "product_rounds", "product_flops", "product"),
            ("read_share", "kv_bytes", "read_rounds", "read_bytes", "read"),
        ):
            if rate not in roof:  # a file that is older than this one
                continue
            times = paired(roof.get(kernel, ()), x.get("rounds", ())) if which == "median" else None
            found[name] = result[work] / (roof[of_kernel] / times if times else roof[rate] * seconds)
        found["share"] = max(found["fma_share"], found["read_share"])
    return found


def crowding(result: Result) -> float | None:
    """How many times as long fma take beside as many other instructions, in the same rounds: 1 on a core of our own, up
    to 2 where another hardware thread shares it, of this machine or of a virtual one that nothing tells of."""
    roof = result["roof"] or {}
    return paired(roof.get("crowded_rounds", ()), roof.get("fma_rounds", ()))


def shared(result: Result) -> bool:
    """Whether another hardware thread shared the core."""
    return (crowding(result) or 1.0) >= SHARED


def limit(result: Result) -> str:
    """Which roof is the lower one here: fma or reads."""
    own = figures(result, result["ours"])
    return "fma" if own.get("fma_share", 0) >= own.get("read_share", 0) else "reads"


def times_ours(result: Result, x: Record) -> float:
    """How many times our time a contender's is."""
    ours = result["ours"]
    return paired(x.get("rounds", ()), ours.get("rounds", ())) or float(x["median"] / ours["median"])


def fastest(result: Result) -> Record | None:
    """The peer that is nearest to us, or farthest ahead."""
    return min(result["peers"], key=lambda x: times_ours(result, x), default=None)


def ratio(result: Result) -> float | None:
    """How many times our time the fastest peer's is."""
    best = fastest(result)
    return times_ours(result, best) if best else None


def relative(result: Result, side: str = "ours") -> float | None:
    """How many times the operations a second of ours beside it; with side "roof", of the roof that limits us."""
    beside = result.get("beside")
    if not beside:
        return None
    if side == "ours":
        return float(result["flops"] / beside["flops"]) * times_ours(result, beside["ours"])
    name = {"fma": "flops", "reads": "read"}[limit(result)]
    return result["roof"][name] / beside["roof"][name] if result["roof"] and beside["roof"] else None


def beside_text(result: Result) -> str:
    """`0.97x W1`, and how the roofs compare where they differ in threads or target."""
    ratio, roofs = relative(result), relative(result, "roof")
    if ratio is None:
        return ""
    beside = result["beside"]
    other = [f"x{beside['threads']}"] * (beside["threads"] != result["threads"])
    other += [beside["target"]] * (beside["target"] != result["target"])
    text = " ".join([f"{ratio:.2f}x", beside["workload"], *other])
    return f"{text} (roof {roofs:.2f}x)" if other and roofs else text


def summary(result: Result) -> dict[str, Any]:
    """The figures that a reader looks for first; part of the JSON file."""
    best = fastest(result)
    return {
        **figures(result, result["ours"]),
        "best": figures(result, result["ours"], "best"),
        "limit": limit(result) if result["roof"] else None,
        "fastest_peer": f"{best['peer']} {best['variant']}" if best else None,
        "ratio": ratio(result),
        "beside": relative(result),
        "crowding": crowding(result),
    }


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def megabytes(nbytes: float | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 1e6:.1f}"


def busy_line(result: Result) -> str:
    """How busy the machine was, in words."""
    busy, text = result["busy"], f"unknown to this system (load {result['busy']['load']})"
    if busy["known"]:
        text = "BUSY, figures are doubtful" if busy["busy"] else "quiet"
        text += f": others used {busy['others']:.2f} cores of ours, the host stole {busy['steal']:.2f}"
        text += f" (load {busy['load']})"
    if shared(result):
        text += f"; SHARED with another hardware thread: fma beside others took {crowding(result):.2f} times as long"
    return text


def _states(result: Result) -> str:
    return " ".join(["busy"] * result["busy"]["busy"] + ["shared"] * shared(result))


def roof_line(roof: Mapping[str, Any] | None) -> str:
    if not roof:
        return "not measured: the fixed cost of a call is what counts"
    return (
        f"{roof['flops'] / 1e9:.1f} GFLOP/s (best {roof['flops_best'] / 1e9:.1f}), "
        f"in products with their loads {roof['product'] / 1e9:.1f} (best {roof['product_best'] / 1e9:.1f}), "
        f"{roof['read'] / 1e9:.1f} GB/s (best {roof['read_best'] / 1e9:.1f}, {roof['read_kernel']})"
    )


def print_result(result: Result, file: IO[str], width: int) -> None:
    """One workload: everybody in the order of their medians."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file, width=width)
    table = Table(
        title=f"{result['workload']} {result['title']}: {result['shape']}, {_threads(result)}, {result['target']}",
        title_justify="left", title_style="bold",
    )  # fmt: skip
    table.add_column("who")
    for head in (
        "median",
        "best",
        "lowest-highest",
        "GFLOP/s",
        "(best)",
        "GB/s",
        "roof",
        "ours is",
        "MB",
        "error",
        "n",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for x in sorted([result["ours"], *result["peers"]], key=lambda x: float(x["median"])):
        table.add_row(*_cells(result, x), style="bold green" if x is result["ours"] else None)
    beside = result.get("beside")
    if beside:
        name = f"{beside['workload']}: {beside['shape']}, {_threads(beside)}, {beside['target']}"
        table.add_section()
        table.add_row(f"tilewise {beside['workload']}", *list(_cells(beside, beside["ours"]))[1:], style="green")
    console.print(table)
    if beside:
        console.print(f"  beside: {name}", markup=False, highlight=False)
        console.print(f"  operations a second: {beside_text(result)}", markup=False, highlight=False)
        console.print(f"  its roof: {roof_line(beside['roof'])}", markup=False, highlight=False)
    for x in (x for x in result["skipped"] if x["reason"] != NOT_FOR_IT):
        console.print(f"  not timed: {x['peer']} {x['variant']}: {x['reason']}", markup=False, highlight=False)
    console.print(f"  roof: {roof_line(result['roof'])}", markup=False, highlight=False)
    console.print(f"  machine: {busy_line(result)}", markup=False, highlight=False)


def _cells(result: Result, x: Record) -> Iterator[str]:
    middle, best = figures(result, x), figures(result, x, "best")
    yield f"{x['peer']} {x['variant']}"
    yield duration(x["median"])
    yield duration(x["best"])
    yield f"{duration(x['lowest'])} - {duration(x['highest'])}"
    yield f"{middle['gflops']:.1f}"
    yield f"{best['gflops']:.1f}"
    yield f"{middle['gbytes']:.2f}"
    yield f"{100 * middle['share']:.0f} %" if "share" in middle else ""
    yield "" if x is result["ours"] else f"{times_ours(result, x):.2f}x"
    yield megabytes(x["growth"])
    yield f"{x['max_error']:.1e}"
    yield str(x["calls"])


def _threads(result: Result) -> str:
    return f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"


def print_summary(results: Sequence[Result], file: IO[str], width: int) -> None:
    """Ours against the fastest peer, a line a workload."""
    from rich.console import Console
    from rich.table import Table

    heads = (
        "workload",
        "threads",
        "ours",
        "GFLOP/s",
        "GB/s",
        "of the roof",
        "fastest peer",
        "its time",
        "ratio",
        "beside",
        "MB",
        "",
    )
    table = Table(*heads, title="summary", title_justify="left", title_style="bold")
    for result in results:
        own, best = figures(result, result["ours"]), fastest(result)
        rival = ["", "", ""]
        if best:
            rival = [f"{best['peer']} {best['variant']}", duration(best["median"]), f"{ratio(result):.2f}x"]
        table.add_row(
            result["workload"], str(result["threads"]), duration(result["ours"]["median"]), f"{own['gflops']:.1f}",
            f"{own['gbytes']:.2f}", f"{own['share']:.2f} {limit(result)}" if "share" in own else "",
            *rival, beside_text(result), megabytes(result["ours"]["growth"]), _states(result),
        )  # fmt: skip
    Console(file=file, width=width).print(table)


def facts_lines(run: Mapping[str, Any]) -> Iterator[str]:
    """The machine and the versions, a line each."""
    x = run["machine"]
    yield f"{x['cpu']}, {x['cores']} of {x['cores_of_machine']} cores, {x['caches']}" + ", virtual" * x["virtual"]
    yield f"tilewise {x['tilewise']}, Python {x['python']}, NumPy {x['numpy']}, llvmlite {x['llvmlite']}"
    yield from (f"{name} {version}" for name, version in run["peers"].items())
    yield from (f"missing: {name}: {reason}" for name, reason in run["missing"].items())


def save(run: Mapping[str, Any], path: Path) -> None:
    """Write the JSON file: complete or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise tw.InvalidArgument(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise tw.InvalidArgument(f"{path}: expected a file of tilewise bench --json, format {FORMAT}")
    return run


def markdown(run: Mapping[str, Any]) -> str:
    """The README's table of speed, with the machine, the versions and the command that made it."""
    heads = ["workload", "shape", "threads", "time", "speed", "of the roof", "fastest peer", "ratio"]
    lines = ["---", "---", "--:", "--:", "--:", "--:", "---", "--:"]
    besides = [beside_text(x) for x in run["results"]]
    rows = [list(_markdown_cells(x)) for x in run["results"]]
    if any(besides):
        heads, lines = [*heads, "beside"], [*lines, "---"]
        rows = [[*row, text] for row, text in zip(rows, besides, strict=True)]
    table = [f"| {' | '.join(heads)} |", f"|{'|'.join(lines)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    peers = "; ".join(f"{name} {version}" for name, version in run["peers"].items())
    x = run["machine"]
    doubtful = [f"{r['workload']} ({_threads(r)})" for r in run["results"] if r["busy"]["busy"]]
    notes = [
        f"{types(run).capitalize()}, medians, everybody in turn in one run. {x['cpu']}, {x['caches']}"
        + (", a virtual machine" if x["virtual"] else "")
        + f". tilewise {x['tilewise']}, target {run['target']}. Peers: {peers or 'none'}.",
        "The roof is what the same run measured with kernels of its own: float32 multiply-add, or reads of as many "
        "bytes as the keys and values, whichever is the lower limit. The ratio is the fastest peer's time / ours. "
        "Shares and ratios are medians over rounds, of figures of one round."
        + " Beside: our operations a second / those of ours on another workload, in the same rounds."
        * any(besides),
        f"Made by `{run['command']}`.",
    ]
    if doubtful:
        notes.append(f"The machine was busy during {', '.join(doubtful)}.")
    if with_another := [f"{r['workload']} ({crowding(r):.2f})" for r in run["results"] if shared(r)]:
        notes.append(
            f"Another hardware thread shared the core during {', '.join(with_another)}: in parentheses, how many times "
            "as long multiply-adds took beside as many other instructions; 1 on a core of one's own."
        )
    return "\n".join([*table, "", *notes, ""])


def types(run: Mapping[str, Any]) -> str:
    """Of the inputs in a run, in words."""
    return ", ".join(sorted({TYPES[x.get("type", "f32")] for x in run["results"]}))


def _markdown_cells(result: Result) -> Iterator[str]:
    own, best = figures(result, result["ours"]), fastest(result)
    yield f"{result['workload']} {result['title']}"
    yield result["shape"]
    yield str(result["threads"])
    yield duration(result["ours"]["median"])
    if result["tiny"]:
        yield ""
        yield ""
    else:
        reads = limit(result) == "reads"
        yield f"{own['gbytes']:.1f} GB/s" if reads else f"{own['gflops']:.1f} GFLOP/s"
        yield f"{own['share']:.2f} ({'reads' if reads else 'fma'})"
    yield f"{best['peer']} {best['variant']}" if best else "none"
    yield f"{ratio(result):.2f}x" if best else ""
