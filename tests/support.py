"""What several tests share: whole problems with inputs that show a swap, bitwise and measured comparison."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numpy.typing import NDArray

import tilewise as tw
from tilewise.arguments import float_type
from tilewise.reference import attention32, attention64
from tilewise.simd.target import TARGETS, missing_features

F32Array = NDArray[np.float32]
Result = tuple[F32Array, F32Array]  # o, lse

RUNNABLE = [name for name, target in TARGETS.items() if not missing_features(target)]
POISON = np.uint32(0xFFC0DEAD)  # a NaN that no arithmetic makes
FLOOR_ULPS = 4
PER_SEQUENCE = ("q_offset", "kv_start", "kv_len", "k_offset")
MASKS = ("causal", "window", "scale", "sinks", *PER_SEQUENCE)  # what the reference also takes


def inputs(B: int, H: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int, seed: int = 0) -> list[F32Array]:
    """q, k, v that no two heads, rows, tiles or columns share, so that a swap shows.

    Later keys are longer, so a row's maximum keeps growing and every rescale matters.
    """
    rng = np.random.default_rng([seed, B, H, Hkv, Tq, Tk, D, Dv])
    q, k, v = (rng.standard_normal(s) for s in ((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)))
    return [x.astype(np.float32) for x in (q, k * (0.5 + np.linspace(0, 1, Tk))[:, None], v)]


def sinks_for(H: int) -> F32Array:
    """A logit for each head, from one that hardly counts to one that takes most of the weight."""
    return np.linspace(-2, 4, H, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of a call. A per-sequence number is an int or a list of B ints."""

    q: F32Array
    k: F32Array
    v: F32Array
    options: dict[str, Any]

    def run(self, **changes: Any) -> Result:
        return tw.attention(self.q, self.k, self.v, return_lse=True, **{**self.options, **changes})

    def change(self, **changes: Any) -> Case:
        return replace(self, options={**self.options, **changes})

    def of_sequence(self, name: str, b: int) -> int:
        value = self.options.get(name)
        if value is None:
            return self.k.shape[2] - self.of_sequence("kv_start", b) if name == "kv_len" else 0
        return int(np.broadcast_to(value, self.q.shape[0])[b])

    def rows(self, lo: int, hi: int) -> Case:
        """The same rows [lo, hi), as a chunk: at their own positions."""
        offset = [self.of_sequence("q_offset", b) + lo for b in range(self.q.shape[0])]
        return replace(self, q=self.q[:, :, lo:hi], options={**self.options, "q_offset": offset})

    def sequences(self, order: list[int]) -> Case:
        """The sequences of that order, as a batch."""
        own = {name: [self.of_sequence(name, b) for b in order] for name in PER_SEQUENCE}
        return Case(self.q[order], self.k[order], self.v[order], {**self.options, **own})

    def naive(self) -> Result:
        return attention32(self.q, self.k, self.v, **dict(self._masks()))

    def exact(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return attention64(self.q, self.k, self.v, **dict(self._masks()))

    def visible(self) -> NDArray[np.bool_]:
        """[B, Tq, Tk]: which element of k[b] each row sees, from the definition."""
        causal, window = self.options.get("causal", False), self.options.get("window") or 0
        B, Tq, Tk = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        seen = np.zeros((B, Tq, Tk), np.bool_)
        for b in range(B):
            q_offset, start, length, k_offset = (self.of_sequence(name, b) for name in PER_SEQUENCE)
            p = q_offset + np.arange(Tq)[:, None]
            j = np.arange(Tk) - start  # of this sequence's keys
            c = k_offset + j
            seen[b] = (j >= 0) & (j < length) & ((not causal) | (c <= p)) & ((window <= 0) | (c > p - window))
        return seen

    def _masks(self) -> Iterator[tuple[str, Any]]:
        for name in MASKS:
            value = self.options.get(name)
            if value is not None:
                # the reference takes NumPy's rounding of scale in float64 as it is; the call rounds it to float32
                yield name, float(np.float32(value)) if name == "scale" else value
        if self.options.get("scale") is None:
            yield "scale", float(np.float32(self.q.shape[3] ** -0.5))


def case(
    B: int = 1, H: int = 1, Hkv: int = 1, Tq: int = 1, Tk: int = 1, D: int = 16, Dv: int = 16, seed: int = 0,
    **options: Any,
) -> Case:  # fmt: skip
    options.setdefault("q_offset", 0)
    return Case(*inputs(B, H, Hkv, Tq, Tk, D, Dv, seed), options)


def in_chunks(c: Case, size: int, **changes: Any) -> Result:
    """o and lse of the case, computed `size` rows a call."""
    parts = [c.rows(i, min(i + size, c.q.shape[2])).run(**changes) for i in range(0, c.q.shape[2], size)]
    return np.concatenate([o for o, _ in parts], axis=2), np.concatenate([lse for _, lse in parts], axis=2)


def poisoned(shape: tuple[int, ...]) -> F32Array:
    """An array to be written: what remains of the poison was not."""
    return np.full(shape, POISON, np.uint32).view(np.float32)


def assert_written(x: F32Array) -> None:
    left = np.argwhere(x.view(np.uint32) == POISON)
    assert not len(left), f"{len(left)} of {x.size} elements were never written, the first at {tuple(left[0])}"


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    """a and b are equal in every bit: two arrays of a float type, or two tuples of them such as (o, lse)."""
    if isinstance(a, tuple):
        assert len(a) == len(b)
        for name, x, y in zip(("o", "lse"), a, b, strict=True):
            assert_same_bits(x, y, f"{name} {what}")
        return
    assert a.dtype == b.dtype, f"{what}: dtypes {a.dtype} and {b.dtype}"
    assert float_type(a.dtype), f"{what}: dtype {a.dtype}"
    assert a.shape == b.shape, f"{what}: shapes {a.shape} and {b.shape}"
    x, y = (np.ascontiguousarray(array).view(f"u{a.itemsize}") for array in (a, b))
    differ = np.argwhere(x != y)
    if len(differ):
        i = tuple(int(n) for n in differ[0])
        pytest.fail(
            f"{what}: {len(differ)} of {a.size} elements differ in bits, the first at {i}: "
            f"{a[i]!r} ({x[i]:#010x}) and {b[i]!r} ({y[i]:#010x})"
        )


def assert_as_accurate_as_naive(result: Result, c: Case) -> None:
    """The largest error of o and of lse against float64 is at most twice that of naive float32 on the same inputs.

    The floor, 4 ULP of the largest reference value, is for the cases where naive float32 is right by luck: with one
    visible key it returns the value itself, and over a handful of elements its largest error may be near 0. Ours has at
    least these roundings of one such ULP each: the weight (exp2 is good to 1 ULP), the sum, the quotient; for lse log2
    (up to 2 ULP), its sum with m and the product by ln 2.
    """
    for name, got, exact, naive in zip(("o", "lse"), result, c.exact(), c.naive(), strict=True):
        assert got.dtype == np.float32
        assert got.shape == exact.shape
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=f"{name} where it is not finite")
        if not finite.any():
            continue
        error, naive_error = (float(np.abs(x[finite].astype(np.float64) - exact[finite]).max()) for x in (got, naive))
        floor = FLOOR_ULPS * float(np.spacing(np.abs(exact[finite]).max().astype(np.float32)))
        assert error <= max(2 * naive_error, floor), (
            f"{name}: the largest error is {error:.3g}, that of naive float32 {naive_error:.3g}, the floor {floor:.3g}"
        )


