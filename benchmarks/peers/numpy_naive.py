"""NumPy: matrix product, softmax, matrix product, one head at a time."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload

NAME = "numpy"
NEEDS = ("numpy",)
# Its matrix product reads the variables of threads and of kernels when NumPy is imported. Where they cannot be set
# afterwards, or were set to the kernels of another processor, it gets a process of its own with its own variables.
ISOLATED = importlib.util.find_spec("threadpoolctl") is None or "OPENBLAS_CORETYPE" in os.environ


def start(threads: int) -> str:
    if importlib.util.find_spec("threadpoolctl") is None:
        return np.__version__
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")
    libraries = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas" and "numpy" in x["filepath"]]
    words = [f"{x['internal_api']} {x['version']}, {x.get('architecture')} kernels" for x in libraries]
    return ", ".join([np.__version__, *words])


def naive(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready:
    scale = np.float32(w.D**-0.5)
    hidden = ~w.mask() if w.masked else None

    def head(Q: F32Array, K: F32Array, V: F32Array) -> F32Array:
        S = (Q * scale) @ K.T
        if hidden is not None:
            S[hidden] = -np.inf
        S -= S.max(axis=-1, keepdims=True)
        np.exp(S, out=S)
        o: F32Array = (S @ V) / S.sum(axis=-1, keepdims=True)
        return o

    def grouped() -> F32Array:
        """One row a head: the heads of a group are the rows of one product."""
        o = np.empty_like(q)
        for b in range(w.B):
            for h in range(w.Hkv):
                own = slice(h * w.group, (h + 1) * w.group)
                o[b, own, 0] = head(q[b, own, 0], k[b, h], v[b, h])
        return o

    def each() -> F32Array:
        o = np.empty_like(q)
        for b in range(w.B):
            for h in range(w.H):
                o[b, h] = head(q[b, h], k[b, h // w.group], v[b, h // w.group])
        return o

    return Ready(grouped if w.Tq == 1 else each, np.asarray)


VARIANTS: dict[str, Any] = {"naive": naive}
