#!/usr/bin/env python3
"""Does a test notice when tilewise is broken on purpose? Every mutant of tests/quality/mutants must be killed.

    python scripts/mutate.py [--jobs N] [--no-baseline] [--list] [NAME ...]
    python scripts/mutate.py --brain [--jobs N]

A mutant is a file: what is wrong, the tests that must notice, and patches as the exact old text and the new one.

    what: the denominator is not rescaled when the maximum grows
    test: tests/api/test_contract.py::test_gqa_causal_window_match_naive
    file: src/tilewise/kernels/softmax.py
    --- old
    b.fma(b.load(state.l + row), alpha, t)
    --- new
    b.load(state.l + row) + t

An old text must occur exactly once in its file. Several `test:` lines and several patches may stand in a file; `ends:`
says how the tests must end: fails (the default), hangs, crashes, or passes for a harmless change, which may be made
because the recipe leaves it free and must move no bit. `timeout:` is in seconds. `needs:` names a target without which
the change changes nothing: a mutant is left out, and said to be, on a machine that cannot run it.

Each mutant is applied to a temporary copy of the tree and meets only its own tests, in a process of its own and with a
kernel cache that nobody else uses. NAME picks mutants by the beginning of their names. Exit code 1 when one survives.

--brain instead lets mutmut (to be installed for it) change the integer code that decides what a kernel is told, a word
at a time, and prints what survives; docs/explanation/mutation.md says why each of those does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tilewise.simd.target import TARGETS, missing_features

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("tests", "quality", "mutants")
COPIED = ("src", "tests", "scripts", "docs", "benchmarks", "pyproject.toml", "README.md")
ENDINGS = ("fails", "hangs", "crashes", "passes")
TIMEOUT = 300.0  # seconds; only an endless loop takes so long, also on a busy machine
BASELINE_TIMEOUT = 1800.0
KEYS = ("what", "test", "file", "ends", "timeout", "needs")
OLD, NEW = "--- old", "--- new"


BRAIN = ("problem.py", "arguments.py", "visibility.py", "plan.py", "runtime/arena.py")
BRAIN_TESTS = (
    "tests/api/test_errors.py", "tests/api/test_plan.py", "tests/api/test_visibility.py",
    "tests/api/test_kill_layout.py", "tests/api/test_kill_arguments.py", "tests/runtime/test_arena.py",
)  # fmt: skip


class BadMutant(Exception):
    """A mutant that cannot be read or applied."""


@dataclass(frozen=True)
class Patch:
    """One change of one file."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A change on purpose and the tests that must notice it."""

    name: str
    what: str
    tests: tuple[str, ...]
    patches: tuple[Patch, ...]
    ends: tuple[str, ...] = ("fails",)
    timeout: float = TIMEOUT
    needs: str = ""

    @property
    def harmless(self) -> bool:
        """Whether the tests must pass: the recipe leaves free what it changes."""
        return "passes" in self.ends


@dataclass(frozen=True)
class Result:
    """How the tests of a mutant ended."""

    mutant: Mutant
    ending: str  # one of ENDINGS, or broken: no test ran
    detail: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.ending in self.mutant.ends

    def __str__(self) -> str:
        verdict = ("harmless" if self.mutant.harmless else "killed") if self.good else "SURVIVED"
        if self.ending == "broken" or (self.mutant.harmless and not self.good):
            verdict = "BAD"
        expected = "" if self.good else f", expected {' or '.join(self.mutant.ends)}: {self.mutant.what}"
        return f"{verdict:8}  {self.mutant.name:34} {self.seconds:6.1f} s  {self.ending}{expected}  {self.detail}"


