"""PyTorch's own threads as the workers of a call.

Between two operators PyTorch's threads wait awake for the next one, so workers of ours would have to fight with them
for the cores: inside a model two workers were slower than one. Its OpenMP runtime hands a function to these threads
(`GOMP_parallel`, the call that compilers make for `#pragma omp parallel`), and the kernels that we give them claim
their work items as ever.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from tilewise.frontends.tensors import torch
from tilewise.runtime.pool import Pool
from tilewise.simd.jit import entry_address, team_address

_PROCESS = os.getpid()
_LIBRARY = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")


class OpenMPPool(Pool):
    """A pool whose workers are those of PyTorch's OpenMP, where a kernel is all that they have to run."""

    def __init__(self, threads: int, path: str) -> None:
        super().__init__(threads)
        self._parallel = ctypes.CDLL(path).GOMP_parallel
        self._parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        self._parallel.restype = None
        self._function = team_address()

    def run_native(self, workers: int, entry: Callable[[int, int], int], table: int) -> bool:
        """See `Pool.run_native`. OpenMP may give us fewer threads than we ask for: they then claim what there is."""
        if os.getpid() != _PROCESS:  # the child of a fork: OpenMP's threads are gone, and it would wait for them
            return False
        kernel = entry_address(entry)
        if not kernel:  # it is interpreted
            return False
        work = (ctypes.c_int64 * 3)(kernel, table, 0)
        self._parallel(self._function, ctypes.addressof(work), workers, 0)
        return True


@functools.cache
def openmp_pool(threads: int) -> Pool | None:
    """The shared pool of that many threads of PyTorch's; None where PyTorch has none that we know how to ask."""
    path = _runtime()
    try:
        return OpenMPPool(threads, path) if path else None
    except (OSError, AttributeError):  # the file is gone, or has no such function
        return None


@functools.cache
def _runtime() -> str | None:
    """The file of the OpenMP runtime that PyTorch uses: the one that it brought, else the only one in the process."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    loaded = {name for line in maps.splitlines() if _LIBRARY.search(name := line.rpartition(" ")[2])}
    brought = {name for name in loaded if Path(name).parent.name in ("lib", "torch.libs") and "/torch" in name}
    found = brought or loaded
    return found.pop() if len(found) == 1 else None
