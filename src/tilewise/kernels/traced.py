"""The values that a score or keep function computes with: our own words behind Python's operators.

A hook is called while a kernel is written, with `Traced` values for its score and positions. What it does to them is
written into the kernel, so it must do it with arithmetic, comparisons and the functions below; a branch on a value that
is not known yet, or a function of another library, is an error that names the line.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from tilewise.simd import math as words
from tilewise.simd.builder import F32, I32, LANES, Builder, Int, IVec, Mask, Ptr, Vec

SIGN = 0x7FFFFFFF  # all bits of a float32 but its sign
POINTERS: ContextVar[Sequence[Ptr]] = ContextVar("POINTERS", default=())  # of the tables of what is being traced


class TraceError(TypeError):
    """Something that cannot be written into a kernel."""


class Traced:
    """16 numbers or truth values of a kernel that is being written.

    `value` is a Vec of floats, a Mask, an IVec of integers, or an Int: the same integer in all lanes, or, where
    `steps` is set, the first of 16 that follow one another.
    """

    __slots__ = ("b", "steps", "value")
    __hash__ = None  # type: ignore[assignment]  # == makes a Traced

    def __init__(self, b: Builder, value: Vec | Mask | IVec | Int, steps: bool = False) -> None:
        self.b, self.value, self.steps = b, value, steps

    # ---- kinds
    @property
    def is_float(self) -> bool:
        return isinstance(self.value, Vec)

    @property
    def is_mask(self) -> bool:
        return isinstance(self.value, Mask)

    def floats(self) -> Vec:
        if isinstance(self.value, Vec):
            return self.value
        return self.b.to_float(self.lanes())

    def lanes(self) -> IVec:
        """The integers, a lane each."""
        if isinstance(self.value, Int):
            same = self.b.splat(self.value)
            return same + self.b.iota() if self.steps else same
        if isinstance(self.value, IVec):
            return self.value
        raise TraceError("an integer is needed here")

    def mask(self) -> Mask:
        if isinstance(self.value, Mask):
            return self.value
        raise TraceError("a truth value is needed here: compare with something")

    def _lift(self, x: Any) -> Traced:
        return lift(self.b, x)

    # ---- arithmetic
    def __add__(self, other: Any) -> Traced:
        y = self._lift(other)
        if isinstance(self.value, Int) and isinstance(y.value, Int) and not (self.steps and y.steps):
            return Traced(self.b, self.value + y.value, self.steps or y.steps)
        return _arithmetic(self, y, lambda x, y: x + y)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Traced:
        y = self._lift(other)
        if isinstance(self.value, Int) and isinstance(y.value, Int) and not y.steps:
            return Traced(self.b, self.value - y.value, self.steps)
        return _arithmetic(self, y, lambda x, y: x - y)

    def __rsub__(self, other: Any) -> Traced:
        return self._lift(other) - self

    def __mul__(self, other: Any) -> Traced:
        return _arithmetic(self, self._lift(other), lambda x, y: x * y)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Traced:
        return Traced(self.b, self.floats() / self._lift(other).floats())

    def __rtruediv__(self, other: Any) -> Traced:
        return self._lift(other) / self

    def __floordiv__(self, other: Any) -> Traced:
        x, y = self.lanes(), self._lift(other).lanes()
        return Traced(self.b, self.b.where_ints(_rounds_up(x, y), x // y - self.b.ivec(1), x // y))

    def __rfloordiv__(self, other: Any) -> Traced:
        return self._lift(other) // self

    def __mod__(self, other: Any) -> Traced:
        x, y = self.lanes(), self._lift(other).lanes()
        return Traced(self.b, self.b.where_ints(_rounds_up(x, y), x % y + y, x % y))

    def __rmod__(self, other: Any) -> Traced:
        return self._lift(other) % self

    def __neg__(self) -> Traced:
        if self.is_float:
            return Traced(self.b, self.b.vec(-0.0) - self.floats())
        return Traced(self.b, self.b.ivec(0) - self.lanes())

    def __abs__(self) -> Traced:
        if self.is_float:
            return Traced(self.b, self.b.floats(self.b.bits(self.floats()) & self.b.ivec(SIGN)))
        return where(self < 0, -self, self)

    # ---- comparisons
    def __lt__(self, other: Any) -> Traced:
        y = self._lift(other)
        if self.is_float or y.is_float:
            return Traced(self.b, self.floats() < y.floats())
        return Traced(self.b, self.lanes() < y.lanes())

    def __le__(self, other: Any) -> Traced:
        y = self._lift(other)
        if self.is_float or y.is_float:
            return Traced(self.b, self.floats() <= y.floats())
        return ~(y < self)

    def __gt__(self, other: Any) -> Traced:
        return self._lift(other) < self

    def __ge__(self, other: Any) -> Traced:
        return self._lift(other) <= self

    def __eq__(self, other: Any) -> Traced:  # type: ignore[override]
        y = self._lift(other)
        if self.is_mask or y.is_mask:
            return (self & y) | (~self & ~y)
        if self.is_float or y.is_float:
            return Traced(self.b, self.floats().equals(y.floats()))
        return Traced(self.b, self.lanes().equals(y.lanes()))

    def __ne__(self, other: Any) -> Traced:  # type: ignore[override]
        return ~self.__eq__(other)

    # ---- truth
    def __and__(self, other: Any) -> Traced:
        y = self._lift(other)
        if self.is_mask or y.is_mask:
            return Traced(self.b, self.mask() & y.mask())
        return Traced(self.b, self.lanes() & y.lanes())

    __rand__ = __and__

    def __or__(self, other: Any) -> Traced:
        return Traced(self.b, self.mask() | self._lift(other).mask())

    __ror__ = __or__

    def __invert__(self) -> Traced:
        return Traced(self.b, ~self.mask())

    def __xor__(self, other: Any) -> Traced:
        x, y = self.mask(), self._lift(other).mask()
        return Traced(self.b, x & ~y | ~x & y)

    __rxor__ = __xor__

    # ---- what has no place in a kernel
    def __bool__(self) -> bool:
        raise TraceError("`if`, `and`, `or`, `not` and `while` need a value that is not known yet: use where, &, |, ~")

    def __index__(self) -> int:
        raise TraceError(
            "int(), range() and the index of a list need a value that is not known yet: capture a NumPy array in a "
            "variable of its own"
        )

    def __float__(self) -> float:
        raise TraceError("float() and the functions of math need a value that is not known yet: use the words of hooks")

    __int__ = __index__

    def __iter__(self) -> Any:
        raise TraceError("a traced value cannot be iterated over")

    def __pow__(self, other: Any) -> Traced:
        if other == 2:
            return self * self
        raise TraceError("** is not a word of hooks (except ** 2)")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        known = UFUNCS.get(ufunc.__name__)
        if known is None or method != "__call__" or options:
            raise TraceError(f"np.{ufunc.__name__} is not a word of hooks")
        return known(*(self._lift(x) for x in inputs))

    def __array_function__(self, function: Any, *rest: Any) -> Any:
        if function is np.where:
            return where(*rest[1])
        raise TraceError(f"np.{function.__name__} is not a word of hooks")

    # ---- the same words by PyTorch's names
    @classmethod
    def __torch_function__(cls, function: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        from tilewise.kernels.torchwords import call

        return call(function.__name__, arguments, options or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from tilewise.kernels.torchwords import METHODS, PROPERTIES

        if name in PROPERTIES:
            return PROPERTIES[name](self)
        if name not in METHODS:
            raise AttributeError(f".{name} is not a word of hooks")
        return functools.partial(METHODS[name], self)


class Table:
    """A captured array, indexed by traced integers; an index beyond its ends means the end.

    `kind` is NumPy's: f, i, u, or b for truth values, which lie in memory as integers. In memory each row of its last
    axis has 16 more entries before and after, copies of its ends (`padded`), so that 16 entries that follow one another
    are one load.
    """

    def __init__(self, shape: tuple[int, ...], kind: str, number: int, first: tuple[Any, ...] = ()) -> None:
        self.shape, self.kind, self.number = shape, kind, number
        self.first = first  # the indices so far, of a part of an array: x[h][i] is x[h, i]

    def __len__(self) -> int:
        return self.shape[len(self.first)]

    def __getitem__(self, index: Any) -> Any:
        indices = self.first + (index if isinstance(index, tuple) else (index,))
        if len(indices) > len(self.shape):
            raise TraceError(f"an array of {len(self.shape)} axes needs as many indices, got {len(indices)}")
        for x, n in zip(indices, self.shape, strict=False):
            if not isinstance(x, Traced) and not 0 <= operator.index(x) < n:
                raise TraceError(f"the index {x} of a captured array is not in 0 ... {n - 1}")
        if len(indices) < len(self.shape):
            return Table(self.shape, self.kind, self.number, indices)
        pointers = POINTERS.get()
        if self.number >= len(pointers):
            raise TraceError(f"more than {len(pointers)} arrays are captured")
        p = pointers[self.number].of(F32 if self.kind == "f" else I32)
        entry = self._at(p.b, [lift(p.b, x) for x in indices], p)
        return entry != 0 if self.kind == "b" else entry

    def _at(self, b: Builder, indices: list[Traced], p: Ptr) -> Traced:
        if all(isinstance(x.value, Int) and not x.steps for x in indices[:-1]) and isinstance(indices[-1].value, Int):
            row: Any = 0
            for x, n in zip(indices[:-1], self.shape, strict=False):
                row = row * n + b.imin(b.imax(x.value, 0), n - 1)  # type: ignore[arg-type]
            last, n = indices[-1], self.shape[-1]
            column = b.imin(b.imax(last.value, -LANES), n) if last.steps else b.imin(b.imax(last.value, 0), n - 1)  # type: ignore[arg-type]
            place = p + (row * (n + 2 * LANES) + column + LANES)
            if last.steps:
                return Traced(b, b.load(place) if self.kind == "f" else b.load_ints(place))
            return Traced(b, b.broadcast(place)) if self.kind == "f" else Traced(b, b.load_int(place))
        flat = b.ivec(0)
        for axis, (x, n) in enumerate(zip(indices, self.shape, strict=True)):
            inside = minimum(maximum(x, 0), n - 1).lanes()
            width = n + 2 * LANES if axis == len(self.shape) - 1 else n
            flat = flat * b.ivec(width) + inside
        at = flat + b.ivec(LANES)
        return Traced(b, b.gather(p, at) if self.kind == "f" else b.gather_ints(p, at))


def padded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A captured array as its Table has it: float32 or int32, 16 more entries at both ends of each row."""
    kind = np.float32 if x.dtype.kind == "f" else np.int32
    return np.ascontiguousarray(np.pad(x.astype(kind), [(0, 0)] * (x.ndim - 1) + [(LANES, LANES)], mode="edge"))


