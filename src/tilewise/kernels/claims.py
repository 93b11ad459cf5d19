"""Which work items a worker does: it claims one after another, with an atomic counter and no Python between them."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.kernels.tables import SEQUENCE, Row
from tilewise.simd.builder import I64, Builder, Int


def work_items(b: Builder, call: Row) -> Iterator[tuple[Int, Int, Int]]:
    """Claim items until none is left or `batch` are taken: (descriptor's address, item of its sequence, of all)."""
    items, size = call["items"], 8 * len(SEQUENCE)

    def first_item(descriptor: Int) -> Int:
        address = descriptor + 8 * SEQUENCE.index("first_item")
        return b.load_int(b.pointer(address, address, address + 8, I64))

    claimed, taken = b.var(b.fetch_add(call.cell("counter"), 1)), b.var(b.integer(0))
    descriptor = b.var(call["sequences"])
    for _ in b.repeat(lambda: claimed.value < items):
        for _ in b.repeat(lambda: first_item(descriptor.value + size) <= claimed.value):
            descriptor.value = descriptor.value + size
        yield descriptor.value, claimed.value - first_item(descriptor.value), claimed.value
        taken.value = taken.value + 1
        last = taken.value >= call["batch"]
        claimed.value = items
        for _ in b.when(~last):
            claimed.value = b.fetch_add(call.cell("counter"), 1)
