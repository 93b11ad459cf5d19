"""Compiled kernels: the disk cache and whom it trusts, what compiles again and when, dumps."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simd.support import NATIVE_TARGETS
from tilewise.config import config
from tilewise.simd import jit
from tilewise.simd.builder import F32, LANES, Builder, Int, Kernel
from tilewise.simd.lower import llvm_ir
from tilewise.simd.target import TARGETS, Target

TARGET = TARGETS[NATIVE_TARGETS[0]]
ROOT = Path(__file__).parents[2]
POSIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners and modes of files")
ROOT_USER = hasattr(os, "getuid") and os.getuid() == 0

_numbers = itertools.count()


def doubling(name: str, factor: float = 2.0) -> Kernel:
    """Multiply the 16 floats at the table's address by a factor."""

    def body(b: Builder, table: Int, worker: Int) -> None:
        p = b.pointer(table, table, table + 4 * LANES, F32)
        b.store(p, b.load(p) * b.vec(factor))

    return Kernel(name, body)


def works(entry: jit.Entry, factor: float = 2.0) -> bool:
    data = np.arange(LANES, dtype=np.float32)
    assert entry(data.__array_interface__["data"][0], 0) == 0
    return data.tolist() == [x * factor for x in range(LANES)]


class Compiler:
    """Counts what is compiled; a process of its own is played by forgetting what this one has loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled = 0
        self.name = f"cached_{next(_numbers)}"
        real = jit.compile_object

        def spy(text: str, target: Target) -> bytes:
            self.compiled += '@"trampoline"' not in text  # which calls the interpreter, and is no kernel
            return real(text, target)

        monkeypatch.setattr(jit, "compile_object", spy)

    def run(self) -> int:
        """Get and run the kernel as a new process would; how many times it was compiled."""
        jit._entries.clear()
        before = self.compiled
        assert works(jit.native(doubling(self.name), TARGET))
        return self.compiled - before


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    yield Compiler(monkeypatch)
    jit._entries.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache folder that does not exist yet."""
    path = tmp_path / "cache"
    with config(cache=path):
        yield path


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_second_process_loads_what_the_first_compiled(folder: Path) -> None:
    """Real processes: the second has no compiler at all."""
    program = """
import numpy as np, sys
from tests.simd.test_jit import TARGET, doubling, works
from tilewise.simd import jit
if sys.argv[1] == "forbidden":
    jit.compile_object = None
assert works(jit.native(doubling("two_processes"), TARGET))
"""
    environment = {**os.environ, "TILEWISE_CACHE": str(folder)}
    for compiling in ("allowed", "forbidden"):
        command = [sys.executable, "-c", program, compiling]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    only_file(folder).unlink()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "NoneType" in done.stderr  # without the file it would have had to compile


def test_kernel_is_compiled_once_a_process(folder: Path, compiler: Compiler) -> None:
    kernel = doubling(compiler.name)
    assert jit.native(kernel, TARGET) is jit.native(doubling(compiler.name), TARGET)
    assert compiler.compiled == 1
    assert works(jit.native(kernel, TARGET))


def test_cache_is_private_and_sealed(folder: Path, compiler: Compiler) -> None:
    """One file, no temporary left over, its name the key, its content the code behind the code's checksum."""
    assert compiler.run() == 1
    assert compiler.run() == 0
    path = only_file(folder)
    assert path.name == jit.cache_key(llvm_ir(doubling(compiler.name), TARGET), TARGET) + ".o"
    data = path.read_bytes()
    assert hashlib.sha256(data[32:]).digest() == data[:32]
    if hasattr(os, "getuid"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not path.stat().st_mode & 0o077


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:31],
        lambda data: data[:32],
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\0",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
        lambda data: data[:200] + bytes([data[200] ^ 4]) + data[201:],
        lambda data: data[32:],
        lambda data: b"\0" * len(data),
    ],
)
def test_damaged_file_is_compiled_again_and_replaced(folder: Path, compiler: Compiler, damage: Any) -> None:
    compiler.run()
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compiler.run() == 1
    assert path.read_bytes() == whole
    assert compiler.run() == 0


@POSIX
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_folder_that_others_can_write_to_is_neither_read_nor_written(
    folder: Path, compiler: Compiler, mode: int
) -> None:
    compiler.run()
    before = only_file(folder).read_bytes()
    folder.chmod(mode)
    assert compiler.run() == 1  # not read
    only_file(folder).unlink()
    assert compiler.run() == 1
    assert not list(folder.iterdir())  # not written
    folder.chmod(0o700)
    assert compiler.run() == 1
    assert only_file(folder).read_bytes() == before
    assert compiler.run() == 0


@POSIX
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_to_is_not_loaded(folder: Path, compiler: Compiler, mode: int) -> None:
    compiler.run()
    only_file(folder).chmod(mode)
    assert compiler.run() == 1
    assert not only_file(folder).stat().st_mode & 0o022  # replaced by one of our own
    assert compiler.run() == 0


@POSIX
@pytest.mark.skipif(not ROOT_USER, reason="only root can give a file away")
def test_what_another_user_owns_is_not_trusted(folder: Path, compiler: Compiler) -> None:
    compiler.run()
    os.chown(only_file(folder), 12345, -1)
    assert compiler.run() == 1
    assert compiler.run() == 0
    os.chown(folder, 12345, -1)
    assert compiler.run() == 1
    only_file(folder).unlink()
    assert compiler.run() == 1
    assert not list(folder.iterdir())


