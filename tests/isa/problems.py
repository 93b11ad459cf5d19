"""Problems that between them take every path of the forward kernel, small enough for an emulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tilewise.arguments import BFLOAT16

F32Array = NDArray[np.float32]
GARBAGE = float("nan")
TINY = np.float32(2.0**-140)  # a subnormal


@dataclass(frozen=True, eq=False)
class Example:
    """The arguments of a call, by how many workers it is run, and whether the caller flushes subnormals to zero."""

    arrays: tuple[F32Array, F32Array, F32Array]
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    flush: bool = False
    page_size: int = 0  # 0: keys lie one after the other

    def paged(self) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """(q, k_pages, v_pages) and the further arguments; the pages are not in order, and garbage where unused."""
        q, k, v = self.arrays
        (B, _, Tk, _), size = k.shape, self.page_size
        each = -(-Tk // size)
        block_table = (np.arange(B * each, dtype=np.int32)[::-1] + 1).reshape(B, each)
        pages = [np.full((B * each + 2, size, x.shape[1], x.shape[3]), GARBAGE, x.dtype) for x in (k, v)]
        for target, x in zip(pages, (k, v), strict=True):
            for b in range(B):
                for j in range(Tk):
                    target[block_table[b, j // size], j % size] = x[b, :, j]
        return (q, pages[0], pages[1]), {"block_table": block_table, "kv_len": Tk}

    def run(self, **changes: Any) -> tuple[F32Array, F32Array]:
        """(o, lse) by the library, on this machine and in one thread."""
        options = {"pool": 1, "return_lse": True, **self.options, **changes}
        if not self.page_size:
            return tw.attention(*self.arrays, **options)  # type: ignore[no-any-return]
        (q, k_pages, v_pages), further = self.paged()
        return tw.attention_paged(q, k_pages, v_pages, **further, **options)  # type: ignore[no-any-return]


def arrays(
    B: int, H: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int, seed: int = 0
) -> tuple[F32Array, F32Array, F32Array]:
    """q, k, v in [-2, 2) from a generator of our own: the bits are the same wherever they are made."""
    shapes = ((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv))
    result, first = [], seed << 32
    for shape in shapes:
        n = int(np.prod(shape))
        x = np.arange(first, first + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)  # 24 bits: exact in float32
        result.append((x.astype(np.float32) * np.float32(2.0**-22) - np.float32(2.0)).reshape(shape))
        first += n
    return result[0], result[1], result[2]


def sinks(H: int) -> F32Array:
    return np.linspace(-2, 4, H, dtype=np.float32)


def examples() -> dict[str, Example]:
    """All of them, by name."""
    return {
        **_shapes(), **_masks(), **_spans(), **_hard_numbers(), **_layouts(), **_halves(), **_pages(), **_variants()
    }  # fmt: skip


def _shapes() -> dict[str, Example]:
    return {
        "decode, streamed": Example(arrays(2, 4, 2, 1, 70, 64, 64), {"causal": True, "q_offset": [69, 40]}),
        "decode by four heads": Example(arrays(1, 4, 1, 1, 37, 40, 24), {"causal": True, "q_offset": 36}),
        "decode by seven heads, in two blocks of rows": Example(arrays(1, 7, 1, 1, 61, 40, 24), {"bc": 33, "span": 66}),
        "prefill, packed, GQA, tails, odd Bc": Example(
            arrays(1, 6, 2, 37, 37, 20, 33), {"causal": True, "bc": 33, "span": 66}
        ),
        "one dimension": Example(arrays(1, 2, 2, 19, 23, 1, 1), {"bc": 7, "span": 14}),
        "wide heads": Example(arrays(1, 1, 1, 17, 65, 128, 144), {}),
    }


def _masks() -> dict[str, Example]:
    return {
        "window and sinks": Example(
            arrays(2, 6, 3, 21, 50, 16, 16),
            {"causal": True, "window": 9, "q_offset": [29, 5], "bc": 5, "span": 10, "sinks": sinks(6)},
        ),
        "window without causal": Example(arrays(1, 2, 2, 9, 30, 24, 8), {"window": 6, "q_offset": 7, "bc": 16}),
        "rows that see nothing": Example(
            arrays(2, 2, 1, 6, 5, 8, 8), {"causal": True, "window": 2, "q_offset": [0, 40], "kv_len": [5, 0]}
        ),
        "nothing but sinks": Example(
            arrays(1, 4, 2, 3, 5, 8, 20), {"causal": True, "window": 2, "q_offset": 40, "sinks": sinks(4)}
        ),
        "positions of a sliding cache": Example(
            arrays(3, 2, 2, 5, 40, 32, 32),
            {"causal": True, "kv_start": [0, 3, 11], "kv_len": [40, 30, 9], "k_offset": [0, 13, 64],
             "q_offset": [35, 38, 68], "bc": 16, "span": 32},
        ),
    }  # fmt: skip


def _spans() -> dict[str, Example]:
    return {
        "spans in turn": Example(arrays(1, 2, 1, 3, 150, 16, 48), {"bc": 16, "span": 32, "q_offset": 0}),
        "default span": Example(arrays(1, 1, 1, 2, 1100, 16, 16), {"causal": True, "q_offset": 1098}),
        "split spans, decode": Example(
            arrays(1, 4, 2, 1, 200, 32, 32), {"causal": True, "q_offset": 199, "bc": 16, "span": 32}, workers=3
        ),
        "split spans, packed, sinks": Example(
            arrays(1, 2, 1, 20, 130, 16, 16),
            {"causal": True, "q_offset": 110, "bc": 16, "span": 16, "sinks": sinks(2)},
            workers=2,
        ),
        "split spans, slots used again": Example(
            arrays(2, 2, 2, 6, 90, 16, 16), {"window": 50, "q_offset": 40, "bc": 8, "span": 16, "br": 3}, workers=4
        ),
        "many tiles, several workers": Example(
            arrays(1, 8, 2, 33, 40, 16, 16), {"causal": True, "q_offset": 7, "br": 4}, workers=4
        ),
    }


def _halves() -> dict[str, Example]:
    def half(*sizes: int) -> tuple[Any, Any, Any]:
        return tuple(x.astype(np.float16) for x in arrays(*sizes))  # type: ignore[return-value]

    def bits(*sizes: int) -> tuple[Any, Any, Any]:
        """bfloat16, cut off: the upper halves."""
        return tuple((x.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16) for x in arrays(*sizes))  # type: ignore[return-value]

    mixed = half(1, 2, 2, 18, 20, 20, 20)[0], bits(1, 2, 2, 18, 20, 20, 20)[1], arrays(1, 2, 2, 18, 20, 20, 20)[2]
    return {
        "float16, streamed": Example(half(1, 4, 2, 1, 40, 40, 24), {}),
        "float16, packed": Example(half(1, 2, 1, 20, 37, 20, 33), {"causal": True, "q_offset": 17}),
        "bfloat16, streamed": Example(bits(1, 4, 2, 1, 40, 48, 24), {}),
        "bfloat16, packed": Example(bits(1, 2, 1, 20, 37, 52, 33), {"causal": True, "q_offset": 17}),
        "three types": Example(mixed, {}),
    }


def _pages() -> dict[str, Example]:
    return {
        "pages, streamed": Example(arrays(2, 4, 2, 1, 70, 32, 20), {"causal": True, "bc": 16, "span": 32}, page_size=7),
        "pages, packed": Example(arrays(2, 2, 1, 20, 50, 16, 16), {"causal": True, "window": 20}, page_size=16),
        "pages of one key": Example(arrays(1, 2, 2, 2, 37, 16, 16), {"bc": 8, "span": 16}, workers=2, page_size=1),
    }


def _variants() -> dict[str, Example]:
    shape = (1, 4, 2, 9, 35, 16, 20)
    mask = arrays(1, 4, 1, 9, 1, 35, 1)[0] > -1  # [1, 4, 9, 35]
    mask[0, 1, 2] = False
    bias = arrays(1, 1, 1, 9, 1, 35, 1)[0]
    bias[..., 3] = -np.inf
    slopes = np.linspace(0.1, 0.7, 4, dtype=np.float32)
    positions = {"causal": True, "q_offset": 26, "bc": 8, "span": 16}
    return {
        "softcap and ALiBi": Example(arrays(*shape), {**positions, "softcap": 2.0, "alibi_slopes": slopes}),
        "mask": Example(arrays(*shape), {"q_offset": 0, "mask": mask}),
        "mask, streamed": Example(arrays(1, 4, 2, 2, 35, 16, 20), {"mask": mask[:, :, :2]}),
        "bias of all heads": Example(arrays(*shape), {**positions, "bias": bias}),
        "bias and mask for all keys": Example(
            arrays(*shape), {**positions, "bias": bias[..., :1], "mask": mask[..., :1]}
        ),
    }


def _hard_numbers() -> dict[str, Example]:
    q, k, v = arrays(1, 2, 1, 20, 40, 16, 20)
    k[0, 0, 3, 5], v[0, 0, 7, 2], v[0, 0, 30, 19] = np.nan, np.inf, -np.inf
    k[0, 0, 35:], v[0, 0, 35:] = GARBAGE, GARBAGE
    visible_nan = {"causal": True, "q_offset": 0, "kv_len": 35, "bc": 8, "span": 16}
    low_q, low_k, low_v = arrays(1, 2, 1, 18, 33, 16, 20, seed=5)
    low_v *= TINY  # subnormal values and outputs
    low_q[:, :, ::2] *= np.float32(2.0**-100)
    low_k[:, :, ::3] *= np.float32(2.0**-40)  # subnormal products
    infinite = arrays(1, 1, 1, 2, 40, 16, 16, seed=7)
    infinite[0][0, 0, 0, 0], infinite[1][0, 0, 16:32, 0] = 1.0, -np.inf  # a tile of nothing but -inf for row 0
    return {
        "NaN and infinities, packed": Example((q, k, v), visible_nan),
        "NaN and infinities, two blocks of rows": Example(
            (np.concatenate([q[:, :, :1]] * 3, axis=1), k[:, :1], v[:, :1]), {**visible_nan, "q_offset": 33}
        ),
        "NaN and infinities, streamed": Example((q[:, :, :1], k, v), {**visible_nan, "q_offset": 33}),
        "scores of -inf": Example(infinite, {"bc": 16, "span": 16, "scale": 1.0}),
        "subnormals": Example((low_q, low_k, low_v), {"causal": True, "q_offset": 15}),
        "subnormals, the caller flushes": Example((low_q, low_k, low_v), {"causal": True, "q_offset": 15}, flush=True),
        "subnormals, the caller flushes, streamed": Example(
            (low_q[:, :, :1], low_k, low_v), {"q_offset": 0, "bc": 16, "span": 16}, flush=True
        ),
    }


def _layouts() -> dict[str, Example]:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays(2, 4, 2, 9, 31, 24, 12))
    backwards = tuple(x[:, ::-1, ::-1] for x in arrays(1, 2, 2, 18, 21, 16, 16))
    shared = arrays(1, 2, 2, 5, 12, 16, 16)
    gaps = tuple(x[..., :13] for x in arrays(1, 2, 2, 7, 18, 32, 32))
    return {
        "heads after rows in memory": Example((q, k, v), {"causal": True, "q_offset": 22}),
        "negative strides": Example((backwards[0], backwards[1], backwards[2]), {"bc": 16}),
        "one sequence for a batch of three": Example(
            (np.repeat(shared[0], 3, 0), *(np.broadcast_to(x, (3, *x.shape[1:])) for x in shared[1:])),  # type: ignore[arg-type]
            {"kv_len": [12, 5, 1]},
        ),
        "rows with gaps": Example((gaps[0], gaps[1], gaps[2]), {}),
    }