def lift(b: Builder, x: Any) -> Traced:
    """A number or truth value as a Traced."""
    if isinstance(x, Traced):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Traced(b, b.between(0, LANES if x else 0))
    if isinstance(x, (numbers.Integral, np.integer)):
        if not -(1 << 31) <= int(x) < 1 << 31:
            raise TraceError(f"integers of hooks have 32 bits, got {x}")
        return Traced(b, b.integer(int(x)))
    if isinstance(x, (numbers.Real, np.floating)):
        return Traced(b, b.vec(float(x)))
    if getattr(x, "ndim", None) == 0 and hasattr(x, "item"):  # an array of one number, of NumPy or PyTorch
        return lift(b, x.item())
    raise TraceError(f"a {type(x).__name__} has no place in a kernel")


def _arithmetic(x: Traced, y: Traced, operation: Callable[[Any, Any], Any]) -> Traced:
    if x.is_mask or y.is_mask:
        raise TraceError("arithmetic on truth values: use where(condition, x, y)")
    if x.is_float or y.is_float:
        return Traced(x.b, operation(x.floats(), y.floats()))
    return Traced(x.b, operation(x.lanes(), y.lanes()))


def _rounds_up(x: IVec, y: IVec) -> Mask:
    """Where division towards zero is above division towards minus infinity, Python's."""
    zero, rest = x.b.ivec(0), x % y
    return ~rest.equals(zero) & ((rest < zero) & ~(y < zero) | ~(rest < zero) & (y < zero))


