"""The cache of keys and values that a FlashAttention call reads, and writes new ones into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewise.errors import InvalidArgument, ShapeError
from tilewise.frontends.calls import traced
from tilewise.frontends.tensors import refuse_gradients, torch


class Cache:
    """A cache as `flash_attn_with_kvcache` is given it, for a batch of B queries. See there for the arguments.

    A cache that is read through cache_batch_idx is one of pages that hold a sequence each: `table` names the pages, and
    is None where sequence b of the batch is sequence b of the cache.
    """

    def __init__(
        self, k_cache: Any, v_cache: Any, B: int, seqlens: Any, batch_idx: Any, leftpad: Any, block_table: Any
    ) -> None:  # fmt: skip
        if sum(x is not None for x in (batch_idx, leftpad, block_table)) > 1:
            raise NotImplementedError("cache_batch_idx, cache_leftpad and block_table cannot be given together")
        self.k, self.v, self.B, self.seqlens = k_cache, v_cache, B, seqlens
        self.leftpad = None if leftpad is None else integers_of_tensor("cache_leftpad", leftpad, 1, B)
        self.table = None if block_table is None else integers_of_tensor("block_table", block_table, 2, B)
        if batch_idx is not None:
            self.table = integers_of_tensor("cache_batch_idx", batch_idx, 1, B)[:, None]
        self.capacity = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        self.lengths = self.capacity if seqlens is None else seqlens
        if isinstance(seqlens, torch.Tensor):
            self.lengths = integers_of_tensor("cache_seqlens", seqlens, 1, B)
        elif not isinstance(self.lengths, int):
            raise TypeError(f"cache_seqlens must be an int or a tensor of integers, got {type(seqlens).__name__}")

    def operands(self) -> dict[str, Any]:
        """The arguments of `attention`, or with a table of `attention_paged`, that say where the keys are."""
        if self.table is not None:
            return {"k_pages": self.k, "v_pages": self.v, "block_table": self.table}
        return {"k": self.k.transpose(1, 2), "v": self.v.transpose(1, 2), "kv_start": self.leftpad}

    def expect_new(self, k: Any, v: Any) -> int:
        """How many new tokens k and v hold for each sequence; refused where they do not fit into the cache."""
        if traced():
            raise NotImplementedError(
                "k and v cannot be given while PyTorch traces the call: write them into the cache"
            )
        if k is None or v is None or self.seqlens is None:
            raise InvalidArgument("k, v and cache_seqlens must be given together")
        for name, x, cache in (("k", k, self.k), ("v", v, self.v)):
            if not isinstance(x, torch.Tensor) or x.dtype != cache.dtype:
                raise TypeError(
                    f"{name} must be a tensor of {cache.dtype} as {name}_cache is, got {getattr(x, 'dtype', x)}"
                )
            if x.ndim != 4 or x.shape != (self.B, k.shape[1], *cache.shape[2:]):
                expected = (self.B, "new", *cache.shape[2:])
                raise ShapeError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
            refuse_gradients(name, x)
            refuse_gradients(f"{name}_cache", cache)
        return int(k.shape[1])

    @contextmanager
    def appended(self, k: Any, v: Any) -> Iterator[None]:
        """Write k and v behind the tokens of each sequence; take them out again if what is done in the block fails."""
        at = self._places(k.shape[1])
        old = self.k[at], self.v[at]
        self.k[at], self.v[at] = k, v
        try:
            yield
        except BaseException:
            self.k[at], self.v[at] = old
            raise

    def _places(self, new: int) -> tuple[Any, Any]:
        """The indices [B, new] into the first two axes of the cache where new tokens belong."""
        first = torch.as_tensor(self.lengths).expand(self.B).long()
        position = first[:, None] + torch.arange(new)
        if self.B and new and not 0 <= int(position.min()) <= int(position.max()) < self.capacity:
            raise InvalidArgument(
                f"cache_seqlens must leave room for {new} new tokens of {self.capacity} in all, got {first.tolist()}"
            )
        if self.table is None:
            return torch.arange(self.B)[:, None], position
        page_size = self.k.shape[1]
        pages = self.table.long().gather(1, position // page_size)
        if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < len(self.k):
            raise InvalidArgument(f"a page of a new token must lie in 0 ... {len(self.k) - 1}, got {pages.tolist()}")
        return pages, position % page_size


def integers_of_tensor(name: str, x: Any, rank: int, B: int | None = None) -> Any:
    """A tensor of integers of that rank, with B of them on its first axis."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != rank or (B is not None and len(x) != B):
        raise ShapeError(
            f"{name} must have {rank} axes and the batch size {B} on the first, got shape {tuple(x.shape)}"
        )
    return x
