"""Words to LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilewise.simd.builder import (
    I32,
    I64,
    LANES,
    U8,
    WORDS,
    Bool,
    Builder,
    Element,
    Int,
    IntLike,
    IVec,
    Kernel,
    Mask,
    Ptr,
    Value,
    Vec,
)
from tilewise.simd.environment import in_default_float_environment
from tilewise.simd.ir import VF, VM, VN, FunctionText, float32, vector
from tilewise.simd.target import Target

_VI8, _VI16, _VF16 = (vector(element) for element in ("i8", "i16", "half"))
_TYPE = {Int: "i64", Vec: VF, IVec: VN, Mask: VM, Bool: "i1"}
# how an element lies in memory: half types as bits, which every target can load and mask
_ELEMENT = {"f32": "float", "f16": "i16", "bf16": "i16", "i64": "i64", "i32": "i32", "u8": "i8"}
_MASKED = {"f32": "v16f32.p0", "f16": "v16i16.p0", "bf16": "v16i16.p0", "u8": "v16i8.p0"}
_ROUND = 1.5 * 2.0**23  # x + _ROUND has a last place of 1, so its low bits hold round(x)
_EXPONENT_BITS, _EXPONENT_BIAS = 23, 127
_EVERY_LANE, _TIES_TO_EVEN, _MODE_AS_IT_IS = -1, 8, 4  # operands of instructions of AVX-512
_BF16_SHIFT, _BF16_HALF, _BF16_NAN = 16, 0x7FFF, 0x7FC0  # bits below; half a last place, less one; a NaN
YIELD = "tilewise_yield"  # the function behind `pause`, which whoever loads a kernel provides


def _lanes(values: Sequence[int]) -> str:
    """A constant of 16 x i32."""
    return f"<{', '.join(f'i32 {x}' for x in values)}>"


_IOTA = _lanes(range(LANES))


class LlvmBuilder(Builder):
    """Writes the body of one kernel as an LLVM function. A raw value is its name in the text, or a constant's text."""

    def __init__(self, checked: bool, target: Target) -> None:
        self.ir = FunctionText()
        self.checked = checked
        self.avx512 = "avx512dq" in target.features  # which has instructions for exponents

    # ---- what Builder asks for
    def word(self, word: str, *operands: Any, **static: Any) -> Any:
        return _LOWERING[word](self, *operands, **static)

    def constant(self, kind: str, x: float) -> Any:
        if kind == "i":
            return str(int(x))
        scalar = f"i32 {int(x)}" if kind == "n" else f"float {float32(x)}"
        return f"splat ({scalar})"

    def advance(self, pointer: Any, count: Any, element: Element) -> Any:
        return self.ir.value(f"getelementptr {_ELEMENT[element.name]}, ptr {pointer}, i64 {count}")

    def address_to_pointer(self, address: Any) -> Any:
        return self.ir.value(f"inttoptr i64 {address} to ptr")

    def new_slot(self, initial: Value) -> Any:
        slot = self.ir.slot(_TYPE[type(initial)]), _TYPE[type(initial)]
        self.write_slot(slot, initial.raw)
        return slot

    def read_slot(self, slot: Any) -> Any:
        return self.ir.value(f"load {slot[1]}, ptr {slot[0]}")

    def write_slot(self, slot: Any, raw: Any) -> None:
        self.ir.do(f"store {slot[1]} {raw}, ptr {slot[0]}")

    def loop(self, lo: IntLike, hi: IntLike, step: IntLike = 1) -> Iterator[Int]:
        """The condition stands behind the body, and once before it: a jump an iteration."""
        lo, hi, step = (self.integer(x).raw for x in (lo, hi, step))
        body, done = self.ir.blocks("loop", "loop.done")
        before = self.ir.block
        self.ir.branch(self.ir.binary("icmp slt", "i64", lo, hi), body, done)
        self.ir.begin(body)
        index = self.ir.value("")  # known when the body is written
        phi = len(self.ir.lines) - 1
        yield Int(self, index)
        following = self.ir.binary("add", "i64", index, step)
        self.ir.lines[phi] += f"phi i64 [ {lo}, %{before} ], [ {following}, %{self.ir.block} ]"
        self.ir.branch(self.ir.binary("icmp slt", "i64", following, hi), body, done)
        self.ir.begin(done)

    def when(self, condition: Bool) -> Iterator[None]:
        body, done = self.ir.blocks("when", "when.done")
        self.ir.branch(condition.raw, body, done)
        self.ir.begin(body)
        yield
        self.ir.do(f"br label %{done}")
        self.ir.begin(done)

    def repeat(self, condition: Callable[[], Bool]) -> Iterator[None]:
        body, done = self.ir.blocks("repeat", "repeat.done")
        self.ir.branch(condition().raw, body, done)
        self.ir.begin(body)
        yield
        self.ir.branch(condition().raw, body, done)
        self.ir.begin(done)

    # ---- help for the table below
    def guard(self, p: Ptr, size: Any) -> Any:
        """The raw pointer, after a check that [p, p + size) lies in its extent where checks are asked for.

        An access of no bytes is none. A failed check leaves the kernel at once; its result is the address, 1 for null.
        """
        if self.checked:
            ir = self.ir
            address = ir.cast("ptrtoint", p.raw, "ptr", "i64")
            below = ir.binary("icmp slt", "i64", address, p.lo)
            above = ir.binary("icmp sgt", "i64", ir.binary("add", "i64", address, size), p.hi)
            outside, some = ir.binary("or", "i1", below, above), ir.binary("icmp sgt", "i64", size, 0)
            fault, fine = ir.blocks("fault", "fine")
            ir.branch(ir.binary("and", "i1", outside, some), fault, fine)
            ir.begin(fault)
            ir.do(f"ret i64 {ir.select(ir.binary('icmp eq', 'i64', address, 0), 'i64', 1, address)}")
            ir.begin(fine)
        return p.raw

    def guard_elements(self, p: Ptr, elements: int) -> Any:
        return self.guard(p, elements * p.element.size)

    def load_raw(self, p: Ptr, elements: int) -> str:
        """That many elements as they lie in memory; a scalar where it is one."""
        element = _ELEMENT[p.element.name]
        type_ = element if elements == 1 else f"<{elements} x {element}>"
        return self.ir.value(f"load {type_}, ptr {self.guard_elements(p, elements)}, align {p.element.align}")

    def store_raw(self, p: Ptr, type_: str, x: Any, elements: int) -> None:
        self.ir.do(f"store {type_} {x}, ptr {self.guard_elements(p, elements)}, align {p.element.align}")


