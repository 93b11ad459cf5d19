"""OpenVINO: its ScaledDotProductAttention in float32, and the stateful graph by which its language models decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload

NAME = "openvino"
NEEDS = ("openvino",)
NEW_TOKENS = 0.01  # by how much a cache may grow before it is filled anew
_threads = 1


def start(threads: int) -> str:
    global _threads
    import openvino

    _threads = threads
    return str(openvino.__version__).partition("-")[0]


def _request(model: Any) -> Any:
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": _threads,
        "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False, "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    return openvino.Core().compile_model(model, "CPU", options).create_infer_request()


def sdpa(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready:
    """The operator broadcasts heads, so each KV head is a sequence with one KV head."""
    import openvino
    from openvino import opset13 as op

    if w.group > 1:
        q = q.reshape(w.B * w.Hkv, w.group, w.Tq, w.D)
        k, v = (x.reshape(w.B * w.Hkv, 1, w.Tk, w.D) for x in (k, v))
    arrays = [q, k, v]
    causal = w.masked and w.square_causal
    if w.masked and not causal:
        arrays.append(np.where(w.mask(), np.float32(0), np.float32(-np.inf))[None, None])
    parameters = [op.parameter(list(x.shape), np.float32) for x in arrays]
    node = op.scaled_dot_product_attention(*parameters, causal=causal)
    request = _request(openvino.Model([op.result(node)], parameters, "sdpa"))
    for index, x in enumerate(arrays):
        request.set_input_tensor(index, openvino.Tensor(x, shared_memory=True))

    def call() -> Any:
        request.infer()
        return request

    def fetch(r: Any, owners: Any = arrays) -> F32Array:  # the tensors share the arrays' memory, but do not own it
        o: F32Array = r.get_output_tensor(0).data.reshape(w.B, w.H, w.Tq, w.D).copy()
        return o

    return Ready(call, fetch)


def _stateful_model(w: Workload) -> Any:
    """ReadValue, Gather by beam, Concat, broadcast over the group, attention, Assign: fused to one node."""
    import openvino
    from openvino import opset13 as op
    from openvino.op.util import Variable, VariableInfo

    def constant(x: Any) -> Any:
        return op.constant(np.array(x, np.int64))

    q, k, v = (op.parameter([w.B, heads, -1, w.D], np.float32) for heads in (w.H, w.Hkv, w.Hkv))
    beam, mask = op.parameter([-1], np.int32), op.parameter([-1, 1, -1, -1], np.float32)
    sinks, caches = [], []
    for name, new in (("k", k), ("v", v)):
        info = VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, w.Hkv, -1, w.D]), openvino.Type.f32
        info.variable_id = name
        variable = Variable(info)
        past = op.read_value(op.constant(np.zeros((w.B, w.Hkv, 0, w.D), np.float32)), variable)
        cache = op.concat([op.gather(past, beam, constant(0)), new], 2)
        sinks.append(op.assign(cache, variable))
        if w.group > 1:
            length = op.gather(op.shape_of(cache), constant([2]), constant(0))
            grouped = op.concat([constant([w.B, w.Hkv, w.group]), length, constant([w.D])], 0)
            cache = op.broadcast(op.unsqueeze(cache, constant([2])), grouped, broadcast_spec="BIDIRECTIONAL")
            flat = op.concat([constant([w.B, w.H]), length, constant([w.D])], 0)
            cache = op.reshape(cache, flat, special_zero=False)
        caches.append(cache)
    node = op.scaled_dot_product_attention(q, *caches, mask, causal=False)
    return openvino.Model([op.result(node)], sinks, [q, k, v, beam, mask], "stateful")


def kv_cache(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    """Decode: the cache holds Tk - 1 tokens; each call appends one, and it is filled anew when it has grown."""
    import openvino

    if not w.decode or not w.causal:
        return None
    request = _request(_stateful_model(w))
    beam, past = np.arange(w.B, dtype=np.int32), w.Tk - 1
    new = [np.ascontiguousarray(x[:, :, past:]) for x in (k, v)]
    most, appended = max(1, int(NEW_TOKENS * w.Tk)), 0

    def fill() -> None:
        nonlocal appended
        request.reset_state()
        for state in request.query_state():
            cache = k if state.name.startswith("k") else v
            state.state = openvino.Tensor(np.ascontiguousarray(cache[:, :, :past]))
        appended = 0

    def call() -> Any:
        nonlocal appended
        if appended >= most:  # only a long burst gets here; `before` does it untimed
            fill()
        mask = np.zeros((w.B, 1, 1, past + 1 + appended), np.float32)
        for index, x in enumerate((q, *new, beam, mask)):
            request.set_input_tensor(index, openvino.Tensor(x))
        request.infer()
        appended += 1
        return request

    def before() -> None:
        if appended > most // 2:
            fill()

    fill()
    return Ready(call, lambda r: r.get_output_tensor(0).data.reshape(w.B, w.H, 1, w.D).copy(), before)


VARIANTS: dict[str, Any] = {"sdpa": sdpa, "kv_cache": kv_cache}
