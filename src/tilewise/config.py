"""Every knob of tilewise, in one table: the fields of `Config`.

A knob is set by its environment variable (``TILEWISE_DEBUG=2``) or, inside a block, by name::

    with tw.config(threads=1, interpret=True):
        o = tw.attention(q, k, v)

The environment is read once, when a knob is first asked for, because a call of 30 microseconds asks for several:
`current` costs two look-ups. A program that changes ``os.environ`` afterwards calls `reload`. An empty variable counts
as unset.

The package exports the function `config` under this module's name and so hides the module: what else is here is
imported by ``from tilewise.config import current``, never by ``from tilewise import config``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import Any, NamedTuple, SupportsIndex

from tilewise.errors import InvalidArgument

__all__ = ["Config", "Knob", "config", "current", "describe", "reload"]

PREFIX = "TILEWISE_"
CACHE_OFF = "off"


class _Kind(NamedTuple):
    """The values of a knob: how to read one, whether text or already a value, and what to tell whoever got it wrong."""

    parse: Callable[[object], object]  # raises ValueError or TypeError; the message is made from `expects`
    expects: str


def _integer(low: int, high: int | None = None) -> _Kind:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | SupportsIndex):
            raise TypeError
        number = int(value) if isinstance(value, str) else index(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    return _Kind(parse, f"an int of at least {low}" if high is None else f"an int from {low} to {high}")


def _flag() -> _Kind:
    meanings = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

    def parse(value: object) -> bool:
        text = str(value).strip().lower()
        if text not in meanings:
            raise ValueError
        return meanings[text]

    return _Kind(parse, "a bool: 1, true, yes, on or 0, false, no, off")


def _text(what: str) -> _Kind:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        if not value.strip():
            raise ValueError
        return value.strip()

    return _Kind(parse, what)


def _folder(*words: str) -> _Kind:
    """An absolute path, so that a later chdir does not move it; or one of `words`, which are kept as they are."""

    def parse(value: object) -> str:
        if not isinstance(value, str | os.PathLike):
            raise TypeError
        path = os.fspath(value)
        if not isinstance(path, str) or not path:
            raise ValueError
        return path.lower() if path.lower() in words else os.path.abspath(os.path.expanduser(path))

    return _Kind(parse, " or ".join(["the path of a folder", *(f"'{word}'" for word in words)]))


def _optional(kind: _Kind) -> _Kind:
    return _Kind(lambda value: None if value is None else kind.parse(value), f"{kind.expects}, or None")


def _knob(kind: _Kind, doc: str) -> dict[str, object]:
    return {"kind": kind, "doc": doc}


@dataclass(frozen=True)
class Config:
    """The table of knobs, and the values of all of them at one moment. The variable of `debug` is TILEWISE_DEBUG."""

    debug: int = field(
        default=0,
        metadata=_knob(
            _integer(0, 5),
            "What to print: 1 the target, 2 a line a call with time and speed, 3 the plan and its reasons, "
            "4 pseudo-code, 5 IR and assembly; each includes those before it.",
        ),
    )
    interpret: bool = field(
        default=False,
        metadata=_knob(_flag(), "Run kernels op by op in NumPy, with every access checked, instead of native code."),
    )
    target: str | None = field(
        default=None,
        metadata=_knob(
            _optional(_text("the name of a target, such as x86-64-v3")),
            "The target to compile for; None detects this machine's.",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_knob(
            _optional(_integer(1)), "Threads of the default pool; None means the cores that this process may use."
        ),
    )
    check: int = field(
        default=0,
        metadata=_knob(
            _integer(0, 2),
            "Checks at run time: 2 checks bounds in native code, fills scratch with NaN and guards it with redzones.",
        ),
    )
    dump: str | None = field(
        default=None,
        metadata=_knob(_optional(_folder()), "Folder for the IR and assembly of every kernel; None writes none."),
    )
    cache: str | None = field(
        default=None,
        metadata=_knob(
            _optional(_folder(CACHE_OFF)),
            "Folder for compiled kernels; None means the user's cache folder, 'off' keeps none on disk.",
        ),
    )


class Knob(NamedTuple):
    """One row of the table, for documentation and ``tilewise info``."""

    name: str
    variable: str
    expects: str
    default: object
    doc: str


_kinds: dict[str, _Kind] = {knob.name: knob.metadata["kind"] for knob in fields(Config)}
_environment: Config | None = None

# A context variable, not a thread-local: tasks of an event loop share a thread and must not see each other's settings.
# Worker threads of a Pool start outside every block, so what they need is passed to them by the call.
_override: ContextVar[Config | None] = ContextVar("tilewise_config", default=None)


def current() -> Config:
    """The values in force here: those of the innermost open `config` block, over the environment, over the defaults.

    Raises:
        InvalidArgument: an environment variable, read now for the first time, has a bad value.
    """
    override = _override.get()
    if override is not None:
        return override
    return _environment if _environment is not None else reload()


def reload() -> Config:
    """Read the environment again and return what it says. Blocks of `config` that are open keep their values.

    Raises:
        InvalidArgument: a variable has a bad value; nothing changes then.
    """
    global _environment
    values: dict[str, Any] = {}
    for name in _kinds:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text:
            values[name] = _parse(name, text, variable)
    _environment = replace(Config(), **values)
    return _environment


def config(**overrides: object) -> AbstractContextManager[Config]:
    """Set knobs inside a ``with`` block, in this thread or task only. Blocks nest; ``as`` gives the block's `Config`.

    Args:
        overrides: knobs by their names in `Config`, as values (``threads=2``) or as text, read as from the environment.

    Raises:
        InvalidArgument: no knob has that name, or the knob refuses the value. Raised here, before the block is entered.
    """
    for name in overrides:
        if name not in _kinds:
            raise InvalidArgument(f"config: got the unknown knob {name!r}, expected one of {', '.join(_kinds)}")
    return _overriding({name: _parse(name, value, f"config: {name}") for name, value in overrides.items()})


def describe() -> Iterator[Knob]:
    """Yield the rows of the table in order."""
    for knob in fields(Config):
        variable = PREFIX + knob.name.upper()
        yield Knob(knob.name, variable, _kinds[knob.name].expects, knob.default, knob.metadata["doc"])


@contextmanager
def _overriding(values: dict[str, Any]) -> Iterator[Config]:
    settings = replace(current(), **values)
    token = _override.set(settings)
    try:
        yield settings
    finally:
        _override.reset(token)


def _parse(name: str, value: object, origin: str) -> object:
    kind = _kinds[name]
    try:
        return kind.parse(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{origin}: got {value!r}, expected {kind.expects}") from None