@POSIX
def test_what_another_user_owns_is_not_trusted_seen_by_that_user(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for those who are not root: this process takes another identity instead."""
    compiler.run()
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    assert compiler.run() == 1
    only_file(folder).unlink()
    assert compiler.run() == 1
    assert not list(folder.iterdir())


@POSIX
def test_read_only_home_costs_time_only(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder cannot be made. (Root may write anywhere: for root, a file is in the way.)"""
    home = tmp_path / "home"
    if ROOT_USER:
        home.write_text("in the way")
    else:
        home.mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    with config(cache=None):
        assert jit.cache_folder() == home / "tilewise"
        assert compiler.run() == 1
        assert compiler.run() == 1
    assert not (home / "tilewise").exists()


def test_users_cache_folder_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with config(cache=None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
        assert jit.cache_folder() == tmp_path / "tilewise"
        if sys.platform != "win32":
            monkeypatch.delenv("XDG_CACHE_HOME")
            monkeypatch.setenv("HOME", str(tmp_path))
            assert jit.cache_folder() == tmp_path / ".cache" / "tilewise"


def test_cache_off_keeps_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    with config(cache="off"):
        assert jit.cache_folder() is None
        assert compiler.run() == 1
        assert compiler.run() == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("module", "step"), [(os, "replace"), (tempfile, "mkstemp")])
def test_full_disk_costs_time_only(
    folder: Path, compiler: Compiler, module: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space for a file or for its name: the kernel runs, and nothing half-written stays behind."""

    def full(*operands: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, step, full)
        assert compiler.run() == 1
        assert not list(folder.iterdir())
        assert compiler.run() == 1
    assert compiler.run() == 1
    assert compiler.run() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_device(folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own refusal, at the first byte that is flushed."""
    folder.mkdir(mode=0o700)
    left = folder / "left"

    def mkstemp(dir: Path) -> tuple[int, str]:
        left.touch()
        return os.open("/dev/full", os.O_WRONLY), str(left)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", mkstemp)
        assert compiler.run() == 1
    assert not list(folder.iterdir())


def test_cache_key_depends_on_all_that_the_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    text = llvm_ir(doubling("key"), TARGET)
    key = jit.cache_key(text, TARGET)
    assert key == jit.cache_key(llvm_ir(doubling("key"), TARGET), TARGET)
    keys = {key, *(jit.cache_key(text, target) for target in TARGETS.values() if target is not TARGET)}
    keys.add(jit.cache_key(llvm_ir(doubling("key", 3.0), TARGET), TARGET))  # another constant
    keys.add(jit.cache_key(llvm_ir(doubling("other"), TARGET), TARGET))  # another name
    keys.add(jit.cache_key(llvm_ir(doubling("key"), TARGET, checked=True), TARGET))
    monkeypatch.setattr(jit.llvm, "llvm_version_info", (99, 0, 0))
    keys.add(jit.cache_key(text, TARGET))
    assert len(keys) == len(TARGETS) + 4


def test_ir_is_the_same_every_time() -> None:
    """In another process too, under another hash seed; else the cache would never hit."""
    program = "from tests.simd.test_jit import *; print(llvm_ir(doubling('same'), TARGET), end='')"
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert texts == {llvm_ir(doubling("same"), TARGET)}


@pytest.mark.parametrize("names", [1, 4])
@pytest.mark.parametrize("cached", [True, False])
def test_threads_that_ask_at_once(folder: Path, compiler: Compiler, names: int, cached: bool) -> None:
    """Each kernel is compiled once, however many threads want it; every thread gets one that works."""
    kernels = [f"{compiler.name}_{x % names}" for x in range(12)]
    barrier, results = threading.Barrier(len(kernels)), []

    def ask(name: str) -> None:
        with config(cache=folder if cached else "off"):  # a thread starts outside of every block
            barrier.wait()
            results.append(works(jit.native(doubling(name), TARGET)))

    crew = [threading.Thread(target=ask, args=(name,)) for name in kernels]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert results == [True] * len(kernels)
    assert compiler.compiled == names
    assert not cached or len(list(folder.iterdir())) == names


def test_dump_writes_ir_and_assembly(tmp_path: Path, compiler: Compiler) -> None:
    """For every kernel and target, under the kernel's name, in a folder that is made for it."""
    dump = tmp_path / "deep" / "dump"
    with config(dump=dump):
        jit.native(doubling(compiler.name), TARGET)
    stem = f"{compiler.name}.{TARGET.name}"
    assert sorted(path.name for path in dump.iterdir()) == [f"{stem}.ll", f"{stem}.s"]
    assert (dump / f"{stem}.ll").read_text() == llvm_ir(doubling(compiler.name), TARGET)
    assert f"{compiler.name}:" in (dump / f"{stem}.s").read_text()


def test_executable_takes_the_ring_from_the_configuration(compiler: Compiler) -> None:
    with config(interpret=True):
        assert works(jit.executable(doubling(compiler.name)))
    assert compiler.compiled == 0
    for check in (0, 2):
        with config(interpret=False, check=check, target=TARGET.name):
            assert works(jit.executable(doubling(compiler.name)))
        assert (compiler.name, TARGET.name, check == 2) in jit._entries
    assert compiler.compiled == 2
