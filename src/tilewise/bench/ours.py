"""How we run a workload: the call that a user writes. Threads and target are knobs, set around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np

import tilewise as tw
from tilewise.arguments import Array, F32Array
from tilewise.bench.peers import Peer, Ready
from tilewise.bench.workloads import TYPES, Batch, Startup, Workload, empty
from tilewise.config import current
from tilewise.verify.halves import wide

# The start of the process and its inputs are not timed: they are there before the first import of ours.
FIRST_CALL = """
import json, sys, time
shapes, arguments = json.loads(sys.argv[1])
data = sys.stdin.buffer.read()
begin = time.perf_counter()
import numpy as np
import tilewise as tw
ends = np.cumsum([np.prod(x) for x in shapes])[:-1]
q, k, v = (x.reshape(s) for x, s in zip(np.split(np.frombuffer(data, np.float32), ends), shapes))
o = tw.attention(q, k, v, **arguments)
seconds = time.perf_counter() - begin
sys.stdout.buffer.write(np.float64(seconds).tobytes() + o.tobytes())
"""


def dense(w: Workload, q: Array, k: Array, v: Array) -> Ready:
    arguments = w.arguments
    return Ready(lambda: tw.attention(q, k, v, **arguments), partial(wide, type=w.type))


def ragged(w: Batch, q: Array, k: Array, v: Array) -> Ready:
    starts = w.starts
    return Ready(
        lambda: tw.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True),
        partial(wide, type=w.type),
    )


def paged(w: Batch, q: Array, k: Array, v: Array) -> Ready:
    """Decode. A step of a server is one call, with new lengths and a table that may have changed."""
    table, steps, q = w.block_table(w.page), w.steps(), q[:, :, None]
    k_pages, v_pages = pages(w, k), pages(w, v)

    def call() -> Array:
        o: Array = tw.attention_paged(q, k_pages, v_pages, block_table=table, kv_len=next(steps), causal=True)
        return o

    return Ready(call, lambda o: wide(o, w.type).reshape(w.shapes[0]))


def pages(w: Batch, x: Array) -> Array:
    """Keys or values in pages, [pages, page_size, Hkv, D] over memory as `tilewise.PagedKVCache` has it."""
    table, starts = w.block_table(w.page), w.starts
    array = empty((int(table.max()) + 1, w.Hkv, w.page, w.D), w.type).swapaxes(1, 2)
    for row, start, end in zip(table, starts, starts[1:], strict=False):
        slot = np.arange(end - start)
        array[row[slot // w.page], slot % w.page] = x[start:end]
    return array


def first_call(w: Startup, q: Array, k: Array, v: Array) -> Ready:
    knobs = {"TILEWISE_THREADS": current().threads, "TILEWISE_TARGET": current().target}
    environment = os.environ | {name: str(x) for name, x in knobs.items() if x}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a package that was installed has its bytecode
    command = [sys.executable, "-c", FIRST_CALL, json.dumps([w.shapes, w.arguments])]
    data = b"".join(x.tobytes() for x in (q, k, v))

    def call() -> bytes:
        with TemporaryDirectory() as folder:
            environment["TILEWISE_CACHE"] = folder
            for _ in range(1 + w.cached):  # the last one counts
                done = subprocess.run(command, input=data, capture_output=True, env=environment, check=True)
        return done.stdout

    def fetch(answer: bytes) -> F32Array:
        return np.frombuffer(answer, np.float32, offset=8).reshape(w.shapes[0])

    return Ready(call, fetch, seconds=lambda answer: float(np.frombuffer(answer, np.float64, 1)[0]))


def prepare(w: Workload, q: Array, k: Array, v: Array) -> Ready:
    if isinstance(w, Startup):
        return first_call(w, q, k, v)
    if isinstance(w, Batch):
        return paged(w, q, k, v) if w.page else ragged(w, q, k, v)
    return dense(w, q, k, v)


VARIANTS = {"attention": prepare}
OURS = Peer("tilewise", None, False, lambda threads: tw.__version__, VARIANTS, VARIANTS, tuple(TYPES))
