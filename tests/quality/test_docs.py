"""The docs are true to the tree: generated pages are current, links lead somewhere, named files exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tilewise.simd.builder import WORDS

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")
# A path in code quotes that names a file or folder of the repository.
NAMED = re.compile(
    r"`((?:src|tests|docs|scripts|benchmarks|\.ci)/[\w./-]+|(?:simd|kernels|runtime|cli|verify)/[\w./-]+)`"
)


@pytest.mark.parametrize("name", GENERATOR["PAGES"])
def test_generated_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text() == GENERATOR["PAGES"][name](), (
        "run python docs/reference/generate.py"
    )


def test_every_word_is_explained() -> None:
    unsaid = [word for word in WORDS if word not in GENERATOR["OPERATORS"] and not GENERATOR["meaning"](word)]
    assert unsaid == []
    assert GENERATOR["OPERATORS"].keys() | GENERATOR["MEANINGS"].keys() <= WORDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [target for target, _ in LINK.findall(text) if "://" not in target]
    broken = [target for target in links if not (page.parent / target).exists()]
    for name in NAMED.findall(text):
        if not (
            (ROOT / name).exists() or (ROOT / "src" / "tilewise" / name).exists() or (ROOT / "tests" / name).exists()
        ):
            broken.append(name)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text()) if "://" not in target}
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    assert pages - listed == set()


def test_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda page: page.name)
def test_python_of_the_how_tos_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    for library in {"torch", "transformers"} & set(re.findall(r"^(?:import|from) (\w+)", "\n".join(blocks), re.M)):
        pytest.importorskip(library)
    names: dict[str, object] = {}  # the blocks of a page go on from each other
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
