"""Partial loads and stores that end at a page which may not be touched: run by test_memory.py in a process of its own.

    python -m tests.simd.guard_page RING within|load|store

`within` touches what it may; `load` and `store` go one element too far, which must end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from tests.simd.support import compiled
from tilewise.config import config
from tilewise.simd.builder import F32, I64, LANES, Builder, Int

NO_ACCESS = 0


def page_before_a_guard() -> tuple[Any, int]:
    """(the owner of the memory, the address where the page that may not be touched begins)."""
    owner = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    middle = ctypes.addressof(ctypes.c_char.from_buffer(owner)) + mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(middle), ctypes.c_size_t(mmap.PAGESIZE), NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    return owner, middle


def parts(b: Builder, table: Int, worker: Int) -> None:
    """Copy table[2] lanes at table[0] to the vector at table[1], and back. Extents are endless: the page guards."""
    source, copy, count = (b.load_int(b.pointer(table + 8 * i, 0, 1 << 62, I64)) for i in range(3))
    p, q = (b.pointer(address, 0, 1 << 62, F32) for address in (source, copy))
    x = b.load_part(p, count)
    b.store(q, x)
    b.store_part(p, x, count)


def whole(b: Builder, table: Int, worker: Int) -> None:
    """A whole load from the end, or a whole store there (table[2] = 1)."""
    source, copy, stores = (b.load_int(b.pointer(table + 8 * i, 0, 1 << 62, I64)) for i in range(3))
    p, q = (b.pointer(address, 0, 1 << 62, F32) for address in (source, copy))
    for _ in b.when(stores.equals(0)):
        b.store(q, b.load(p))
    for _ in b.when(stores.equals(1)):
        b.store(p, b.load(q))


def main(ring: str, mode: str) -> int:
    owner, end = page_before_a_guard()
    before = np.frombuffer(owner, np.float32, mmap.PAGESIZE // 4)
    before[:] = np.arange(1, len(before) + 1)
    copy = np.zeros(LANES, np.float32)
    if mode != "within":
        table = np.array([end - 4 * (LANES - 1), copy.ctypes.data, int(mode == "store")], np.int64)
        return compiled(whole, ring)(table.ctypes.data, 0)
    entry = compiled(parts, ring)
    for count in range(LANES + 1):
        table = np.array([end - 4 * count, copy.ctypes.data, count], np.int64)
        assert entry(table.ctypes.data, 0) == 0
        assert copy.tolist() == [*before[len(before) - count :].tolist(), *[0.0] * (LANES - count)], count
    assert before.tolist() == list(range(1, len(before) + 1))
    return 0


if __name__ == "__main__":
    with config(cache="off"):
        sys.exit(main(*sys.argv[1:]))
