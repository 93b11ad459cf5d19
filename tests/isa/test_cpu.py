"""Other processors of the x86 family, emulated: the whole of Python runs there, finds its target or refuses clearly."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tests.isa.problems import examples
from tests.support import RUNNABLE, assert_same_bits

EMULATOR = "qemu-x86_64-static"
ROOT = Path(__file__).parents[2]
SECONDS = 1200
COMPILED_THERE = (
    2  # how many examples are compiled in the emulator too, at some seconds each; the others only run there
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNNABLE or RUNNABLE[-1] != "x86-64-v3", reason="needs an x86 machine to compare with"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR}: apt-get install qemu-user-static"),
]

REFUSED = """
import numpy as np
import tilewise as tw
from tilewise.simd.target import host_features
x, out = np.ones((1, 1, 2, 16), np.float32), np.full((1, 1, 2, 16), 7, np.float32)
assert "sse4.2" in host_features() and "fma" not in host_features(), host_features()
for target in (None, "x86-64-v3", "x86-64-v4"):
    try:
        with tw.config(target=target):
            tw.attention(x, x, x, out=out, pool=1)
    except tw.TargetError as error:
        print(error)
assert (out == 7).all()
"""
COMPUTED = """
import sys
import tilewise as tw
from tests.isa.problems import examples
from tilewise.simd.target import current_target
assert current_target().name == "x86-64-v3", current_target()
with open(sys.argv[1], "wb") as file:
    for example in examples().values():
        for x in example.run():
            file.write(x.tobytes())
"""


def emulate(cpu: str, code: str, cache: str, *arguments: str) -> str:
    """Run Python code on such a processor; what it printed."""
    command = [EMULATOR, "-cpu", cpu, "-E", f"TILEWISE_CACHE={cache}", sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_processor_without_fma_is_refused() -> None:
    """Nehalem has SSE4.2 and no AVX: the error says what is needed and what each target lacks; nothing is written."""
    best, v3, v4 = emulate("Nehalem", REFUSED, "off").splitlines()
    assert "tilewise needs fused multiply-add" in best
    assert "x86-64-v3 needs avx, avx2, bmi, bmi2, f16c, fma, lzcnt, movbe" in best
    assert v3 == "target x86-64-v3 cannot run on this machine: it lacks avx, avx2, bmi, bmi2, f16c, fma, lzcnt, movbe"
    assert v4.startswith("target x86-64-v4 cannot run on this machine: it lacks avx,")


def test_processor_without_avx512_gives_the_same_bits(tmp_path: Path) -> None:
    """Haswell takes x86-64-v3 by itself, and gives the bits of this machine's best target."""
    cache, result = tmp_path / "cache", tmp_path / "result"
    cases = examples()
    for example in list(cases.values())[COMPILED_THERE:]:
        with tw.config(cache=str(cache), target="x86-64-v3"):
            example.run()
    emulate("Haswell", COMPUTED, str(cache), str(result))
    data = result.read_bytes()
    for name, example in cases.items():
        for what, wanted in zip(("o", "lse"), example.run(), strict=True):
            got = np.frombuffer(data[: wanted.nbytes], wanted.dtype).reshape(wanted.shape)
            assert_same_bits(got, wanted, f"{what} of Haswell and of this machine: {name}")
            data = data[wanted.nbytes :]
    assert not data