# ---- functions of hooks; each takes numbers as well


def _builder(*values: Any) -> Builder:
    for x in values:
        if isinstance(x, Traced):
            return x.b
    raise TraceError("none of these values depends on the score or a position")


def where(condition: Any, x: Any, y: Any) -> Traced:
    """x where the condition holds, else y."""
    b = _builder(condition, x, y)
    test, x, y = lift(b, condition).mask(), lift(b, x), lift(b, y)
    if x.is_mask or y.is_mask:
        return Traced(b, test & x.mask() | ~test & y.mask())
    if x.is_float or y.is_float:
        return Traced(b, b.where(test, x.floats(), y.floats()))
    return Traced(b, b.where_ints(test, x.lanes(), y.lanes()))


def minimum(x: Any, y: Any) -> Traced:
    """The smaller one; y where either is NaN."""
    b = _builder(x, y)
    return where(lift(b, x) < y, x, y)


def maximum(x: Any, y: Any) -> Traced:
    """The larger one; y where either is NaN."""
    b = _builder(x, y)
    return where(lift(b, x) > y, x, y)


def exp2(x: Any) -> Traced:
    """2 ** x, with the accuracy and limits of `tilewise.simd.math.exp2`."""
    b = _builder(x)
    return Traced(b, words.exp2(b, lift(b, x).floats()))


