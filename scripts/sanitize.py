"""Sanitizers over generated code: kernels outside Python, on the examples of tests/isa, by its driver.

    scripts/sanitize [--install] [--keep FOLDER] [CHECK ...]

Each check builds the kernels and runs every example: no report, and the bits of the library. Then it plants faults,
each of which must be reported, or the check proves nothing. A line a check; exit code 0: all passed, 1: not, 2: a tool
is missing. --install gets the tools, also those of tests/isa (Debian, as root).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from tests.isa.fixtures import BUFFERS, DRIVER, ELEMENT, Fixture, attention_fixture, write_kernel_list
from tests.isa.problems import Example, examples
from tilewise.kernels.softmax import OnlineSoftmax
from tilewise.kernels.tables import CALL_INDEX
from tilewise.simd.jit import compile_object
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS, Target, missing_features

ROOT = Path(__file__).parent.parent
PACKAGES = ("clang-22", "libclang-rt-22-dev", "valgrind", "qemu-user-static")
CLANGS = tuple(f"clang-{major}" for major in sorted({int(llvm.llvm_version_info[0]), 22}, reverse=True))
SECONDS = 1800
TRIES = 20
VECTOR_BYTES = 64
INT64_MAX = (1 << 63) - 1
# What the faults are planted in: one that is packed, one whose spans are work items of several workers.
PACKED, SPLIT = "prefill, packed, GQA, tails, odd Bc", "split spans, slots used again"
MANY = "many tiles, several workers"

Change = Callable[[str], str]  # of IR text


@dataclass(frozen=True)
class Fault:
    """A fault that must be reported: in the call of the driver, the fixture, the IR or the kernel."""

    name: str
    report: str  # part of what is printed
    example: str = PACKED
    short: str = ""  # a buffer that lacks its last row
    fixture: Callable[[Fixture], Fixture] | None = None
    text: Change | None = None
    kernel: Callable[[], Any] | None = None  # a context in which the kernel is written wrongly


@dataclass(frozen=True)
class Check:
    name: str
    target: str
    flags: tuple[str, ...]
    mark: Change
    faults: tuple[Fault, ...]
    options: tuple[str, ...] = ()  # of the driver
    wrapper: tuple[str, ...] = ()
    flushes: bool = True  # whether a caller's flush-to-zero can be set: valgrind has no such thing
    product: bool = False  # link the objects that the library itself would load, instead of clang's from the same IR


def attribute(name: str) -> Change:
    """An attribute for every function of a text: without it a sanitizer passes over a function."""
    return lambda text: re.sub(r"^(define [^\n]*\))", rf"\1 {name}", text, flags=re.MULTILINE)


def report_vectors(text: str) -> str:
    """Tell TSan of every vector access: it knows accesses of up to 16 bytes and passes over ours of 64.

    The mask of a part is a prefix of the lanes, so its population counts the floats.
    """
    lines = []
    for i, line in enumerate(text.splitlines()):
        if found := re.search(r"= load <16 x float>, ptr (\S+), align", line):
            lines.append(f"  call void @__tsan_read_range(ptr {found[1]}, i64 {VECTOR_BYTES})")
        elif found := re.search(r"store <16 x float> .*, ptr (\S+), align", line):
            lines.append(f"  call void @__tsan_write_range(ptr {found[1]}, i64 {VECTOR_BYTES})")
        elif found := re.search(r"call .*@.?llvm\.masked\.(load|store).*?ptr (\S+), i32 4, <16 x i1> ([^,)]+)", line):
            side = {"load": "read", "store": "write"}[found[1]]
            lines += [
                f"  %tsan.{i}.bits = bitcast <16 x i1> {found[3]} to i16",
                f"  %tsan.{i}.count = call i16 @llvm.ctpop.i16(i16 %tsan.{i}.bits)",
                f"  %tsan.{i}.floats = zext i16 %tsan.{i}.count to i64",
                f"  %tsan.{i}.bytes = shl i64 %tsan.{i}.floats, 2",
                f"  call void @__tsan_{side}_range(ptr {found[2]}, i64 %tsan.{i}.bytes)",
            ]
        lines.append(line)
    lines += ["declare void @__tsan_read_range(ptr, i64)", "declare void @__tsan_write_range(ptr, i64)"]
    return "\n".join([*lines, "declare i16 @llvm.ctpop.i16(i16)", ""])


def for_threads(text: str) -> str:
    return attribute("sanitize_thread")(report_vectors(text))


def unordered(order: str) -> Change:
    """Drop the order of a wait or of its signal."""

    def change(text: str) -> str:
        pattern = {"acquire": r"(load atomic .*) acquire", "release": r"(store atomic .*) release"}[order]
        return re.sub(pattern, r"\1 monotonic", text)

    return change


def hide_a_key(fixture: Fixture) -> Fixture:
    """Forbid the first key, which is visible."""
    return dataclasses.replace(fixture, hidden=(*fixture.hidden, (BUFFERS.index("k"), 0, 64)))


def overflow(fixture: Fixture) -> Fixture:
    """An address that leaves 64 bits when the driver adds it up."""
    offsets = fixture.offsets.copy()
    offsets[int((fixture.base == 2 + BUFFERS.index("q")).argmax())] = INT64_MAX
    return dataclasses.replace(fixture, offsets=offsets)


@contextmanager
def outputs_not_cleared() -> Iterator[None]:
    """OnlineSoftmax.init leaves the outputs of a fresh state as they are in memory."""
    right = OnlineSoftmax.init

    def wrong(self: OnlineSoftmax, state: Any, rows: Any) -> None:
        no_columns = dataclasses.replace(self.shape, Dv=0)
        right(dataclasses.replace(self, shape=no_columns), state, rows)

    OnlineSoftmax.init = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        OnlineSoftmax.init = right  # type: ignore[method-assign]


def share_scratch(fixture: Fixture) -> Fixture:
    """All workers get the first one's scratch."""
    offsets = fixture.offsets.copy()
    offsets[CALL_INDEX["scratch_bytes"]] = 0
    return dataclasses.replace(fixture, offsets=offsets)


