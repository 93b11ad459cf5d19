"""A kernel computes in the default floating-point environment, and gives the caller's back."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from tests.simd import scalar
from tests.simd.support import NATIVE_TARGETS, compiled, floats, over_arrays, table_of
from tilewise.simd.builder import LANES, Builder, Ptr
from tilewise.simd.target import host_architecture

pytestmark = [
    pytest.mark.skipif(host_architecture() != "x86_64", reason="sets the control register of x86"),
    pytest.mark.parametrize("ring", NATIVE_TARGETS),
]

DEFAULT = 0x1F80
FLUSH_TO_ZERO, DENORMALS_ARE_ZERO = 1 << 15, 1 << 6
ROUND_DOWN, ROUND_UP, ROUND_TO_ZERO = 1 << 13, 2 << 13, 3 << 13
FLAGS = 0x3F  # exceptions that have happened since someone looked
SETTINGS = [
    FLUSH_TO_ZERO, DENORMALS_ARE_ZERO, FLUSH_TO_ZERO | DENORMALS_ARE_ZERO, ROUND_DOWN, ROUND_UP, ROUND_TO_ZERO,
    ROUND_UP | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO,
]  # fmt: skip
CONTROL_IR = """
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
define i32 @exchange(i32 %new) {
  %old = alloca i32
  %next = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  store i32 %new, ptr %next
  call void @llvm.x86.sse.ldmxcsr(ptr %next)
  %result = load i32, ptr %old
  ret i32 %result
}
"""


@pytest.fixture
def exchange() -> Iterator[Any]:
    """exchange(new): set the control register, give what it was. The test leaves the default behind."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(CONTROL_IR), machine)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(engine.get_function_address("exchange"))
    yield call
    call(DEFAULT)


# x * y is subnormal, or not exact; x + y likewise
X = np.array([2.0**-70, 2.0**-149, 1.0, 1.0, -1.0, 3.0, 2.0**-126, -(2.0**-126)] * 2, np.float32)
Y = np.array([2.0**-70, 1.0, 2.0**-30, 1 / 3, -(2.0**-30), 1 / 7, 0.5, 1 / 3] * 2, np.float32)


def arithmetic(b: Builder, x: Ptr, y: Ptr, result: Ptr) -> None:
    p, q = b.load(x), b.load(y)
    for j, value in enumerate((p * q, p + q, p - q, p / q, b.fma(p, q, p))):
        b.store(result + j * LANES, value)


@pytest.mark.parametrize("setting", SETTINGS)
def test_callers_environment_changes_no_bit(ring: str, setting: int, exchange: Any) -> None:
    out = np.zeros((5, LANES), np.float32)
    arrays = X, Y, out
    table = table_of(arrays)
    entry, address = compiled(over_arrays(arithmetic, arrays), ring), table.__array_interface__["data"][0]
    with np.errstate(all="ignore"):
        fused = floats(
            [scalar.fma(x, y, x) for x, y in zip(X.view(np.uint32).tolist(), Y.view(np.uint32).tolist(), strict=True)]
        )
        expected = np.array([X * Y, X + Y, X - Y, X / Y, fused])
    assert (np.abs(expected[0]) > 0).all()

    callers = exchange(DEFAULT | setting)
    entry(address, 0)
    after = exchange(callers)

    assert after & ~FLAGS == DEFAULT | setting
    assert out.view(np.int32).tolist() == expected.view(np.int32).tolist()


def test_settings_would_change_bits(ring: str, exchange: Any) -> None:
    """NumPy, which keeps the caller's environment, shows that each setting matters on these numbers."""

    def bits() -> list[int]:
        with np.errstate(all="ignore"):
            return np.concatenate([X * Y, X + Y, X - Y, X / Y]).view(np.int32).tolist()

    results = []
    for setting in (0, *SETTINGS):
        callers = exchange(DEFAULT | setting)
        results.append(bits())
        exchange(callers)
    assert all(x != results[0] for x in results[1:])
    assert any(x != y for x, y in itertools.pairwise(results[1:]))
