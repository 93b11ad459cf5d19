"""`tilewise verify` and `tilewise parity`: what tilewise promises, checked on this machine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import click
import numpy as np

import tilewise as tw
from tilewise import verify as catalogue
from tilewise.cli.terminal import columns, progress, verdict
from tilewise.reference import attention32, attention64
from tilewise.simd.target import current_target
from tilewise.verify import bits as golden


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.option(
    "--bits", "only_bits", is_flag=True, help="Check the golden bits of the recipe instead: SHA-256 of fixed problems."
)
def verify(as_json: bool, only_bits: bool) -> int:
    """Check the contract and the invariances on this machine; the exit code is the verdict."""
    checks = golden.checks() if only_bits else catalogue.catalogue()
    width = max(len(check.name) for check in checks)
    results = []
    with progress("verify", len(checks)) as advance:
        for result in catalogue.run(checks):
            results.append(result)
            if not as_json:
                bits = f"{result.bits:,} bits differ: " if result.values else ""
                click.echo(f"{verdict(result.ok)}  {result.name:<{width}}  {result.claim}: {bits}{result.detail}")
            advance()
    failed = sum(not result.ok for result in results)
    if as_json:
        facts = {"version": tw.__version__, "target": current_target().name, "recipe": golden.RECIPE, "ok": not failed}
        click.echo(json.dumps({**facts, "checks": [dataclasses.asdict(x) for x in results]}, indent=2))
    else:
        seconds = sum(result.seconds for result in results)
        outcome = f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks hold"
        outcome += f", the golden bits of recipe {golden.RECIPE}," if only_bits else ""
        click.echo(f"{outcome} on {current_target().name}, in {seconds:.0f} s")
    return 1 if failed else 0


class Row(NamedTuple):
    """One shape of the grid."""

    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    D: int
    Dv: int
    arguments: dict[str, Any]
    mean: float = 0.0  # of the values

    @property
    def shape(self) -> str:
        return f"{self.B} {self.H}:{self.Hkv} {self.Tq} x {self.Tk} {self.D}:{self.Dv}"

    @property
    def words(self) -> str:
        def word(name: str, x: Any) -> str:
            if name == "sinks" or x is True:
                return name
            return f"{name.removeprefix('q_')} {x}"

        words = [word(name, x) for name, x in self.arguments.items()]
        return ", ".join(words + [f"values of mean {self.mean:g}"] * (self.mean != 0)) or "plain"


GRID = (
    Row(1, 1, 1, 1, 1, 64, 64, {}),
    Row(1, 2, 1, 16, 16, 16, 16, {"causal": True}),
    Row(1, 4, 2, 33, 33, 32, 32, {"causal": True}),
    Row(2, 6, 2, 37, 37, 24, 17, {"causal": True, "window": 6}),
    Row(1, 4, 4, 128, 128, 64, 64, {}),
    Row(1, 4, 1, 100, 300, 80, 80, {"causal": True, "q_offset": 200}),
    Row(1, 8, 2, 512, 512, 64, 64, {"causal": True}),
    Row(1, 8, 2, 256, 1024, 128, 128, {"causal": True, "q_offset": 768}),
    Row(1, 8, 2, 64, 2048, 128, 128, {}),
    Row(1, 8, 2, 64, 2048, 64, 64, {"window": 500, "causal": True, "q_offset": 1984}),
    Row(1, 4, 2, 32, 5000, 64, 64, {"causal": True, "q_offset": 4968}),
    Row(1, 4, 2, 64, 700, 256, 256, {"causal": True, "q_offset": 636}),
    Row(1, 4, 2, 64, 500, 64, 64, {"sinks": np.array([3, -1, 0.5, 20], np.float32)}),
    Row(1, 4, 2, 64, 500, 64, 64, {"scale": 1.0}),
)
# Where one chain of fma over all of D, or over a span's keys, rounds more than a library's blocked products do.
# Recipe 1 fixes those chains; docs/explanation/decisions/accuracy.md has the figures. Shown, not judged.
LIMITS = (
    Row(1, 8, 2, 1, 5000, 128, 128, {"causal": True, "q_offset": 4999}),
    Row(1, 2, 1, 20, 200, 1, 3, {}),
    Row(1, 2, 1, 9, 40, 1024, 1024, {}),
    Row(1, 4, 2, 100, 2000, 64, 64, {"causal": True, "q_offset": 1900}, mean=1.0),
)
WIDTHS = (26, 33, -9, -9, -6, -9, -9, -6)
HEAD = ("B H:Hkv Tq x Tk D:Dv", "arguments", "o", "naive", "ratio", "lse", "naive", "ratio")


@click.command()
def parity() -> int:
    """Largest error against float64 over a grid of shapes, beside naive float32 NumPy on the same inputs.

    Exit code 1 when a ratio passes 2. The last rows are known limits, shown but not judged.
    """
    worst = 0.0
    click.echo(next(columns([HEAD], WIDTHS)))
    with progress("parity", len(GRID) + len(LIMITS)) as advance:
        for seed, row in enumerate((*GRID, *LIMITS)):
            judged = seed < len(GRID)
            q, k, v = catalogue.inputs(seed, *row[:7])
            v += np.float32(row.mean)
            got = tw.attention(q, k, v, return_lse=True, **row.arguments)
            naive, truth = attention32(q, k, v, **row.arguments), attention64(q, k, v, **row.arguments)
            found = [catalogue.accuracy(*x) for x in zip(got, naive, truth, strict=True)]
            worst = max(worst, *(x.ratio for x in found)) if judged else worst
            cells = [cell for x in found for cell in (f"{x.error:.2e}", f"{x.naive:.2e}", f"{x.ratio:.2f}")]
            line = next(columns([(row.shape, row.words, *cells)], WIDTHS))
            if not judged:
                line += "  known limit"
            click.echo(line if all(x.ok for x in found) or not judged else click.style(f"{line}  FAIL", fg="red"))
            advance()
    ok = worst <= catalogue.ALLOWED_RATIO
    click.echo(
        f"{verdict(ok).rstrip()}  the largest ratio is {worst:.2f}, at most {catalogue.ALLOWED_RATIO:g} is promised"
    )
    return 0 if ok else 1
