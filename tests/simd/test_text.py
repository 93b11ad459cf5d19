"""The pseudo-code of a kernel says what the kernel does, a word a line."""

from __future__ import annotations

from tilewise.simd.builder import I64, LANES, WORDS, Builder, Int, Kernel
from tilewise.simd.text import TextBuilder


def sample(b: Builder, table: Int, worker: Int) -> None:
    cells = b.pointer(table, table, table + 16, I64)
    data = b.pointer(b.load_int(cells), 0, 100)
    total = b.var(b.vec(0.0))
    for j in b.loop(0, b.load_int(cells + 1), LANES):
        x = b.load(data + j)
        for _ in b.when(b.any(x < b.vec(-1.5))):
            total.value = b.fma(x, x, total.value)
    for _ in b.repeat(lambda: b.fetch_add(cells, 1) < worker):
        b.store_lane(data, total.value, 3)


SAMPLE = """\
def sample(table, worker):
    i1 = table + 16
    p1 = pointer(table)
    i2 = load_int(p1)
    p2 = pointer(i2)
    x1 := 0.0
    i3 = load_int(p1[1])
    for i4 in range(0, i3, 16):
        v1 = load(p2[i4])
        m1 = v1 < -1.5
        b1 = any(m1)
        if b1:
            v2 = x1
            v3 = fma(v1, v1, v2)
            x1 := v3
    while True:
        i5 = fetch_add(p1, 1)
        b2 = i5 < worker
        if not b2: break
        v4 = x1
        store_lane(p2, v4, 3)
"""


def test_kernel_prints_as_pseudo_code() -> None:
    assert str(Kernel("sample", sample)) == SAMPLE


def test_every_word_has_a_line() -> None:
    """No word is left out of the text, and only one that gives a value has a name for it."""
    operands = {"i": "i9", "v": "v9", "n": "n9", "m": "m9", "b": "b9", "p": "p9"}
    for word, signature in WORDS.items():
        taken, _, given = signature.partition(">")
        b = TextBuilder()
        name = b.word(word, *(operands[kind] for kind in taken))
        (line,) = b.lines
        assert all(operands[kind] in line for kind in taken)
        assert (name is not None) == bool(given)
        assert line.strip().startswith(f"{given}1 = " if given else word)


def test_a_value_read_is_a_value_kept() -> None:
    def body(b: Builder, table: Int, worker: Int) -> None:
        x, y = b.var(table), b.var(worker)
        x.value, y.value = y.value, x.value

    lines = [line.strip() for line in str(Kernel("swap", body)).splitlines()]
    assert lines[-2:] != ["x1 := x2", "x2 := x1"]
