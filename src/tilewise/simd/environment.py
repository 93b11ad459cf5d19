"""The exported function around a kernel: it sets the floating-point environment that the bits depend on."""

from __future__ import annotations

import re
from typing import Any

import llvmlite.ir as ir

from tilewise.simd.target import Target

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_DEFAULT_MXCSR = 0x1F80  # round to nearest, all exceptions masked, no flush-to-zero, no denormals-are-zero
_DEFAULT_FPCR = 0  # the same on aarch64


def call_in_default_float_environment(module: ir.Module, name: str, body: ir.Function, architecture: str) -> None:
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
    call_in_default_float_environment(module, "trampoline", body, target.architecture)
    declaration = r"^declare i64 @\"trampoline.body\".*$"
    return re.sub(declaration, _INDIRECT_CALL, with_vector_width(module, target), flags=re.MULTILINE)


def with_vector_width(module: ir.Module, target: Target) -> str:
    """The text; llvmlite knows no string attributes: the widest vectors that LLVM may use are those of the target."""
    width = f'"prefer-vector-width"="{target.vector_bits}" "min-legal-vector-width"="{target.vector_bits}"'
    return re.sub(r"^(define [^\n]*\))", rf"\1 {width}", str(module), flags=re.MULTILINE)


def team_ir(target: Target) -> str:
    """`void team(i64 work[3])` for threads of somebody else's: each takes a number from work[2] and calls the kernel
    work[0] with the table work[1] and that number as its worker's."""
    return f"""
target triple = "{target.triple}"
define void @team(ptr %work) {{
  %table.at = getelementptr i64, ptr %work, i64 1
  %next.at = getelementptr i64, ptr %work, i64 2
  %entry = load i64, ptr %work
  %table = load i64, ptr %table.at
  %worker = atomicrmw add ptr %next.at, i64 1 monotonic
  %kernel = inttoptr i64 %entry to ptr
  call i64 %kernel(i64 %table, i64 %worker)
  ret void
}}
"""
