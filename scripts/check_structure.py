#!/usr/bin/env python3
"""Is the house in order? Imports run one way, and no file or function has grown past its budget.

    python scripts/check_structure.py [root]

Prints one line for each violation and exits with 1, or one line that says all is well. Imports are read from the
source, wherever they stand in a file, so a lazy import or one for typing counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "tilewise"

# Who may import whom inside the package: a module or folder of src/tilewise, and what it may see besides itself.
# "__init__" stands for the public names. A new module or folder needs a row here.
FREE = {"arguments", "config", "errors", "problem", "ragged", "visibility"}
RUN = {"plan", "runtime", "kernels", "simd"} | FREE
EVERYTHING = RUN | {
    "__init__", "attention", "bench", "blockmask", "cache", "cli", "entry", "frontends", "hooks", "partial", "prefill",
    "reference", "serving", "verify",
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": EVERYTHING,
    "__main__": EVERYTHING,
    "bench": EVERYTHING,
    "cli": EVERYTHING,
    "verify": EVERYTHING - {"cli", "bench"},
    "flash_attn": {"frontends"},
    "onnx": {"frontends"},
    "torch": {"frontends"},
    "transformers": {"frontends"},
    "frontends": RUN | {"__init__", "attention"},
    "prefill": RUN | {"cache", "serving"},
    "cache": {"runtime"} | FREE,
    "attention": RUN | {"entry"},
    "serving": RUN | {"entry"},
    "partial": RUN,
    "entry": RUN | {"blockmask"},
    "blockmask": RUN,
    "hooks": RUN,
    "plan": RUN,
    "runtime": RUN,
    "kernels": {"simd"} | FREE,
    "simd": {"config", "errors"},
    "arguments": FREE,
    "problem": FREE,
    "ragged": FREE,
    "visibility": FREE,
    "config": FREE,
    "errors": FREE,
    "reference": set(),
}

# Outside the package: NumPy for everyone, the rest by name. None: any library (a frontend imports its own).
THIRD_PARTY: dict[str, set[str] | None] = {
    "bench": {"click", "matplotlib", "rich"},
    "cli": {"click", "rich", "safetensors"},
    "frontends": None,
}
LLVMLITE_FILES = {"simd/jit.py", "simd/target.py"}
NOT_IN_KERNELS = {"ctypes", "importlib", "os"}

# Lines, comments included; of a function without its docstring.
SOURCE_FOLDERS = ("src", "tests", "benchmarks", "scripts")
FILE_BUDGET = 400
FRONT_DOOR_BUDGET = 200
FUNCTION_BUDGET = 60
KERNEL_BUDGET = 80


def imported_names(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of all that a file imports; `package` is where its relative imports start from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "llvmlite":
            yield node.lineno, f"llvmlite.{node.attr}"


def unit_of(home: Path, name: str) -> str:
    """The module or folder of the package that `tilewise.x.y` lives in; the public names live in __init__."""
    unit = [*name.split("."), "__init__"][1]
    known = unit in MAY_IMPORT or (home / unit).is_dir() or (home / f"{unit}.py").is_file()
    return unit if known else "__init__"


def outside_problem(unit: str, where: str, name: str) -> str | None:
    """Why the file `where` of `unit` must not import `name`, a module of another distribution."""
    top = name.split(".")[0]
    if top == "llvmlite":
        allowed_files = ", ".join(sorted(LLVMLITE_FILES))
        return None if where in LLVMLITE_FILES else f"imports llvmlite: only {allowed_files} may"
    if unit == "kernels" and top in NOT_IN_KERNELS:
        return f"imports {top}: kernels are written in the words of simd/ alone"
    allowed = THIRD_PARTY.get(unit, set())
    if allowed is None or top in allowed or top == "numpy" or top in sys.stdlib_module_names:
        return None
    return f"imports {top}: tilewise needs numpy and llvmlite only"


def import_problems(root: Path) -> Iterator[str]:
    home = root / "src" / PACKAGE
    for path in sorted(home.rglob("*.py")):
        relative = path.relative_to(home)
        unit = relative.parts[0].removesuffix(".py")
        if unit not in MAY_IMPORT:
            yield f"{path.relative_to(root)}: {unit} has no row in MAY_IMPORT of scripts/check_structure.py"
            continue
        for line, name in imported_names(ast.parse(path.read_bytes()), [PACKAGE, *relative.parts[:-1]]):
            if name.split(".")[0] == PACKAGE:
                target = unit_of(home, name)
                allowed = target == unit or target in MAY_IMPORT[unit]
                why = None if allowed else f"{unit} imports {target}: imports run one way"
            else:
                why = outside_problem(unit, relative.as_posix(), name)
            if why:
                yield f"{path.relative_to(root)}:{line}: {why}"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's docstring: shapes, dtypes and errors cost no function its budget."""
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) else 0


def size_problems(root: Path) -> Iterator[str]:
    home = root / "src" / PACKAGE
    for path in sorted(path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py")):
        shown = path.relative_to(root)
        source = path.read_bytes()
        lines = len(source.splitlines())
        budget = FRONT_DOOR_BUDGET if path == home / "attention.py" else FILE_BUDGET
        if lines > budget:
            yield f"{shown}: {lines} lines, the budget is {budget}"
        budget = KERNEL_BUDGET if home / "kernels" in path.parents else FUNCTION_BUDGET
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
                if lines > budget:
                    yield f"{shown}:{node.lineno}: {node.name} has {lines} lines, the budget is {budget}"


def problems(root: Path) -> list[str]:
    """All violations in the checkout at `root`, one line each."""
    return [*import_problems(root), *size_problems(root)]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    if not (root / "src" / PACKAGE).is_dir():
        print(f"{root}: no src/{PACKAGE} here", file=sys.stderr)
        return 2
    found = problems(root)
    print("\n".join(found) or "structure: imports run one way, files and functions are within budget")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
