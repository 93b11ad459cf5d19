"""Knobs: the table, the environment, blocks of overrides, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tilewise.config import Config, config, current, describe, reload
from tilewise.errors import InvalidArgument


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("TILEWISE_")]:
            patch.delenv(variable)
        reload()
        yield
    reload()


def test_the_table() -> None:
    rows = {row.name: row for row in describe()}
    assert list(rows) == ["debug", "interpret", "target", "threads", "check", "dump", "cache"]
    assert list(rows) == [knob.name for knob in fields(Config)]
    for name, row in rows.items():
        assert row.variable == f"TILEWISE_{name.upper()}"
        assert row.default == getattr(current(), name)
        assert row.doc.endswith(".")
        assert "\n" not in row.doc
        assert row.expects
    assert current() == Config(debug=0, interpret=False, target=None, threads=None, check=0, dump=None, cache=None)


GOOD = [
    ("debug", "0", 0),
    ("debug", "5", 5),
    ("debug", " 3 ", 3),
    ("interpret", "1", True),
    ("interpret", "TRUE", True),
    ("interpret", "on", True),
    ("interpret", "0", False),
    ("interpret", "no", False),
    ("target", "x86-64-v3", "x86-64-v3"),
    ("threads", "1", 1),
    ("threads", "128", 128),
    ("check", "2", 2),
    ("dump", "/tmp/dumps", "/tmp/dumps"),
    ("dump", "off", os.path.join(os.getcwd(), "off")),  # a word for the cache only
    ("cache", "/tmp/kernels", "/tmp/kernels"),
    ("cache", "off", "off"),
    ("cache", "OFF", "off"),
    ("cache", "~/kernels", os.path.expanduser("~/kernels")),
]

BAD = [
    ("debug", "6"),
    ("debug", "-1"),
    ("debug", "1.0"),
    ("debug", "verbose"),
    ("interpret", "2"),
    ("interpret", "maybe"),
    ("target", "  "),
    ("threads", "0"),
    ("threads", "-2"),
    ("threads", "many"),
    ("check", "3"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_environment_and_override_read_alike(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    with config(**{name: text}) as inside:
        assert getattr(inside, name) == value
        assert getattr(current(), name) == value
    monkeypatch.setenv(f"TILEWISE_{name.upper()}", text)
    assert getattr(reload(), name) == value
    assert type(getattr(current(), name)) is type(value)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_bad_value_names_variable_value_and_expectation(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    expects = {row.name: row.expects for row in describe()}[name]
    with pytest.raises(InvalidArgument) as refused:
        config(**{name: text})
    assert str(refused.value) == f"config: {name}: got {text!r}, expected {expects}"
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    reload()
    monkeypatch.setenv(f"TILEWISE_{name.upper()}", text)
    with pytest.raises(InvalidArgument) as refused:
        reload()
    assert str(refused.value) == f"TILEWISE_{name.upper()}: got {text!r}, expected {expects}"
    assert current() == Config(check=1)  # a reload that fails changes nothing


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("debug", True),
        ("debug", None),
        ("debug", 1.0),
        ("interpret", None),
        ("interpret", 2),
        ("target", 3),
        ("threads", 2.5),
        ("threads", False),
        ("check", []),
        ("dump", 7),
        ("dump", ""),
        ("cache", b"/tmp"),
    ],
)
def test_override_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"config: {name}: got"):
        config(**{name: value})


def test_overrides_that_are_values() -> None:
    with config(threads=3, interpret=True, dump=Path("/tmp") / "d", cache=None, target=None):
        assert current() == Config(threads=3, interpret=True, dump="/tmp/d")
    with config(interpret=1):
        assert current().interpret is True


def test_relative_folder_is_fixed_when_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with config(dump="here"):
        assert current().dump == str(tmp_path / "here")


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in describe():
        monkeypatch.setenv(row.variable, "")
    assert reload() == Config()


def test_environment_is_read_once_until_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current()
    monkeypatch.setenv("TILEWISE_DEBUG", "4")
    assert current() is before
    assert reload().debug == 4
    assert current().debug == 4


def test_environment_is_read_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Config.__module__], "_environment", None)
    monkeypatch.setenv("TILEWISE_THREADS", "none")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="TILEWISE_THREADS"):
            current()
    monkeypatch.setenv("TILEWISE_THREADS", "6")
    assert current().threads == 6


def test_blocks_nest_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_THREADS", "7")
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    base = reload()
    with config(threads=1) as outer:
        assert outer == current() == Config(threads=1, check=1)
        with config(debug=2, threads=None):
            assert current() == Config(debug=2, threads=None, check=1)
        assert current() is outer
        with contextlib.suppress(KeyError), config(check=2):
            assert current().check == 2
            raise KeyError
        assert current() is outer
    assert current() is base


def test_reload_inside_a_block_shows_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with config(debug=1):
        monkeypatch.setenv("TILEWISE_DEBUG", "5")
        reload()
        assert current().debug == 1
    assert current().debug == 5


def test_unknown_knob_is_refused_at_the_call() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown knob 'thread'.*threads"):
        config(thread=1)


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        current().debug = 1  # type: ignore[misc]


def test_other_threads_do_not_see_a_block() -> None:
    seen: list[int] = []
    with config(debug=3):
        thread = threading.Thread(target=lambda: seen.append(current().debug))
        thread.start()
        thread.join()
    assert seen == [0]


def test_tasks_do_not_see_each_others_blocks() -> None:
    async def task(level: int) -> list[int]:
        seen = []
        with config(debug=level):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(current().debug)
        return [*seen, current().debug]

    async def both() -> list[list[int]]:
        return await asyncio.gather(task(1), task(2))

    assert asyncio.run(both()) == [[1, 1, 1, 0], [2, 2, 2, 0]]
