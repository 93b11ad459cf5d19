"""`tilewise run`: attention on a file's q, k and v, or on a captured layer of a language model."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tilewise.cli.files import LAYER, Tensors, captured_layer, open_tensors
from tilewise.cli.terminal import fact, progress
from tilewise.config import current
from tilewise.plan import Plan, make_plan
from tilewise.problem import Operands, Problem, make_problem
from tilewise.reference import attention32, attention64
from tilewise.runtime.pool import pool_for
from tilewise.runtime.roof import measure_roof
from tilewise.runtime.trace import mask_of, speed_of
from tilewise.simd.target import current_target
from tilewise.verify import ALLOWED_RATIO, accuracy

Array = NDArray[Any]
Result = tuple[Array, Array]


def integers(text: str | None, name: str) -> int | list[int] | None:
    """`24`, or a number for each sequence: `24,0,7`."""
    if text is None:
        return None
    try:
        numbers = [int(x) for x in text.split(",")]
    except ValueError:
        raise click.ClickException(f"{name}: got {text!r}, expected an integer or integers with commas") from None
    return numbers if "," in text else numbers[0]


def sinks_of(text: str | None, tensors: Tensors) -> Array | None:
    """The array of that name in the file, or the numbers themselves."""
    if text is None:
        return None
    if text in tensors:
        return tensors.read(text)
    try:
        return np.array([float(x) for x in text.split(",")], np.float32)
    except ValueError:
        raise click.ClickException(
            f"--sinks: got {text!r}, expected numbers with commas, or one of {', '.join(tensors.names)}"
        ) from None


def check_output(out: Path | None, tensors: Tensors) -> None:
    """Complain before the work, not after it."""
    if out is None:
        return
    if out.suffix.lower() != ".npz":
        raise click.ClickException(f"--out: {out}: expected the name of a .npz file")
    if out.is_dir():
        raise click.ClickException(f"--out: {out}: is a directory")
    if not out.parent.is_dir():
        raise click.ClickException(f"--out: {out}: there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise click.ClickException(f"--out: {out}: permission denied")
    if out.exists() and tensors.path.exists() and out.samefile(tensors.path):
        raise click.ClickException(f"--out: {out}: is the input file")


def timed(call: Any, repeat: int) -> tuple[Result, float, float]:
    """(result, seconds of the first call, median seconds of `repeat` further ones)."""
    seconds = []
    with progress("attention", repeat + 1) as advance:
        for _ in range(repeat + 1):
            begin = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - begin)
            advance()
    return result, seconds[0], statistics.median(seconds[1:])


def report_speed(problem: Problem, plan: Plan, first: float, seconds: float, repeat: int) -> None:
    speed = speed_of(problem, plan, seconds)
    fact("time", f"{1e3 * seconds:.3f} ms, median of {repeat} (first call {1e3 * first:.1f} ms)")
    pairs = problem.visible_pairs()
    fact("speed", f"{speed.gflops:.1f} GFLOP/s over {pairs:,} visible pairs, {speed.gbytes:.2f} GB/s")
    if current().interpret:
        fact("roof", "not measured: the kernel is interpreted")
        return
    roof = measure_roof(plan.target)
    share, limit = speed.share(roof)
    cores = f"{plan.workers} cores" if plan.workers > 1 else "one core"
    fact(
        "roof",
        f"{100 * share:.0f} % of what {cores} can do, limited by {limit}; measured in this run, a core: "
        f"{roof.flops / 1e9:.0f} GFLOP/s, {roof.read / 1e9:.1f} GB/s",
    )


def report_accuracy(problem: Problem, operands: Operands, result: Result) -> bool:
    """The error against float64 beside naive float32's; whether it is within bounds. One KV head at a time."""
    truth: list[Array] = [np.empty(x.shape, np.float64) for x in result]
    naive: list[Array] = [np.empty(x.shape, np.float32) for x in result]
    with progress("float64", problem.B * problem.Hkv) as advance:
        for b in range(problem.B):
            for head in range(problem.Hkv):
                own = slice(b, b + 1), slice(head * problem.group, (head + 1) * problem.group)
                k, v = operands.k[own[0], head : head + 1], operands.v[own[0], head : head + 1]
                arguments: dict[str, Any] = {
                    "causal": problem.causal, "window": problem.window, "scale": problem.scale,
                    "q_offset": problem.q_offset[b],
                    "sinks": None if operands.sinks is None else operands.sinks[own[1]],
                }  # fmt: skip
                for into, reference in ((truth, attention64), (naive, attention32)):
                    for x, y in zip(into, reference(operands.q[own], k, v, **arguments), strict=True):
                        x[own] = y
                advance()
    found = [accuracy(*x) for x in zip(result, naive, truth, strict=True)]
    fact(
        "error",
        "; ".join(
            f"{name} {x.error:.2g} against float64, naive float32 {x.naive:.2g} (ratio {x.ratio:.2f})"
            for name, x in zip(("o", "lse"), found, strict=True)
        ),
    )
    return all(x.ok for x in found)