def address_check(target: str) -> Check:
    return Check(
        f"asan {target}", target, ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        attribute("sanitize_address"),
        (
            Fault("q lacks a row", "heap-buffer-overflow", short="q"),
            Fault("k lacks a row", "heap-buffer-overflow", short="k"),
            Fault("o lacks a row", "heap-buffer-overflow", short="o"),
            Fault("v lacks a row, streamed", "heap-buffer-overflow", example=SPLIT, short="v"),
            Fault("an invisible key is read", "use-after-poison", fixture=hide_a_key),
            Fault("the driver's own sum overflows", "signed integer overflow", fixture=overflow),
        ),
        ("--threads",),
    )  # fmt: skip


def thread_check(target: str) -> Check:
    return Check(
        f"tsan {target}", target, ("-fsanitize=thread",), for_threads,
        (
            Fault("no acquire", "data race", example=SPLIT, text=unordered("acquire")),
            Fault("no release", "data race", example=SPLIT, text=unordered("release")),
            Fault("workers share their scratch", "data race", example=MANY, fixture=share_scratch),
        ),
        ("--threads",),
    )  # fmt: skip


def memory_check(target: str) -> Check:
    """What memcheck does, also for AVX-512, which valgrind cannot run: undefined values that reach a branch or o."""
    return Check(
        f"msan {target}", target, ("-fsanitize=memory",), attribute("sanitize_memory"),
        (Fault("outputs are not cleared", "use-of-uninitialized-value", kernel=outputs_not_cleared),),
        ("--threads",),
    )  # fmt: skip


CHECKS = (
    address_check("x86-64-v3"),
    address_check("x86-64-v4"),
    thread_check("x86-64-v3"),
    thread_check("x86-64-v4"),
    memory_check("x86-64-v3"),
    memory_check("x86-64-v4"),
    Check(
        "memcheck x86-64-v3", "x86-64-v3", ("-DMEMCHECK", "-gdwarf-4"), str,
        (
            Fault("outputs are not cleared", "depends on undefined memory", kernel=outputs_not_cleared),
            Fault("k lacks a row", "Invalid read", short="k"),
        ),
        wrapper=("valgrind", "-q", "--error-exitcode=99"), flushes=False, product=True,
    ),
)  # fmt: skip


