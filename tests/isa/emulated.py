"""Kernels compiled for aarch64, linked into one static program, run by an emulator."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tests.isa.fixtures import DRIVER, Fixture, write_kernel_list
from tilewise.simd.builder import Kernel
from tilewise.simd.jit import compile_object
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS

AARCH64 = TARGETS["aarch64"]
EMULATOR = "qemu-aarch64-static"
SECONDS = 900  # the first link on a machine builds a C library, which takes a minute of one core


def missing_tool() -> str | None:
    """Why nothing can be run for aarch64 here; None if it can."""
    if importlib.util.find_spec("ziglang") is None:
        return "needs the linker of the ziglang wheel: pip install -r tests/isa/requirements.txt"
    if shutil.which(EMULATOR) is None:
        return f"needs {EMULATOR}: apt-get install qemu-user-static"
    return None


def build(folder: Path, kernels: list[Kernel]) -> Path:
    """The driver with those kernels, for aarch64."""
    distinct = {kernel.name: kernel for kernel in kernels}
    write_kernel_list(folder, distinct.values())
    for name, kernel in distinct.items():
        (folder / f"{name}.o").write_bytes(compile_object(llvm_ir(kernel, AARCH64), AARCH64))
    program = folder / "driver.aarch64"
    options = ["-target", "aarch64-linux-musl", "-static", "-O1", "-std=c11", "-D_GNU_SOURCE", "-I", "."]
    objects = [f"{name}.o" for name in distinct]
    run([sys.executable, "-m", "ziglang", "cc", *options, str(DRIVER), *objects, "-o", str(program)], folder)
    return program


def run_all(program: Path, fixtures: dict[str, Fixture], *options: str) -> dict[str, list[bytes]]:
    """The output arrays of each fixture, by its name."""
    paths = {name: program.parent / f"{i}.fixture" for i, name in enumerate(fixtures)}
    for name, path in paths.items():
        fixtures[name].write(path)
    run([EMULATOR, str(program), *options, *map(str, paths.values())], program.parent)
    return {name: fixtures[name].read_outputs(path) for name, path in paths.items()}


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{command[:4]}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
