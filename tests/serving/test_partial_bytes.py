"""Bytes of partial results: they come back as they were; damaged, cut or hostile ones are refused, never a crash."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.serving.batches import assert_same
from tests.serving.test_partial import PROBLEMS, every_problem, part, parts, same, span_of
from tests.support import Case, case, sinks_for

PREFIX = struct.Struct("<16sII")  # magic, version, bytes of the header: version 1 of the format
MAGIC, DIGEST = b"tilewise partial", 32


def sealed(data: bytes) -> bytes:
    """With a checksum that holds."""
    return data + hashlib.sha256(data).digest()


def message(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(PREFIX.pack(MAGIC, 1, len(text)) + text + body)


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = PREFIX.unpack_from(data)[2]
    return json.loads(data[PREFIX.size : PREFIX.size + length]), data[PREFIX.size + length : -DIGEST]


def small() -> tw.Partial:
    c = case(1, 2, 1, 2, 20, 17, 24, bc=16, span=16, causal=True, window=7, q_offset=18)
    return tw.merge([part(c, 0, 16), part(c, 16, 20)], sinks=sinks_for(2))


GOOD = small().to_bytes()
HEADER, BODY = taken_apart(GOOD)


# ---- what is right


@every_problem
def test_round_trip(c: Case) -> None:
    for p in (*parts(c, [span_of(c)]), part(c, 0, 0), tw.merge(parts(c, []), sinks=sinks_for(c.q.shape[1]))):
        for kind in (bytes, bytearray, memoryview):
            again = tw.Partial.from_bytes(kind(p.to_bytes()))
            assert again.to_bytes() == p.to_bytes()
            assert np.float32(again.scale) == np.float32(p.scale)
            same(again, tw.Partial.from_bytes(again.to_bytes()))
            for name in ("start", "end", "causal", "window", "bc", "span", "dtype"):
                assert getattr(again, name) == getattr(p, name)
            assert_same(again.finish(), p.finish())
            assert again.a.flags.writeable
    through = [tw.Partial.from_bytes(p.to_bytes()) for p in parts(c, [span_of(c)])]
    assert_same(tw.merge(through, c.options.get("sinks")).finish(), c.run())


def test_layout_of_version_1() -> None:
    """Read by hand: another program can."""
    p = small()
    magic, version, length = PREFIX.unpack_from(GOOD)
    assert (magic, version) == (MAGIC, 1)
    assert {
        "recipe": 1, "shape": [1, 2, 2, 2, 24], "start": 0, "end": 20, "causal": True, "q_offset": [18], "window": 7,
        "scale": int(np.float32(17**-0.5).view(np.uint32)), "bc": 16, "span": 16, "type": "f32", "sinks": True,
    } == HEADER  # fmt: skip
    assert p.sinks is not None
    assert p.a.tobytes() + p.stats.tobytes() + p.sinks.tobytes() == BODY
    assert message(HEADER, BODY) == GOOD
    assert len(GOOD) == PREFIX.size + length + len(BODY) + DIGEST


def test_bits_of_any_float() -> None:
    """NaN with payloads, infinities, subnormals and -0 pass through as they are; finish makes of them what it can."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        body = rng.integers(0, 1 << 32, len(BODY) // 4, np.uint32)
        body[rng.integers(0, len(body), 20)] = rng.choice(
            np.array([0, 1 << 31, 0x7F800001, 0xFFC00000, 1], np.uint32), 20
        )
        p = tw.Partial.from_bytes(message(HEADER, body.tobytes()))
        assert p.to_bytes() == message(HEADER, body.tobytes())
        o, lse = p.finish()
        assert o.shape == (1, 2, 2, 24)
        assert lse.shape == (1, 2, 2)


# ---- what was damaged


def refused(data: Any) -> str:
    with pytest.raises(tw.InvalidArgument) as error:
        tw.Partial.from_bytes(data)
    assert type(error.value) is tw.InvalidArgument
    return str(error.value)


