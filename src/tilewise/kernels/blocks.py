"""Block masks: which tiles of keys a keep function hides from a panel of rows wholly, in part, or not at all."""

from __future__ import annotations

from tilewise.kernels.hooks import MAX_TABLES, Hook
from tilewise.kernels.tables import Row, up_to
from tilewise.kernels.variants import FULL, GROUPS, KINDS, PARTIAL, SKIP
from tilewise.simd.builder import I64, LANES, U8, Builder, Int, Kernel

BLOCKS = (
    "sequences", "heads", "panels", "tiles",  # how many; heads 1: the function does not depend on the head
    "panel", "group", "rows_of", "q_offset", "first_key",  # rows a panel, heads a KV head; int64 [sequence]
    "kinds", "kinds_hi",  # bytes [sequence, head, panel, tile]
    *(f"table{n}{end}" for n in range(MAX_TABLES) for end in ("", "_hi")),
)  # fmt: skip


def blocks_kernel(keep: Hook, Bc: int) -> Kernel:
    """kinds[sequence, KV head, panel, tile] by calling the function for every row and key."""

    groups = up_to(LANES, Bc) // LANES

    def body(b: Builder, table: Int, worker: Int) -> None:
        call = Row(b, table, BLOCKS)
        pointers = [
            b.pointer(call[f"table{n}"], call[f"table{n}"], call[f"table{n}_hi"]) for n in range(len(keep.tables))
        ]
        kinds = b.pointer(call["kinds"], call["kinds"], call["kinds_hi"], U8)

        def of(name: str, sequence: Int) -> Int:
            return b.load_int(b.pointer(call[name], call[name], call[name] + call["sequences"] * 8, I64) + sequence)

        for s in b.loop(0, call["sequences"]):
            rows, position, first = of("rows_of", s), of("q_offset", s), of("first_key", s)
            for head in b.loop(0, call["heads"]):
                first_head = head * call["group"]
                last_head = first_head + (call["group"] if keep.reads_head else 1)
                for panel in b.loop(0, call["panels"]):
                    row = panel * call["panel"]
                    i0, i1 = row // call["group"], b.imin((row + call["panel"] - 1) // call["group"] + 1, rows)
                    for tile in b.loop(0, call["tiles"]):
                        every = b.var(b.between(0, LANES))
                        lo, hi = b.var(b.integer(groups)), b.var(b.integer(-1))  # the groups that some row sees
                        j = (first // Bc + tile) * Bc
                        for c in b.loop(0, groups):
                            some = b.var(b.between(0, 0))
                            inside = b.between(0, Bc - c * LANES)  # lanes past Bc belong to the next tile
                            for i in b.loop(i0, i1):
                                for h in b.loop(first_head, last_head):
                                    kept = keep.keep(b, pointers, s, h, position + i, j + c * LANES)
                                    some.value = some.value | kept & inside
                                    every.value = every.value & (kept | ~inside)
                            seen = b.any(some.value)
                            lo.value = b.choose(seen, b.imin(lo.value, c), lo.value)
                            hi.value = b.choose(seen, c, hi.value)
                        kind = b.choose(b.all(every.value), FULL, PARTIAL)
                        if groups <= GROUPS:
                            kind = kind + lo.value * KINDS + hi.value * (KINDS * GROUPS)
                        place = ((s * call["heads"] + head) * call["panels"] + panel) * call["tiles"] + tile
                        b.store_int(kinds + place, b.choose(hi.value < 0, SKIP, kind))

    return Kernel(f"blocks_{keep.digest}_bc{Bc}", body)
