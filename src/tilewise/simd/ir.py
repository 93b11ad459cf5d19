"""LLVM IR as text: the lines of one function.

llvmlite's objects for the same instructions, and their conversion to text, took a third of the time in which a kernel
is compiled.
"""

from __future__ import annotations

import struct
from typing import Any

from tilewise.simd.values import LANES


def vector(element: str) -> str:
    return f"<{LANES} x {element}>"


VM, VN, VF = (vector(element) for element in ("i1", "i32", "float"))


def float32(x: float) -> str:
    """x rounded to float32, as LLVM writes one: the bits of the double that equals it."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


class FunctionText:
    """Instructions in their order. A value is its name, or the text of a constant."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declarations: dict[str, str] = {}  # of the functions that are called
        self.block = "body"  # the one written to
        self._slots: list[str] = []
        self._values = self._blocks = 0

    def __str__(self) -> str:
        return "\n".join(["slots:", *self._slots, "  br label %body", "body:", *self.lines])

    def slot(self, type_: str) -> str:
        """Memory for one value: its address."""
        name = f"%slot{len(self._slots)}"
        self._slots.append(f"  {name} = alloca {type_}")
        return name

    def do(self, text: str) -> None:
        """An instruction without a value."""
        self.lines.append("  " + text)

    def value(self, text: str) -> str:
        """An instruction with one: its name."""
        name = f"%{self._values}"
        self._values += 1
        self.lines.append(f"  {name} = {text}")
        return name

    def binary(self, operation: str, type_: str, x: Any, y: Any) -> str:
        return self.value(f"{operation} {type_} {x}, {y}")

    def cast(self, operation: str, x: Any, source: str, target: str) -> str:
        return self.value(f"{operation} {source} {x} to {target}")

    def select(self, condition: Any, type_: str, x: Any, y: Any) -> str:
        """One value for a scalar, lane by lane for a vector."""
        return self.value(f"select {VM if type_[0] == '<' else 'i1'} {condition}, {type_} {x}, {type_} {y}")

    def call(self, function: str, result: str, *operands: tuple[str, Any]) -> str:
        """A call of a declared function with (type, value) of each operand; its name unless the result is void."""
        if function not in self.declarations:
            types = ", ".join(type_ for type_, _ in operands)
            self.declarations[function] = f"declare {result} @{function}({types})"
        text = f"call {result} @{function}({', '.join(f'{type_} {x}' for type_, x in operands)})"
        if result == "void":
            self.do(text)
            return ""
        return self.value(text)

    def blocks(self, *names: str) -> list[str]:
        """Names of new blocks."""
        self._blocks += 1
        return [f"{name}{self._blocks}" for name in names]

    def branch(self, condition: str, yes: str, no: str) -> None:
        self.do(f"br i1 {condition}, label %{yes}, label %{no}")

    def begin(self, block: str) -> None:
        self.lines.append(f"{block}:")
        self.block = block

    def minmax(self, name: str, x: Any, y: Any) -> str:
        return self.call(f"llvm.{name}.i64", "i64", ("i64", x), ("i64", y))

    def all_lanes(self, type_: str, scalar: Any) -> str:
        lanes = vector(type_)
        first = self.value(f"insertelement {lanes} poison, {type_} {scalar}, i32 0")
        return self.value(f"shufflevector {lanes} {first}, {lanes} poison, {VN} zeroinitializer")
