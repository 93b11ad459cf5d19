"""The exported function around a kernel: it sets the floating-point environment that the bits depend on."""

from __future__ import annotations

from tilewise.simd.ir import FunctionText
from tilewise.simd.target import Target

_DEFAULT_MXCSR = 0x1F80  # round to nearest, all exceptions masked, no flush-to-zero, no denormals-are-zero
_DEFAULT_FPCR = 0  # the same on aarch64
_X86 = (
    "declare void @llvm.x86.sse.stmxcsr(ptr)\ndeclare void @llvm.x86.sse.ldmxcsr(ptr)",
    f"""  %callers = alloca i32
  %ours = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %callers)
  store i32 {_DEFAULT_MXCSR}, ptr %ours
  call void @llvm.x86.sse.ldmxcsr(ptr %ours)""",
    "  call void @llvm.x86.sse.ldmxcsr(ptr %callers)",
)
_AARCH64 = (
    "declare i64 @llvm.aarch64.get.fpcr()\ndeclare void @llvm.aarch64.set.fpcr(i64)",
    f"""  %callers = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 {_DEFAULT_FPCR})""",
    "  call void @llvm.aarch64.set.fpcr(i64 %callers)",
)


def in_default_float_environment(name: str, body: FunctionText, target: Target) -> str:
    """A module with `i64 name(i64 table, i64 worker)`: the body, whatever the caller's floating-point environment is.

    The body is a function of its own so that no arithmetic can move past the change of the environment. The widest
    vectors that LLVM may use are those of the target.
    """
    declared, enter, leave = _X86 if target.architecture == "x86_64" else _AARCH64
    width = f'"prefer-vector-width"="{target.vector_bits}" "min-legal-vector-width"="{target.vector_bits}"'
    return "\n".join([
        f'target triple = "{target.triple}"',
        declared,
        *body.declarations.values(),
        f'define internal i64 @"{name}.body"(i64 %table, i64 %worker) noinline {width} {{',
        str(body),
        "}",
        f'define i64 @"{name}"(i64 %table, i64 %worker) {width} {{',
        enter,
        f'  %result = call i64 @"{name}.body"(i64 %table, i64 %worker)',
        leave,
        "  ret i64 %result",
        "}",
        "",
    ])  # fmt: skip


def trampoline_ir(target: Target) -> str:
    """`i64 trampoline(i64 function, i64 argument)`: function(0, argument) in the default floating-point environment."""
    body = FunctionText()
    function = body.cast("inttoptr", "%table", "i64", "ptr")
    body.do(f"ret i64 {body.value(f'call i64 {function}(i64 0, i64 %worker)')}")
    return in_default_float_environment("trampoline", body, target)


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
