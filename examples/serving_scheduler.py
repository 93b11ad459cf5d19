#!/usr/bin/env python3
"""A scheduler with continuous batching, and every row it computes has the bits of one whole prefill.

    python examples/serving_scheduler.py [--page-size 16] [--budget 64] [--pages N]

Each step is one call of attention: a row for every sequence that decodes, and chunks of the prompts that are still
being read, up to a budget of rows; all of them ragged rows over one paged cache. Sequences are admitted as pages become
free, one is forked from another's prompt, and those that are finished are freed. The unused slots of the cache hold
NaN throughout.

The queries, keys and values are real: one layer of SmolLM2-135M on 512 tokens of a novel, of which every request takes
a piece. In a model the rows of a step would go on through its other layers; here all are known, and so it can be shown
that scheduling moves no bit: o and lse of every row are compared with tw.attention of the whole request. Exit code 1
if a bit differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise

import numpy as np

import tilewise as tw

MASK = {"causal": True}


@dataclass(eq=False)
class Request:
    """The tokens of one request, q [H, T, D], k and v [Hkv, T, D]; the first `prompt` of them are known at once."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    prompt: int
    parent: Request | None = None  # whose first `shared` tokens are also this one's
    shared: int = 0
    seq: int | None = None  # in the cache, from admission to the end
    done: int = 0  # tokens
    forked: int = 0  # tokens that came with the fork, and so were no rows of this request
    calls: int = 0
    rows: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)  # first row, o, lse

    @property
    def total(self) -> int:
        return self.q.shape[1]

    @property
    def finished(self) -> bool:
        return self.done == self.total

    @property
    def decodes(self) -> bool:
        return self.done >= self.prompt

    def differing_bits(self) -> int:
        """Elements of o and lse that are not those of one whole prefill, to the bit; and rows that are missing."""
        o, lse = tw.attention(self.q[None], self.k[None], self.v[None], **MASK, return_lse=True)
        count, position = 0, self.forked
        for start, own_o, own_lse in self.rows:
            stop = start + own_o.shape[1]
            for own, whole in ((own_o, o[0, :, start:stop]), (own_lse, lse[0, :, start:stop])):
                count += int((np.ascontiguousarray(own).view(np.uint32) != whole.copy().view(np.uint32)).sum())
            count += abs(start - position)
            position = stop
        return count + self.total - position


