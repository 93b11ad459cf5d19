"""The kernel language: its values, its words and its control flow.

A kernel is a Python function over a `Builder`. Three builders give the same text three lives: `lower` writes LLVM IR,
`interp` executes it word by word in NumPy, `text` prints it as pseudo-code.

Every vector has 16 float32 lanes on every machine, so lane structure is part of a kernel's meaning and register
width is not. No word may be reordered or contracted: `fma` is one rounding, `a * b + c` is two.

`range` unrolls while the kernel is written; `for j in b.loop(lo, hi)` runs when the kernel runs. Likewise `if` folds
and `for _ in b.when(condition)` branches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.simd.values import (
    BF16,
    BF16_PAIR,
    ELEMENTS,
    F16,
    F32,
    I32,
    I64,
    LANES,
    U8,
    Bool,
    Element,
    Int,
    IntLike,
    IVec,
    Mask,
    Ptr,
    V,
    Value,
    Var,
    Vec,
)  # fmt: skip

__all__ = [
    "BF16", "BF16_PAIR", "ELEMENTS", "F16", "F32", "I32", "I64", "LANES", "U8", "WORDS", "Bool", "Builder", "Element",
    "IVec", "Int", "IntLike", "Kernel", "Mask", "Ptr", "Value", "Var", "Vec",
]  # fmt: skip

# Every word: what it takes and gives. i = i64, v = 16 x f32, n = 16 x i32, m = 16 x bool, b = bool, p = pointer.
# Static operands (lane indices, constants) are not listed. A builder implements each word or is incomplete.
WORDS: dict[str, str] = {
    # scalars of 64 bits; idiv and irem are of non-negative numbers
    "iadd": "ii>i", "isub": "ii>i", "imul": "ii>i", "idiv": "ii>i", "irem": "ii>i", "imin": "ii>i", "imax": "ii>i",
    "ilt": "ii>b", "ile": "ii>b", "ieq": "ii>b", "both": "bb>b", "either": "bb>b", "negate": "b>b", "choose": "bii>i",
    # 16 float32 lanes; max(a, b) is a > b ? a : b in every lane, so it gives b where either is NaN
    "add": "vv>v", "sub": "vv>v", "mul": "vv>v", "div": "vv>v", "fma": "vvv>v", "max": "vv>v",
    "lt": "vv>m", "le": "vv>m", "eq": "vv>m", "where": "mvv>v", "shuffle": "vv>v",
    # of |x| < 2^22, and of -126 <= round(y) <= 127; elsewhere they give anything, but NaN where all operands are NaN
    "fraction": "v>v", "ldexp": "vv>v",
    # 16 int32 lanes, for the bits of floats
    "bits": "v>n", "floats": "n>v", "to_float": "n>v", "nadd": "nn>n", "nsub": "nn>n", "nand": "nn>n",
    "shl": "n>n", "shr": "n>n",
    # 16 int32 lanes as numbers: modulo 2^32; ndiv and nrem round towards zero, by a divisor of 0 they give 0
    "splat": "i>n", "iota": ">n", "nmul": "nn>n", "ndiv": "nn>n", "nrem": "nn>n", "nlt": "nn>m", "neq": "nn>m",
    "nwhere": "mnn>n",
    # masks
    "between": "ii>m", "mand": "mm>m", "mor": "mm>m", "mnot": "m>m", "any": "m>b", "all": "m>b",
    # memory
    "load": "p>v", "load_halves": "pp>v", "load_part": "pi>v", "broadcast": "p>v", "load_int": "p>i", "prefetch": "p>",
    "load_ints": "p>n", "load_lanes": "pii>v", "load_mask_lanes": "pii>m", "gather": "pn>v", "gather_ints": "pn>n",
    "store": "pv>", "store_part": "pvi>", "store_lane": "pv>", "store_int": "pi>", "fetch_add": "pi>i",
    "load_acquire": "p>i", "store_release": "pi>", "pause": ">",  # between threads
}  # fmt: skip


class Builder(ABC):
    """Writes (or runs) one kernel. The abstract part is what differs between the three lives of a kernel."""

    @abstractmethod
    def word(self, word: str, *operands: Any, **static: Any) -> Any:
        """Apply a word of WORDS to raw operands."""

    @abstractmethod
    def constant(self, kind: str, x: float) -> Any:
        """The raw constant x of a kind: i, v or n."""

    @abstractmethod
    def advance(self, pointer: Any, count: Any, element: Element) -> Any:
        """The raw pointer `count` elements further."""

    @abstractmethod
    def address_to_pointer(self, address: Any) -> Any:
        """An address held in an Int, as a raw pointer."""

    @abstractmethod
    def new_slot(self, initial: Value) -> Any: ...

    @abstractmethod
    def read_slot(self, slot: Any) -> Any: ...

    @abstractmethod
    def write_slot(self, slot: Any, raw: Any) -> None: ...

    @abstractmethod
    def loop(self, lo: IntLike, hi: IntLike, step: IntLike = 1) -> Iterator[Int]:
        """`for j in b.loop(lo, hi, step)`: a loop of the kernel, for j = lo, lo + step, ... < hi; step > 0."""

    @abstractmethod
    def when(self, condition: Bool) -> Iterator[None]:
        """`for _ in b.when(condition)`: the body runs once if the condition holds."""

    @abstractmethod
    def repeat(self, condition: Callable[[], Bool]) -> Iterator[None]:
        """`for _ in b.repeat(lambda: ...)`: the body runs as long as the condition, computed anew, holds."""

    # ---- constants and slots
    def integer(self, x: IntLike) -> Int:
        return x if isinstance(x, Int) else Int(self, self.constant("i", x))

    def vec(self, x: float) -> Vec:
        """x, rounded to float32, in every lane."""
        return Vec(self, self.constant("v", x))

    def ivec(self, x: int) -> IVec:
        return IVec(self, self.constant("n", x))

    def var(self, initial: V) -> Var[V]:
        return Var(self, initial)

    # ---- scalars
    def imin(self, x: IntLike, y: IntLike) -> Int:
        return Int(self, self.word("imin", self.integer(x).raw, self.integer(y).raw))

    def imax(self, x: IntLike, y: IntLike) -> Int:
        return Int(self, self.word("imax", self.integer(x).raw, self.integer(y).raw))

    def choose(self, condition: Bool, x: IntLike, y: IntLike) -> Int:
        """x if the condition holds, else y; both are computed."""
        return Int(self, self.word("choose", condition.raw, self.integer(x).raw, self.integer(y).raw))

    # ---- vectors
    def fma(self, x: Vec, y: Vec, z: Vec) -> Vec:
        """x * y + z with one rounding."""
        return Vec(self, self.word("fma", x.raw, y.raw, z.raw))

    def max(self, x: Vec, y: Vec) -> Vec:
        """x > y ? x : y in each lane: y where either is NaN."""
        return Vec(self, self.word("max", x.raw, y.raw))

    def fraction(self, x: Vec) -> Vec:
        """x - round(x), ties to even, for |x| < 2^22: exact, a zero of either sign."""
        return Vec(self, self.word("fraction", x.raw))

    def ldexp(self, x: Vec, y: Vec) -> Vec:
        """x * 2^round(y), ties to even, for -126 <= round(y) <= 127."""
        return Vec(self, self.word("ldexp", x.raw, y.raw))

    def where(self, mask: Mask, x: Vec, y: Vec) -> Vec:
        return Vec(self, self.word("where", mask.raw, x.raw, y.raw))

    def shuffle(self, x: Vec, y: Vec, lanes: Sequence[int]) -> Vec:
        """Lane i of the result is lane lanes[i] of x, or lane lanes[i] - 16 of y."""
        return Vec(self, self.word("shuffle", x.raw, y.raw, lanes=tuple(lanes)))

    def bits(self, x: Vec) -> IVec:
        return IVec(self, self.word("bits", x.raw))

    def floats(self, x: IVec) -> Vec:
        return Vec(self, self.word("floats", x.raw))

    def to_float(self, x: IVec) -> Vec:
        """The integers as floats, rounded to nearest even."""
        return Vec(self, self.word("to_float", x.raw))

    def between(self, lo: IntLike, hi: IntLike) -> Mask:
        """Lane x holds lo <= x < hi; any 64-bit lo and hi."""
        return Mask(self, self.word("between", self.integer(lo).raw, self.integer(hi).raw))

    def splat(self, x: IntLike) -> IVec:
        """The lower 32 bits of x in every lane."""
        return IVec(self, self.word("splat", self.integer(x).raw))

    def iota(self) -> IVec:
        """0, 1, ... 15."""
        return IVec(self, self.word("iota"))

    def where_ints(self, mask: Mask, x: IVec, y: IVec) -> IVec:
        return IVec(self, self.word("nwhere", mask.raw, x.raw, y.raw))

    def any(self, mask: Mask) -> Bool:
        return Bool(self, self.word("any", mask.raw))

    def all(self, mask: Mask) -> Bool:
        return Bool(self, self.word("all", mask.raw))

    # ---- memory
    def pointer(self, address: IntLike, lo: IntLike, hi: IntLike, element: Element = F32) -> Ptr:
        """The element at an address, within the extent [lo, hi) in bytes."""
        raw = self.address_to_pointer(self.integer(address).raw)
        return Ptr(self, raw, self.integer(lo).raw, self.integer(hi).raw, element)

    def load(self, p: Ptr) -> Vec:
        """16 elements as float32; those of half types exactly."""
        return Vec(self, self.word("load", p))

    def load_halves(self, p: Ptr, q: Ptr) -> Vec:
        """8 elements from p, then 8 from q, of one type."""
        return Vec(self, self.word("load_halves", p, q))

    def load_part(self, p: Ptr, count: IntLike) -> Vec:
        """The first `count` lanes from memory, zeros in the rest; nothing past them is read."""
        return Vec(self, self.word("load_part", p, self.integer(count).raw))

    def broadcast(self, p: Ptr) -> Vec:
        """One element in every lane."""
        return Vec(self, self.word("broadcast", p))

    def load_ints(self, p: Ptr) -> IVec:
        """16 int32."""
        return IVec(self, self.word("load_ints", p))

    def load_lanes(self, p: Ptr, lo: IntLike, hi: IntLike) -> Vec:
        """Lanes [lo, hi) from memory, zeros in the rest; nothing outside them is read."""
        return Vec(self, self.word("load_lanes", p, self.integer(lo).raw, self.integer(hi).raw))

    def load_mask_lanes(self, p: Ptr, lo: IntLike, hi: IntLike) -> Mask:
        """Lanes [lo, hi) from memory, a byte each: whether it is not 0; false in the rest, where nothing is read."""
        return Mask(self, self.word("load_mask_lanes", p, self.integer(lo).raw, self.integer(hi).raw))

    def gather(self, p: Ptr, index: IVec) -> Vec:
        """The float32 at p + index, lane by lane."""
        return Vec(self, self.word("gather", p, index.raw))

    def gather_ints(self, p: Ptr, index: IVec) -> IVec:
        """The int32 at p + index, lane by lane."""
        return IVec(self, self.word("gather_ints", p, index.raw))

    def load_int(self, p: Ptr) -> Int:
        """An integer of the pointer's element: i64, i32, or a byte without a sign."""
        return Int(self, self.word("load_int", p))

    def prefetch(self, p: Ptr, locality: int = 3) -> None:
        """Ask for a line that will be read soon; 3 into L1, 2 into L2. Any address is allowed."""
        self.word("prefetch", p, locality=locality)

    def store(self, p: Ptr, x: Vec) -> None:
        """Store 16 elements; a half type rounds to nearest, ties to even, and has one NaN."""
        self.word("store", p, x.raw)

    def store_part(self, p: Ptr, x: Vec, count: IntLike) -> None:
        """Store the first `count` lanes; nothing past them is written."""
        self.word("store_part", p, x.raw, self.integer(count).raw)

    def store_lane(self, p: Ptr, x: Vec, lane: int) -> None:
        self.word("store_lane", p, x.raw, lane=lane)

    def store_int(self, p: Ptr, x: IntLike) -> None:
        self.word("store_int", p, self.integer(x).raw)

    def fetch_add(self, p: Ptr, x: IntLike) -> Int:
        """Add x to the integer at p atomically; the value before."""
        return Int(self, self.word("fetch_add", p, self.integer(x).raw))

    def load_acquire(self, p: Ptr) -> Int:
        """The integer at p; what its writer wrote before store_release is seen after."""
        return Int(self, self.word("load_acquire", p))

    def store_release(self, p: Ptr, x: IntLike) -> None:
        self.word("store_release", p, self.integer(x).raw)

    def pause(self) -> None:
        """Inside a loop that waits for another thread: let it have the core."""
        self.word("pause")


@dataclass(frozen=True)
class Kernel:
    """A kernel: `body(b, table, worker)` over the address of a table of int64 and the number of the worker.

    The name states the constants that the body was specialised for; it is the kernel's name in caches, dumps,
    profilers and tests.
    """

    name: str
    body: Callable[[Builder, Int, Int], None]

    def __str__(self) -> str:
        from tilewise.simd.text import pseudo_code

        return pseudo_code(self)