class Workshop:
    """A folder where one check is built and run."""

    def __init__(self, check: Check, folder: Path, clang: str) -> None:
        self.check, self.folder, self.clang = check, folder, clang
        self.target: Target = TARGETS[check.target]
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, fixtures: dict[str, Fixture], change: Change = str) -> Path:
        """The driver with the kernels of those fixtures."""
        kernels = {fixture.kernel.name: fixture.kernel for fixture in fixtures.values()}
        write_kernel_list(self.folder, kernels.values())
        files = []
        for name, kernel in kernels.items():
            text = llvm_ir(kernel, self.target)
            wrong = change(text)
            if change is not str and wrong == text:
                raise AssertionError(f"{name}: the fault changes nothing")
            path = self.folder / f"{name}.{'o' if self.check.product else 'll'}"
            if self.check.product:
                path.write_bytes(compile_object(wrong, self.target))
            else:
                path.write_text(self.check.mark(wrong))
            files.append(str(path))
        program = self.folder / "driver"
        march = f"-march={self.target.cpu}"
        options = ["-std=gnu11", "-Wall", "-Wextra", "-O1", "-g", "-ffp-contract=off", "-Wno-override-module", march]
        command = [self.clang, *options, *self.check.flags, "-I", str(self.folder), str(DRIVER), *files, "-pthread"]
        done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{self.clang} failed:\n{done.stderr}")
        return program

    def run(self, program: Path, fixtures: dict[str, Fixture], *options: str) -> tuple[int, str]:
        """(exit code, what was printed)."""
        for i, fixture in enumerate(fixtures.values()):
            fixture.write(self.path(i))
        paths = [str(self.path(i)) for i in range(len(fixtures))]
        environment = os.environ | {
            "ASAN_OPTIONS": "redzone=2048",  # a vector access shall not step over a redzone
            "TSAN_OPTIONS": "halt_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        done = subprocess.run(
            [*self.check.wrapper, str(program), *self.check.options, *options, *paths],
            capture_output=True, text=True, errors="replace", timeout=SECONDS, env=environment, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def path(self, i: int) -> Path:
        return self.folder / f"{i}.fixture"

    def examine(self, chosen: dict[str, Example]) -> str:
        """Run the examples, then the faults; what was seen, or an AssertionError."""
        begin = time.monotonic()
        fixtures = {name: attention_fixture(example, self.target) for name, example in chosen.items()}
        if not self.check.flushes:
            fixtures = {name: dataclasses.replace(fixture, flush=False) for name, fixture in fixtures.items()}
        status, printed = self.run(self.build(fixtures), fixtures)
        if status or printed:
            raise AssertionError(f"exit code {status}\n{printed[:6000]}")
        for i, (name, fixture) in enumerate(fixtures.items()):
            wanted = [x.tobytes() for x in chosen[name].run()]
            if fixture.read_outputs(self.path(i)) != wanted:
                raise AssertionError(f"other bits than the library's: {name}")
        for fault in self.check.faults:
            self.plant(fault, chosen[fault.example])
        kernels = len({fixture.kernel.name for fixture in fixtures.values()})
        return (
            f"{kernels} kernels, {len(fixtures)} examples, 0 reports, 0 differing bits; "
            f"{len(self.check.faults)} of {len(self.check.faults)} planted faults reported "
            f"({time.monotonic() - begin:.0f} s)"
        )

    def plant(self, fault: Fault, example: Example) -> None:
        """The fault is reported, or an AssertionError."""
        fixture = attention_fixture(example, self.target)
        if fault.kernel:
            with fault.kernel():
                program = self.build({"": fixture})
        else:
            program = self.build({"": fixture}, fault.text or str)
        options: tuple[str, ...] = ()
        if fault.short:
            place = BUFFERS.index(fault.short)
            columns = example.arrays[{"q": 0, "k": 1, "v": 2, "o": 2}[fault.short]].shape[3]
            options = ("--short", str(place), str(columns * ELEMENT))
        for _ in range(TRIES if example.workers > 1 else 1):  # a race shows where the workers happen to meet
            status, printed = self.run(program, {"": fault.fixture(fixture) if fault.fixture else fixture}, *options)
            if status and fault.report in printed:
                return
        raise AssertionError(f"planted and not reported: {fault.name} (exit code {status})\n{printed[:6000]}")


def install() -> None:
    """Debian's packages for the checks and for tests/isa, and the linker for aarch64 into this environment."""
    subprocess.run(["apt-get", "update", "-q"], check=True)
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    subprocess.run(command, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    requirements = ROOT / "tests" / "isa" / "requirements.txt"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-r", str(requirements)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the tools with apt-get and pip first")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there and leave everything")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="; ".join(check.name for check in CHECKS))
    arguments = parser.parse_args()
    if arguments.install:
        install()
    clang = next((name for name in CLANGS if shutil.which(name)), None)
    if clang is None or shutil.which("valgrind") is None:
        print(f"needs {' or '.join(CLANGS)} and valgrind: scripts/sanitize --install", file=sys.stderr)
        return 2
    wanted = [check for check in CHECKS if not arguments.checks or any(x in check.name for x in arguments.checks)]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for check in wanted:
            if missing := missing_features(TARGETS[check.target]):
                print(f"{check.name}: skipped, this machine lacks {', '.join(missing)}", flush=True)
                continue
            folder = (arguments.keep or Path(temporary)) / check.name.replace(" ", "-")
            try:
                seen = "passed: " + Workshop(check, folder.resolve(), clang).examine(examples())
            except (AssertionError, subprocess.TimeoutExpired) as problem:
                failed += 1
                seen = f"FAILED: {problem}"
            print(f"{check.name}: {seen}", flush=True)
    return 1 if failed or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