def write(out: Path, result: Result) -> None:
    try:
        with out.open("wb") as file:
            np.savez(file, o=result[0], lse=result[1])
    except OSError as error:
        raise click.ClickException(f"--out: {out}: {error.strerror or error}") from None
    fact("written", f"{out}: o {list(result[0].shape)}, lse {list(result[1].shape)}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--causal/--no-causal", default=None, help="Mask the future. Default: only without a FILE.")
@click.option("--window", type=int, help="Keys that a row sees, its own included.")
@click.option("--scale", type=float, help="Factor of the scores; D ** -0.5 by default.")
@click.option("--q-offset", help="Position of the first query row; with commas, one for each sequence.")
@click.option("--sinks", help="Name of an array [H] in the file, or numbers with commas.")
@click.option("--br", type=int, default=0, help="Query positions a work item; moves no bit.")
@click.option("--bc", type=int, default=0, help="Keys a tile (64).")
@click.option("--span", type=int, default=0, help="Keys a span, a multiple of --bc (1024).")
@click.option("--threads", type=click.IntRange(min=1), help="Default: TILEWISE_THREADS, else this process's cores.")
@click.option("--out", type=click.Path(path_type=Path), help="Write o and lse to this .npz file.")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Timed calls.")
@click.option("--check", is_flag=True, help="Compare with float64; exit code 1 where the error is too large.")
def run_command(
    file: Path | None, causal: bool | None, q_offset: str | None, sinks: str | None, threads: int | None,
    out: Path | None, repeat: int, check: bool, **numbers: Any,
) -> int:  # fmt: skip
    """Run attention on FILE (.npz or .safetensors with float32 q [B,H,Tq,D], k [B,Hkv,Tk,D], v [B,Hkv,Tk,Dv]).

    Without a FILE the input is q, k and v of SmolLM2-135M, layer 15, on 512 tokens of a real text, causal.
    """
    with captured_layer() if file is None else open_tensors(file) as tensors:
        check_output(out, tensors)
        q, k, v = (tensors.read(name) for name in "qkv")
        logits = sinks_of(sinks, tensors)
    arguments: dict[str, Any] = {
        **numbers, "causal": file is None if causal is None else causal,
        "q_offset": integers(q_offset, "--q-offset"), "sinks": logits, "return_lse": True,
    }  # fmt: skip
    try:
        problem, operands = make_problem(q, k, v, **arguments)
    except TypeError as error:
        raise click.ClickException(str(error)) from None
    plan = make_plan(problem, current_target(), pool_for(threads).threads)

    fact("input", LAYER if file is None else str(file))
    fact("shapes", "  ".join(f"{name} {list(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True)) + "  float32")
    fact("mask", mask_of(problem) + (f", {problem.H} sinks" if operands.sinks is not None else ""))
    fact("plan", plan.explain())
    arena = tw.Arena()
    result, first, seconds = timed(lambda: tw.attention(q, k, v, arena=arena, pool=threads, **arguments), repeat)
    report_speed(problem, plan, first, seconds, repeat)
    fact("scratch", f"{plan.scratch_bytes:,} bytes, whatever Tk is")
    ok = report_accuracy(problem, operands, result) if check else True
    if out is not None:
        write(out, result)
    if not ok:
        click.echo(f"tilewise run: the error is more than {ALLOWED_RATIO:g} times that of naive float32", err=True)
    return 0 if ok else 1
