"""The chart: for each workload, what share of the machine's roof everybody reaches. Needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tilewise as tw
from tilewise.bench.report import Result, figures, types

FORMATS = (".png", ".svg")
OURS_COLOUR, ROOF_COLOUR = "#c1272d", "#444444"
BAR = 0.8  # of the distance between two groups
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#999999", "#f0e442")  # told apart by everybody


def chart_paths(path: Path) -> list[Path]:
    """The files that a chart is written to: the same name as PNG and as SVG."""
    stem = path.with_suffix("") if path.suffix.lower() in FORMATS else path
    return [stem.with_name(stem.name + suffix) for suffix in FORMATS]


def draw(run: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw a run; the files written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "tilewise"  # the same run draws the same bytes
        import matplotlib.pyplot as plt
    except ImportError:
        raise tw.InvalidArgument("--chart needs matplotlib: pip install 'tilewise[bench]'") from None
    results = [x for x in run["results"] if x["roof"]]
    if not results:
        raise tw.InvalidArgument("--chart: no workload with a roof was measured")
    names = ["tilewise", *sorted({x["peer"] for result in results for x in result["peers"]})]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(results) + 2), 4.5), layout="constrained")
    for index, name in enumerate(names):
        shares = [_share(result, name) for result in results]
        places = [x + BAR * ((index + 0.5) / len(names) - 0.5) for x in range(len(results))]
        colour = _PALETTE[(index - 1) % len(_PALETTE)] if index else OURS_COLOUR
        axes.bar(places, shares, BAR / len(names), label=name, color=colour)
    axes.axhline(1.0, color=ROOF_COLOUR, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(results)), _labels(results))
    axes.set_ylabel("share of the machine's roof")
    axes.set_ylim(0, max(1.08, 1.05 * axes.dataLim.ymax))
    axes.set_title(f"Attention, {types(run)}: {run['machine']['cpu']}, {run['target']}", fontsize=10)
    axes.legend(ncols=min(4, len(names)), fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    files = chart_paths(path)
    for file in files:
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _share(result: Result, name: str) -> float:
    """The best variant of a peer; 0 where it was not timed."""
    records = [x for x in (result["ours"], *result["peers"]) if x["peer"] == name]
    return max((figures(result, x)["share"] for x in records), default=0.0)


def _labels(results: Sequence[Result]) -> list[str]:
    several = len({x["threads"] for x in results}) > 1
    return [
        f"{x['workload']}\n{x['title']}" + (f"\n{x['threads']} thread" + "s" * (x["threads"] > 1)) * several
        for x in results
    ]