def test_every_byte_counts() -> None:
    for i in range(len(GOOD)):
        for flip in (1, 0x80, 0xFF):
            refused(GOOD[:i] + bytes([GOOD[i] ^ flip]) + GOOD[i + 1 :])


def test_every_length_counts() -> None:
    for n in range(len(GOOD)):
        refused(GOOD[:n])
        refused(GOOD[n + 1 :])
    for more in (b"\0", b"x" * 4, GOOD, BODY):
        refused(GOOD + more)
        refused(more + GOOD)


def test_what_is_wrong_is_said() -> None:
    assert "not a partial result" in refused(b"")
    assert "not a partial result" in refused(b"x" * 1000)
    assert "checksum" in refused(GOOD[:-1] + b"\0\0")
    text = json.dumps(HEADER).encode()
    for version in (0, 2, 1 << 31):
        assert f"version {version}" in refused(sealed(PREFIX.pack(MAGIC, version, len(text)) + text + BODY))
    for kind in (str, list, tuple):
        with pytest.raises(TypeError, match="data"):
            tw.Partial.from_bytes(kind(GOOD.decode("latin-1")))  # type: ignore[arg-type]
    for wrong in (None, 3, np.frombuffer(GOOD, np.uint8)):
        with pytest.raises(TypeError, match="data"):
            tw.Partial.from_bytes(wrong)  # type: ignore[arg-type]


# ---- what was made to harm: the checksum holds