class Scheduler:
    """Decode rows first, then chunks of prompts, in order of arrival."""

    def __init__(self, cache: tw.PagedKVCache, requests: list[Request], budget: int) -> None:
        self.cache, self.waiting, self.running, self.budget = cache, list(requests), [], budget

    def steps(self) -> Iterator[tuple[list[Request], int, int]]:
        """Work until all is done: after each step its sequences, and its rows of decoding and of prompts."""
        while self.waiting or self.running:
            self.admit()
            work = self.plan()
            self.step(work)
            decoded = sum(n for request, n in work if request.done > request.prompt)
            yield [request for request, _ in work], decoded, sum(n for _, n in work) - decoded
            for request in [request for request in self.running if request.finished]:
                self.cache.free(request.seq)
                request.seq = None
                self.running.remove(request)

    def pages_of(self, request: Request) -> int:
        return -(-request.total // self.cache.page_size)

    def admit(self) -> None:
        """Start what fits: each running request has a claim to the pages of its whole length, so no step lacks any."""
        for request in list(self.waiting):
            parent = request.parent
            if parent and not parent.finished and parent.done < request.shared:
                continue  # worth to wait for: its pages will be ours as well
            if sum(map(self.pages_of, [*self.running, request])) > self.cache.pages:
                continue
            if parent and parent.seq is not None:
                request.seq = self.cache.fork(parent.seq)
                self.cache.truncate(request.seq, request.shared)  # the parent may have gone on
                request.done = request.forked = request.shared
            else:
                request.seq = self.cache.add()
            self.waiting.remove(request)
            self.running.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """(request, rows) of a step."""
        work = [(request, 1) for request in self.running if request.decodes]
        left = self.budget - len(work)
        for request in self.running:
            if not request.decodes and left > 0:
                work.append((request, min(left, request.prompt - request.done)))
                left -= work[-1][1]
        return work

    def step(self, work: list[tuple[Request, int]]) -> None:
        """Append the new tokens' keys and values, and attend all rows in one call."""
        cache, pieces = self.cache, [(r, slice(r.done, r.done + n)) for r, n in work]
        decoding = [(r, s) for r, s in pieces if r.decodes]
        if decoding:
            k, v = (np.stack([getattr(r, name)[:, s] for r, s in decoding]) for name in "kv")
            cache.append_batch([r.seq for r, _ in decoding], k, v)
        for r, s in pieces:
            if not r.decodes:
                cache.append(r.seq, r.k[:, s], r.v[:, s])
        seqs = [r.seq for r, _ in pieces]
        ends = np.cumsum([0, *(n for _, n in work)])
        q = np.concatenate([r.q[:, s].swapaxes(0, 1) for r, s in pieces])  # [rows, H, D]
        o, lse = tw.attention_paged(
            q, cache.k_pages, cache.v_pages, block_table=cache.block_table(seqs), kv_len=cache.lengths(seqs),
            cu_seqlens_q=ends, return_lse=True, **MASK,
        )  # fmt: skip
        for (r, s), (lo, hi) in zip(pieces, pairwise(ends), strict=True):
            r.rows.append((s.start, o[lo:hi].swapaxes(0, 1), lse[:, lo:hi]))
            r.done, r.calls = s.stop, r.calls + 1


def captured_requests() -> list[Request]:
    """Pieces of the captured tokens. "fork" has the prompt of "story", and goes on otherwise."""
    with resources.as_file(resources.files("tilewise") / "data" / "smollm2_layer.npz") as path, np.load(path) as file:
        tokens = [file[name][0] for name in "qkv"]

    def piece(*ranges: tuple[int, int]) -> list[np.ndarray]:
        return [np.concatenate([x[:, lo:hi] for lo, hi in ranges], axis=1) for x in tokens]

    story = Request("story", *piece((0, 230)), prompt=200)
    return [
        story,
        Request("fork", *piece((0, 200), (400, 425)), prompt=209, parent=story, shared=200),
        Request("long", *piece((37, 360)), prompt=301),
        Request("short", *piece((450, 495)), prompt=17),
        Request("whole", *piece((0, 512)), prompt=490),
        Request("brief", *piece((500, 512)), prompt=11),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching over a paged cache, compared to the bit.")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=64, help="rows a step")
    parser.add_argument("--pages", type=int, help="default: 900 tokens' worth, fewer than all requests need")
    options = parser.parse_args(arguments)
    requests = captured_requests()
    (Hkv, _, D), Dv = requests[0].k.shape, requests[0].v.shape[2]
    pages = options.pages or -(-900 // options.page_size)
    cache = tw.PagedKVCache(pages, options.page_size, Hkv, D, Dv)
    if max(r.total for r in requests) > pages * options.page_size or options.budget < len(requests):
        parser.error("the longest request must fit the cache, and a row of every request the budget")
    cache.k_pages[...] = cache.v_pages[...] = np.nan  # what is not written is not read

    print("step  decode  prefill  pages used  shared  sequences")
    shown = ""
    for step, (worked, decode, prefill) in enumerate(Scheduler(cache, requests, options.budget).steps()):
        usage = cache.usage()
        names = " ".join(request.name for request in worked)
        if prefill or names != shown:  # not the many steps that only decode
            shown = names
            print(f"{step:4}  {decode:6}  {prefill:7}  {usage.pages_used:10}  {usage.pages_shared:6}  {names}")
    print(f"{step + 1} steps; {cache.usage().pages_used} pages used at the end\n")

    print("request  tokens  prompt  forked  calls  elements that differ from one prefill")
    differ = [request.differing_bits() for request in requests]
    for r, count in zip(requests, differ, strict=True):
        print(f"{r.name:7}  {r.total:6}  {r.prompt:6}  {r.forked:6}  {r.calls:5}  {count}")
    return 1 if any(differ) or cache.usage().pages_used else 0


if __name__ == "__main__":
    sys.exit(main())
