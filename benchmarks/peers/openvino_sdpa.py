"""OpenVINO: its ScaledDotProductAttention, and the stateful graph by which its language models decode.

In bfloat16 the graph's inputs, outputs, arithmetic and cache all are, so that nothing is converted inside the timing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arguments import Array, F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import Workload
from tilewise.verify.halves import rounded, wide

NAME = "openvino"
NEEDS = ("openvino",)
TYPES = ("f32", "bf16", "f16")
CAPABILITIES = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
NEW_TOKENS = 0.01  # by how much a cache may grow before it is filled anew
_threads = 1


def start(threads: int) -> str:
    global _threads
    import openvino

    _threads = threads
    return str(openvino.__version__).partition("-")[0]


def _cannot(w: Workload) -> str:
    """Where it has no arithmetic in a type, it converts to float32 and back inside the call."""
    import openvino

    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "" if CAPABILITIES[w.type] in able else f"computes nothing in {w.type_name} on this processor"


def _tensor(w: Workload, x: Array) -> Any:
    """Over the same memory, in the workload's type."""
    import openvino

    if w.type == "bf16":
        return openvino.Tensor(x.view(np.uint16), openvino.Shape(x.shape), openvino.Type.bf16)
    return openvino.Tensor(x, shared_memory=True)


def _mask(w: Workload) -> Array:
    return rounded(np.where(w.mask(), np.float32(0), np.float32(-np.inf)), w.type)[None, None]


def _fetch(w: Workload, request: Any) -> F32Array:
    return wide(request.get_output_tensor(0).data.copy(), w.type).reshape(w.B, w.H, w.Tq, w.D)


def _request(w: Workload, model: Any) -> Any:
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": w.type, "KV_CACHE_PRECISION": w.type, "INFERENCE_NUM_THREADS": _threads,
        "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False, "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    return openvino.Core().compile_model(model, "CPU", options).create_infer_request()


def sdpa(w: Workload, q: Array, k: Array, v: Array) -> Ready | str:
    """The operator broadcasts heads, so each KV head is a sequence with one KV head."""
    import openvino
    from openvino import opset13 as op

    if reason := _cannot(w):
        return reason
    if w.group > 1:
        q = q.reshape(w.B * w.Hkv, w.group, w.Tq, w.D)
        k, v = (x.reshape(w.B * w.Hkv, 1, w.Tk, w.D) for x in (k, v))
    arrays = [q, k, v]
    causal = w.masked and w.square_causal
    if w.masked and not causal:
        arrays.append(_mask(w))
    parameters = [op.parameter(list(x.shape), getattr(openvino.Type, w.type)) for x in arrays]
    node = op.scaled_dot_product_attention(*parameters, causal=causal)
    request = _request(w, openvino.Model([op.result(node)], parameters, "sdpa"))
    for index, x in enumerate(arrays):
        request.set_input_tensor(index, _tensor(w, x))

    def call() -> Any:
        request.infer()
        return request

    def fetch(r: Any, owners: Any = arrays) -> F32Array:  # the tensors share the arrays' memory, but do not own it
        return _fetch(w, r)

    return Ready(call, fetch)


def _stateful_model(w: Workload) -> Any:
    """ReadValue, Gather by beam, Concat, broadcast over the group, attention, Assign: fused to one node."""
    import openvino
    from openvino import opset13 as op
    from openvino.op.util import Variable, VariableInfo

    def constant(x: Any) -> Any:
        return op.constant(np.array(x, np.int64))

    kind = getattr(openvino.Type, w.type)
    q, k, v = (op.parameter([w.B, heads, -1, w.D], kind) for heads in (w.H, w.Hkv, w.Hkv))
    beam, mask = op.parameter([-1], np.int32), op.parameter([-1, 1, -1, -1], kind)
    sinks, caches = [], []
    for name, new in (("k", k), ("v", v)):
        info = VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, w.Hkv, -1, w.D]), kind
        info.variable_id = name
        variable = Variable(info)
        past = op.read_value(op.constant(openvino.Tensor(kind, openvino.Shape([w.B, w.Hkv, 0, w.D]))), variable)
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


def kv_cache(w: Workload, q: Array, k: Array, v: Array) -> Ready | str | None:
    """Decode: the cache holds Tk - 1 tokens; each call appends one, and it is filled anew when it has grown."""
    import openvino

    if not w.decode or not w.causal:
        return None
    if reason := _cannot(w):
        return reason
    request = _request(w, _stateful_model(w))
    beam, past = np.arange(w.B, dtype=np.int32), w.Tk - 1
    new = [np.ascontiguousarray(x[:, :, past:]) for x in (k, v)]
    most, appended = max(1, int(NEW_TOKENS * w.Tk)), 0

    def fill() -> None:
        nonlocal appended
        request.reset_state()
        for state in request.query_state():
            cache = k if state.name.startswith("k") else v
            state.state = _tensor(w, np.ascontiguousarray(cache[:, :, :past]))
        appended = 0

    def call() -> Any:
        nonlocal appended
        if appended >= most:  # only a long burst gets here; `before` does it untimed
            fill()
        mask = np.zeros((w.B, 1, 1, past + 1 + appended), q.dtype)
        for index, x in enumerate((q, *new, mask)):
            request.set_input_tensor(index if index < 3 else 4, _tensor(w, x))
        request.set_input_tensor(3, openvino.Tensor(beam))
        request.infer()
        appended += 1
        return request

    def before() -> None:
        if appended > most // 2:
            fill()

    fill()
    return Ready(call, lambda r: _fetch(w, r), before)


VARIANTS: dict[str, Any] = {"sdpa": sdpa, "kv_cache": kv_cache}
