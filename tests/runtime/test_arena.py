"""Scratch memory: alignment, figures, rewinding, reuse, the limit, and redzones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.config import config, reload
from tilewise.errors import ArenaExhausted, InvalidArgument, KernelError
from tilewise.runtime import arena as module
from tilewise.runtime.arena import Arena, Mark

SIZES = [0, 1, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 10007]


@pytest.fixture(autouse=True)
def default_checks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TILEWISE_CHECK", raising=False)
        reload()
        yield
    reload()


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


def rounded(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def figures(arena: Arena) -> tuple[int, int, int]:
    return arena.used, arena.high_water, arena.capacity


@pytest.mark.parametrize("check", [0, 2])
@pytest.mark.parametrize("nbytes", SIZES)
def test_alloc(nbytes: int, check: int) -> None:
    arena = Arena()
    with config(check=check):
        for count in range(1, 4):
            x = arena.alloc(nbytes)
            assert x.shape == (nbytes,)
            assert x.dtype == np.uint8
            assert x.flags.c_contiguous
            assert x.flags.writeable
            assert address(x) % 64 == 0
            assert arena.used == arena.high_water == count * rounded(nbytes)


def test_figures_by_hand() -> None:
    arena = Arena()
    assert figures(arena) == (0, 0, 0)
    arena.alloc(100)
    mark = arena.mark()
    arena.alloc(1)
    arena.alloc(64)
    assert (arena.used, arena.high_water) == (256, 256)
    arena.rewind(mark)
    assert (arena.used, arena.high_water) == (128, 256)
    arena.alloc(20)
    assert (arena.used, arena.high_water) == (192, 256)
    arena.reset_high_water()
    assert arena.high_water == 192
    arena.rewind(mark)
    assert (arena.used, arena.high_water) == (128, 192)


def test_repr_shows_the_figures() -> None:
    arena = Arena(capacity=5000, limit=6000)
    arena.alloc(100)
    assert repr(arena) == "Arena(used=128, high_water=128, capacity=5056, limit=6000)"
    assert "Arena" not in repr(arena.mark())


def test_capacity_is_allocated_at_once() -> None:
    arena = Arena(capacity=1 << 20)
    assert arena.capacity == 1 << 20
    with mock.patch.object(module, "aligned", side_effect=AssertionError):
        arena.alloc(1 << 19)
        arena.alloc(1 << 19)
    assert arena.capacity == 1 << 20


@pytest.mark.parametrize("value", [2.0, "64", None, True, np.float32(3)])
def test_sizes_that_are_no_int(value: Any) -> None:
    for call in (Arena().alloc, Arena, lambda x: Arena(limit="64" if x is None else x)):
        with pytest.raises(TypeError, match="expected an int, in bytes"):
            call(value)


def test_sizes_that_are_refused() -> None:
    arena = Arena(limit=1000)
    arena.alloc(1)
    before = figures(arena)
    for call in (arena.alloc, Arena, lambda x: Arena(limit=x)):
        with pytest.raises(InvalidArgument, match="got -1, expected 0 bytes or more"):
            call(-1)
    with pytest.raises(InvalidArgument, match="capacity: got 65 bytes, expected at most the limit of 64 bytes"):
        Arena(65, 64)
    assert figures(arena) == before
    assert arena.alloc(np.int64(7)).shape == (7,)  # any integer will do


def test_no_bytes_at_all() -> None:
    arenas = [Arena(limit=0) for _ in range(50)]
    arrays = [arena.alloc(0) for arena in arenas]
    assert all(address(x) % 64 == 0 for x in arrays)
    assert all(arena.used == arena.high_water == 0 for arena in arenas)


def test_limit_counts_in_lines() -> None:
    arena = Arena(limit=100)
    with pytest.raises(ArenaExhausted):
        arena.alloc(65)
    arena.alloc(64)


def test_limit_is_exact_and_names_the_figures() -> None:
    arena = Arena(limit=256)
    first = arena.alloc(100)
    first[:] = 7
    before, blocks = figures(arena), list(arena._blocks)
    with pytest.raises(
        ArenaExhausted, match=r"requested 129 bytes \(192 .*128 bytes used.*limit of 256 bytes"
    ) as error:
        arena.alloc(129)
    assert isinstance(error.value, MemoryError)
    assert figures(arena) == before
    assert all(a is b for a, b in zip(blocks, arena._blocks, strict=True))
    assert (first == 7).all()
    arena.alloc(128)
    assert arena.used == arena.limit == 256
    with pytest.raises(ArenaExhausted):
        arena.alloc(1)
    arena.alloc(0)


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 63, 1 << 80])
def test_more_than_the_system_has(nbytes: int) -> None:
    with pytest.raises(ArenaExhausted, match=f"requested {nbytes} bytes"):
        Arena(nbytes)
    arena = Arena()
    arena.alloc(64)
    before = figures(arena)
    with pytest.raises(ArenaExhausted, match=f"requested {nbytes} bytes .* 64 bytes used and no limit"):
        arena.alloc(nbytes)
    assert figures(arena) == before


def test_no_memory_to_join_blocks_is_no_failure() -> None:
    arena = Arena()
    empty = arena.mark()
    arena.alloc(5000)
    arena.alloc(6000)
    arena.rewind(empty)
    capacity = arena.capacity
    with mock.patch.object(np, "empty", side_effect=MemoryError):
        arena.alloc(5000)[:] = 1
        arena.alloc(6000)[:] = 2
        with pytest.raises(ArenaExhausted):
            arena.alloc(1 << 20)
    assert arena.used == rounded(5000) + rounded(6000)
    assert arena.capacity == capacity


def test_generous_growth_falls_back_to_what_is_needed() -> None:
    arena, empty = Arena(capacity=1 << 20), np.empty
    arena.alloc(1 << 20)

    def tight(nbytes: int, dtype: Any) -> Any:
        if nbytes > 1 << 16:
            raise MemoryError
        return empty(nbytes, dtype)

    with mock.patch.object(np, "empty", tight):
        assert arena.alloc(1000).shape == (1000,)


def test_marks_of_other_arenas_and_dead_marks() -> None:
    arena, other = Arena(), Arena()
    bottom = arena.mark()
    arena.alloc(64)
    middle = arena.mark()
    arena.alloc(64)
    top = arena.mark()
    with pytest.raises(InvalidArgument, match="another arena"):
        other.rewind(bottom)
    arena.rewind(middle)
    with pytest.raises(InvalidArgument, match="ahead"):
        arena.rewind(top)
    assert arena.used == 64
    arena.alloc(64)  # as deep as `top` was, yet not what it was taken after
    with pytest.raises(InvalidArgument, match="ahead"):
        arena.rewind(top)
    assert arena.used == 128
    arena.rewind(middle)
    arena.rewind(middle)
    assert arena.used == 64
    arena.rewind(bottom)
    with pytest.raises(InvalidArgument, match="ahead"):
        arena.rewind(middle)


def test_rewound_memory_is_used_again() -> None:
    arena = Arena()
    mark = arena.mark()
    first = arena.alloc(1000)
    arena.rewind(mark)
    assert address(arena.alloc(1000)) == address(first)


def test_scattered_use_ends_in_one_block() -> None:
    arena = Arena()
    empty = arena.mark()
    for _ in range(50):
        arena.alloc(3000)
    assert len(arena._blocks) > 1
    arena.rewind(empty)
    arena.alloc(1)
    assert len(arena._blocks) == 1
    assert arena.capacity >= 50 * rounded(3000)


def test_blocks_behind_a_live_one_are_joined() -> None:
    arena = Arena(capacity=4096)
    kept = arena.alloc(4000)
    kept[:] = 3
    mark = arena.mark()
    for _ in range(50):
        arena.alloc(3000)[:] = 4
    arena.rewind(mark)
    arena.alloc(3000)[:] = 5
    assert len(arena._blocks) == 2
    assert (kept == 3).all()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.sampled_from(SIZES) | st.integers(0, 9000)),
        st.tuples(st.just("mark"), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 20)),
    ),
    max_size=40,
)


class Model:
    """An arena that is a list of sizes, beside the real one."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.live: list[tuple[Any, int]] = []  # an array, and the byte that it was filled with
        self.marks: list[tuple[Mark, int]] = [(arena.mark(), 0)]
        self.high_water = 0
        self.count = 0

    @property
    def used(self) -> int:
        return sum(rounded(x.size) for x, _ in self.live)

    def step(self, word: str, n: int) -> None:
        if word == "alloc":
            if self.arena.limit is not None and self.used + rounded(n) > self.arena.limit:
                with pytest.raises(ArenaExhausted):
                    self.arena.alloc(n)
            else:
                x = self.arena.alloc(n)
                self.count += 1
                x[:] = self.count % 251
                self.live.append((x, self.count % 251))
        elif word == "mark":
            self.marks.append((self.arena.mark(), len(self.live)))
        else:
            n %= len(self.marks)
            mark, depth = self.marks[n]
            del self.marks[n + 1 :]
            self.arena.rewind(mark)
            del self.live[depth:]
        self.high_water = max(self.high_water, self.used)

    def compare(self) -> None:
        assert self.arena.used == self.used
        assert self.arena.high_water == self.high_water
        assert self.arena.capacity >= self.used
        spans = sorted((address(x), x.size) for x, _ in self.live if x.size)
        assert all(start % 64 == 0 for start, _ in spans)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
        assert all((x == fill).all() for x, fill in self.live)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    capacity=st.sampled_from([0, 64, 5000]),
    limit=st.sampled_from([None, 8010, 40000]),
    check=st.sampled_from([0, 2]),
)
def test_against_a_list_of_sizes(steps: list[tuple[str, int]], capacity: int, limit: int | None, check: int) -> None:
    model = Model(Arena(capacity, limit))
    with config(check=check):
        for word, n in steps:
            model.step(word, n)
            model.compare()
        model.step("rewind", 0)
        model.compare()
    assert model.arena.used == 0


