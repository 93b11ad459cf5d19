"""The catalogue of what tilewise promises, checked on this machine: `tilewise verify`, or `verify.run()` from Python.

The nine contract checks carry the names of the specification; the others are the invariances. Bits are compared as
bits: no tolerance. Errors are measured against float64 and allowed to be twice those of naive float32 NumPy on the same
inputs. Nothing is asserted with `assert`, so the verdict is the same under `python -O`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from tilewise.config import config, current
from tilewise.simd.target import TARGETS, current_target, missing_features
from tilewise.verify.contract import CONTRACT
from tilewise.verify.findings import ALLOWED_RATIO, Accuracy, Check, Findings, accuracy, inputs
from tilewise.verify.invariances import INVARIANCES, RINGS, against_target
from tilewise.verify.serving import SERVING

__all__ = ["ALLOWED_RATIO", "Accuracy", "Check", "Findings", "Result", "accuracy", "catalogue", "inputs", "run"]


@dataclass(frozen=True)
class Result:
    """The verdict of one check. `bits` counts bits that differ among values that must be equal."""

    name: str
    claim: str
    ok: bool
    detail: str
    values: int
    bits: int
    seconds: float


def catalogue() -> list[Check]:
    """All checks that this machine can make, in order. Every target that it can force is held to the present one."""
    here = current_target().name
    targets = [
        Check(f"target_{name}", f"{name} = {here}", against_target(name))
        for name, target in TARGETS.items()
        if name != here and not missing_features(target)
    ]
    return [*CONTRACT, *INVARIANCES, *SERVING, *targets, *RINGS]


def run(checks: list[Check] | None = None) -> Iterator[Result]:
    """Make the checks, native code unless a check says otherwise, and yield each verdict as it is found.

    A check that raises has failed: its detail is the error.
    """
    for check in catalogue() if checks is None else checks:
        found, begin = Findings(), time.perf_counter()
        with config(interpret=False, debug=min(current().debug, 1)):
            try:
                check.run(found)
            except Exception as error:
                found.wrong.append(f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - begin
        yield Result(check.name, check.claim, not found.wrong, found.detail(), found.values, found.bits, seconds)
