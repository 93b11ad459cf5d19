"""PyTorch's names of the words of hooks: of functions, and of methods of the tensors that traced values stand for.

Nothing here needs PyTorch: a function is known by its name, a dtype by how it prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.kernels.captured import captured
from tilewise.kernels.traced import UFUNCS, Traced, TraceError, exp, lift, log, maximum, minimum, where

DTYPES = {"bool": "bool", "int32": "int", "int64": "int", "int": "int", "long": "int", "float32": "float"}


def call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What PyTorch's function of that name is for traced values."""
    known = WORDS.get(name)
    if known is None:
        raise TraceError(f"{name} of PyTorch is not a word of hooks")
    try:
        return known(*arguments, **options)
    except TypeError as failure:
        if isinstance(failure, TraceError):
            raise
        raise TraceError(f"{name} of PyTorch is not a word of hooks with these arguments: {failure}") from failure


def _any_of(*values: Any) -> Traced:
    return next(x for x in values if isinstance(x, Traced))


def _lifted(word: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A word of two values, of which one may be a number or a tensor of one."""

    def on_both(x: Any, y: Any) -> Any:
        b = _any_of(x, y).b
        return word(lift(b, x), lift(b, y))

    return on_both


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise TraceError(f"div with rounding_mode={rounding_mode!r} is not a word of hooks")
    b = _any_of(x, y).b
    return lift(b, x) // lift(b, y) if rounding_mode else lift(b, x) / lift(b, y)


def _cast(x: Traced, dtype: Any) -> Traced:
    """x as another type. There is one kind of floats, float32, and one of integers, int32."""
    name = str(dtype).removeprefix("torch.")
    wanted = DTYPES.get(name)
    if wanted is None or (wanted == "int" and x.is_float):
        raise TraceError(f"a value of {_dtype(x)} cannot become {name} in a hook")
    if wanted == "bool":
        return x if x.is_mask else x != 0
    if x.is_mask:
        return where(x, 1.0, 0.0) if wanted == "float" else where(x, 1, 0)
    return Traced(x.b, x.floats()) if wanted == "float" and not x.is_float else x


def _to(x: Traced, *target: Any, **options: Any) -> Traced:
    """Devices and layouts mean nothing here."""
    wanted = [y for y in (*target, options.get("dtype")) if str(y).startswith("torch.") or str(y) in DTYPES]
    return _cast(x, wanted[0]) if wanted else x


def _dtype(x: Traced) -> str:
    return "bool" if x.is_mask else "float32" if x.is_float else "int32"


def _filled(value: int) -> Callable[..., Traced]:
    """A constant beside x, of the dtype that is asked for, or of that of x."""

    def make(x: Traced, *shape: Any, dtype: Any = None, **options: Any) -> Traced:
        return _cast(lift(x.b, value), dtype or _dtype(x))

    return make


def _full(x: Traced, *given: Any, dtype: Any = None, **options: Any) -> Traced:
    """full_like(x, value) and x.new_full(shape, value)."""
    value = lift(x.b, options.get("fill_value", given[-1] if given else None))
    return _cast(value, dtype) if dtype else value


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + exp(-x))


WORDS: dict[str, Callable[..., Any]] = {
    **UFUNCS,
    **{
        name: _lifted(UFUNCS[word])
        for word, names in {
            "add": "add __radd__", "subtract": "sub subtract", "multiply": "mul multiply __rmul__",
            "floor_divide": "floor_divide __floordiv__", "remainder": "remainder __mod__",
            "less": "lt less", "less_equal": "le less_equal", "greater": "gt greater",
            "greater_equal": "ge greater_equal", "equal": "eq", "not_equal": "ne not_equal",
            "logical_and": "logical_and", "logical_or": "logical_or",
            "bitwise_and": "bitwise_and __and__ __rand__", "bitwise_or": "bitwise_or __or__ __ror__",
            "minimum": "minimum min", "maximum": "maximum max",
        }.items()
        for name in names.split()
    },
    "logical_xor": _lifted(lambda x, y: x ^ y), "bitwise_xor": _lifted(lambda x, y: x ^ y),
    "__xor__": _lifted(lambda x, y: x ^ y), "__rxor__": _lifted(lambda x, y: x ^ y),
    "rsub": _lifted(lambda x, y: y - x), "__rsub__": _lifted(lambda x, y: y - x),
    "__rtruediv__": _lifted(lambda x, y: y / x), "__rdiv__": _lifted(lambda x, y: y / x),
    "__rfloordiv__": _lifted(lambda x, y: y // x), "__rmod__": _lifted(lambda x, y: y % x),
    "div": _divide, "divide": _divide, "true_divide": _divide, "__truediv__": _divide, "neg": lambda x: -x,
    "abs": abs, "pow": lambda x, y: x**y, "bitwise_not": lambda x: ~x, "where": where, "clamp": _clamp,
    "clip": _clamp, "sigmoid": _sigmoid, "log": log, "__getitem__": lambda x, index: captured(x)[index],
    "full_like": _full, "zeros_like": _filled(0), "ones_like": _filled(1),
}  # fmt: skip

METHODS: dict[str, Callable[..., Any]] = {
    **{name: word for name, word in WORDS.items() if not name.startswith("_") and name != "where"},
    "where": lambda x, condition, y: where(condition, x, y),
    "masked_fill": lambda x, hidden, value: where(hidden, value, x),
    "to": _to, "type": _to, "float": lambda x: _cast(x, "float32"), "int": lambda x: _cast(x, "int32"),
    "long": lambda x: _cast(x, "int64"), "bool": lambda x: _cast(x, "bool"), "new_zeros": _filled(0),
    "new_ones": _filled(1), "new_full": _full,
}  # fmt: skip
PROPERTIES: dict[str, Callable[[Traced], Any]] = {"dtype": _dtype, "device": lambda x: "cpu"}
