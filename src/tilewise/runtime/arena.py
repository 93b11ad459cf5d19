"""Scratch memory by bump allocation: take a mark, allocate, rewind to the mark."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tilewise.config import current
from tilewise.errors import ArenaExhausted, InvalidArgument, KernelError

__all__ = ["ALIGNMENT", "Arena", "Mark", "round_up"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_SMALLEST_BLOCK = 4096  # bytes: what malloc hands out cheaply, so that many small requests do not make many blocks
_REDZONE = ALIGNMENT  # bytes on either side of an allocation
_REDZONE_BYTE = 0xA5
_NAN_BYTE = 0xFF  # four of them are an f32 NaN


def round_up(nbytes: int) -> int:
    """The bytes that an allocation of `nbytes` counts for: the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Mark:
    """A position in one arena, to be handed back to `Arena.rewind`. It dies with the allocation it was taken after."""

    arena: Arena = field(repr=False)
    depth: int
    serial: int


class _Allocation(NamedTuple):
    """One live allocation. The arena's position is the end of its last one."""

    serial: int  # never used again, so it tells whether a mark still stands
    block: int  # index into the arena's blocks
    start: int  # of the caller's bytes in the block
    nbytes: int
    end: int  # in the block, behind the padding and the redzone
    used: int  # the arena's figure with this allocation
    guarded: bool


_BOTTOM = _Allocation(serial=0, block=0, start=0, nbytes=0, end=0, used=0, guarded=False)