@settings(max_examples=100, deadline=None)
@given(before=st.integers(0, 9000), steps=STEPS)
def test_the_third_pass_allocates_nothing(before: int, steps: list[tuple[str, int]]) -> None:
    arena = Arena()
    arena.alloc(before)
    for turn in range(4):
        with mock.patch.object(module, "aligned", wraps=module.aligned) as aligned:
            model = Model(arena)
            for word, n in steps:
                model.step(word, n)
            model.step("rewind", 0)
        assert aligned.call_count == 0 or turn < 2, turn


@pytest.mark.parametrize("nbytes", [4, 64, 100])
def test_check_2_hands_out_nan(nbytes: int) -> None:
    arena = Arena()
    mark = arena.mark()
    arena.alloc(nbytes)[:] = 0
    arena.rewind(mark)
    with config(check=2):
        assert np.isnan(arena.alloc(nbytes).view(np.float32)).all()


@pytest.mark.parametrize("nbytes", [1, 60, 64, 100])
def test_check_2_finds_damage(nbytes: int) -> None:
    for byte in (-64, -1, nbytes, rounded(nbytes) + 63):
        arena = Arena()
        with config(check=2):
            mark = arena.mark()
            arena.alloc(10)
            victim = arena.alloc(nbytes)
            arena.alloc(10)
            memory = arena._blocks[0]
            offset = address(victim) - address(memory) + byte
            memory[offset] ^= 0x10
            with pytest.raises(KernelError, match=f"allocation 2 of {nbytes} bytes: somebody wrote to byte {byte},"):
                arena.rewind(mark)
        assert arena.used == 0  # rewound nevertheless
        arena.rewind(mark)


