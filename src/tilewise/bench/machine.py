"""The machine a benchmark runs on: what it is, how busy it was, how much memory a call took."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilewise as tw
from tilewise.runtime.pool import available_cores

CPU_FOLDER = Path("/sys/devices/system/cpu/cpu0")
BUSY_CORES, BUSY_STEAL = 0.05, 0.02  # cores' worth of time taken by others, above which a figure is doubtful
# Columns of a cpu line of /proc/stat that count as work; guest time is part of user time.
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 0, 1, 2, 5, 6, 7


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _kilobytes(text: str, name: str) -> int | None:
    """Bytes, of a line `name:  123 kB`."""
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    return None


def caches() -> str:
    """`L1 48K, L2 2048K, L3 ...`, of data, as the first core sees them."""
    found = {}
    for index in sorted(CPU_FOLDER.glob("cache/index*")):
        if _read(index / "type") != "Instruction":
            found[f"L{_read(index / 'level')}"] = _read(index / "size")
    return ", ".join(f"{level} {size}" for level, size in found.items())


def facts() -> dict[str, Any]:
    """What figures depend on, for a report. Nothing that names the machine itself."""
    from importlib import metadata

    from tilewise.cli.info import processor

    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]
    total = _kilobytes(_read("/proc/meminfo"), "MemTotal")
    return {
        "cpu": processor(),
        "cores": available_cores(),
        "cores_of_machine": os.cpu_count(),
        "caches": caches(),
        "memory_bytes": total,
        "huge_pages": pages,
        "virtual": "hypervisor" in _read("/proc/cpuinfo"),
        "system": f"{platform.system()} {platform.machine()}",
        "tilewise": tw.__version__,
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "llvmlite": metadata.version("llvmlite"),
    }


@dataclass(frozen=True)
class Usage:
    """Seconds of processor time on our cores so far: of everybody, stolen by the host, and our own."""

    wall: float
    everybody: float
    stolen: float
    own: float


def parse_stat(text: str, cores: Iterable[int], tick: int) -> tuple[float, float]:
    """(seconds of work, seconds stolen) on the cores, of the text of /proc/stat."""
    wanted = {f"cpu{core}" for core in cores}
    work = stolen = 0
    for name, *columns in (line.split() for line in text.splitlines() if line.startswith("cpu")):
        if name in wanted:
            ticks = [*map(int, columns), *[0] * STEAL]  # not every system fills every column
            work += sum(ticks[x] for x in (USER, NICE, SYSTEM, IRQ, SOFTIRQ))
            stolen += ticks[STEAL]
    return work / tick, stolen / tick


def _seconds_of_process(pid: int, tick: int) -> float:
    """Processor time of a process; its name, in parentheses, may hold spaces."""
    columns = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(columns[11]) + int(columns[12])) / tick if columns else 0.0


def usage(workers: Iterable[int] = ()) -> Usage | None:
    """The counters now; `workers` are processes of ours. None where the system does not tell."""
    stat = _read("/proc/stat")
    if not stat:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    work, stolen = parse_stat(stat, os.sched_getaffinity(0), tick)
    mine = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # the latter have ended
    own = sum(x.ru_utime + x.ru_stime for x in mine) + sum(_seconds_of_process(pid, tick) for pid in workers)
    return Usage(time.monotonic(), work, stolen, own)


def disturbance(before: Usage | None, after: Usage | None) -> dict[str, Any]:
    """What others took of our cores between two readings, in cores, and whether that is too much."""
    load = round(os.getloadavg()[0], 2)
    if before is None or after is None:
        return {"known": False, "load": load, "busy": False}
    wall = max(after.wall - before.wall, 1e-9)
    others = max(0.0, (after.everybody - before.everybody) - (after.own - before.own)) / wall
    steal = max(0.0, after.stolen - before.stolen) / wall
    return {
        "known": True, "load": load, "others": round(others, 3), "steal": round(steal, 3),
        "busy": others > BUSY_CORES or steal > BUSY_STEAL,
    }  # fmt: skip


def peak_growth(call: Callable[[], Any]) -> tuple[Any, int | None]:
    """(result, bytes by which resident memory grew at its peak during the call, results included); None: unknown.

    Free memory is handed back first: what malloc or NumPy keep for the next call would hide what the call takes.
    """
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return call(), None
    trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    except OSError:
        return call(), None
    before = _kilobytes(_read("/proc/self/status"), "VmRSS")
    result = call()
    peak = _kilobytes(_read("/proc/self/status"), "VmHWM")
    return result, (None if before is None or peak is None else max(0, peak - before))
