"""Kernels to native code: LLVM passes, the disk cache, dumps.

The cache holds object files under the hash of (IR text, target, LLVM version). They are code, so one is loaded only
from a folder that this user owns and nobody else can write to, and only when its own checksum holds. Whatever goes
wrong with the cache, the kernel is compiled anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm

from tilewise.config import current
from tilewise.errors import TargetError
from tilewise.simd.builder import Kernel
from tilewise.simd.environment import team_ir, trampoline_ir
from tilewise.simd.interp import interpret
from tilewise.simd.lower import YIELD, llvm_ir
from tilewise.simd.target import Target, current_target, missing_features

Entry = Callable[[int, int], int]
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_DIGEST_SIZE = 32
_LEVEL = 3  # of code generation
_PASSES = ("sroa", "simplify_cfg", "instruction_combine", "new_gvn", "simplify_cfg")
_lock = threading.Lock()
_entries: dict[tuple[str, str, bool], Entry] = {}
_libraries: list[tuple[llvm.LLJIT, llvm.ResourceTracker]] = []  # the owners of the loaded code


def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _machine(target: Target) -> llvm.TargetMachine:
    if target.triple != llvm.get_process_triple():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    found = llvm.Target.from_triple(target.triple)
    return found.create_target_machine(cpu=target.cpu, opt=_LEVEL, reloc="pic", codemodel="small")


def _optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """The parsed module after the few passes that pay: kernels are unrolled and vectorised by hand.

    The standard pipeline gives code of the same speed in three times the time.
    """
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_function_pass_manager()
    for name in _PASSES:
        getattr(passes, f"add_{name}_pass")()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module


def compile_object(text: str, target: Target) -> bytes:
    """IR text to an object file."""
    _initialize()
    machine = _machine(target)
    return bytes(machine.emit_object(_optimized(text, machine)))


def assembly(text: str, target: Target) -> str:
    """IR text to assembly, to read."""
    _initialize()
    machine = _machine(target)
    return str(machine.emit_assembly(_optimized(text, machine)))


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where they are not."""
    chosen = current().cache
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", tempfile.gettempdir())) / "tilewise"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tilewise"


def _trusted(path: Path) -> bool:
    """Owned by this user, and writable by nobody else."""
    if not hasattr(os, "getuid"):
        return True
    info = path.stat()
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_cached(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        if _trusted(path.parent) and _trusted(path):
            data = path.read_bytes()
            digest, code = data[:_DIGEST_SIZE], data[_DIGEST_SIZE:]
            if hashlib.sha256(code).digest() == digest:
                return code
    return None


def _write_cached(path: Path, code: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk or a read-only home costs time, not correctness
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _trusted(path.parent):
            return
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def cache_key(text: str, target: Target) -> str:
    """What a compiled kernel depends on: IR text, target, passes, level, and the LLVM that compiles it."""
    facts = (text, " ".join(_PASSES), str(_LEVEL), target.name, target.triple, target.cpu, repr(llvm.llvm_version_info))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _object_of(kernel: Kernel, target: Target, checked: bool) -> bytes:
    folder, text = cache_folder(), llvm_ir(kernel, target, checked)
    if folder is None:
        return compile_object(text, target)
    path = folder / f"{cache_key(text, target)}.o"
    code = _read_cached(path)
    if code is None:
        code = compile_object(text, target)
        _write_cached(path, code)
    return code


def _yield_address() -> int:
    """The system's function that lets another thread have the core: a thread that spins may hold up the very one it
    waits for."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _load(code: bytes, name: str, target: Target) -> Entry:
    _initialize()
    # JITLink puts all sections of an object into one block, so the small code model's 32-bit distances always reach
    linker = llvm.create_lljit_compiler(_machine(target), use_jit_link=True)
    builder = llvm.JITLibraryBuilder().add_object_img(code).import_symbol(YIELD, _yield_address())
    library = builder.export_symbol(name).link(linker, name)
    _libraries.append((linker, library))
    return _SIGNATURE(library[name])


def _dump(folder: str, kernel: Kernel, target: Target, text: str) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{kernel.name}.{target.name}.ll").write_text(text)
    (path / f"{kernel.name}.{target.name}.s").write_text(assembly(text, target))


def native(kernel: Kernel, target: Target, checked: bool = False) -> Entry:
    """The kernel compiled for a target of this machine (once a process), as a function of (table, worker)."""
    if missing := missing_features(target):
        raise TargetError(f"target {target.name} cannot run on this machine: it lacks {', '.join(missing)}")
    key = (kernel.name, target.name, checked)
    entry = _entries.get(key)
    if entry is None:
        with _lock:
            entry = _entries.get(key)
            if entry is None:
                if dump := current().dump:
                    _dump(str(dump), kernel, target, llvm_ir(kernel, target, checked))
                entry = _entries[key] = _load(_object_of(kernel, target, checked), kernel.name, target)
    return entry


def executable(kernel: Kernel) -> Entry:
    """The kernel in the ring that the configuration asks for: native, or interpreted word by word."""
    knobs = current()
    if knobs.interpret:
        return _interpreted(kernel, current_target())
    return native(kernel, current_target(), knobs.check >= 2)


def _glue(name: str, text: Callable[[Target], str], target: Target) -> Entry:
    """A function that is no kernel, compiled once a process."""
    with _lock:
        entry = _entries.get((name, target.name, False))
        if entry is None:
            entry = _entries[name, target.name, False] = _load(compile_object(text(target), target), name, target)
        return entry


def entry_address(entry: Entry) -> int:
    """Where the code of a native entry is; 0 for an interpreted one."""
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if isinstance(entry, _SIGNATURE) else 0


def team_address() -> int:
    """Where the code of `environment.team_ir` is."""
    return entry_address(_glue("team", team_ir, current_target()))


def _interpreted(kernel: Kernel, target: Target) -> Entry:
    """The interpreter as an entry: called back from native code that sets the floating-point environment, as NumPy's
    arithmetic obeys the caller's."""
    trampoline = _glue("trampoline", trampoline_ir, target)

    def entry(table: int, worker: int) -> int:
        failures: list[BaseException] = []

        def run(_: int, worker: int) -> int:
            try:
                return interpret(kernel, table, worker)
            except BaseException as failure:  # a callback from C cannot raise
                failures.append(failure)
                return 0

        callback = _SIGNATURE(run)
        trampoline(ctypes.cast(callback, ctypes.c_void_p).value or 0, worker)
        if failures:
            raise failures[0]
        return 0

    return entry