def _max(b: LlvmBuilder, x: Any, y: Any) -> Any:
    return b.ir.select(b.ir.binary("fcmp ogt", VF, x, y), VF, x, y)


def _avx512(b: LlvmBuilder, name: str, *operands: tuple[str, Any]) -> Any:
    last = (VF, "zeroinitializer"), (f"i{LANES}", _EVERY_LANE), ("i32", _MODE_AS_IT_IS)
    return b.ir.call(f"llvm.x86.avx512.mask.{name}.ps.512", VF, *operands, *last)


def _rounded(b: LlvmBuilder, x: Any) -> Any:
    return b.ir.binary("fadd", VF, x, b.constant("v", _ROUND))


def _fraction(b: LlvmBuilder, x: Any) -> Any:
    if b.avx512:
        return _avx512(b, "reduce", (VF, x), ("i32", _TIES_TO_EVEN))
    return b.ir.binary("fsub", VF, x, b.ir.binary("fsub", VF, _rounded(b, x), b.constant("v", _ROUND)))


def _ldexp(b: LlvmBuilder, x: Any, y: Any) -> Any:
    if b.avx512:
        return _avx512(b, "scalef", (VF, x), (VF, b.ir.binary("fsub", VF, y, _fraction(b, y))))
    bits = b.ir.cast("bitcast", _rounded(b, y), VF, VN)
    biased = b.ir.binary("add", VN, bits, b.constant("n", _EXPONENT_BIAS))
    power = b.ir.binary("shl", VN, biased, b.constant("n", _EXPONENT_BITS))
    return b.ir.binary("fmul", VF, x, b.ir.cast("bitcast", power, VN, VF))


