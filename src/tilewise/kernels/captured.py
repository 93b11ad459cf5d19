"""The arrays that a function of the user's captured, as tables that the kernel reads."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from tilewise.errors import InvalidArgument
from tilewise.kernels.traced import POINTERS, Table, TraceError, padded
from tilewise.simd.builder import Ptr

Array = np.ndarray[Any, Any]

# How the arrays of a library become NumPy's; a frontend adds its own.
ARRAYS: dict[type, Callable[[Any], Array]] = {np.ndarray: lambda x: x}
_CURRENT: ContextVar[Captured] = ContextVar("_CURRENT")


class Captured:
    """The arrays of a function, padded, with a Table each; `function` reads the tables in their place.

    They are found in its closure, globals and defaults and those of the functions that it calls, in tuples, lists and
    functools.partial; and, where they are attributes of objects, while it is traced, if their library tells.
    """

    def __init__(self, function: Any) -> None:
        self.arrays: list[Array] = []
        self.tables: list[Table] = []
        self.complete = False  # whether the function was traced, and its arrays are known
        self._replaced: dict[int, tuple[Any, Any]] = {}  # by identity: what was replaced, which so stays alive
        self.function = self._without_arrays(function)

    @property
    def codes(self) -> set[types.CodeType]:
        """Of the function and of those that it may call."""
        return {new.__code__ for _, new in self._replaced.values() if isinstance(new, types.FunctionType)}

    def call(self, pointers: list[Ptr], *arguments: Any) -> Any:
        """Call the function, with its tables at these addresses."""
        with _set(_CURRENT, self), _set(POINTERS, pointers):
            return self.function(*arguments)

    def table(self, x: Any) -> Any:
        """The Table of an array; the number itself of one without axes."""
        if id(x) in self._replaced:
            return self._replaced[id(x)][1]
        if self.complete:
            raise TraceError("an array that the function makes when it is called: make it before, and capture it")
        convert = next(ARRAYS[kind] for kind in type(x).__mro__ if kind in ARRAYS)
        found = convert(x)
        if found.dtype.kind not in "biuf" or not found.size:
            raise InvalidArgument(
                f"a captured array must hold numbers, at least one, got {found.dtype} of shape {found.shape}"
            )
        if found.dtype.kind in "iu" and (int(found.min()) < -(1 << 31) or int(found.max()) >= 1 << 31):
            raise InvalidArgument("a captured array of integers must fit 32 bits")
        table: Any = found.item() if not found.ndim else Table(found.shape, found.dtype.kind, len(self.tables))
        if found.ndim:
            self.arrays.append(padded(found))
            self.tables.append(table)
        self._replaced[id(x)] = x, table
        return table

    def _without_arrays(self, x: Any) -> Any:
        """x with a Table for each array that it, or a function that it captured, captured."""
        if id(x) in self._replaced:
            return self._replaced[id(x)][1]
        if isinstance(x, tuple(ARRAYS)):
            return self.table(x)
        if type(x) in (tuple, list):
            return type(x)(self._without_arrays(y) for y in x)
        if isinstance(x, functools.partial):
            parts = [self._without_arrays(y) for y in (x.func, *x.args)]
            options = {name: self._without_arrays(y) for name, y in x.keywords.items()}
            return functools.partial(parts[0], *parts[1:], **options)
        if isinstance(x, types.FunctionType) and (x.__closure__ or not _is_ours(x)):
            return self._function(x)
        return x

    def _function(self, x: types.FunctionType) -> types.FunctionType:
        cells = [types.CellType(c.cell_contents) if is_full(c) else types.CellType() for c in x.__closure__ or ()]
        names = dict(x.__globals__)
        result = types.FunctionType(x.__code__, names, x.__name__, None, tuple(cells))
        self._replaced[id(x)] = x, result  # before its contents, as a function may capture itself
        result.__defaults__ = x.__defaults__ and tuple(map(self._without_arrays, x.__defaults__))
        result.__kwdefaults__ = x.__kwdefaults__ and {n: self._without_arrays(y) for n, y in x.__kwdefaults__.items()}
        for cell in cells:
            if is_full(cell):
                cell.cell_contents = self._without_arrays(cell.cell_contents)
        names.update({name: self._without_arrays(names[name]) for name in _names(x.__code__) if name in names})
        return result


def captured(x: Any) -> Any:
    """The Table of an array that a function reads while it is traced."""
    if not isinstance(x, tuple(ARRAYS)):
        raise TraceError(f"a {type(x).__name__} has no place in a kernel")
    return _CURRENT.get().table(x)


def is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_ours(x: types.FunctionType) -> bool:
    return (x.__module__ or "").partition(".")[0] in ("numpy", "torch", "tilewise")


def _names(code: types.CodeType) -> set[str]:
    """The names that code, and the functions in it, may look up among globals."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
