"""Words to pseudo-code: what `print(kernel)` and `tilewise show` print, and what the golden kernels hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilewise.simd.builder import WORDS, Bool, Builder, Element, Int, IntLike, IVec, Kernel, Mask, Ptr, Value, Vec

_INFIX = {
    "iadd": "+", "isub": "-", "imul": "*", "idiv": "//", "irem": "%", "ilt": "<", "ile": "<=", "ieq": "==",
    "both": "and", "either": "or", "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==",
    "nadd": "+", "nsub": "-", "nand": "&", "mand": "&", "mor": "|",
}  # fmt: skip
_KINDS = {Int: "i", Vec: "v", IVec: "n", Mask: "m", Bool: "b"}


class TextBuilder(Builder):
    """Writes one line a word; names are numbered by kind (i int, v vector, n bits, m mask, b bool, p pointer)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1
        self._count: dict[str, int] = {}

    def _line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)

    def _name(self, kind: str) -> str:
        self._count[kind] = self._count.get(kind, 0) + 1
        return f"{kind}{self._count[kind]}"

    def word(self, word: str, *operands: Any, **static: Any) -> Any:
        texts = [x.raw if isinstance(x, Ptr) else x for x in operands]
        if word in _INFIX:
            expression = f"{texts[0]} {_INFIX[word]} {texts[1]}"
        else:
            expression = f"{word}({', '.join([*texts, *(str(x) for x in static.values())])})"
        kind = WORDS[word].partition(">")[2]
        if not kind:
            self._line(expression)
            return None
        name = self._name(kind)
        self._line(f"{name} = {expression}")
        return name

    def constant(self, kind: str, x: float) -> Any:
        return str(x)

    def advance(self, pointer: Any, count: Any, element: Element) -> Any:
        return f"{pointer}[{count}]"

    def address_to_pointer(self, address: Any) -> Any:
        name = self._name("p")
        self._line(f"{name} = pointer({address})")
        return name

    def new_slot(self, initial: Value) -> Any:
        name = self._name("x")
        self._line(f"{name} := {initial.raw}")
        return name, _KINDS[type(initial)]

    def read_slot(self, slot: Any) -> Any:
        name = self._name(slot[1])
        self._line(f"{name} = {slot[0]}")
        return name

    def write_slot(self, slot: Any, raw: Any) -> None:
        self._line(f"{slot[0]} := {raw}")

    def _block(self, head: str) -> Iterator[None]:
        self._line(head)
        self._depth += 1
        yield
        self._depth -= 1

    def loop(self, lo: IntLike, hi: IntLike, step: IntLike = 1) -> Iterator[Int]:
        index = self._name("i")
        lo, hi, step = (x.raw if isinstance(x, Int) else x for x in (lo, hi, step))
        for _ in self._block(f"for {index} in range({lo}, {hi}, {step}):"):
            yield Int(self, index)

    def when(self, condition: Bool) -> Iterator[None]:
        yield from self._block(f"if {condition.raw}:")

    def repeat(self, condition: Callable[[], Bool]) -> Iterator[None]:
        for _ in self._block("while True:"):
            self._line(f"if not {condition().raw}: break")
            yield


def pseudo_code(kernel: Kernel) -> str:
    """The kernel, one word a line."""
    b = TextBuilder()
    kernel.body(b, Int(b, "table"), Int(b, "worker"))
    return "\n".join([f"def {kernel.name}(table, worker):", *b.lines, ""])
