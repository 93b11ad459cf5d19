"""The values that words take and give. Their operators are words of the builder that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tilewise.simd.builder import Builder

LANES = 16


class Element(NamedTuple):
    """What a pointer points at."""

    name: str
    size: int  # bytes
    align: int  # what its address is a multiple of


F32 = Element("f32", 4, 4)
F16 = Element("f16", 2, 2)
BF16 = Element("bf16", 2, 2)
BF16_PAIR = Element("f32", 4, 2)  # two of them, as the bits of a float32
I64 = Element("i64", 8, 8)
I32 = Element("i32", 4, 4)
U8 = Element("u8", 1, 1)
ELEMENTS = {element.name: element for element in (F32, F16, BF16, I64)}


class Value:
    """A value of a kernel: `raw` is what its builder makes of it (an IR value, an array, a name)."""

    __slots__ = ("b", "raw")

    def __init__(self, b: Builder, raw: Any) -> None:
        self.b = b
        self.raw = raw


class Bool(Value):
    """A truth value of the control flow."""

    def __and__(self, other: Bool) -> Bool:
        return Bool(self.b, self.b.word("both", self.raw, other.raw))

    def __or__(self, other: Bool) -> Bool:
        return Bool(self.b, self.b.word("either", self.raw, other.raw))

    def __invert__(self) -> Bool:
        return Bool(self.b, self.b.word("negate", self.raw))

    def __bool__(self) -> bool:
        raise TypeError("a Bool has no value while the kernel is written: branch with `for _ in b.when(condition)`")


class Int(Value):
    """A signed 64-bit integer: positions, lengths, strides, addresses."""

    def _arith(self, word: str, x: IntLike, y: IntLike) -> Int:
        return Int(self.b, self.b.word(word, self.b.integer(x).raw, self.b.integer(y).raw))

    def _compare(self, word: str, x: IntLike, y: IntLike) -> Bool:
        return Bool(self.b, self.b.word(word, self.b.integer(x).raw, self.b.integer(y).raw))

    def __add__(self, other: IntLike) -> Int:
        return self if isinstance(other, int) and other == 0 else self._arith("iadd", self, other)

    __radd__ = __add__

    def __sub__(self, other: IntLike) -> Int:
        return self._arith("isub", self, other)

    def __rsub__(self, other: IntLike) -> Int:
        return self._arith("isub", other, self)

    def __mul__(self, other: IntLike) -> Int:
        return self if isinstance(other, int) and other == 1 else self._arith("imul", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Int:
        return self._arith("idiv", self, other)

    def __mod__(self, other: IntLike) -> Int:
        return self._arith("irem", self, other)

    def __lt__(self, other: IntLike) -> Bool:
        return self._compare("ilt", self, other)

    def __le__(self, other: IntLike) -> Bool:
        return self._compare("ile", self, other)

    def __gt__(self, other: IntLike) -> Bool:
        return self._compare("ilt", other, self)

    def __ge__(self, other: IntLike) -> Bool:
        return self._compare("ile", other, self)

    def equals(self, other: IntLike) -> Bool:
        """self == other, as a Bool of the kernel (`==` keeps Python's meaning)."""
        return self._compare("ieq", self, other)


IntLike = Int | int


class IVec(Value):
    """16 int32 lanes: the bits of floats."""

    def __add__(self, other: IVec) -> IVec:
        return IVec(self.b, self.b.word("nadd", self.raw, other.raw))

    def __sub__(self, other: IVec) -> IVec:
        return IVec(self.b, self.b.word("nsub", self.raw, other.raw))

    def __and__(self, other: IVec) -> IVec:
        return IVec(self.b, self.b.word("nand", self.raw, other.raw))

    def __mul__(self, other: IVec) -> IVec:
        return IVec(self.b, self.b.word("nmul", self.raw, other.raw))

    def __floordiv__(self, other: IVec) -> IVec:
        """Towards zero; 0 where other is 0."""
        return IVec(self.b, self.b.word("ndiv", self.raw, other.raw))

    def __mod__(self, other: IVec) -> IVec:
        """self - other * (self // other); 0 where other is 0."""
        return IVec(self.b, self.b.word("nrem", self.raw, other.raw))

    def __lt__(self, other: IVec) -> Mask:
        return Mask(self.b, self.b.word("nlt", self.raw, other.raw))

    def equals(self, other: IVec) -> Mask:
        return Mask(self.b, self.b.word("neq", self.raw, other.raw))

    def __lshift__(self, count: int) -> IVec:
        return IVec(self.b, self.b.word("shl", self.raw, count=count))

    def __rshift__(self, count: int) -> IVec:
        """Shift right, zeros coming in."""
        return IVec(self.b, self.b.word("shr", self.raw, count=count))


class Mask(Value):
    """16 truth values, one a lane."""

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.b, self.b.word("mand", self.raw, other.raw))

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.b, self.b.word("mor", self.raw, other.raw))

    def __invert__(self) -> Mask:
        return Mask(self.b, self.b.word("mnot", self.raw))


class Vec(Value):
    """16 float32 lanes."""

    def __add__(self, other: Vec) -> Vec:
        return Vec(self.b, self.b.word("add", self.raw, other.raw))

    def __sub__(self, other: Vec) -> Vec:
        return Vec(self.b, self.b.word("sub", self.raw, other.raw))

    def __mul__(self, other: Vec) -> Vec:
        return Vec(self.b, self.b.word("mul", self.raw, other.raw))

    def __truediv__(self, other: Vec) -> Vec:
        return Vec(self.b, self.b.word("div", self.raw, other.raw))

    def __lt__(self, other: Vec) -> Mask:
        return Mask(self.b, self.b.word("lt", self.raw, other.raw))

    def __le__(self, other: Vec) -> Mask:
        return Mask(self.b, self.b.word("le", self.raw, other.raw))

    def equals(self, other: Vec) -> Mask:
        """self == other in each lane; false where either is NaN."""
        return Mask(self.b, self.b.word("eq", self.raw, other.raw))


class Ptr:
    """An address of an element, with the extent [lo, hi) (addresses in bytes) that it may reach.

    `p + n` moves by n elements and keeps the extent, so a check knows which array an access was meant for.
    """

    __slots__ = ("b", "element", "hi", "lo", "raw")

    def __init__(self, b: Builder, raw: Any, lo: Any, hi: Any, element: Element) -> None:
        self.b, self.raw, self.lo, self.hi, self.element = b, raw, lo, hi, element

    def __add__(self, count: IntLike) -> Ptr:
        if isinstance(count, int) and count == 0:
            return self
        raw = self.b.advance(self.raw, self.b.integer(count).raw, self.element)
        return Ptr(self.b, raw, self.lo, self.hi, self.element)

    def of(self, element: Element) -> Ptr:
        """The same address, read as another element."""
        return Ptr(self.b, self.raw, self.lo, self.hi, element)


V = TypeVar("V", bound=Value)


class Var(Generic[V]):
    """A mutable slot; LLVM promotes it to a register."""

    __slots__ = ("_kind", "_slot", "b")

    def __init__(self, b: Builder, initial: V) -> None:
        self.b = b
        self._kind = type(initial)
        self._slot = b.new_slot(initial)

    @property
    def value(self) -> V:
        return self._kind(self.b, self.b.read_slot(self._slot))

    @value.setter
    def value(self, new: V) -> None:
        self.b.write_slot(self._slot, new.raw)
