"""What commands share on the terminal: facts in two columns, tables, a progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress

LABEL_WIDTH = 9


def fact(label: str, text: str) -> None:
    """A line of `label  text`; further lines of the text are indented below it."""
    first, *rest = text.splitlines() or [""]
    click.echo(f"{label:<{LABEL_WIDTH}} {first}".rstrip())
    for line in rest:
        click.echo(f"{'':<{LABEL_WIDTH}} {line}")


def verdict(ok: bool) -> str:
    """ok or FAIL, in colour on a terminal, padded to the same width."""
    return click.style("ok  ", fg="green") if ok else click.style("FAIL", fg="red", bold=True)


def columns(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """Rows as lines: a positive width aligns left, a negative one right."""
    for row in rows:
        cells = (f"{x:<{w}}" if w > 0 else f"{x:>{-w}}" for x, w in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar of so many steps, gone at the end; nothing where stderr is not a terminal. Yields `advance`."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
