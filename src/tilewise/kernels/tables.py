"""What a kernel is given: its constants, and the tables of int64 that hold everything else.

One list of fields defines each table; the code that fills a table and the kernel that reads it share the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tilewise.kernels.hooks import MAX_TABLES
from tilewise.kernels.variants import PLAIN, Variant
from tilewise.simd.builder import ELEMENTS, F32, I64, LANES, Builder, Element, Int, Ptr

# One row for the call. Strides are in elements, extents (lo, hi) and scratch in bytes.
CALL = (
    "sequences", "items", "counter", "batch",  # the descriptors; work items, the next one to claim, claims a run
    "scratch", "scratch_bytes",  # the first worker's scratch, the bytes of one worker
    "rows", "group", "left", "right", "span",  # rows a query tile; H // Hkv; keys seen before and after a row's own
    "units", "progress", "slots", "abort",  # work items a query tile; whose turn it is, a cell a slot; 1: do not wait
    "scale", "sinks", "sinks_lo", "sinks_hi",  # scale is a float32 in its cell; sinks 0: none
    "page_size", "k_page", "v_page", "blocks_lo", "blocks_hi", "first_page",  # first_page: 0, the one page of all keys
    "q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "o_row", "o_head", "lse_row", "lse_head",
    "softcap", "inverse_softcap",  # float32, like scale
    "slopes", "slopes_lo", "slopes_hi", "slopes_batch", "slopes_head",
    "bias", "bias_lo", "bias_hi", "bias_batch", "bias_head", "bias_row",
    "mask", "mask_lo", "mask_hi", "mask_batch", "mask_head", "mask_row",
    "kinds", "kinds_hi", "kinds_panel", "panels_batch", "panels_head",  # a byte a panel and tile; strides in panels
    "tiles", "tiles_hi",  # the first tile and the end of those that a panel sees
    *(f"table{n}{end}" for n in range(MAX_TABLES) for end in ("", "_hi")),  # arrays that hooks captured
    "q_lo", "q_hi", "k_lo", "k_hi", "v_lo", "v_hi", "o_lo", "o_hi", "lse_lo", "lse_hi",
)  # fmt: skip
# One row a sequence, and a last one whose first_item is the number of work items.
# index, first_row, first_column: of the sequence, its first row and key, on the axes of slopes, bias and mask
SEQUENCE = (
    "q",
    "k",
    "v",
    "o",
    "lse",
    "blocks",
    "rows",
    "first_key",
    "keys",
    "q_offset",
    "first_item",
    "index",
    "first_row",
    "first_column",
)
CALL_INDEX = {name: index for index, name in enumerate(CALL)}
# The table of the merge of partial results.
MERGE = (
    "sequences", "spans", "rows",  # rows of a sequence, all heads together
    "a", "a_hi", "stats", "stats_hi",  # [sequence, span, row, Dv] and [sequence, span, row, 2], m and l
    "sinks", "sinks_hi", "seen", "seen_hi",  # float32 [row], or 0; int64 [sequence, row]: whether it sees a key
    "o", "o_hi", "lse", "lse_hi", "scratch",
)  # fmt: skip
SEQUENCE_INDEX = {name: index for index, name in enumerate(SEQUENCE)}

NO_KEY = (1 << 62, 0)  # the [lo, hi) of a row without a visible key

Size = TypeVar("Size", int, Int)


def up_to(multiple: int, n: Size) -> Size:
    """n rounded up to a multiple."""
    return (n + (multiple - 1)) // multiple * multiple


# A field of scratch: (name, elements, further elements a row, element). Rows are counted in whole vectors, so that
# every field begins on a cache line.
Field = tuple[str, int, int, Element]


def size_of(fields: list[Field], rows: Size) -> Size:
    """Bytes of a list of fields."""
    total = up_to(LANES, rows) * sum(each * element.size for _, _, each, element in fields)
    return total + sum(fixed * element.size for _, fixed, _, element in fields)


@dataclass(frozen=True)
class Shape:
    """The constants that a forward kernel is specialised for."""

    D: int
    Dv: int
    Bc: int
    panel: int  # query rows that go through a tile together: 1, 2, 4, 8 or 16
    mr: int
    nr: int
    types: tuple[str, str, str, str] = ("f32", "f32", "f32", "f32")  # of q, k, v and o
    partial: bool = False  # whether the states (m, l, a) are written, not o and lse
    variant: Variant = PLAIN

    @property
    def name(self) -> str:
        types = "_".join(self.types) if len(set(self.types)) > 1 else self.types[0]
        what = "partial" if self.partial else "forward"
        return f"{what}_{types}_d{self.D}x{self.Dv}_bc{self.Bc}_p{self.panel}_{self.mr}x{self.nr}{self.variant.name}"

    def element(self, name: str) -> Element:
        """What q, k, v or o (or lse) is made of."""
        return ELEMENTS[self.types["qkvo".index(name)]] if name in "qkvo" else F32

    @property
    def streamed(self) -> bool:
        """Whether the panel is of a few rows: K and V are then read in place, not packed."""
        return self.panel < LANES

    @property
    def width(self) -> int:
        """Dv in whole vectors."""
        return up_to(LANES, self.Dv)

    @property
    def value_step(self) -> int:
        """From a packed value to the next. Rows of 1 kB would lie in a quarter of the first-level cache's sets."""
        return self.width + (LANES if self.width % 256 == 0 else 0)

    @property
    def columns(self) -> int:
        """Bc in whole vectors."""
        return up_to(LANES, self.Bc)

    def state_fields(self) -> list[Field]:
        """The softmax state of a query tile's rows."""
        any_seen: list[Field] = [("any", 0, 1, F32)] if self.variant.elements else []  # 1 for a row that saw a key
        return [("m", 0, 1, F32), ("l", 0, 1, F32), ("a", 0, self.width, F32), *any_seen]

    def scratch_fields(self) -> list[Field]:
        """The scratch of one worker, beside two states: its span's, and a total."""
        packed = self.columns
        if self.streamed:  # one group of 16 keys at a time, where rows are more than registers hold
            packed = 0 if self.panel <= self.mr else LANES
        placed = 0 if self.variant.plain else 1
        return [
            ("keys", packed * self.D, 0, F32),  # [group of 16 keys][D][16]
            ("values", 0 if self.streamed else packed * self.value_step, 0, F32),  # [key][value_step]
            ("S", LANES * self.columns, 0, F32),  # scores, then weights, of one panel
            ("lanes", LANES * LANES, 0, F32),  # a vector a row, to be folded
            ("shift", LANES, 0, F32),  # M of each row of the panel, 0 where M is -inf
            ("seen", LANES, 0, F32),  # 0 where all that a row sees of this tile is -inf
            ("queries", 0, up_to(LANES, self.D), F32),
            ("alpha", 0, 1, F32), ("beta", 0, 1, F32), ("inverse", 0, 1, F32), ("lse", 0, 1, F32),
            ("k_at", 2 * self.columns, 0, I64), ("v_at", 2 * self.columns, 0, I64),  # places of this tile, and the next
            ("visible", LANES * self.columns * self.variant.elements, 0, F32),  # 1 for a key that a row sees, like S
            ("kinds", 0, 1 if self.variant.arrays else 0, I64),  # what bias and mask say of a panel and this tile
            ("row_index", 0, placed, I64), ("row_head", 0, placed, I64),
            ("row_lo", 0, 1, I64), ("row_hi", 0, 1, I64),
            ("panel_lo", 0, 1, I64), ("panel_lo_max", 0, 1, I64), ("panel_hi_min", 0, 1, I64), ("panel_hi", 0, 1, I64),
        ]  # fmt: skip

    def worker_bytes(self, rows: int) -> int:
        """Bytes of scratch for a worker, for query tiles of that many rows."""
        return size_of(self.scratch_fields(), rows) + 2 * size_of(self.state_fields(), rows)


class Row:
    """A row of a table in the kernel's hands: fields by name, read once and kept."""

    def __init__(self, b: Builder, address: Int, fields: tuple[str, ...]) -> None:
        self.b, self.address = b, address
        self._end = address + 8 * len(fields)
        self._index = {name: index for index, name in enumerate(fields)}
        self._values = {name: b.load_int(self.cell(name)) for name in fields}

    def __getitem__(self, name: str) -> Int:
        return self._values[name]

    def cell(self, name: str, element: Element = I64) -> Ptr:
        """Where a field lies, for one that is changed or is not an integer."""
        return self.b.pointer(self.address + 8 * self._index[name], self.address, self._end, element)


class Fields:
    """Memory laid out by a list of fields: a pointer a field, each with its own extent."""

    def __init__(self, b: Builder, fields: list[Field], address: Int, rows: Int) -> None:
        self._fields: dict[str, Ptr] = {}
        rows = up_to(LANES, rows)
        for name, fixed, each, element in fields:
            end = address + (rows * each + fixed) * element.size
            self._fields[name] = b.pointer(address, address, end, element)
            address = end

    def __getattr__(self, name: str) -> Ptr:
        return self._fields[name]
