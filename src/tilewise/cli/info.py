"""`tilewise info`: what this machine offers and how tilewise is set up."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata

import click
import numpy as np

import tilewise as tw
from tilewise.cli.terminal import fact
from tilewise.config import current, describe
from tilewise.runtime.pool import available_cores
from tilewise.simd import jit
from tilewise.simd.target import TARGETS, current_target, host_features, missing_features


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def targets() -> str:
    lines = []
    for name, target in TARGETS.items():
        missing = missing_features(target)
        lines.append(f"{name}: " + (f"cannot run here, needs {', '.join(missing)}" if missing else "can run here"))
    return "\n".join(lines)


def cache_state() -> str:
    folder = jit.cache_folder()
    if folder is None:
        return "off"
    try:
        objects = [entry.stat() for entry in os.scandir(folder) if entry.name.endswith(".o")]
    except FileNotFoundError:
        return f"{folder}: not made yet"
    except OSError as error:
        return f"{folder}: cannot be used: {error.strerror}"
    kernels = f"{len(objects)} kernels, {sum(x.st_size for x in objects) / 1e6:.1f} MB"
    info = folder.stat()
    ours = not hasattr(os, "getuid") or (info.st_uid == os.getuid() and not info.st_mode & 0o022)
    return f"{folder}: {kernels}" + ("" if ours else "; not used: others own it or can write to it")


@click.command()
def info() -> None:
    """Versions, processor, targets, threads, cache and knobs."""
    settings = current()
    llvm = ".".join(str(x) for x in vars(jit)["llvm"].llvm_version_info)  # only simd/ may import llvmlite itself
    fact("tilewise", tw.__version__)
    fact("python", f"{platform.python_version()} ({platform.python_implementation()})")
    fact("numpy", np.__version__)
    fact("llvmlite", f"{metadata.version('llvmlite')}, LLVM {llvm}")
    fact("machine", f"{platform.system()} {platform.machine()}, {processor()}")
    wanted = {feature for target in TARGETS.values() for feature in target.features}
    fact("features", " ".join(sorted(wanted & host_features())) or "none that a target needs")
    fact("targets", targets())
    try:
        chosen = current_target().name
    except tw.TargetError as error:
        chosen = f"none: {error}"
    fact("target", chosen)
    fact("threads", f"{settings.threads or available_cores()} of {available_cores()} cores that this process may use")
    fact("cache", cache_state())
    values = dataclasses.asdict(settings)
    width = max(len(knob.variable) for knob in describe())
    fact("knobs", "\n".join(f"{knob.variable:<{width}} {values[knob.name]!s:<6} {knob.doc}" for knob in describe()))
