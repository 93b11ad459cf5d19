"""ONNX Runtime: its GroupQueryAttention and MultiHeadAttention, and the standard's Attention, with bound outputs.

GroupQueryAttention shares the buffer of past and present keys, as generation does, and appends the new tokens' keys
and values itself: that is inside the timing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench.peers import Ready
from tilewise.bench.workloads import FLOAT, Workload

NAME = "onnxruntime"
NEEDS = ("onnxruntime", "onnx")
MOST_SCORES = 1 << 32  # bytes; Attention keeps all of them, several times over
MICROSOFT = "com.microsoft"
_threads = 1


def start(threads: int) -> str:
    global _threads
    import onnxruntime

    _threads = threads
    return str(onnxruntime.__version__)


def _tokens(x: F32Array) -> F32Array:
    """[B,H,T,D] to [B,T,H*D]."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


def _ready(
    w: Workload, operator: str, domain: str, arrays: dict[str, Any], out: F32Array, attributes: dict[str, Any],
    in_place: dict[str, str], fetch: Any,
) -> Ready:  # fmt: skip
    """A session of one node. `in_place`: outputs that are written to the buffers of inputs."""
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    node = helper.make_node(operator, list(arrays), ["o", *in_place], domain=domain, **attributes)
    taken = [helper.make_tensor_value_info(name, kinds[x.dtype.name], x.shape) for name, x in arrays.items()]
    given = [helper.make_tensor_value_info("o", TensorProto.FLOAT, out.shape)]
    given += [helper.make_tensor_value_info(x, TensorProto.FLOAT, arrays[y].shape) for x, y in in_place.items()]
    graph = helper.make_graph([node], "attention", taken, given)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = _threads, 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}
    result = onnxruntime.OrtValue.ortvalue_from_numpy(out)
    binding, run_options = session.io_binding(), onnxruntime.RunOptions()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("o", result)
    for name, source in in_place.items():
        binding.bind_ortvalue_output(name, values[source])

    def call(owners: Any = (arrays, values, out)) -> Any:  # a value may share its array's memory
        session.run_with_iobinding(binding, run_options)
        return result

    return Ready(call, lambda o: fetch(o.numpy()))


def _heads(w: Workload) -> Any:
    return lambda o: o.reshape(w.B, w.Tq, w.H, w.D).transpose(0, 2, 1, 3).copy()


def gqa(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    if not w.causal or w.q_offset + w.Tq != w.Tk:
        return None
    new = slice(w.q_offset, None)
    arrays = {
        "q": _tokens(q), "k": _tokens(k[:, :, new]), "v": _tokens(v[:, :, new]),
        "past_k": k.copy(), "past_v": v.copy(),  # written to
        "lengths": np.full(w.B, w.Tk - 1, np.int32), "total": np.array(w.Tk, np.int32),
    }  # fmt: skip
    attributes: dict[str, Any] = {"num_heads": w.H, "kv_num_heads": w.Hkv, "scale": float(w.D**-0.5)}
    if w.window:
        attributes["local_window_size"] = w.window
    out = np.empty((w.B, w.Tq, w.H * w.D), np.float32)
    in_place = {"present_k": "past_k", "present_v": "past_v"}
    return _ready(w, "GroupQueryAttention", MICROSOFT, arrays, out, attributes, in_place, _heads(w))


def mha(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | None:
    if w.group > 1 or w.window or (w.masked and not w.square_causal):
        return None
    attributes = {"num_heads": w.H, "scale": float(w.D**-0.5), "unidirectional": int(w.masked)}
    arrays = {"q": _tokens(q), "k": _tokens(k), "v": _tokens(v)}
    out = np.empty((w.B, w.Tq, w.H * w.D), np.float32)
    return _ready(w, "MultiHeadAttention", MICROSOFT, arrays, out, attributes, {}, _heads(w))


def attention(w: Workload, q: F32Array, k: F32Array, v: F32Array) -> Ready | str:
    """The standard's operator: it computes and keeps every score."""
    scores = FLOAT * w.B * w.H * w.Tq * w.Tk
    if scores >= MOST_SCORES:
        return f"would keep {scores / 1e9:.1f} GB of scores"
    arrays = {"q": q, "k": k, "v": v}
    if w.masked and not w.square_causal:
        arrays["mask"] = np.where(w.mask(), np.float32(0), np.float32(-np.inf))
    attributes = {"is_causal": int(w.masked and w.square_causal), "scale": float(w.D**-0.5)}
    return _ready(w, "Attention", "", arrays, np.empty_like(q), attributes, {}, np.copy)


VARIANTS: dict[str, Any] = {"gqa": gqa, "mha": mha, "attention": attention}
