"""Words to LLVM IR. The only file that imports llvmlite.ir."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.ir as ir

from tilewise.simd.builder import I64, LANES, WORDS, Bool, Builder, Element, Int, IntLike, Kernel, Ptr, Value
from tilewise.simd.target import Target

_I1, _I32, _I64, _F = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_PTR = ir.PointerType()
_BITS = ir.IntType(LANES)  # a mask, a bit a lane
_VM, _VN, _VF = (ir.VectorType(element, LANES) for element in (_I1, _I32, _F))
_ELEMENT = {"f32": _F, "i64": _I64}
_IOTA = ir.Constant(_VN, list(range(LANES)))
YIELD = "tilewise_yield"  # the function behind `pause`, which whoever loads a kernel provides
_DEFAULT_MXCSR = 0x1F80  # round to nearest, all exceptions masked, no flush-to-zero, no denormals-are-zero
_DEFAULT_FPCR = 0  # the same on aarch64


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

    def splat(self, scalar: Any) -> Any:
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
    start = b.splat(b.ir.trunc(lo, _I32))
    count = b.splat(b.ir.trunc(b.ir.sub(hi, lo), _I32))
    return b.ir.icmp_unsigned("<", b.ir.sub(_IOTA, start), count)


def _load(b: LlvmBuilder, p: Ptr) -> Any:
    return b.ir.load(b.guard_elements(p, LANES), typ=_VF, align=p.element.size)


def _load_part(b: LlvmBuilder, p: Ptr, count: Any) -> Any:
    mask, zeros = b.lanes_below(count), b.constant("v", 0.0)
    raw = b.guard_part(p, count)
    return b.intrinsic("llvm.masked.load.v16f32.p0", _VF, raw, ir.Constant(_I32, p.element.size), mask, zeros)


def _store_part(b: LlvmBuilder, p: Ptr, x: Any, count: Any) -> None:
    mask, raw = b.lanes_below(count), b.guard_part(p, count)
    b.intrinsic("llvm.masked.store.v16f32.p0", ir.VoidType(), x, raw, ir.Constant(_I32, p.element.size), mask)


def _store_lane(b: LlvmBuilder, p: Ptr, x: Any, lane: int) -> None:
    b.ir.store(b.ir.extract_element(x, ir.Constant(_I32, lane)), b.guard_elements(p, 1), align=p.element.size)


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
    "between": _between,
    "mand": lambda b, x, y: b.ir.and_(x, y),
    "mor": lambda b, x, y: b.ir.or_(x, y),
    "any": lambda b, m: b.ir.icmp_signed("!=", b.ir.bitcast(m, _BITS), ir.Constant(_BITS, 0)),
    "all": lambda b, m: b.ir.icmp_signed("==", b.ir.bitcast(m, _BITS), ir.Constant(_BITS, -1)),
    "load": _load,
    "load_part": _load_part,
    "broadcast": lambda b, p: b.splat(b.ir.load(b.guard_elements(p, 1), typ=_F, align=p.element.size)),
    "load_int": lambda b, p: b.ir.load(b.guard_elements(p, 1), typ=_I64, align=p.element.size),
    "prefetch": _prefetch,
    "store": lambda b, p, x: b.ir.store(x, b.guard_elements(p, LANES), align=p.element.size),
    "store_part": _store_part,
    "store_lane": _store_lane,
    "store_int": lambda b, p, x: b.ir.store(x, b.guard_elements(p, 1), align=p.element.size),
    "fetch_add": _fetch_add,
    "load_acquire": lambda b, p: b.ir.load_atomic(b.guard_elements(p, 1), "acquire", I64.size, typ=_I64),
    # llvmlite's atomic store knows no opaque pointers: an exchange whose result is dropped
    "store_release": lambda b, p, x: b.ir.atomic_rmw("xchg", b.guard_elements(p, 1), x, "release"),
    "pause": _pause,
}
assert _LOWERING.keys() == WORDS.keys()


def _call_in_default_float_environment(module: ir.Module, name: str, body: ir.Function, architecture: str) -> None:
    """The exported function: the body, in the default floating-point environment whatever the caller's is.

    The body is a function of its own so that no arithmetic can move past the change of the environment.
    """
    function = ir.Function(module, body.function_type, name)
    b = ir.IRBuilder(function.append_basic_block("entry"))

    def call(intrinsic: str, result: Any, *operands: Any) -> Any:
        declared = module.globals.get(intrinsic) or ir.Function(
            module, ir.FunctionType(result, [x.type for x in operands]), intrinsic
        )
        return b.call(declared, operands)

    if architecture == "x86_64":
        callers, ours = b.alloca(_I32), b.alloca(_I32)
        call("llvm.x86.sse.stmxcsr", ir.VoidType(), callers)
        b.store(ir.Constant(_I32, _DEFAULT_MXCSR), ours)
        call("llvm.x86.sse.ldmxcsr", ir.VoidType(), ours)
        result = b.call(body, function.args)
        call("llvm.x86.sse.ldmxcsr", ir.VoidType(), callers)
    else:
        saved = call("llvm.aarch64.get.fpcr", _I64)
        call("llvm.aarch64.set.fpcr", ir.VoidType(), ir.Constant(_I64, _DEFAULT_FPCR))
        result = b.call(body, function.args)
        call("llvm.aarch64.set.fpcr", ir.VoidType(), saved)
    b.ret(result)


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
    _call_in_default_float_environment(module, kernel.name, body, target.architecture)
    return _with_vector_width(module, target)


_INDIRECT_CALL = """define internal i64 @"trampoline.body"(i64 %function, i64 %argument) noinline {
  %pointer = inttoptr i64 %function to ptr
  %result = call i64 %pointer(i64 0, i64 %argument)
  ret i64 %result
}
"""  # in text, as llvmlite's call wants a callee whose type it knows


def trampoline_ir(target: Target) -> str:
    """`i64 trampoline(i64 function, i64 argument)`: function(0, argument) in the default floating-point environment."""
    module = ir.Module("trampoline")
    module.triple = target.triple
    body = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64]), "trampoline.body")
    _call_in_default_float_environment(module, "trampoline", body, target.architecture)
    declaration = r"^declare i64 @\"trampoline.body\".*$"
    return re.sub(declaration, _INDIRECT_CALL, _with_vector_width(module, target), flags=re.MULTILINE)


def _with_vector_width(module: ir.Module, target: Target) -> str:
    """The text; llvmlite knows no string attributes: the widest vectors that LLVM may use are those of the target."""
    width = f'"prefer-vector-width"="{target.vector_bits}" "min-legal-vector-width"="{target.vector_bits}"'
    return re.sub(r"^(define [^\n]*\))", rf"\1 {width}", str(module), flags=re.MULTILINE)