class Arena:
    """Scratch memory that grows to what its use needs and is then used again and again without a further allocation.

    Every size counts as its next multiple of 64 bytes, in `used`, `high_water` and against the limit. The figures are
    thus the same whatever blocks the memory lies in. Blocks are the arena's own business: it adds one when the others
    are full, keeps those that a rewind frees, and joins those that hold nothing, so that repeated use ends in one.

    Not thread-safe: workers get slices of memory that was allocated before they start. With ``TILEWISE_CHECK=2`` memory
    is handed out full of NaN, between redzones that `rewind` verifies.

    Args:
        capacity: bytes to allocate now.
        limit: bytes that may be in use at a time; None: what the system gives. The blocks may take more than that when
            the use is scattered over several.

    Raises:
        InvalidArgument: a size is negative, or capacity exceeds the limit.
        TypeError: a size is not an int.
        ArenaExhausted: the system does not have capacity bytes.
    """

    def __init__(self, capacity: int = 0, limit: int | None = None) -> None:
        wanted = round_up(_size("capacity", capacity))
        self._limit = None if limit is None else _size("limit", limit)
        if self._limit is not None and capacity > self._limit:
            raise InvalidArgument(f"capacity: got {capacity} bytes, expected at most the limit of {limit} bytes")
        self._blocks: list[Bytes] = []
        self._live = [_BOTTOM]
        self._serials = itertools.count(1)
        self._high_water = 0
        if wanted:
            self._blocks.append(self._new_block(wanted, wanted))

    @property
    def used(self) -> int:
        """Bytes in live allocations, each rounded up to 64; without redzones."""
        return self._live[-1].used

    @property
    def high_water(self) -> int:
        """The largest `used` since the arena was made, or since `reset_high_water`."""
        return self._high_water

    @property
    def capacity(self) -> int:
        """Bytes that the arena holds from the system, in use or not."""
        return sum(block.size for block in self._blocks)

    @property
    def limit(self) -> int | None:
        """Bytes that may be in use at a time; None: no limit."""
        return self._limit

    def alloc(self, nbytes: int) -> Bytes:
        """Scratch of `nbytes` bytes: uint8 [nbytes], C contiguous, at a multiple of 64 bytes, with arbitrary contents.

        It belongs to the caller until the arena is rewound to an earlier mark; then the next caller writes to it.

        Raises:
            InvalidArgument: nbytes is negative.
            TypeError: nbytes is not an int.
            ArenaExhausted: it does not fit under the limit, or the system has no more memory. Nothing changed.
        """
        nbytes = _size("nbytes", nbytes)
        size = round_up(nbytes)
        if self._limit is not None and self.used + size > self._limit:
            raise self._exhausted(nbytes)
        redzone = _REDZONE if current().check >= 2 else 0
        block, offset = self._room(nbytes, size + 2 * redzone)
        start, end = offset + redzone, offset + size + 2 * redzone
        if redzone:
            self._blocks[block][offset:end] = _REDZONE_BYTE
            self._blocks[block][start : start + nbytes] = _NAN_BYTE
        used = self.used + size
        self._live.append(_Allocation(next(self._serials), block, start, nbytes, end, used, guarded=redzone > 0))
        self._high_water = max(self._high_water, used)
        return self._blocks[block][start : start + nbytes]

    def mark(self) -> Mark:
        """The present position. It stays good until a rewind frees what was allocated last before it."""
        return Mark(self, len(self._live) - 1, self._live[-1].serial)

    def rewind(self, mark: Mark) -> None:
        """Free everything that was allocated since `mark` was taken. The mark stays good.

        Raises:
            InvalidArgument: the mark is of another arena, or lies ahead of the present position. Nothing changed.
            KernelError: somebody wrote to a redzone. The arena is rewound nevertheless.
        """
        if mark.arena is not self:
            raise InvalidArgument("mark: got a mark of another arena, expected one of this arena")
        if mark.depth >= len(self._live) or self._live[mark.depth].serial != mark.serial:
            raise InvalidArgument(f"mark: got {mark}, which lies ahead of the arena's position; it was rewound before")
        freed = self._live[mark.depth + 1 :]
        del self._live[mark.depth + 1 :]
        for allocation in freed:
            if allocation.guarded:
                self._verify(allocation)

    def reset_high_water(self) -> None:
        """Start to measure `high_water` anew, from what is in use now."""
        self._high_water = self.used

    def __repr__(self) -> str:
        return f"Arena(used={self.used}, high_water={self.high_water}, capacity={self.capacity}, limit={self.limit})"

    def _room(self, nbytes: int, size: int) -> tuple[int, int]:
        """Find `size` contiguous bytes behind the last allocation; return their block and their offset in it."""
        top = self._live[-1]
        first_spare = top.block + (top.end > 0)
        spare = self._blocks[first_spare:]
        if top.end > 0 and top.end + size <= self._blocks[top.block].size:
            return top.block, top.end
        total = sum(block.size for block in spare)
        if len(spare) != 1 or total < size:
            try:
                spare = [self._new_block(nbytes, size, total)]
            except ArenaExhausted:
                if not spare or spare[0].size < size:
                    raise
            self._blocks[first_spare:] = spare
        return first_spare, 0

    def _new_block(self, nbytes: int, size: int, spare: int = 0) -> Bytes:
        """A block to replace `spare` bytes of empty ones. If those were too small, the arena doubles."""
        generous = spare
        if size > spare:
            generous = max(self.capacity, _SMALLEST_BLOCK)
            if self._limit is not None:
                generous = min(generous, self._limit - self.used)
        for attempt in (max(size, generous), size):
            try:
                return aligned(attempt)
            except ArenaExhausted:
                continue
        raise self._exhausted(nbytes)

    def _exhausted(self, nbytes: int) -> ArenaExhausted:
        limit = "no limit but the system's" if self._limit is None else f"a limit of {self._limit} bytes"
        return ArenaExhausted(
            f"arena: requested {nbytes} bytes ({round_up(nbytes)} in lines of {ALIGNMENT}) "
            f"with {self.used} bytes used and {limit}"
        )

    def _verify(self, allocation: _Allocation) -> None:
        block, start, nbytes = self._blocks[allocation.block], allocation.start, allocation.nbytes
        before = np.flatnonzero(block[start - _REDZONE : start] != _REDZONE_BYTE) - _REDZONE
        behind = np.flatnonzero(block[start + nbytes : allocation.end] != _REDZONE_BYTE) + nbytes
        if before.size or behind.size:
            byte = before[-1] if before.size else behind[0]
            raise KernelError(
                f"scratch allocation {allocation.serial} of {nbytes} bytes: somebody wrote to byte {byte}, outside it"
            )


def aligned(nbytes: int) -> Bytes:
    """`nbytes` bytes of memory of their own, at a multiple of 64 bytes: scratch for one call without an arena.

    Raises:
        ArenaExhausted: the system does not have them.
    """
    nbytes = max(nbytes, ALIGNMENT)  # an empty slice would begin where the array does, which need not be aligned
    try:
        raw: Bytes = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    except (MemoryError, OverflowError, ValueError):  # NumPy has three ways to say that it is too much
        raise ArenaExhausted(f"arena: requested {nbytes} bytes, more than the system gives") from None
    address: int = raw.__array_interface__["data"][0]
    start = -address % ALIGNMENT
    return raw[start : start + nbytes]


def _size(name: str, value: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected an int, in bytes")
    try:
        nbytes = index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, expected an int, in bytes") from None
    if nbytes < 0:
        raise InvalidArgument(f"{name}: got {nbytes}, expected 0 bytes or more")
    return nbytes
