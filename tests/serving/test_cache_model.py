"""The paged cache against a model in plain Python, under any order of calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)  # fmt: skip

from tests.serving.caches import (
    assert_holds,
    assert_refused,
    keys_of,
    make,
    put,
    put_batch,
    values_of,
)
from tilewise.errors import CacheFull


class AgainstModel(RuleBasedStateMachine):
    """Sequences as lists of tokens and of page numbers of the model's own, one token after the other."""

    live: Bundle[int] = Bundle("live")
    freed: Bundle[int] = Bundle("freed")

    @initialize(page_size=st.sampled_from([1, 2, 3, 7]), pages=st.integers(1, 14))
    def start(self, page_size: int, pages: int) -> None:
        self.size, self.cache = page_size, make(pages, page_size)
        self.texts: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.new_page, self.new_token = itertools.count(), itertools.count(1)

    def pages_in_use(self, tables: dict[int, list[int]]) -> Counter[int]:
        return Counter(page for table in tables.values() for page in table)

    def appended(self, work: list[tuple[int, int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Texts and tables after so many new tokens for each of the sequences."""
        texts, tables = ({seq: list(x) for seq, x in y.items()} for y in (self.texts, self.tables))
        for seq, n in work:
            for _ in range(n):
                if len(texts[seq]) % self.size == 0:
                    tables[seq].append(next(self.new_page))
                elif self.pages_in_use(tables)[tables[seq][-1]] > 1:
                    tables[seq][-1] = next(self.new_page)
                texts[seq].append(next(self.new_token))
        return texts, tables

    def do(self, work: list[tuple[int, int]], call: Callable[[list[list[int]]], None]) -> None:
        texts, tables = self.appended(work)
        new = [texts[seq][len(self.texts[seq]) :] for seq, _ in work]
        if len(self.pages_in_use(tables)) > self.cache.pages:
            assert_refused(self.cache, CacheFull, lambda: call(new))
        else:
            call(new)
            self.texts, self.tables = texts, tables

    @rule(target=live)
    def add(self) -> int:
        seq = self.cache.add()
        assert seq not in self.texts
        self.texts[seq], self.tables[seq] = [], []
        return seq

    @rule(seq=live, n=st.integers(0, 16))
    def append(self, seq: int, n: int) -> None:
        self.do([(seq, n)], lambda new: put(self.cache, seq, new[0]))

    @rule(seqs=st.lists(live, min_size=1, max_size=6, unique=True), n=st.sampled_from([1, 1, 1, 2, 5]))
    def append_batch(self, seqs: list[int], n: int) -> None:
        self.do([(seq, n) for seq in seqs], lambda new: put_batch(self.cache, seqs, new))

    @rule(random=st.randoms(use_true_random=False))
    def append_to_all(self, random: Any) -> None:
        seqs = random.sample(list(self.texts), len(self.texts))
        if seqs:
            self.do([(seq, 1) for seq in seqs], lambda new: put_batch(self.cache, seqs, new))

    @rule(target=live, seq=live, count=st.integers(1, 3))
    def fork(self, seq: int, count: int) -> Any:
        forks = [self.cache.fork(seq) for _ in range(count)]
        for fork in forks:
            assert fork not in self.texts
            self.texts[fork], self.tables[fork] = list(self.texts[seq]), list(self.tables[seq])
        return multiple(*forks)

    @rule(seq=live, data=st.data())
    def truncate(self, seq: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.texts[seq])))
        self.cache.truncate(seq, length)
        del self.texts[seq][length:]
        del self.tables[seq][-(-length // self.size) :]

    @rule(target=freed, seq=consumes(live))
    def free(self, seq: int) -> int:
        self.cache.free(seq)
        del self.texts[seq], self.tables[seq]
        return seq

    @rule(seq=freed, other=live)
    def refused(self, seq: int, other: int) -> None:
        for call in (
            lambda: put(self.cache, seq, [1]),
            lambda: put_batch(self.cache, [other, seq], [[1], [2]]),
            lambda: put_batch(self.cache, [other, other], [[1], [2]]),
            lambda: self.cache.truncate(other, len(self.texts[other]) + 1),
            lambda: self.cache.append(other, keys_of([1]), values_of([1, 2])),
            *(lambda f=f: f(seq) for f in (self.cache.free, self.cache.fork)),
            *(lambda f=f: f([other, seq]) for f in (self.cache.block_table, self.cache.lengths)),
        ):
            assert_refused(self.cache, ValueError, call)

    @invariant()
    @precondition(lambda self: hasattr(self, "cache"))
    def contents(self) -> None:
        for seq, text in self.texts.items():
            assert_holds(self.cache, seq, text)

    @invariant()
    @precondition(lambda self: hasattr(self, "cache"))
    def pages(self) -> None:
        """The model's pages and the cache's are the same but for their numbers; books and free list are those pages."""
        seqs, cache = list(self.texts), self.cache
        tables = dict(zip(seqs, cache.block_table(seqs).tolist(), strict=True))
        pairs = {pair for seq in seqs for pair in zip(self.tables[seq], tables[seq], strict=False)}
        ours, theirs = {a for a, _ in pairs}, {b for _, b in pairs}
        assert len(ours) == len(theirs) == len(pairs)
        assert all(set(tables[seq][len(self.tables[seq]) :]) <= {0} for seq in seqs)
        references = self.pages_in_use(self.tables)
        assert {page: int(n) for page, n in enumerate(cache._references) if n} == {b: references[a] for a, b in pairs}
        free = cache._free[: cache._free_count].tolist()
        assert sorted(free) == sorted(set(range(cache.pages)) - theirs)
        usage = cache.usage()
        assert usage.sequences == len(seqs)
        assert usage.tokens == sum(map(len, self.texts.values()))
        assert usage.pages_used == len(references)
        assert usage.pages_free == cache.pages - len(references)
        assert usage.pages_shared == sum(n > 1 for n in references.values())


AgainstModel.TestCase.settings = settings(stateful_step_count=40)
TestAgainstModel = AgainstModel.TestCase