def read_mutant(path: Path) -> Mutant:
    """The mutant in a file; raises BadMutant when it does not follow the format above."""
    fields: dict[str, list[str]] = {key: [] for key in KEYS}
    patches: list[Patch] = []
    part: list[str] | None = None
    old: list[str] = []
    new: list[str] = []

    def close() -> None:
        if part is not None:
            if part is old or not fields["file"] or not old:
                raise BadMutant(f"{path.name}: a patch is a file, an old text and a new one")
            patches.append(Patch(fields["file"][-1], "\n".join(old), "\n".join(new)))

    for line in path.read_text().splitlines():
        heading = re.match(r"(\w+): (.+)", line)
        if line == OLD:
            close()
            part = old = []
        elif line == NEW:
            if part is None or part is not old:
                raise BadMutant(f"{path.name}: {NEW} without {OLD}")
            part = new = []
        elif heading and heading[1] in KEYS and (part is None or part is new):
            close()
            part = None
            fields[heading[1]].append(heading[2].strip())
        elif part is None:
            raise BadMutant(f"{path.name}: unknown line {line!r}")
        else:
            part.append(line)
    close()
    ends = tuple(" ".join(fields["ends"] or ["fails"]).split())
    if len(fields["what"]) != 1 or not fields["test"] or not patches or not set(ends) <= set(ENDINGS):
        raise BadMutant(f"{path.name}: needs one `what:`, a `test:`, a patch, and `ends:` of {', '.join(ENDINGS)}")
    timeout = float(fields["timeout"][0]) if fields["timeout"] else TIMEOUT
    needs = fields["needs"][0] if fields["needs"] else ""
    return Mutant(path.stem, fields["what"][0], tuple(fields["test"]), tuple(patches), ends, timeout, needs)


def read_mutants(root: Path) -> list[Mutant]:
    """All mutants of a tree, by name, those that are harmless last."""
    mutants = [read_mutant(path) for path in (root / FOLDER).glob("*.txt")]
    return sorted(mutants, key=lambda mutant: (mutant.harmless, mutant.name))


def can_run(mutant: Mutant) -> bool:
    """Whether this machine runs the target that a mutant needs."""
    return not mutant.needs or not missing_features(TARGETS[mutant.needs])


def apply(mutant: Mutant, tree: Path) -> None:
    """Change the files of a tree; raises BadMutant, before anything is written, where an old text is not there once."""
    texts: dict[Path, str] = {}
    for patch in mutant.patches:
        path = tree / patch.file
        if not path.is_file():
            raise BadMutant(f"{mutant.name}: there is no {patch.file}")
        text = texts.get(path) or path.read_text()
        count = text.count(patch.old)
        if count != 1 or patch.old == patch.new:
            raise BadMutant(
                f"{mutant.name}: the old text occurs {count} times in {patch.file}, not once: {patch.old!r}"
            )
        texts[path] = text.replace(patch.old, patch.new)
    for path, text in texts.items():
        path.write_text(text)


def copy_tree(root: Path, target: Path) -> Path:
    """What the tests need of a tree, without compiled files: a mutant must not meet bytecode of the true source."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def environment(tree: Path, cache: str) -> dict[str, str]:
    """The variables of a run: the package of that tree, no knob of the user's, a cache of the run's own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TILEWISE_", "PYTEST_"))}
    path = os.pathsep.join([str(tree / "src"), *filter(None, [inherited.get("PYTHONPATH")])])
    return inherited | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TILEWISE_CACHE": cache}


def run_tests(tree: Path, tests: Iterable[str], cache: str, timeout: float) -> tuple[str, str]:
    """(how the tests of a tree end, the first line of pytest's summary)."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment(tree, cache),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs", f"after {timeout:.0f} s"
    if done.returncode < 0 or done.returncode > 127:
        return "crashes", f"exit code {done.returncode}"
    ending = {0: "passes", 1: "fails"}.get(done.returncode, "broken")
    summary = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ending == "fails" and not any(line.startswith("FAILED") for line in summary):
        ending = "broken"  # an error of a fixture or of an import is not a test that noticed
    if ending == "broken":
        return ending, " ".join((done.stdout + done.stderr).split())[-300:]
    return ending, summary[0].removeprefix("FAILED ")[:160] if summary else ""


def try_mutant(mutant: Mutant, root: Path, work: Path) -> Result:
    """Apply a mutant to a copy of the tree and run its tests there."""
    begin = time.perf_counter()
    tree = work / mutant.name
    try:
        apply(mutant, copy_tree(root, tree))
        # kernels are cached by their IR, so mutants may share a cache; not those of the cache itself
        caching = any(patch.file.endswith("simd/jit.py") for patch in mutant.patches)
        cache = str(tree / "cache" if caching else work / "cache")
        ending, detail = run_tests(tree, mutant.tests, cache, mutant.timeout)
    except BadMutant as error:
        ending, detail = "broken", str(error)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return Result(mutant, ending, detail, time.perf_counter() - begin)


def baseline(mutants: Sequence[Mutant], root: Path, work: Path) -> str | None:
    """What is wrong with the unchanged tree: where a test fails anyway, it proves nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    # a function stands for all its cases: naming both would run some twice
    tests = [test for test in tests if "[" not in test or test.partition("[")[0] not in tests]
    tree = copy_tree(root, work / "unchanged")
    ending, detail = run_tests(tree, tests, str(work / "cache"), BASELINE_TIMEOUT)
    shutil.rmtree(tree, ignore_errors=True)
    return None if ending == "passes" else f"the tests of the unchanged tree: {ending} {detail}"