def exp(x: Any) -> Traced:
    """e ** x, as exp2(x * log2(e))."""
    b = _builder(x)
    return Traced(b, words.exp2(b, lift(b, x).floats() * b.vec(words.LOG2E)))


def log2(x: Any) -> Traced:
    """The base-2 logarithm, of normal numbers."""
    b = _builder(x)
    return Traced(b, words.log2(b, lift(b, x).floats()))


def log(x: Any) -> Traced:
    """The natural logarithm, as log2(x) * ln(2)."""
    b = _builder(x)
    return Traced(b, words.log2(b, lift(b, x).floats()) * b.vec(words.LN2))


def tanh(x: Any) -> Traced:
    """The hyperbolic tangent."""
    b = _builder(x)
    return Traced(b, words.tanh(b, lift(b, x).floats()))


UFUNCS: dict[str, Callable[..., Traced]] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y, "true_divide": lambda x, y: x / y, "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y, "negative": lambda x: -x, "absolute": abs, "square": lambda x: x * x,
    "less": lambda x, y: x < y, "less_equal": lambda x, y: x <= y, "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y, "equal": lambda x, y: x == y, "not_equal": lambda x, y: x != y,
    "logical_and": lambda x, y: x & y, "logical_or": lambda x, y: x | y, "logical_not": lambda x: ~x,
    "bitwise_and": lambda x, y: x & y, "bitwise_or": lambda x, y: x | y, "invert": lambda x: ~x,
    "minimum": minimum, "maximum": maximum, "exp": exp, "exp2": exp2, "log": log, "log2": log2, "tanh": tanh,
}  # fmt: skip
assert F32.size == np.dtype(np.float32).itemsize
