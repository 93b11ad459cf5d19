"""Words to LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.ir as ir

from tilewise.simd.builder import I64, LANES, WORDS, Bool, Builder, Element, Int, IntLike, Kernel, Ptr, Value
from tilewise.simd.environment import call_in_default_float_environment, with_vector_width
from tilewise.simd.target import Target

_I1, _I16, _I32, _I64, _F = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_PTR = ir.PointerType()
_BITS = ir.IntType(LANES)  # a mask, a bit a lane
_VM, _VN, _VF = (ir.VectorType(element, LANES) for element in (_I1, _I32, _F))
_VI16, _VF16 = (ir.VectorType(element, LANES) for element in (_I16, ir.HalfType()))
# how an element lies in memory: half types as bits, which every target can load and mask
_I8 = ir.IntType(8)
_ELEMENT = {"f32": _F, "f16": _I16, "bf16": _I16, "i64": _I64, "i32": _I32, "u8": _I8}
_VECTOR = {name: ir.VectorType(element, LANES) for name, element in _ELEMENT.items()}
_MASKED = {"f32": "v16f32.p0", "f16": "v16i16.p0", "bf16": "v16i16.p0", "u8": "v16i8.p0"}
_BF16_SHIFT, _BF16_HALF, _BF16_NAN = 16, 0x7FFF, 0x7FC0  # bits below; half a last place, less one; a NaN
_IOTA = ir.Constant(_VN, list(range(LANES)))
YIELD = "tilewise_yield"  # the function behind `pause`, which whoever loads a kernel provides


class LlvmBuilder(Builder):
    """Emits the body of one kernel into an LLVM function."""

    def __init__(self, function: ir.Function, checked: bool) -> None:
        self.function = function
        self.module = function.module
        self.checked = checked
        self._slots = ir.IRBuilder(function.append_basic_block("slots"))  # the allocas of all Vars
        self.ir = ir.IRBuilder(function.append_basic_block("body"))
        self._first = self.ir.block
        self._constants: dict[tuple[str, str], Any] = {}

    def finish(self) -> None:
        self.ir.ret(ir.Constant(_I64, 0))
        self._slots.branch(self._first)

    # ---- what Builder asks for
    def word(self, word: str, *operands: Any, **static: Any) -> Any:
        return _LOWERING[word](self, *operands, **static)

    def constant(self, kind: str, x: float) -> Any:
        key = (kind, repr(x))
        if key not in self._constants:
            scalar = {"i": _I64, "n": _I32, "v": _F}[kind]
            value = int(x) if kind in "in" else float(x)
            vector = ir.VectorType(scalar, LANES)
            self._constants[key] = ir.Constant(scalar, value) if kind == "i" else ir.Constant(vector, [value] * LANES)
        return self._constants[key]

    def advance(self, pointer: Any, count: Any, element: Element) -> Any:
        return self.ir.gep(pointer, [count], source_etype=_ELEMENT[element.name])

    def address_to_pointer(self, address: Any) -> Any:
        return self.ir.inttoptr(address, _PTR)

    def new_slot(self, initial: Value) -> Any:
        slot = self._slots.alloca(initial.raw.type)
        self.ir.store(initial.raw, slot)
        return slot, initial.raw.type

    def read_slot(self, slot: Any) -> Any:
        return self.ir.load(slot[0], typ=slot[1])

    def write_slot(self, slot: Any, raw: Any) -> None:
        self.ir.store(raw, slot[0])

    def loop(self, lo: IntLike, hi: IntLike, step: IntLike = 1) -> Iterator[Int]:
        lo, hi, step = self.integer(lo), self.integer(hi), self.integer(step)
        head, body, done = (self.function.append_basic_block(name) for name in ("loop", "loop.body", "loop.done"))
        before = self.ir.block
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index = self.ir.phi(_I64)
        index.add_incoming(lo.raw, before)
        self.ir.cbranch(self.ir.icmp_signed("<", index, hi.raw), body, done)
        self.ir.position_at_end(body)
        yield Int(self, index)
        index.add_incoming(self.ir.add(index, step.raw), self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(done)

    def when(self, condition: Bool) -> Iterator[None]:
        body, done = (self.function.append_basic_block(name) for name in ("when", "when.done"))
        self.ir.cbranch(condition.raw, body, done)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(done)
        self.ir.position_at_end(done)

    def repeat(self, condition: Callable[[], Bool]) -> Iterator[None]:
        head, body, done = (self.function.append_basic_block(name) for name in ("repeat", "repeat.body", "repeat.done"))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        self.ir.cbranch(condition().raw, body, done)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(head)
        self.ir.position_at_end(done)

    # ---- help for the table below
    def intrinsic(self, name: str, result: Any, *operands: Any) -> Any:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [x.type for x in operands]), name)
        return self.ir.call(function, operands)

    def all_lanes(self, scalar: Any) -> Any:
        vector = ir.VectorType(scalar.type, LANES)
        first = self.ir.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.ir.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_VN, [0] * LANES))

    def lanes_below(self, count: Any) -> Any:
        return _between(self, ir.Constant(_I64, 0), count)

    def guard(self, p: Ptr, size: Any) -> Any:
        """The raw pointer, after a check that [p, p + size) lies in its extent where checks are asked for.

        An access of no bytes is none. A failed check leaves the kernel at once; its result is the address, 1 for null.
        """
        if self.checked:
            b, zero = self.ir, ir.Constant(_I64, 0)
            address = b.ptrtoint(p.raw, _I64)
            outside = b.or_(b.icmp_signed("<", address, p.lo), b.icmp_signed(">", b.add(address, size), p.hi))
            fault, fine = (self.function.append_basic_block(name) for name in ("fault", "fine"))
            b.cbranch(b.and_(outside, b.icmp_signed(">", size, zero)), fault, fine)
            b.position_at_end(fault)
            b.ret(b.select(b.icmp_signed("==", address, zero), ir.Constant(_I64, 1), address))
            b.position_at_end(fine)
        return p.raw

    def guard_part(self, p: Ptr, count: Any) -> Any:
        clipped = _minmax(self, "smax", _minmax(self, "smin", count, ir.Constant(_I64, LANES)), ir.Constant(_I64, 0))
        return self.guard(p, self.ir.mul(clipped, ir.Constant(_I64, p.element.size)))

    def guard_elements(self, p: Ptr, elements: int) -> Any:
        return self.guard(p, ir.Constant(_I64, elements * p.element.size))


def _minmax(b: LlvmBuilder, name: str, x: Any, y: Any) -> Any:
    return b.intrinsic(f"llvm.{name}.i64", _I64, x, y)


def _max(b: LlvmBuilder, x: Any, y: Any) -> Any:
    return b.ir.select(b.ir.fcmp_ordered(">", x, y), x, y)


def _between(b: LlvmBuilder, lo: Any, hi: Any) -> Any:
    # one unsigned compare: x - lo < hi - lo; clipped first, so that 32 bits hold what counts
    zero, end = ir.Constant(_I64, 0), ir.Constant(_I64, LANES)
    lo = _minmax(b, "smax", lo, zero)
    hi = _minmax(b, "smax", _minmax(b, "smin", hi, end), lo)
    start = b.all_lanes(b.ir.trunc(lo, _I32))
    count = b.all_lanes(b.ir.trunc(b.ir.sub(hi, lo), _I32))
    return b.ir.icmp_unsigned("<", b.ir.sub(_IOTA, start), count)


def _from_memory(b: LlvmBuilder, x: Any, element: Element) -> Any:
    """16 elements as they lie in memory, as float32: exact."""
    if element.name == "f16":
        return b.ir.fpext(b.ir.bitcast(x, _VF16), _VF)
    if element.name == "bf16":
        return b.ir.bitcast(b.ir.shl(b.ir.zext(x, _VN), b.constant("n", _BF16_SHIFT)), _VF)
    return x


def _to_memory(b: LlvmBuilder, x: Any, element: Element) -> Any:
    """16 float32 as they will lie in memory: rounded to nearest, ties to even."""
    if element.name == "f16":
        return b.ir.bitcast(b.ir.fptrunc(x, _VF16), _VI16)
    if element.name == "bf16":
        bits, shift = b.ir.bitcast(x, _VN), b.constant("n", _BF16_SHIFT)
        odd = b.ir.and_(b.ir.lshr(bits, shift), b.constant("n", 1))
        rounded = b.ir.lshr(b.ir.add(b.ir.add(bits, b.constant("n", _BF16_HALF)), odd), shift)
        number = b.ir.fcmp_ordered("==", x, x)
        return b.ir.trunc(b.ir.select(number, rounded, b.constant("n", _BF16_NAN)), _VI16)
    return x


def _load(b: LlvmBuilder, p: Ptr) -> Any:
    raw = b.guard_elements(p, LANES)
    return _from_memory(b, b.ir.load(raw, typ=_VECTOR[p.element.name], align=p.element.align), p.element)


def _load_halves(b: LlvmBuilder, p: Ptr, q: Ptr) -> Any:
    half = ir.VectorType(_ELEMENT[p.element.name], LANES // 2)
    first, second = (b.ir.load(b.guard_elements(x, LANES // 2), typ=half, align=x.element.align) for x in (p, q))
    return _from_memory(b, b.ir.shuffle_vector(first, second, _IOTA), p.element)


def _broadcast(b: LlvmBuilder, p: Ptr) -> Any:
    scalar = b.ir.load(b.guard_elements(p, 1), typ=_ELEMENT[p.element.name], align=p.element.align)
    return _from_memory(b, b.all_lanes(scalar), p.element)


def _load_part(b: LlvmBuilder, p: Ptr, count: Any) -> Any:
    return _from_memory(b, _masked_load(b, p, ir.Constant(_I64, 0), count), p.element)


def _load_int(b: LlvmBuilder, p: Ptr) -> Any:
    x = b.ir.load(b.guard_elements(p, 1), typ=_ELEMENT[p.element.name], align=p.element.align)
    if p.element.name == "u8":
        return b.ir.zext(x, _I64)
    return x if p.element.name == "i64" else b.ir.sext(x, _I64)


def _store_int(b: LlvmBuilder, p: Ptr, x: Any) -> None:
    if p.element.name != "i64":
        x = b.ir.trunc(x, _ELEMENT[p.element.name])
    b.ir.store(x, b.guard_elements(p, 1), align=p.element.align)


def _masked_load(b: LlvmBuilder, p: Ptr, lo: Any, hi: Any) -> Any:
    """Lanes [lo, hi) as they lie in memory, zeros in the rest."""
    vector, size = _VECTOR[p.element.name], ir.Constant(_I64, p.element.size)
    if b.checked:
        zero, end = ir.Constant(_I64, 0), ir.Constant(_I64, LANES)
        first = _minmax(b, "smin", _minmax(b, "smax", lo, zero), end)
        count = b.ir.sub(_minmax(b, "smin", hi, end), first)
        start = Ptr(p.b, b.advance(p.raw, first, p.element), p.lo, p.hi, p.element)
        b.guard(start, b.ir.mul(count, size))
    zeros, align = ir.Constant(vector, [0] * LANES), ir.Constant(_I32, p.element.align)
    name = f"llvm.masked.load.{_MASKED[p.element.name]}"
    return b.intrinsic(name, vector, p.raw, align, _between(b, lo, hi), zeros)


def _load_mask_lanes(b: LlvmBuilder, p: Ptr, lo: Any, hi: Any) -> Any:
    return b.ir.icmp_unsigned("!=", _masked_load(b, p, lo, hi), ir.Constant(_VECTOR["u8"], [0] * LANES))


def _gather(b: LlvmBuilder, p: Ptr, index: Any) -> Any:
    """Lane by lane: a gather is no faster than the loads that it is made of."""
    result = ir.Constant(_VECTOR[p.element.name], ir.Undefined)
    for lane in range(LANES):
        at = ir.Constant(_I32, lane)
        count = b.ir.sext(b.ir.extract_element(index, at), _I64)
        one = Ptr(p.b, b.advance(p.raw, count, p.element), p.lo, p.hi, p.element)
        x = b.ir.load(b.guard_elements(one, 1), typ=_ELEMENT[p.element.name], align=p.element.align)
        result = b.ir.insert_element(result, x, at)
    return result


def _divide(b: LlvmBuilder, x: Any, y: Any, remainder: bool) -> Any:
    """Division by 0, and of the least integer by -1, is undefined in LLVM: by 1 instead, and then 0 or the same."""
    zero, one = b.constant("n", 0), b.constant("n", 1)
    nothing = b.ir.icmp_signed("==", y, zero)
    least = b.ir.and_(
        b.ir.icmp_signed("==", x, b.constant("n", -(1 << 31))), b.ir.icmp_signed("==", y, b.constant("n", -1))
    )
    safe = b.ir.select(b.ir.or_(nothing, least), one, y)
    return b.ir.select(nothing, zero, b.ir.srem(x, safe) if remainder else b.ir.sdiv(x, safe))


def _store(b: LlvmBuilder, p: Ptr, x: Any) -> None:
    b.ir.store(_to_memory(b, x, p.element), b.guard_elements(p, LANES), align=p.element.align)


def _store_part(b: LlvmBuilder, p: Ptr, x: Any, count: Any) -> None:
    mask, raw, align = b.lanes_below(count), b.guard_part(p, count), ir.Constant(_I32, p.element.align)
    x = _to_memory(b, x, p.element)
    b.intrinsic(f"llvm.masked.store.{_MASKED[p.element.name]}", ir.VoidType(), x, raw, align, mask)


def _store_lane(b: LlvmBuilder, p: Ptr, x: Any, lane: int) -> None:
    scalar = b.ir.extract_element(_to_memory(b, x, p.element), ir.Constant(_I32, lane))
    b.ir.store(scalar, b.guard_elements(p, 1), align=p.element.align)


def _prefetch(b: LlvmBuilder, p: Ptr, locality: int) -> None:
    read, data = ir.Constant(_I32, 0), ir.Constant(_I32, 1)
    b.intrinsic("llvm.prefetch.p0", ir.VoidType(), p.raw, read, ir.Constant(_I32, locality), data)


def _pause(b: LlvmBuilder) -> None:
    b.intrinsic(YIELD, ir.VoidType())


def _fetch_add(b: LlvmBuilder, p: Ptr, x: Any) -> Any:
    return b.ir.atomic_rmw("add", b.guard_elements(p, 1), x, "monotonic")


_LOWERING: dict[str, Callable[..., Any]] = {
    "iadd": lambda b, x, y: b.ir.add(x, y),
    "isub": lambda b, x, y: b.ir.sub(x, y),
    "imul": lambda b, x, y: b.ir.mul(x, y),
    "idiv": lambda b, x, y: b.ir.udiv(x, y),
    "irem": lambda b, x, y: b.ir.urem(x, y),
    "imin": lambda b, x, y: _minmax(b, "smin", x, y),
    "imax": lambda b, x, y: _minmax(b, "smax", x, y),
    "ilt": lambda b, x, y: b.ir.icmp_signed("<", x, y),
    "ile": lambda b, x, y: b.ir.icmp_signed("<=", x, y),
    "ieq": lambda b, x, y: b.ir.icmp_signed("==", x, y),
    "both": lambda b, x, y: b.ir.and_(x, y),
    "either": lambda b, x, y: b.ir.or_(x, y),
    "negate": lambda b, x: b.ir.not_(x),
    "choose": lambda b, c, x, y: b.ir.select(c, x, y),
    "add": lambda b, x, y: b.ir.fadd(x, y),
    "sub": lambda b, x, y: b.ir.fsub(x, y),
    "mul": lambda b, x, y: b.ir.fmul(x, y),
    "div": lambda b, x, y: b.ir.fdiv(x, y),
    "fma": lambda b, x, y, z: b.intrinsic("llvm.fma.v16f32", _VF, x, y, z),
    "max": _max,
    "lt": lambda b, x, y: b.ir.fcmp_ordered("<", x, y),
    "le": lambda b, x, y: b.ir.fcmp_ordered("<=", x, y),
    "eq": lambda b, x, y: b.ir.fcmp_ordered("==", x, y),
    "where": lambda b, m, x, y: b.ir.select(m, x, y),
    "shuffle": lambda b, x, y, lanes: b.ir.shuffle_vector(x, y, ir.Constant(_VN, list(lanes))),
    "bits": lambda b, x: b.ir.bitcast(x, _VN),
    "floats": lambda b, x: b.ir.bitcast(x, _VF),
    "to_float": lambda b, x: b.ir.sitofp(x, _VF),
    "nadd": lambda b, x, y: b.ir.add(x, y),
    "nsub": lambda b, x, y: b.ir.sub(x, y),
    "nand": lambda b, x, y: b.ir.and_(x, y),
    "shl": lambda b, x, count: b.ir.shl(x, b.constant("n", count)),
    "shr": lambda b, x, count: b.ir.lshr(x, b.constant("n", count)),
    "splat": lambda b, x: b.all_lanes(b.ir.trunc(x, _I32)),
    "iota": lambda b: _IOTA,
    "nmul": lambda b, x, y: b.ir.mul(x, y),
    "ndiv": lambda b, x, y: _divide(b, x, y, remainder=False),
    "nrem": lambda b, x, y: _divide(b, x, y, remainder=True),
    "nlt": lambda b, x, y: b.ir.icmp_signed("<", x, y),
    "neq": lambda b, x, y: b.ir.icmp_signed("==", x, y),
    "nwhere": lambda b, m, x, y: b.ir.select(m, x, y),
    "between": _between,
    "mand": lambda b, x, y: b.ir.and_(x, y),
    "mor": lambda b, x, y: b.ir.or_(x, y),
    "mnot": lambda b, m: b.ir.not_(m),
    "any": lambda b, m: b.ir.icmp_signed("!=", b.ir.bitcast(m, _BITS), ir.Constant(_BITS, 0)),
    "all": lambda b, m: b.ir.icmp_signed("==", b.ir.bitcast(m, _BITS), ir.Constant(_BITS, -1)),
    "load": _load,
    "load_halves": _load_halves,
    "load_part": _load_part,
    "broadcast": _broadcast,
    "load_int": _load_int,
    "load_ints": lambda b, p: b.ir.load(b.guard_elements(p, LANES), typ=_VN, align=p.element.align),
    "load_lanes": lambda b, p, lo, hi: _from_memory(b, _masked_load(b, p, lo, hi), p.element),
    "load_mask_lanes": _load_mask_lanes,
    "gather": _gather,
    "gather_ints": _gather,
    "prefetch": _prefetch,
    "store": _store,
    "store_part": _store_part,
    "store_lane": _store_lane,
    "store_int": _store_int,
    "fetch_add": _fetch_add,
    "load_acquire": lambda b, p: b.ir.load_atomic(b.guard_elements(p, 1), "acquire", I64.size, typ=_I64),
    # llvmlite's atomic store knows no opaque pointers: an exchange whose result is dropped
    "store_release": lambda b, p, x: b.ir.atomic_rmw("xchg", b.guard_elements(p, 1), x, "release"),
    "pause": _pause,
}
assert _LOWERING.keys() == WORDS.keys()


def llvm_ir(kernel: Kernel, target: Target, checked: bool = False) -> str:
    """The kernel as LLVM IR text: `i64 name(i64 table, i64 worker)`, 0 or the address of a failed check."""
    module = ir.Module(kernel.name)
    module.triple = target.triple
    body = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), kernel.name + ".body")
    body.linkage = "internal"
    body.attributes.add("noinline")
    b = LlvmBuilder(body, checked)
    kernel.body(b, Int(b, body.args[0]), Int(b, body.args[1]))
    b.finish()
    call_in_default_float_environment(module, kernel.name, body, target.architecture)
    return with_vector_width(module, target)
