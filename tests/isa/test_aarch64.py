"""aarch64 gives the bits of this machine: kernels compiled for it, run by an emulator, in every word and every path.

One program holds all kernels; it runs once with workers that take turns, and once with workers that are threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.isa.emulated import AARCH64, build, missing_tool, run_all
from tests.isa.fixtures import Fixture, attention_fixture
from tests.isa.problems import examples
from tests.isa.words import PROGRAMS, word_program
from tests.simd.support import floats, is_nan
from tests.simd.test_words import CASES, bits_below, expected
from tests.support import assert_same_bits
from tilewise.config import config
from tilewise.simd.builder import WORDS

pytestmark = pytest.mark.slow
EXAMPLES = examples()


@pytest.fixture(scope="module")
def fixtures() -> dict[str, Fixture]:
    """All that is run, by name: words, what is made of them, attention."""
    found = {f"word_{word}": word_program(word).fixture(f"word_{word}") for word in CASES}
    found |= {name: make().fixture(f"part_{name}") for name, make in PROGRAMS.items()}
    return found | {name: attention_fixture(example, AARCH64) for name, example in EXAMPLES.items()}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, fixtures: dict[str, Fixture]) -> Any:
    if reason := missing_tool():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("aarch64"), [fixture.kernel for fixture in fixtures.values()])


@pytest.fixture(scope="module")
def outputs(program: Any, fixtures: dict[str, Fixture]) -> dict[str, list[bytes]]:
    return run_all(program, fixtures)


@pytest.fixture(scope="module")
def outputs_of_threads(program: Any, fixtures: dict[str, Fixture]) -> dict[str, list[bytes]]:
    several = {name: fixture for name, fixture in fixtures.items() if fixture.workers > 1}
    assert len(several) >= 4
    return run_all(program, several, "--threads")


@pytest.fixture(scope="module", autouse=True)
def _no_disk_cache() -> Iterator[None]:
    with config(cache="off"):
        yield


@pytest.mark.parametrize("name", EXAMPLES)
def test_attention(name: str, outputs: dict[str, list[bytes]]) -> None:
    assert_bits_of_this_machine(name, outputs)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.workers > 1])
def test_attention_in_threads(name: str, outputs_of_threads: dict[str, list[bytes]]) -> None:
    assert_bits_of_this_machine(name, outputs_of_threads)


def assert_bits_of_this_machine(name: str, outputs: dict[str, list[bytes]]) -> None:
    wanted = EXAMPLES[name].run()
    got = tuple(np.frombuffer(data, x.dtype).reshape(x.shape) for data, x in zip(outputs[name], wanted, strict=True))
    assert_same_bits(got, wanted, f"of aarch64 and of this machine: {name}")


@pytest.mark.parametrize("word", CASES)
def test_word(word: str, outputs: dict[str, list[bytes]]) -> None:
    (data,), kind, wanted = outputs[f"word_{word}"], WORDS[word][-1], expected(word)[2]
    if kind in "ib":
        assert np.frombuffer(data, np.int64).tolist() == [int(x) for x in wanted]
    elif kind == "m":
        assert np.frombuffer(data, np.float32).tolist() == [float(x) for x in wanted]
    else:
        got = np.frombuffer(data, np.uint32).tolist()
        exact = CASES[word].exact_nan
        for place, (x, want) in enumerate(zip(got, map(bits_below, wanted), strict=True)):
            assert x == want or (not exact and is_nan(x) and is_nan(want)), (place, hex(x), hex(want))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_made_of_words(name: str, outputs: dict[str, list[bytes]]) -> None:
    """The same bits as the interpreted ring; a NaN for a NaN, for machines differ in the NaN that they make."""
    (data,), wanted = outputs[name], PROGRAMS[name]().interpreted()
    got = np.frombuffer(data, wanted.dtype)
    differ = got.view(np.int32) != wanted.view(np.int32)
    if wanted.dtype == np.float32:
        differ &= ~(np.isnan(got) & np.isnan(wanted))
    places = np.flatnonzero(differ)
    assert not len(places), [(int(i), got[i], wanted[i]) for i in places[:5]]


def test_examples_take_every_path(fixtures: dict[str, Fixture]) -> None:
    """What the examples are there for does occur in them, with the register tiles of aarch64."""
    shapes = [re.findall(r"_bc(\d+)_p(\d+)_(\d+)x", fixtures[name].kernel.name)[0] for name in EXAMPLES]
    ways = {"packed" if panel == "16" else "one block" if panel == mr else "blocks" for _, panel, mr in shapes}
    assert ways == {"packed", "one block", "blocks"}  # the last two streamed
    assert any(int(bc) % 16 for bc, _, _ in shapes)  # tiles that end within a vector
    assert any(fixture.hidden for fixture in fixtures.values())
    results = [example.run() for example in EXAMPLES.values() if example.arrays[0].dtype == np.float32]
    assert any(np.isnan(o).any() for o, _ in results)
    assert any(np.isneginf(lse).any() for _, lse in results)
    smallest_normal = floats([0x00800000])[0]
    assert any(((np.abs(o) > 0) & (np.abs(o) < smallest_normal)).any() for o, _ in results)
