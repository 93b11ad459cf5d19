"""Every mutant fits the tree and names tests that exist; those of the specification are all there, with its own tests.

That each one is killed is what `scripts/mutate` shows; here it is a slow test.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.mutate import ROOT, TIMEOUT, BadMutant, Mutant, Patch, apply, copy_tree, main, read_mutant, read_mutants

MUTANTS = read_mutants(ROOT)
KILLED = [mutant for mutant in MUTANTS if not mutant.harmless]
# Section 5 of the specification: which of its nine tests must notice the pitfall.
SPECIFICATION = {
    **dict.fromkeys(("s01", "s02", "s03", "s04", "s05"), "gqa_causal_window_match_naive"),
    **dict.fromkeys(("s06", "s10"), "chunk_invariant_with_q_offset"),
    "s07": "sinks_join_the_denominator",
    "s08": "hand_example",
    "s09": "no_visible_key_gives_zeros_and_minus_inf",
    **dict.fromkeys(("s11", "s12"), "arena_rewound_and_scratch_independent_of_tk"),
    "s13": "pool_result_equals_serial_bitwise",
    "s14": "query_tile_and_batch_invariant",
    "s15": "shape_and_argument_errors",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies(mutant: Mutant, tmp_path: Path) -> None:
    """Each old text is in its file exactly once, and what comes out is Python."""
    for patch in mutant.patches:
        assert patch.file.startswith("src/tilewise/"), "a mutant breaks the library, not its tests"
        target = tmp_path / patch.file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((ROOT / patch.file).read_text())
    apply(mutant, tmp_path)
    for file in {patch.file for patch in mutant.patches}:
        text = (tmp_path / file).read_text()
        assert text != (ROOT / file).read_text()
        compile(text, file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, _, function = test.partition("[")[0].partition("::")
        source = (ROOT / file).read_text()
        assert not function or re.search(rf"^def {function}\(", source, re.M), f"there is no {test}"


def test_there_are_enough() -> None:
    ours = [mutant for mutant in KILLED if not re.match(r"s\d\d_", mutant.name)]
    assert len(ours) >= 25
    assert len(KILLED) >= 40
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.patches for mutant in MUTANTS}) == len(MUTANTS)


def test_pitfalls_of_the_specification() -> None:
    pitfalls = {mutant.name[:3]: mutant for mutant in KILLED if re.match(r"s\d\d_", mutant.name)}
    assert sorted(pitfalls) == sorted(SPECIFICATION) == [f"s{n:02}" for n in range(1, 16)]
    for name, test in SPECIFICATION.items():
        assert pitfalls[name].tests == (f"tests/api/test_contract.py::test_{test}",)
        assert pitfalls[name].ends == ("fails",)


# ---- the runner itself can fail

LINES = ["what: one is two", "test: tests/test_one.py", "file: src/tilewise/one.py", "--- old", "ONE = 1", "--- new"]


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def small_tree(root: Path, new: str, test: str, *more: str) -> Path:
    """A package of one number, a test of it and one mutant."""
    write(root / "src/tilewise/__init__.py", "")
    write(root / "src/tilewise/one.py", "ONE = 1")
    write(root / "tests/test_one.py", "from tilewise.one import ONE", "def test_one():", f"    {test}")
    write(root / "tests/quality/mutants/s01_two.txt", *more, *LINES, new)
    return root


@pytest.mark.parametrize(
    ("new", "test", "more", "code", "verdict"),
    [
        ("ONE = 2", "assert ONE == 1", [], 0, "killed 1/1"),
        ("ONE = 2", "assert ONE", [], 1, "SURVIVED"),
        ("ONE = 2", "assert ONE > 1", [], 1, "the tests of the unchanged tree: fails"),
        ("ONE = ", "assert ONE == 1", [], 1, "BAD"),  # not to be imported is not to be noticed
        ("TWO = 2", "assert ONE == 1", [], 1, "BAD"),
        ("ONE = 2", "while ONE > 1: pass", ["timeout: 4"], 1, "hangs, expected fails"),
        ("ONE = 2", "while ONE > 1: pass", ["timeout: 4", "ends: hangs"], 0, "killed 1/1"),
        ("ONE = 2", "import os; ONE == 1 or os.abort()", [], 1, "crashes, expected fails"),
        ("ONE = 2", "import os; ONE == 1 or os.abort()", ["ends: fails crashes"], 0, "killed 1/1"),
        ("ONE = 2", "assert ONE", ["ends: passes"], 0, "1 of 1 harmless changes moved no bit"),
        ("ONE = 2", "assert ONE == 1", ["ends: passes"], 1, "0 of 1 harmless changes moved no bit"),
    ],
)
def test_verdicts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], new: str, test: str, more: list[str], code: int, verdict: str
) -> None:
    root = small_tree(tmp_path, new, test, *more)
    assert main([], root) == code
    out, err = capfd.readouterr()
    assert verdict in out + err


def test_old_text_must_be_there_once(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "x = 1", "y = 1", "v = 1")
    before = (tmp_path / "a.py").read_text()
    for file, old, new in (("a.py", "= 1", "= 2"), ("a.py", "z", "w"), ("a.py", "x", "x"), ("b.py", "x", "y")):
        patches = Patch("a.py", "x = 1", "x = 3"), Patch(file, old, new)
        with pytest.raises(BadMutant):
            apply(Mutant("m", "", (), patches), tmp_path)
        assert (tmp_path / "a.py").read_text() == before, "nothing is written where one patch does not fit"
    apply(Mutant("m", "", (), (Patch("a.py", "x = 1", "x = 3"), Patch("a.py", "y = 1", "y = 4"))), tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 3\ny = 4\nv = 1\n"


def test_a_mutant_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "m.txt", *LINES, "    ONE = 2", "", "file: src/tilewise/two.py", "--- old", "", "--- new")
    mutant = read_mutant(path)
    assert mutant == Mutant(
        "m", "one is two", ("tests/test_one.py",),
        (Patch("src/tilewise/one.py", "ONE = 1", "    ONE = 2\n"), Patch("src/tilewise/two.py", "", "")),
        ("fails",), TIMEOUT,
    )  # fmt: skip


@pytest.mark.parametrize("left_out", [0, 1, 2, 3, 4, 5])
def test_a_mutant_that_lacks_something_is_refused(tmp_path: Path, left_out: int) -> None:
    with pytest.raises(BadMutant):
        read_mutant(write(tmp_path / "m.txt", *(line for i, line in enumerate(LINES) if i != left_out), "ONE = 2"))
    with pytest.raises(BadMutant):
        read_mutant(write(tmp_path / "m.txt", "ends: badly", *LINES, "ONE = 2"))


def test_a_copy_has_no_bytecode(tmp_path: Path) -> None:
    """Bytecode is trusted by time and size, which a mutant may keep."""
    copy = copy_tree(ROOT, tmp_path / "copy")
    assert (copy / "src/tilewise/attention.py").is_file()
    assert not list(copy.rglob("__pycache__"))


@pytest.mark.slow
def test_every_mutant_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--jobs", "2"])
    assert code == 0, capsys.readouterr().out
