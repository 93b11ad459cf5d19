"""Call tw.attention with spoiled arguments, so many times: `python -m tests.fuzz --cases 100000 --seed 1`.

The calls are made by a child process, which says the number of each before it makes it: should it crash or hang, that
call is a failure and another child goes on behind it. `--only N` makes one call here, for a debugger.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.huge import make_huge
from tests.fuzz.spoil import spoil
from tests.fuzz.trial import Failure, Trial, make, run

ROOT = Path(__file__).parents[2]
HANGS = 20.0  # seconds without a call finished
HUGE = 0.05  # share of calls with huge sizes


def trial_of(rng: random.Random) -> Trial:
    if rng.random() < HUGE:
        return make_huge(rng)
    trial = make(rng)
    spoil(trial)
    return trial


def one(seed: int, number: int) -> tuple[str, str]:
    """(what came of it, what was wrong or '')."""
    trial = trial_of(random.Random(f"{seed} {number}"))
    words = ", ".join(trial.what)
    try:
        return run(trial), ""
    except Failure as failure:
        return "FAILURE", f"call {number} ({words}): {failure}"
    except Exception:
        return "FAILURE", f"call {number} ({words}): {traceback.format_exc()}"


def child(seed: int, first: int, last: int, report: Path) -> None:
    """Calls first to last - 1; the report has a line a call: its number, then what came of it."""
    faulthandler.enable()
    with report.open("a", buffering=1) as file:
        for number in range(first, last):
            file.write(f"{number} ")
            file.write(json.dumps(one(seed, number)) + "\n")


def calls(seed: int, cases: int, folder: Path) -> tuple[collections.Counter[str], list[str]]:
    """Make the calls in children; what came of them, and the failures."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    first = 0
    while first < cases:
        report = folder / f"from_{first}"
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            "--seed",
            str(seed),
            "--child",
            str(first),
            str(cases),
            str(report),
        ]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            code = watch(process, report)
            words = process.stderr.read() if process.stderr else ""
        lines = report.read_text().splitlines() if report.exists() else []
        for line in lines:
            _, _, found = line.partition(" ")
            if found:
                outcome, why = json.loads(found)
                outcomes[outcome] += 1
                failures += [why] if why else []
        first += len(lines)
        if code:
            number = first - 1 if lines and not lines[-1].partition(" ")[2] else first
            first = max(first, number + 1)
            outcomes["CRASH"] += 1
            failures.append(f"call {number}: the process ended with {code}\n{words[-2000:]}")
    return outcomes, failures


def watch(process: subprocess.Popen[str], report: Path) -> int:
    """Wait for the child; end it where it makes no progress."""
    size, since = -1, time.monotonic()
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            now = report.stat().st_size if report.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > HANGS:
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--child", nargs=3)
    chosen = parser.parse_args()
    if chosen.child:
        first, last, report = chosen.child
        child(chosen.seed, int(first), int(last), Path(report))
        return 0
    if chosen.only is not None:
        print(*one(chosen.seed, chosen.only), sep="\n")
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, failures = calls(chosen.seed, chosen.cases, Path(folder))
    print("\n".join(failures[:20]))
    told = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    print(f"seed {chosen.seed}: {sum(outcomes.values())} calls in {time.perf_counter() - begin:.0f} s: {told}")
    print(f"{len(failures)} failures")
    return 1 if failures or sum(outcomes.values()) < chosen.cases else 0


if __name__ == "__main__":
    sys.exit(main())