def refused_or_sound(data: bytes) -> bool:
    """Refused as it should be, or a partial result like any other. True: refused."""
    try:
        p = tw.Partial.from_bytes(data)
    except tw.InvalidArgument:
        return True
    B, spans, H, Tq, Dv = p.a.shape
    assert p.stats.shape == (B, spans, H, Tq, 2)
    assert p.q_offset.shape == (B,)
    assert spans == -(-(p.end - p.start) // p.span)
    assert tw.Partial.from_bytes(p.to_bytes()).to_bytes() == p.to_bytes()
    if max(p.a.shape) < 1 << 20 and B * H * Tq * Dv < 1 << 20:
        assert p.finish()[0].shape == (B, H, Tq, Dv)
    return False


def test_every_byte_of_the_header_with_a_checksum_that_holds() -> None:
    end = len(GOOD) - len(BODY) - DIGEST
    rng = np.random.default_rng(1)
    verdicts = [
        refused_or_sound(sealed(GOOD[:i] + bytes([GOOD[i] ^ flip]) + GOOD[i + 1 : -DIGEST]))
        for i in range(end)
        for flip in (1, 2, 4, 8, 16, 128, *rng.integers(1, 256, 3).tolist())
    ]
    assert np.mean(verdicts) > 0.8  # only some digits and the case of a flag may change


def test_every_length_with_a_checksum_that_holds() -> None:
    for n in range(len(GOOD) - DIGEST):
        refused(sealed(GOOD[:n]))
    for more in (b"\0", b"\0" * 4, BODY):
        refused(sealed(GOOD[:-DIGEST] + more))


NOT_INTEGERS = [None, True, 1.0, "1", [], [1], {}, float("nan"), float("inf"), 10**400, -1, 1 << 63, 1 << 64]
FIELDS: dict[str, list[Any]] = {
    "recipe": [0, 2, None, "1", []],
    "shape": [
        None, 5, "12224", [], [1, 2, 2, 2], [1, 2, 2, 2, 24, 1], [2, 1, 2, 2, 24], [1, 2, 2, 2, 23], [1, 2, 2, 2, 25],
        [-1, 2, 2, 2, 24], [1, -2, 2, -2, 24], [1, 2, -2, -2, 24], [1, 2, 2, 2, -24], [1, 2, 2, 2, 0], [0, 2, 2, 2, 24],
        [1, 2, 2, 2, 1025], [1, 3, 2, 2, 24], [1, 1, 2, 2, 24], [1 << 62, 2, 2, 2, 24], [1, 2, 1 << 40, 1 << 40, 24],
        [1, 2, 2, 1 << 64, 24], [True, 2, 2, 2, 24], [1.0, 2, 2, 2, 24], ["1", 2, 2, 2, 24], {"1": 2}, [[1]] * 5,
    ],
    "start": [*NOT_INTEGERS, 1, 8, 16, 32, 1 << 57],
    "end": [*NOT_INTEGERS, 0, 16, 33, 1 << 57],
    "causal": [None, 0, 1, "true", [], {}],
    "q_offset": [None, [], [1, 2], [-1], [1 << 57], [1 << 70], ["1"], [1.0], [True], [[1]], "1", {}, 1.0, [None]],
    "window": [True, 1.0, "1", [], {}, float("nan")],
    "scale": [None, -1, 1 << 32, "x", [], {}, [1, 2], 0x7F800000, 0xFF800000, 0x7FC00000, float("nan"), 10**400],
    "bc": [*NOT_INTEGERS, 0, 3, 17],
    "span": [*NOT_INTEGERS, 0, 8, 17, 32],
    "type": [None, "", "f64", "i64", 1, [], {}, ["f32"]],
    "sinks": [None, 0, 1, "", [], False],
}  # fmt: skip


@pytest.mark.parametrize(("field", "index"), [(field, i) for field, wrong in FIELDS.items() for i in range(len(wrong))])
def test_hostile_field(field: str, index: int) -> None:
    assert "partial result" in refused(message({**HEADER, field: FIELDS[field][index]}, BODY))


@pytest.mark.parametrize("field", HEADER)
def test_missing_field(field: str) -> None:
    refused(message({name: x for name, x in HEADER.items() if name != field}, BODY))


WHOLE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: message(b""),
    "null": lambda: message(b"null", BODY),
    "number": lambda: message(b"7", BODY),
    "list": lambda: message([HEADER], BODY),
    "text": lambda: message(b'"shape"', BODY),
    "no utf-8": lambda: message(b"\xff\xfe{}", BODY),
    "zeros": lambda: message(b"\0" * 64, BODY),
    "not closed": lambda: message(json.dumps(HEADER).encode()[:-1], BODY),
    "digits without end": lambda: message(b'{"shape": ' + b"9" * 10000 + b"}", BODY),
    "header as long as can be": lambda: sealed(PREFIX.pack(MAGIC, 1, (1 << 32) - 1) + json.dumps(HEADER).encode()),
    "body in the header": lambda: sealed(PREFIX.pack(MAGIC, 1, len(GOOD)) + GOOD[PREFIX.size : -DIGEST]),
    "no key but sequences without end": lambda: message(EMPTY | {"shape": [10**13, 0, 1, 1, 4], "q_offset": 0}),
    "no key but heads without end": lambda: message(EMPTY | {"shape": [0, 0, 10**12, 10**12, 4]}),
    "nested without end": lambda: message(b"[" * 100_000, BODY),
    "nested lengths": lambda: message(json.dumps(HEADER).encode()[:-1] + b',"q_offset":' + b"[" * 50_000, b""),
}  # fmt: skip
EMPTY = {**HEADER, "shape": [0, 0, 1, 1, 4], "end": 0, "q_offset": [], "sinks": False}


@pytest.mark.parametrize("name", WHOLE)
def test_hostile_message(name: str) -> None:
    refused(WHOLE[name]())


def test_no_keys_and_no_sequences() -> None:
    """The header that the hostile ones above are made of is a good one."""
    assert tw.Partial.from_bytes(message(EMPTY)).empty


def test_hostile_floats_of_the_kernel() -> None:
    """A state of NaN, of infinities or of negative sums makes a result without meaning, not a fault."""
    c = PROBLEMS["causal"]
    header, body = taken_apart(part(c, 0, 150).to_bytes())
    for value in (np.nan, np.inf, -np.inf, -1.0, 3e38, 1e-45):
        p = tw.Partial.from_bytes(message(header, np.full(len(body) // 4, value, np.float32).tobytes()))
        with tw.config(check=2):
            assert p.finish()[0].shape == (1, 4, 70, 24)