def _between(b: LlvmBuilder, lo: Any, hi: Any) -> Any:
    # one unsigned compare: x - lo < hi - lo; clipped first, so that 32 bits hold what counts
    lo = b.ir.minmax("smax", lo, 0)
    hi = b.ir.minmax("smax", b.ir.minmax("smin", hi, LANES), lo)
    start = b.ir.all_lanes("i32", b.ir.cast("trunc", lo, "i64", "i32"))
    count = b.ir.all_lanes("i32", b.ir.cast("trunc", b.ir.binary("sub", "i64", hi, lo), "i64", "i32"))
    return b.ir.binary("icmp ult", VN, b.ir.binary("sub", VN, _IOTA, start), count)


def _from_memory(b: LlvmBuilder, x: Any, element: Element) -> Any:
    """16 elements as they lie in memory, as float32: exact."""
    if element.name == "f16":
        return b.ir.cast("fpext", b.ir.cast("bitcast", x, _VI16, _VF16), _VF16, VF)
    if element.name == "bf16":
        bits = b.ir.binary("shl", VN, b.ir.cast("zext", x, _VI16, VN), b.constant("n", _BF16_SHIFT))
        return b.ir.cast("bitcast", bits, VN, VF)
    return x


def _to_memory(b: LlvmBuilder, x: Any, element: Element) -> tuple[str, Any]:
    """16 float32 as they will lie in memory: rounded to nearest, ties to even; with their type."""
    if element.name == "f16":
        return _VI16, b.ir.cast("bitcast", b.ir.cast("fptrunc", x, VF, _VF16), _VF16, _VI16)
    if element.name == "bf16":
        bits, shift = b.ir.cast("bitcast", x, VF, VN), b.constant("n", _BF16_SHIFT)
        odd = b.ir.binary("and", VN, b.ir.binary("lshr", VN, bits, shift), b.constant("n", 1))
        raised = b.ir.binary("add", VN, b.ir.binary("add", VN, bits, b.constant("n", _BF16_HALF)), odd)
        rounded = b.ir.binary("lshr", VN, raised, shift)
        number = b.ir.binary("fcmp oeq", VF, x, x)
        return _VI16, b.ir.cast("trunc", b.ir.select(number, VN, rounded, b.constant("n", _BF16_NAN)), VN, _VI16)
    return VF, x