def test_check_2_names_the_nearest_byte() -> None:
    arena = Arena()
    mark = arena.mark()
    with config(check=2):
        victim = arena.alloc(10)
    memory = arena._blocks[0]
    start = address(victim) - address(memory)
    memory[[start - 9, start - 3, start + 12, start + 20]] = 0
    with pytest.raises(KernelError, match="somebody wrote to byte -3,"):
        arena.rewind(mark)


def test_checks_may_change_between_alloc_and_rewind() -> None:
    arena = Arena()
    mark = arena.mark()
    arena.alloc(100)[:] = 1
    with config(check=2):
        guarded = arena.alloc(100)
        guarded[:] = 2
    arena.alloc(100)[:] = 3
    memory = arena._blocks[0]
    memory[address(guarded) - address(memory) - 1] = 0
    with pytest.raises(KernelError, match="allocation 2 of 100 bytes: somebody wrote to byte -1,"):
        arena.rewind(mark)
    with config(check=2):
        arena.alloc(100)
        arena.rewind(mark)


def test_redzones_do_not_count() -> None:
    with config(check=2):
        arena = Arena(limit=256)
        arena.alloc(128)
        arena.alloc(128)
        assert (arena.used, arena.high_water) == (256, 256)
        with pytest.raises(ArenaExhausted):
            arena.alloc(1)
