"""Write the pages of this folder that are made from tables of the source: config.md and words.md.

    python docs/reference/generate.py

tests/quality/test_docs.py fails when a page is not what this writes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from tilewise.config import describe
from tilewise.simd.builder import WORDS, Builder

HERE = Path(__file__).parent
NOTICE = "<!-- Written by docs/reference/generate.py. Do not edit. -->"

KINDS = {"i": "Int", "v": "Vec", "n": "IVec", "m": "Mask", "b": "Bool", "p": "Ptr"}
# How a word is written where it is an operator or a method of a value; the others are methods of the builder.
OPERATORS = {
    "iadd": "x + y", "isub": "x - y", "imul": "x * y", "idiv": "x // y", "irem": "x % y",
    "ilt": "x < y", "ile": "x <= y", "ieq": "x.equals(y)", "both": "x & y", "either": "x | y", "negate": "~x",
    "add": "x + y", "sub": "x - y", "mul": "x * y", "div": "x / y",
    "lt": "x < y", "le": "x <= y", "eq": "x.equals(y)",
    "nadd": "x + y", "nsub": "x - y", "nand": "x & y", "shl": "x << count", "shr": "x >> count",
    "nmul": "x * y", "ndiv": "x // y", "nrem": "x % y", "nlt": "x < y", "neq": "x.equals(y)",
    "nwhere": "b.where_ints(mask, x, y)",
    "mand": "x & y", "mor": "x | y", "mnot": "~x",
}  # fmt: skip
MEANINGS = {
    "idiv": "of non-negative numbers", "irem": "of non-negative numbers",
    "imin": "the smaller", "imax": "the larger",
    "shr": "zeros come in", "eq": "false where either is NaN",
    "add": "one rounding", "sub": "one rounding", "mul": "one rounding", "div": "one rounding, a true division",
    "where": "x in the lanes where the mask holds, else y",
    "ndiv": "towards zero; 0 where y is 0", "nrem": "x - y * (x // y)", "nmul": "modulo 2^32",
    "nwhere": "x in the lanes where the mask holds, else y",
    "any": "whether some lane holds", "all": "whether every lane holds",
    "bits": "the same 32 bits as an integer", "floats": "the same 32 bits as a float",
    "load": "16 floats", "load_int": "one integer",
    "store": "16 floats", "store_lane": "one lane", "store_int": "one integer",
    "store_release": "one int64; who sees it by load_acquire sees all that was written before",
}  # fmt: skip


def written(word: str) -> str:
    """How a kernel says it."""
    if word in OPERATORS:
        return OPERATORS[word]
    parameters = list(inspect.signature(getattr(Builder, word)).parameters)[1:]
    return f"b.{word}({', '.join(parameters)})"


def meaning(word: str) -> str:
    if word in MEANINGS:
        return MEANINGS[word]
    text = inspect.getdoc(getattr(Builder, word, None)) if word not in OPERATORS else ""
    text = " ".join((text or "").split()).rstrip(".")
    return text[:1].lower() + text[1:]


WORDS_PAGE = """{notice}

# The words of the kernel language

Kernels are written in these words and no others; `src/tilewise/simd/builder.py` is the source of this table. A word
has a meaning in NumPy (`simd/interp.py`), a lowering to LLVM IR (`simd/lower.py`) and a test on every lane, or it does
not exist. Int is a 64-bit integer, Vec 16 float32 lanes, IVec 16 int32 lanes, Mask 16 truth values, Bool a truth value
of the control flow, Ptr an address with the extent that it may reach.

Control flow is written `for j in b.loop(lo, hi, step)`, `for _ in b.when(condition)` and
`for _ in b.repeat(lambda: condition)`. Python's own `for` and `if` unroll and fold while the kernel is written.

| word | written | takes | gives | meaning |
|---|---|---|---|---|
{rows}
"""


def words_page() -> str:
    rows = []
    for word, signature in WORDS.items():
        takes, _, gives = signature.partition(">")
        kinds = ", ".join(KINDS[kind] for kind in takes)
        code = written(word).replace("|", "\\|")  # or it would end the cell
        row = f"| `{word}` | `{code}` | {kinds} | {KINDS.get(gives, '')} | {meaning(word)} |"
        rows.append(row.replace("  |", " |"))
    return WORDS_PAGE.format(notice=NOTICE, rows="\n".join(rows))


CONFIG_PAGE = """{notice}

# Knobs

Every knob is set by its environment variable, or for a block of code with `with tw.config(threads=1, interpret=True):`,
which covers this thread or task only. The environment is read once, when a knob is first asked for; an empty variable
counts as unset. `tilewise info` shows what is in force. No knob changes a bit of a result.

| variable | name | expects | default | meaning |
|---|---|---|---|---|
{rows}
"""


def config_page() -> str:
    rows = (
        f"| `{knob.variable}` | `{knob.name}` | {knob.expects} | `{knob.default}` | {knob.doc} |" for knob in describe()
    )
    return CONFIG_PAGE.format(notice=NOTICE, rows="\n".join(rows))


PAGES = {"config.md": config_page, "words.md": words_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
