"""Problems and kernels as files for `driver.c`, which runs them where Python is not: other processors, sanitizers."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tests.isa.problems import Example
from tilewise.arguments import SIZE
from tilewise.kernels.tables import CALL_INDEX
from tilewise.plan import make_plan
from tilewise.problem import Operands, Problem, make_problem
from tilewise.ragged import make_paged_problem
from tilewise.runtime.launch import BASES, Prepared, address_of, prepare
from tilewise.simd.builder import Builder, Int, Kernel
from tilewise.simd.target import Target

DRIVER = Path(__file__).parent / "driver.c"
MAGIC = 0x31585446
ABSENT, INPUT, OUTPUT, SCRATCH = range(4)
TABLES, FIRST_BUFFER = 1, 2  # what a table's cell may be relative to: nothing (0), the tables, a buffer
BUFFERS = BASES[FIRST_BUFFER:]
ELEMENT = 4
Array = NDArray[Any]


@dataclass(frozen=True)
class Buffer:
    """Memory for a kernel: `origin` is where the address that tables mean lies in it."""

    kind: int
    size: int
    origin: int = 0
    data: bytes = b""


@dataclass(frozen=True, eq=False)
class Fixture:
    """A kernel and all it is given. Cell i of its table is offsets[i] plus an address: of base[i]."""

    kernel: Kernel
    offsets: Array
    base: Array
    buffers: tuple[Buffer, ...]
    hidden: tuple[tuple[int, int, int], ...] = ()  # (buffer, lo, hi): bytes that nobody may touch
    items: int = 0  # 0: the kernel has no work items, and is called once
    workers: int = 1
    flush: bool = False  # the caller takes subnormals for zero

    def write(self, path: Path) -> None:
        header = (
            MAGIC, len(self.offsets), self.items, CALL_INDEX["counter"], self.workers, self.flush, len(self.buffers),
            len(self.hidden),
        )  # fmt: skip
        with path.open("wb") as file:
            file.write(struct.pack("<8q128s", *header, self.kernel.name.encode()))
            file.write(self.offsets.astype("<i8").tobytes() + self.base.astype("<i8").tobytes())
            for buffer in self.buffers:
                file.write(struct.pack("<3q", buffer.kind, buffer.size, buffer.origin))
            for hidden in self.hidden:
                file.write(struct.pack("<3q", *hidden))
            file.write(b"".join(buffer.data for buffer in self.buffers))

    def read_outputs(self, path: Path) -> list[bytes]:
        """The output arrays that the driver wrote for the fixture at `path`."""
        data, parts = path.with_name(path.name + ".out").read_bytes(), []
        for size in (buffer.size for buffer in self.buffers if buffer.kind == OUTPUT):
            parts.append(data[:size])
            data = data[size:]
        assert not data
        return parts


def attention_fixture(example: Example, target: Target) -> Fixture:
    """An example as a fixture for a target: its work items are claimed one a call by `example.workers` workers."""
    options = {**example.options, "return_lse": True}
    if example.page_size:
        (q, k_pages, v_pages), further = example.paged()
        problem, operands = make_paged_problem(q, k_pages, v_pages, **further, **options)
    else:
        problem, operands = make_problem(*example.arrays, **options)
    plan = make_plan(problem, target, example.workers)
    workers = max(1, min(example.workers, plan.items))
    plan = dataclasses.replace(plan, workers=workers, threads=workers, batch=1)
    with tw.config(interpret=True, check=0):  # nothing is compiled here: the target may not be this machine's
        call = prepare(problem, plan)
    return Fixture(
        plan.kernel, call.offsets, call.base, tuple(_buffers(call, operands)), tuple(_hidden(problem)), plan.items,
        workers, example.flush,
    )  # fmt: skip


def _buffers(call: Prepared, operands: Operands) -> Iterator[Buffer]:
    problem, blocks = call.problem, operands.blocks
    arrays = {name: getattr(operands, name) for name in ("q", "k", "v", "sinks", "slopes", "bias", "mask")}
    outputs = {
        "o": int(np.prod(problem.out_shape)) * problem.out_dtype.itemsize,
        "lse": int(np.prod(problem.lse_shape)) * ELEMENT,
    }
    for name in BUFFERS:
        array = arrays.get(name)
        if name == "scratch":
            yield Buffer(SCRATCH, call.plan.scratch_bytes)
        elif name in outputs:
            yield Buffer(OUTPUT, outputs[name])
        elif name == "blocks" and blocks is not None:
            yield Buffer(INPUT, blocks.nbytes, 0, blocks.tobytes())
        elif array is None:
            yield Buffer(ABSENT, 0)
        else:
            view = problem.views[name]
            data = ctypes.string_at(address_of(array) + view.lo, view.hi - view.lo) if view.hi > view.lo else b""
            yield Buffer(INPUT, view.hi - view.lo, -view.lo, data)


def _hidden(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """The bytes within the extents of q, k and v that belong to no row: between rows, and outside kv_start, kv_len.

    Of keys in pages none: which slots are in use is not a matter of strides.
    """
    for name, heads, rows, width in (
        ("q", problem.H, problem.rows, problem.D),
        ("k", problem.Hkv, problem.kv_len, problem.D),
        ("v", problem.Hkv, problem.kv_len, problem.Dv),
    ):
        if problem.page_size and name in "kv":
            continue
        view, base = problem.views[name], getattr(problem, name + "_base")
        element = SIZE[view.type]
        own = np.zeros(view.hi - view.lo + 2, np.int8)  # with a byte of nobody's on either side
        for b in range(problem.B):
            for head in range(heads):
                for row in range(int(rows[b])):
                    start = int(base[b]) + (head * view.head + row * view.row) * element - view.lo + 1
                    own[start : start + width * element] = 1
        edges = np.flatnonzero(np.diff(own)).tolist()  # own from edges[0], not from edges[1], ...
        free = [0, *edges, view.hi - view.lo]
        for lo, hi in zip(free[::2], free[1::2], strict=True):
            if hi > lo:
                yield BUFFERS.index(name), lo, hi


def arrays_fixture(
    name: str, body: Callable[[Builder, Int, Int], None], inputs: Iterable[Array], output: Array
) -> Fixture:
    """A kernel over a table of the first and last address of each array, the output last: see tests/simd/support.py."""
    buffers = [Buffer(INPUT, x.nbytes, 0, x.tobytes()) for x in inputs] + [Buffer(OUTPUT, output.nbytes)]
    offsets = np.array([(0, buffer.size) for buffer in buffers], np.int64).ravel()
    base = np.repeat(np.arange(len(buffers)) + FIRST_BUFFER, 2)
    return Fixture(Kernel(name, body), offsets, base, tuple(buffers))


def write_kernel_list(folder: Path, kernels: Iterable[Kernel]) -> None:
    """kernels.inc of the driver."""
    (folder / "kernels.inc").write_text("".join(f"KERNEL({kernel.name})\n" for kernel in kernels))
