"""Faults that need a process of their own: what the user's machine refuses, and interrupts that may hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import case

ROOT = Path(__file__).parents[2]

# Prints the sum of the bits of o and lse. Nothing but a kernel of ours tells what they are.
CALL = """
import hashlib
import tilewise as tw
from tests.support import case
o, lse = case(1, 2, 1, 5, 70, 8, 5, bc=4, span=8, causal=True, q_offset=65).run()
print(hashlib.sha256(o.tobytes() + lse.tobytes()).hexdigest())
"""


def python(program: str, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: x for name, x in os.environ.items() if not name.startswith("TILEWISE_")}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


def bits(**variables: str) -> str:
    done = python(CALL, **variables)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "not a word, where only the cache is at fault"
    return done.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    return bits(TILEWISE_CACHE="off")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage(path: Path) -> None:
    """Every byte of the code inverted, the checksum left as it is."""
    data = path.read_bytes()
    path.write_bytes(data[:32] + bytes(255 - x for x in data[32:]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [truncate, damage, empty, unreadable])
def test_cache_file_that_is_damaged(spoil: Callable[[Path], None], tmp_path: Path, expected: str) -> None:
    folder = tmp_path / "cache"
    assert bits(TILEWISE_CACHE=str(folder)) == expected
    files = list(folder.glob("*.o"))
    assert files
    for path in files:
        spoil(path)
    for _ in range(2):
        assert bits(TILEWISE_CACHE=str(folder)) == expected


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o500, 0o000])
def test_cache_folder_of_any_mode(mode: int, tmp_path: Path, expected: str) -> None:
    """Others can write to it, or nobody can."""
    folder = tmp_path / "cache"
    assert bits(TILEWISE_CACHE=str(folder)) == expected
    for path in folder.iterdir():
        damage(path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.chmod(mode)
    try:
        assert bits(TILEWISE_CACHE=str(folder)) == expected
    finally:
        folder.chmod(0o700)
    if mode & 0o022:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "neither read nor written"


@pytest.mark.parametrize("home", ["missing/below", "file", "/proc/nobody", "/dev/full"])
def test_home_that_cannot_be_written(home: str, tmp_path: Path, expected: str) -> None:
    (tmp_path / "file").write_text("in the way")
    assert bits(HOME=str(tmp_path / home), XDG_CACHE_HOME=str(tmp_path / home)) == expected


def test_full_disk(tmp_path: Path, expected: str) -> None:
    """The system refuses the file's bytes: a limit on the size of files stands for the disk."""
    folder = tmp_path / "cache"
    program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
{CALL}
"""
    if sys.platform == "win32":
        pytest.skip("needs resource limits")
    done = python(program, TILEWISE_CACHE=str(folder))
    assert (done.stdout, done.stderr) == (expected, "")
    assert not list(folder.iterdir()), "nothing half-written stays"
    assert bits(TILEWISE_CACHE=str(folder)) == expected


def test_memory_that_runs_out(tmp_path: Path) -> None:
    """The address space is limited by the system: MemoryError, and the same process computes what does fit."""
    if sys.platform != "linux":
        pytest.skip("needs the limit of the address space")
    program = """
import resource
import numpy as np
import tilewise as tw
q = np.ones((1, 1, 1, 16), np.float32)
arena = tw.Arena()
tw.attention(q, q, q, arena=arena, pool=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
rows = np.broadcast_to(q, (1, 1, 4_000_000, 16))
for _ in range(3):
    try:
        tw.attention(rows, q, q, arena=arena, pool=1)
    except MemoryError:
        print("MemoryError", arena.used)
print(tw.attention(q, q, q, arena=arena, pool=1).sum())
"""
    done = python(program, TILEWISE_CACHE=str(tmp_path))
    assert done.stdout.split() == ["MemoryError", "0"] * 3 + ["16.0"], done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
@pytest.mark.parametrize("ring", ["native", "interpreted"])
def test_interrupts_while_spans_wait_for_each_other(ring: str) -> None:
    """Many interrupts at any moment; a worker that waits for the span of an interrupted one must not wait for ever."""
    program = f"""
import signal
import numpy as np
import tilewise as tw
import tilewise.plan
from tests.support import case
tilewise.plan.SMALLEST_JOB = tilewise.plan.BATCH_FLOPS = 1

class Stop(BaseException):
    pass

def interrupt(*_):
    raise Stop

signal.signal(signal.SIGALRM, interrupt)
interpret = {ring == "interpreted"}
c = case(Tq=4, Tk=1500 if interpret else 60_000, D=8, Dv=5, bc=4, span=8)
expected = case(Tq=4, Tk=30, D=8, Dv=5, bc=4, span=8).run(pool=1)
stopped = 0
with tw.config(interpret=interpret):
    for n in range(8 if interpret else 40):
        pool = tw.Pool(3)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.01 * n if interpret else 0.0005 + 0.0002 * n)
            c.run(pool=pool)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Stop:
            stopped += 1
        again = case(Tq=4, Tk=30, D=8, Dv=5, bc=4, span=8).run(pool=pool)
        assert all((x == y).all() for x, y in zip(again, expected))
        pool.close()
print("stopped" if stopped else "never")
"""
    try:
        done = python(program, seconds=60)
    except subprocess.TimeoutExpired:
        pytest.fail("a worker waits for ever for the span of one that was interrupted")
    assert done.stdout == "stopped\n", done.stderr


def test_these_programs_can_tell() -> None:
    """Another problem has other bits."""
    c = case(1, 2, 1, 5, 70, 8, 5, bc=4, span=16, causal=True, q_offset=65)
    assert (c.run()[0] != c.change(span=8).run()[0]).any()
