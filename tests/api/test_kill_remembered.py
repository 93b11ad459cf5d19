"""What is remembered of a call (its plan, its kernel) is used again only where nothing differs that it depends on.

The bits of a row are the same on every target, so a wrong target shows in the plan and in the code, not in a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import RUNNABLE, assert_same_bits, case
from tilewise import entry
from tilewise.runtime import launch
from tilewise.simd import jit


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prepared call of each call of attention, in order; a batch whose rows are alike is one."""
    seen: list[Any] = []

    def watched(calls: Any, *rest: Any) -> Any:
        (call,) = calls
        seen.append(call)
        return launch.launch(calls, *rest)

    monkeypatch.setattr(entry, "_memory", {})
    monkeypatch.setattr(entry, "launch", watched)
    monkeypatch.setattr(entry, "short_way", lambda *_: None)
    return seen


@pytest.mark.skipif(len(RUNNABLE) < 2, reason=f"this machine runs one target only: {RUNNABLE}")
def test_each_target_has_a_plan_and_a_kernel_of_its_own(calls: list[Any]) -> None:
    c = case(1, 2, 1, 3, 20, 8, 5)
    for _ in range(2):
        for name in RUNNABLE:
            with tw.config(target=name):
                c.run()
    assert [call.plan.target.name for call in calls] == [*RUNNABLE, *RUNNABLE]
    for i, name in enumerate(RUNNABLE):
        assert calls[i] is calls[i + len(RUNNABLE)], f"the call for {name} was not remembered"
        shape = calls[i].plan.shape
        assert calls[i].entry is jit._entries[shape.name, name, False]
    assert len({id(call.entry) for call in calls}) == len(RUNNABLE)


def test_same_register_tile_on_two_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the names of two targets' kernels are equal, their codes are not."""
    compiled: list[str] = []
    compile_object = jit._object_of

    def watched(kernel: Any, target: Any, checked: bool) -> bytes:
        compiled.append(target.name)
        return compile_object(kernel, target, checked)

    monkeypatch.setattr(jit, "_object_of", watched)
    monkeypatch.setattr(jit, "_entries", {})
    c = case(1, 1, 1, 1, 20, 8, 5)
    for name in RUNNABLE:
        with tw.config(target=name):
            c.run()
    assert compiled == RUNNABLE


@pytest.mark.parametrize("knob", ["check", "interpret"])
def test_each_ring_has_an_entry_of_its_own(calls: list[Any], knob: str) -> None:
    c = case(1, 2, 1, 3, 20, 8, 5)
    plain = c.run()
    with tw.config(**{knob: 2 if knob == "check" else True}):
        other = c.run()
    assert calls[0].entry is not calls[1].entry
    assert calls[1].checked == (knob == "check")
    assert_same_bits(other, plain)


CHANGES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window": 5}, "scale": {"scale": 0.1}, "q_offset": {"q_offset": 3},
    "kv_start": {"kv_start": 2}, "kv_len": {"kv_len": 7}, "k_offset": {"k_offset": 3}, "bc": {"bc": 4},
    "span": {"bc": 4, "span": 4}, "br": {"br": 1}, "sinks": {"sinks": np.zeros(2, np.float32)}, "pool": {"pool": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_argument_counts(calls: list[Any], name: str) -> None:
    """The second time a call with other arguments comes, it is what it was the first time."""
    c = case(1, 2, 1, 3, 20, 8, 5, causal=name in ("q_offset", "k_offset"), pool=1)
    changed = c.change(**CHANGES[name])
    first = [x.run() for x in (c, changed)]
    again = [x.run() for x in (c, changed)]
    for x, y in zip(first, again, strict=True):
        assert_same_bits(x, y, name)
    assert calls[0] is calls[2]
    assert calls[1] is calls[3]
    assert calls[0] is not calls[1]


@pytest.mark.parametrize("array", ["q", "k", "v"])
def test_strides_count(calls: list[Any], array: str) -> None:
    c = case(2, 2, 2, 3, 20, 8, 5)
    expected = c.run()
    x = getattr(c, array)
    moved = {"q": c.q, "k": c.k, "v": c.v, array: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)}
    assert_same_bits(tuple(tw.attention(**moved, return_lse=True, **c.options)), expected, array)
    assert calls[0] is not calls[1]


def test_equal_arguments_of_other_types_are_checked() -> None:
    """True == 1, but a window of True is refused, also right after a window of 1."""
    c = case(1, 2, 1, 3, 20, 8, 5, causal=True)
    c.run(window=1)
    for wrong in ({"window": True}, {"window": 1.0}, {"causal": 1, "window": 1}):
        with pytest.raises(TypeError):
            c.run(**wrong)