def _load_halves(b: LlvmBuilder, p: Ptr, q: Ptr) -> Any:
    half = f"<{LANES // 2} x {_ELEMENT[p.element.name]}>"
    first, second = (b.load_raw(x, LANES // 2) for x in (p, q))
    return _from_memory(b, b.ir.value(f"shufflevector {half} {first}, {half} {second}, {VN} {_IOTA}"), p.element)


def _load_int(b: LlvmBuilder, p: Ptr) -> Any:
    x = b.load_raw(p, 1)
    if p.element is I64:
        return x
    return b.ir.cast("zext" if p.element is U8 else "sext", x, _ELEMENT[p.element.name], "i64")


def _store_int(b: LlvmBuilder, p: Ptr, x: Any) -> None:
    type_ = _ELEMENT[p.element.name]
    b.store_raw(p, type_, x if p.element is I64 else b.ir.cast("trunc", x, "i64", type_), 1)


def _masked_load(b: LlvmBuilder, p: Ptr, lo: Any, hi: Any) -> Any:
    """Lanes [lo, hi) as they lie in memory, zeros in the rest."""
    if b.checked:
        first = b.ir.minmax("smin", b.ir.minmax("smax", lo, 0), LANES)
        count = b.ir.binary("sub", "i64", b.ir.minmax("smin", hi, LANES), first)
        start = Ptr(p.b, b.advance(p.raw, first, p.element), p.lo, p.hi, p.element)
        b.guard(start, b.ir.binary("mul", "i64", count, p.element.size))
    name, type_ = f"llvm.masked.load.{_MASKED[p.element.name]}", vector(_ELEMENT[p.element.name])
    lanes, zeros = (VM, _between(b, lo, hi)), (type_, "zeroinitializer")
    return b.ir.call(name, type_, ("ptr", p.raw), ("i32", p.element.align), lanes, zeros)


def _load_lanes(b: LlvmBuilder, p: Ptr, lo: Any, hi: Any) -> Any:
    return _from_memory(b, _masked_load(b, p, lo, hi), p.element)


def _gather(b: LlvmBuilder, p: Ptr, index: Any) -> Any:
    """Lane by lane: a gather is no faster than the loads that it is made of."""
    result, type_ = "poison", _ELEMENT[p.element.name]
    for lane in range(LANES):
        count = b.ir.cast("sext", b.ir.value(f"extractelement {VN} {index}, i32 {lane}"), "i32", "i64")
        x = b.load_raw(Ptr(p.b, b.advance(p.raw, count, p.element), p.lo, p.hi, p.element), 1)
        result = b.ir.value(f"insertelement {vector(type_)} {result}, {type_} {x}, i32 {lane}")
    return result


def _divide(b: LlvmBuilder, operation: str, x: Any, y: Any) -> Any:
    """Division by 0, and of the least integer by -1, is undefined in LLVM: by 1 instead, and then 0 or the same."""
    zero, one = b.constant("n", 0), b.constant("n", 1)
    nothing = b.ir.binary("icmp eq", VN, y, zero)
    least, minus_one = b.constant("n", -(1 << 31)), b.constant("n", -1)
    beyond = b.ir.binary("and", VM, b.ir.binary("icmp eq", VN, x, least), b.ir.binary("icmp eq", VN, y, minus_one))
    unsafe = b.ir.binary("or", VM, nothing, beyond)
    return b.ir.select(nothing, VN, zero, b.ir.binary(operation, VN, x, b.ir.select(unsafe, VN, one, y)))


def _store_part(b: LlvmBuilder, p: Ptr, x: Any, count: Any) -> None:
    mask, raw = _between(b, 0, count), p.raw
    if b.checked:
        inside = b.ir.minmax("smax", b.ir.minmax("smin", count, LANES), 0)
        b.guard(p, b.ir.binary("mul", "i64", inside, p.element.size))
    name, stored = f"llvm.masked.store.{_MASKED[p.element.name]}", _to_memory(b, x, p.element)
    b.ir.call(name, "void", stored, ("ptr", raw), ("i32", p.element.align), (VM, mask))


def _store_lane(b: LlvmBuilder, p: Ptr, x: Any, lane: int) -> None:
    type_, x = _to_memory(b, x, p.element)
    b.store_raw(p, _ELEMENT[p.element.name], b.ir.value(f"extractelement {type_} {x}, i32 {lane}"), 1)


def _prefetch(b: LlvmBuilder, p: Ptr, locality: int) -> None:
    read, data = 0, 1
    b.ir.call("llvm.prefetch.p0", "void", ("ptr", p.raw), ("i32", read), ("i32", locality), ("i32", data))


def _any_or_all(comparison: str, bits: int) -> Callable[[LlvmBuilder, Any], Any]:
    return lambda b, m: b.ir.binary(f"icmp {comparison}", f"i{LANES}", b.ir.cast("bitcast", m, VM, f"i{LANES}"), bits)


def _binary(operation: str, type_: str) -> Callable[[LlvmBuilder, Any, Any], Any]:
    return lambda b, x, y: b.ir.binary(operation, type_, x, y)


_LOWERING: dict[str, Callable[..., Any]] = {
    **{"i" + name: _binary(name, "i64") for name in ("add", "sub", "mul")},
    "idiv": _binary("udiv", "i64"),
    "irem": _binary("urem", "i64"),
    "imin": lambda b, x, y: b.ir.minmax("smin", x, y),
    "imax": lambda b, x, y: b.ir.minmax("smax", x, y),
    "ilt": _binary("icmp slt", "i64"),
    "ile": _binary("icmp sle", "i64"),
    "ieq": _binary("icmp eq", "i64"),
    "both": _binary("and", "i1"),
    "either": _binary("or", "i1"),
    "negate": lambda b, x: b.ir.binary("xor", "i1", x, "true"),
    "choose": lambda b, c, x, y: b.ir.select(c, "i64", x, y),
    **{name: _binary("f" + name, VF) for name in ("add", "sub", "mul", "div")},
    "fma": lambda b, x, y, z: b.ir.call("llvm.fma.v16f32", VF, (VF, x), (VF, y), (VF, z)),
    "max": _max,
    "fraction": _fraction,
    "ldexp": _ldexp,
    "lt": _binary("fcmp olt", VF),
    "le": _binary("fcmp ole", VF),
    "eq": _binary("fcmp oeq", VF),
    "where": lambda b, m, x, y: b.ir.select(m, VF, x, y),
    "shuffle": lambda b, x, y, lanes: b.ir.value(f"shufflevector {VF} {x}, {VF} {y}, {VN} {_lanes(lanes)}"),
    "bits": lambda b, x: b.ir.cast("bitcast", x, VF, VN),
    "floats": lambda b, x: b.ir.cast("bitcast", x, VN, VF),
    "to_float": lambda b, x: b.ir.cast("sitofp", x, VN, VF),
    **{"n" + name: _binary(name, VN) for name in ("add", "sub", "and", "mul")},
    "shl": lambda b, x, count: b.ir.binary("shl", VN, x, b.constant("n", count)),
    "shr": lambda b, x, count: b.ir.binary("lshr", VN, x, b.constant("n", count)),
    "splat": lambda b, x: b.ir.all_lanes("i32", b.ir.cast("trunc", x, "i64", "i32")),
    "iota": lambda b: _IOTA,
    "ndiv": lambda b, x, y: _divide(b, "sdiv", x, y),
    "nrem": lambda b, x, y: _divide(b, "srem", x, y),
    "nlt": _binary("icmp slt", VN),
    "neq": _binary("icmp eq", VN),
    "nwhere": lambda b, m, x, y: b.ir.select(m, VN, x, y),
    "between": _between,
    "mand": _binary("and", VM),
    "mor": _binary("or", VM),
    "mnot": lambda b, m: b.ir.binary("xor", VM, m, "splat (i1 true)"),
    "any": _any_or_all("ne", 0),
    "all": _any_or_all("eq", -1),
    "load": lambda b, p: _from_memory(b, b.load_raw(p, LANES), p.element),
    "load_halves": _load_halves,
    "load_part": lambda b, p, count: _load_lanes(b, p, 0, count),
    "broadcast": lambda b, p: _from_memory(b, b.ir.all_lanes(_ELEMENT[p.element.name], b.load_raw(p, 1)), p.element),
    "load_int": _load_int,
    "load_ints": lambda b, p: b.load_raw(p.of(I32), LANES),
    "load_lanes": _load_lanes,
    "load_mask_lanes": lambda b, p, lo, hi: b.ir.binary("icmp ne", _VI8, _masked_load(b, p, lo, hi), "zeroinitializer"),
    "gather": _gather,
    "gather_ints": _gather,
    "prefetch": _prefetch,
    "store": lambda b, p, x: b.store_raw(p, *_to_memory(b, x, p.element), LANES),
    "store_part": _store_part,
    "store_lane": _store_lane,
    "store_int": _store_int,
    "fetch_add": lambda b, p, x: b.ir.value(f"atomicrmw add ptr {b.guard_elements(p, 1)}, i64 {x} monotonic"),
    "load_acquire": lambda b, p: b.ir.value(f"load atomic i64, ptr {b.guard_elements(p, 1)} acquire, align {I64.size}"),
    "store_release": lambda b, p, x: b.ir.do(
        f"store atomic i64 {x}, ptr {b.guard_elements(p, 1)} release, align {I64.size}"
    ),
    "pause": lambda b: b.ir.call(YIELD, "void"),
}
assert _LOWERING.keys() == WORDS.keys()


def llvm_ir(kernel: Kernel, target: Target, checked: bool = False) -> str:
    """The kernel as LLVM IR text: `i64 name(i64 table, i64 worker)`, 0 or the address of a failed check."""
    b = LlvmBuilder(checked, target)
    kernel.body(b, Int(b, "%table"), Int(b, "%worker"))
    b.ir.do("ret i64 0")
    return in_default_float_environment(kernel.name, b.ir, target)
