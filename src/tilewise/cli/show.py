"""`tilewise show`: what tilewise makes of a problem: plan, pseudo-code, IR, assembly."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from tilewise.plan import Plan, make_plan
from tilewise.problem import MAX_HEAD_DIM, Problem, make_problem
from tilewise.runtime.pool import pool_for
from tilewise.simd.jit import assembly
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS, current_target

SIZE = click.IntRange(0, 1 << 40)
HEADS = click.IntRange(0, 1 << 20)
HEAD_DIM = click.IntRange(1, MAX_HEAD_DIM)


def problem_of(sizes: dict[str, int], **arguments: Any) -> Problem:
    """A problem of that size. Every row of an input is one and the same in memory: nothing will be computed."""
    B, H, Tq, Tk, D = (sizes[name] for name in ("b", "h", "tq", "tk", "d"))
    shapes = (B, H, Tq, D), (B, sizes["hkv"], Tk, D), (B, sizes["hkv"], Tk, sizes["dv"])
    try:
        q, k, v = (np.broadcast_to(np.zeros(shape[-1], np.float32), shape) for shape in shapes)
    except ValueError as error:  # NumPy's own limit on sizes
        raise click.ClickException(f"the sizes are too large: {error}") from None
    return make_problem(q, k, v, **arguments)[0]


def describe(plan: Plan, what: str) -> str:
    if what == "plan":
        return plan.explain()
    if what == "code":
        return str(plan.kernel)
    text = llvm_ir(plan.kernel, plan.target)
    return text if what == "ir" else assembly(text, plan.target)


@click.command()
@click.option("--B", "b", type=HEADS, default=1, show_default=True, help="Sequences.")
@click.option("--H", "h", type=HEADS, default=8, show_default=True, help="Query heads.")
@click.option("--Hkv", "hkv", type=HEADS, help="KV heads; as many as query heads by default.")
@click.option("--Tq", "tq", type=SIZE, default=512, show_default=True, help="Query rows.")
@click.option("--Tk", "tk", type=SIZE, help="Keys; as many as query rows by default.")
@click.option("--D", "d", type=HEAD_DIM, default=64, show_default=True, help="Head dimension of q and k.")
@click.option("--Dv", "dv", type=HEAD_DIM, help="Head dimension of v; that of q and k by default.")
@click.option("--causal/--no-causal", default=False, help="Mask the future.")
@click.option("--window", type=int, help="Keys that a row sees, its own included.")
@click.option("--q-offset", type=int, help="Position of the first query row; Tk - Tq by default.")
@click.option("--br", type=int, default=0, help="Query positions a work item.")
@click.option("--bc", type=int, default=0, help="Keys a tile.")
@click.option("--span", type=int, default=0, help="Keys a span.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: TILEWISE_THREADS, else this process's cores.")
@click.option("--target", type=click.Choice(list(TARGETS)), help="Any target, also one that cannot run here.")
@click.option("--what", type=click.Choice(["plan", "code", "ir", "asm"]), default="plan", show_default=True)
def show(
    what: str, target: str | None, threads: int | None, q_offset: int | None, causal: bool, window: int | None,
    br: int, bc: int, span: int, **sizes: int | None,
) -> None:  # fmt: skip
    """Show the plan of a problem, or its kernel as pseudo-code, LLVM IR or assembly."""
    for name, other in (("hkv", "h"), ("tk", "tq"), ("dv", "d")):
        sizes[name] = sizes[other] if sizes[name] is None else sizes[name]
    known = {name: size for name, size in sizes.items() if size is not None}
    if q_offset is None:
        q_offset = max(0, known["tk"] - known["tq"])
    problem = problem_of(known, causal=causal, window=window, q_offset=q_offset, br=br, bc=bc, span=span)
    chosen = TARGETS[target] if target else current_target()
    click.echo(describe(make_plan(problem, chosen, pool_for(threads).threads), what))
