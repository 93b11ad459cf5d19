"""Write the golden bits anew, which is to make a new recipe: never to make a test pass.

    python -m tests.golden.regenerate --recipe 1 --really [--to FILE]

Refused unless the recipe is named and it is the one that this code computes. Nothing is written where two targets of
this machine, or serial and threaded calls, do not agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tilewise as tw
from tests.support import RUNNABLE
from tilewise.verify.bits import PROBLEMS, RECIPE

FILE = Path(__file__).parents[2] / "src" / "tilewise" / "data" / "bits.json"
ABOUT = (
    "SHA-256 of o and lse (the bits of their types, little-endian, C order) for the problems of tilewise/verify/bits.py"
)


def document() -> str:
    """The text of bits.json, from the kernels as they are."""
    problems = {}
    for problem in PROBLEMS:
        sums = []
        for target in RUNNABLE:
            for threads in (1, 3):
                with tw.config(target=target, interpret=False):
                    sums.append(problem.sums(pool=threads))
        if any(one != sums[0] for one in sums):
            raise SystemExit(f"{problem.name}: targets or threads disagree, so there are no bits to record")
        problems[problem.name] = sums[0]
    return json.dumps({"recipe": RECIPE, "about": ABOUT, "problems": problems}, indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the golden bits anew.")
    parser.add_argument("--recipe", type=int, help="the number of the recipe whose bits are to be recorded")
    parser.add_argument("--really", action="store_true", help="to change what users were promised")
    parser.add_argument("--to", type=Path, default=FILE)
    chosen = parser.parse_args(arguments)
    if chosen.recipe != RECIPE or not chosen.really:
        print(
            f"refused: golden bits change only with the recipe. If recipe {RECIPE} is new and unpublished, say "
            f"--recipe {RECIPE} --really",
            file=sys.stderr,
        )
        return 2
    chosen.to.write_text(document())
    print(f"{len(PROBLEMS)} problems of recipe {RECIPE} written to {chosen.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