def assert_within_error_bound(result: Result, c: Case) -> None:
    """Every element is within the a-priori bound of recipe 1's arithmetic, computed from the data in float64.

    With u = 2^-24: a score of D terms errs by at most (D + 5) u times the sum of its terms' sizes, and y - M by u times
    |y| + |M|; exp2, and alpha once a tile, add a few u. So a weight errs relatively by at most `weight`, the output by
    twice that and n u for its n additions, times the weighted mean of |v|. For single problems this is wider than what
    is seen, by a factor of 10 or so; but it holds for all of them, and the error of naive float32 is a matter of luck.
    """
    u = 2.0**-24
    (o, lse), (exact_o, exact_lse) = result, c.exact()
    B, H, _, D = c.q.shape
    group, Tk = H // c.k.shape[1], c.k.shape[2]
    scale, visible = float(dict(c._masks())["scale"]), c.visible()
    tiles = Tk // (c.options.get("bc") or 64) + Tk // (c.options.get("span") or 1024) + 4
    for b in range(B):
        for h in range(H):
            q, k, v = c.q[b, h].astype(float), c.k[b, h // group].astype(float), c.v[b, h // group].astype(float)
            for i, seen in enumerate(visible[b]):
                keys, values = k[seen], np.abs(v[seen])
                if not len(keys):
                    continue
                s = scale * (keys @ q[i])
                weights = np.exp(s - s.max())
                weights /= weights.sum()
                score = (D + 5) * u * abs(scale) * (np.abs(keys) @ np.abs(q[i]))
                weight = np.expm1(score + 4 * u * (np.abs(s) + np.abs(s).max())).max() + 8 * u * tiles
                total = 2 * weight + (len(keys) + 8) * u
                assert (np.abs(o[b, h, i] - exact_o[b, h, i]) <= total * (weights @ values) + 1e-37).all(), (b, h, i)
                allowed = total + score.max() + 4 * u * np.abs(exact_lse[b, h, i])
                assert abs(lse[b, h, i] - exact_lse[b, h, i]) <= allowed, (b, h, i)
    empty = ~np.broadcast_to(visible.any(2)[:, None], lse.shape)
    np.testing.assert_array_equal(lse[empty], exact_lse[empty].astype(np.float32))
    assert (o[empty] == 0).all()


_FLUSH = {"x86_64": 0x8040, "aarch64": 1 << 24}  # MXCSR: flush-to-zero, denormals-are-zero; FPCR: FZ
_ACCESS = {
    "x86_64": """
        declare void @llvm.x86.sse.stmxcsr(ptr)
        declare void @llvm.x86.sse.ldmxcsr(ptr)
        define i64 @get() {
            %cell = alloca i32
            call void @llvm.x86.sse.stmxcsr(ptr %cell)
            %narrow = load i32, ptr %cell
            %wide = zext i32 %narrow to i64
            ret i64 %wide
        }
        define void @set(i64 %wide) {
            %cell = alloca i32
            %narrow = trunc i64 %wide to i32
            store i32 %narrow, ptr %cell
            call void @llvm.x86.sse.ldmxcsr(ptr %cell)
            ret void
        }""",
    "aarch64": """
        declare i64 @llvm.aarch64.get.fpcr()
        declare void @llvm.aarch64.set.fpcr(i64)
        define i64 @get() {
            %x = call i64 @llvm.aarch64.get.fpcr()
            ret i64 %x
        }
        define void @set(i64 %x) {
            call void @llvm.aarch64.set.fpcr(i64 %x)
            ret void
        }""",
}


@functools.cache
def _control_register() -> tuple[Any, Any, Any]:
    """Read and write this thread's floating-point control register; and the owner of that code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_ACCESS[_architecture()])
    module.triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    get = ctypes.CFUNCTYPE(ctypes.c_int64)(engine.get_function_address("get"))
    put = ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address("set"))
    return get, put, engine


def _architecture() -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


@contextmanager
def flushing_subnormals() -> Iterator[None]:
    """This thread takes subnormals as zero and makes none, as after torch.set_flush_denormal(True).

    At the end the register must be as it was set: nobody in between may change the caller's environment. Keep
    everything but the call under test out of the block, for NumPy's own arithmetic flushes in it as well.
    """
    if _architecture() not in _ACCESS:
        pytest.skip(f"no access to the floating-point control register of {platform.machine()}")
    get, put, _ = _control_register()
    before = get()
    flushing = before | _FLUSH[_architecture()]
    put(flushing)
    try:
        yield
    finally:
        after = get()
        put(before)
    sticky = 0x3F if _architecture() == "x86_64" else 0  # MXCSR also holds flags of exceptions that have occurred
    assert after & ~sticky == flushing & ~sticky, "the caller's floating-point environment was not restored"
