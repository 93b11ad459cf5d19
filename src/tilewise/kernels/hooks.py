"""Score and keep functions of the user's, traced into a kernel."""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.errors import InvalidArgument
from tilewise.simd.builder import Builder, Int, Mask, Ptr, Vec

if TYPE_CHECKING:  # what only calls with functions need is imported by them: it takes a tenth of the whole import
    from tilewise.kernels.captured import Captured
    from tilewise.kernels.traced import Table

MAX_TABLES = 8  # captured arrays of a call


@dataclass(frozen=True)
class Hook:
    """A function of the user's, ready to be written into a kernel. Equal hooks write the same words.

    A kernel reads captured arrays from its table, so their contents are no part of it.
    """

    kind: str  # score or keep
    digest: str
    captured: Captured  # the function, with a Table for each captured array
    reads_sequence: bool  # whether it depends on b
    reads_head: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hook) and (self.kind, self.digest) == (other.kind, other.digest)

    def __hash__(self) -> int:
        return hash((self.kind, self.digest))

    def score(self, b: Builder, pointers: list[Ptr], s: Vec, *place: Int) -> Vec:
        """The changed score; place is (sequence, query head, query position, first of 16 key positions)."""
        from tilewise.kernels.traced import Traced, lift

        return lift(b, self._call(b, pointers, Traced(b, s), *place)).floats()

    def keep(self, b: Builder, pointers: list[Ptr], *place: Int) -> Mask:
        """Which of 16 keys are seen."""
        from tilewise.kernels.traced import lift

        return lift(b, self._call(b, pointers, *place)).mask()

    def _call(self, b: Builder, pointers: list[Ptr], *arguments: Any) -> Any:
        from tilewise.kernels.traced import Traced

        *first, batch, head, i, j = arguments
        place = Traced(b, batch), Traced(b, head), Traced(b, i), Traced(b, j, steps=True)
        return self.captured.call(pointers, *first, *place)

    @property
    def tables(self) -> list[Table]:
        """Of the captured arrays."""
        return self.captured.tables


@dataclass(frozen=True)
class Hooks:
    """The hooks of a call."""

    score: Hook | None = None
    keep: Hook | None = None


NO_HOOKS = Hooks()


def trace(kind: str, function: Any) -> tuple[Hook, list[np.ndarray[Any, Any]]]:
    """The hook of a function score(s, b, h, i, j) or keep(b, h, i, j), and the arrays that it captured, padded.

    Raises InvalidArgument, with the line, for a function that cannot be traced.
    """
    from tilewise.kernels.captured import Captured

    if not callable(function):
        raise TypeError(f"{kind} must be a function, got {type(function).__name__}")
    captured = None
    try:
        captured = Captured(function)
        attributes = len(captured.tables)
        text = _text(kind, captured)
        captured.complete = True
        if len(captured.tables) > attributes:  # found while it ran: are they the same arrays when it runs again?
            _text(kind, captured)
    except Exception as failure:
        raise InvalidArgument(f"{kind} cannot be traced: {_where(failure, captured)}{failure}") from failure
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Hook(kind, digest, captured, "SEQUENCE" in text, "HEAD" in text), captured.arrays


def _text(kind: str, captured: Captured) -> str:
    """What the function writes."""
    from tilewise.kernels.traced import TraceError
    from tilewise.simd.text import TextBuilder

    b = TextBuilder()
    pointers = [b.pointer(Int(b, f"TABLE{n}"), 0, 0) for n in range(MAX_TABLES)]
    place = [Int(b, name) for name in ("SEQUENCE", "HEAD", "ROW", "KEY")]
    hook = Hook(kind, "", captured, False, False)
    result: Vec | Mask = (
        hook.score(b, pointers, Vec(b, "SCORE"), *place) if kind == "score" else hook.keep(b, pointers, *place)
    )
    if len(captured.tables) > MAX_TABLES:
        raise TraceError(f"it captures {len(captured.tables)} arrays, at most {MAX_TABLES} are possible")
    return "\n".join([*b.lines, f"return {result.raw}", *(f"{t.shape} {t.kind}" for t in captured.tables)])


def _where(failure: BaseException, captured: Captured | None) -> str:
    """The line of the user's code that failed."""
    found, entry = "", failure.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if captured and code in captured.codes:
            line = linecache.getline(code.co_filename, entry.tb_lineno).strip()
            found = f"line {entry.tb_lineno} of {code.co_filename}: {line}: "
        entry = entry.tb_next
    return found