def run_all(mutants: Sequence[Mutant], root: Path, work: Path, jobs: int) -> Iterator[Result]:
    """The results, in the order of the mutants."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda mutant: try_mutant(mutant, root, work), mutants)


def mutate_brain(root: Path, work: Path, jobs: int) -> int:
    """Run mutmut over a copy of the tree and print what survives; its exit code."""
    tree = copy_tree(root, work / "brain")
    lists = {
        "source_paths": ["src"],
        "only_mutate": [f"src/tilewise/{file}" for file in BRAIN],
        "also_copy": ["scripts", "docs", "benchmarks", "README.md"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": list(BRAIN_TESTS),
        "use_git_change_detection": ["false"],
    }
    lines = ["[mutmut]", *(f"{name}=\n    " + "\n    ".join(values) for name, values in lists.items())]
    (tree / "setup.cfg").write_text("\n".join(lines) + "\n")
    variables = environment(tree, str(work / "cache"))
    del variables["PYTHONPATH"], variables["PYTHONDONTWRITEBYTECODE"]  # mutmut finds its own copy of the source
    run = [sys.executable, "-m", "mutmut"]
    code = subprocess.run([*run, "run", "--max-children", str(jobs)], cwd=tree, env=variables, check=False).returncode
    subprocess.run([*run, "results"], cwd=tree, env=variables, check=False)
    return code


def report(results: Sequence[Result], seconds: float) -> bool:
    """Print the sums; whether all went as it must."""
    spent = sum(os.times()[2:4])  # of the processes that have ended: what counts where others use the machine too
    for harmless in (False, True):
        group = [result for result in results if result.mutant.harmless == harmless]
        good = sum(result.good for result in group)
        if group and harmless:
            print(f"{good} of {len(group)} harmless changes moved no bit")
        elif group:
            print(f"killed {good}/{len(group)} mutants in {seconds:.0f} s ({spent:.0f} s of processor time)")
    return all(result.good for result in results)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Apply each mutant to a copy of the tree; its tests must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a mutant's name; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not first run the tests on the unchanged tree")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, run nothing")
    parser.add_argument("--brain", action="store_true", help="mutate the integer code with mutmut")
    chosen = parser.parse_args(arguments)
    if chosen.brain:
        with tempfile.TemporaryDirectory(prefix="tilewise-mutants-") as name:
            return mutate_brain(root, Path(name), chosen.jobs)
    mutants = read_mutants(root)
    if chosen.names:
        mutants = [mutant for mutant in mutants if mutant.name.startswith(tuple(chosen.names))]
    if not mutants:
        print("no such mutant", file=sys.stderr)
        return 2
    if chosen.list:
        for mutant in mutants:
            print(f"{mutant.name:34} {mutant.what}\n{'':34} {' '.join(mutant.tests)}")
        return 0
    for mutant in mutants:
        if not can_run(mutant):
            print(f"left out  {mutant.name:34} needs {mutant.needs}")
    mutants = [mutant for mutant in mutants if can_run(mutant)]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tilewise-mutants-") as name:
        work = Path(name)
        if not chosen.no_baseline and (wrong := baseline(mutants, root, work)):
            print(wrong, file=sys.stderr)
            return 1
        results = []
        for result in run_all(mutants, root, work, chosen.jobs):
            print(result, flush=True)
            results.append(result)
    return 0 if report(results, time.perf_counter() - begin) else 1


if __name__ == "__main__":
    sys.exit(main())
