"""One call of the core with tensors, done here and now, or by an operator of PyTorch where it is being traced.

The operators are torch.ops.tilewise.attention, attention_varlen and attention_paged, each also with the suffix _lse,
which returns (o, lse). Their arguments are those of the functions in `tilewise.frontends.torch`, in another order and
of fixed types: per-sequence numbers are integer tensors ([B], or [] for one number of all), `pool` is `threads`, and
`window` is a list: [keys], or [left, right] with -1 for no limit. Python functions (score, keep) they cannot take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tilewise
from tilewise import arguments
from tilewise.arguments import flag
from tilewise.frontends.tensors import array, booleans, integers, refuse_gradients, tensor, torch, workers

_NUMBERS = ("q_offset", "k_offset", "kv_start", "kv_len", "cu_seqlens_q", "cu_seqlens_k", "block_table")
_FLOATS = ("q", "k", "v", "k_pages", "v_pages", "sinks", "out", "lse", "alibi_slopes", "bias")
_SEEN: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLOATS, array), **dict.fromkeys(_NUMBERS, integers), "mask": booleans,
}  # fmt: skip
_OPTIONS = (
    "Tensor? sinks=None, Tensor? q_offset=None, Tensor? k_offset=None, bool causal=False, SymInt[]? window=None, "
    "float? scale=None, int br=0, int bc=0, int span=0, int? threads=None, float? softcap=None, "
    "Tensor? alibi_slopes=None, Tensor? mask=None, Tensor? bias=None"
)
_SIGNATURES = {
    "attention": f"Tensor q, Tensor k, Tensor v, Tensor? kv_start=None, Tensor? kv_len=None, {_OPTIONS}",
    "attention_varlen": f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_OPTIONS}",
    "attention_paged": "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor kv_len, "
    f"Tensor? cu_seqlens_q=None, {_OPTIONS}",
}


def call(function: str, given: dict[str, Any]) -> Any:
    """Call the core's function of that name with the arguments of its namesake in `tilewise.frontends.torch`."""
    return _call_operator(function, given) if traced() else _call_core(function, given)


def call_by_token(function: str, given: dict[str, Any]) -> Any:
    """The same of q [B, H, Tq, D], with o lying token by token in memory, as a contiguous tensor [B, Tq, H, Dv]."""
    q, v = given["q"], given["v" if "v" in given else "v_pages"]
    if isinstance(q, torch.Tensor) and q.ndim == 4 and 1 not in q.shape[1:3] and not traced():
        given["out"] = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)
    result = call(function, given)
    if isinstance(result, tuple):
        return result[0].transpose(1, 2).contiguous(), result[1]
    return result.transpose(1, 2).contiguous()


def traced() -> bool:
    """Whether somebody wants to see operators: a compiler, a tracer, a dispatch mode such as that of fake tensors."""
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing())


def _call_core(function: str, given: dict[str, Any]) -> Any:
    out, lse = given.get("out"), given.get("lse")
    arrays = {name: x if x is None or name not in _SEEN else _SEEN[name](name, x) for name, x in given.items()}
    arrays["pool"] = workers(given.get("pool"))
    result = getattr(tilewise, function)(**arrays)
    for written in (out, lse):
        if written is not None:
            torch.autograd.graph.increment_version(written)
    if not isinstance(result, tuple):
        return tensor(result) if out is None else out
    return tensor(result[0]) if out is None else out, tensor(result[1]) if lse is None else lse


def _call_operator(function: str, given: dict[str, Any]) -> Any:
    given = dict(given)
    for name in ("out", "lse", "arena"):
        if given.pop(name, None) is not None:
            raise NotImplementedError(f"{name} cannot be given while PyTorch traces a call: it plans memory by itself")
    for name in ("score", "keep"):
        if given.pop(name, None) is not None:
            raise NotImplementedError(
                f"{name} cannot be given while PyTorch traces a call, as a function is no argument of an operator: "
                f"make the call in a function under torch.compiler.disable"
            )
    given["threads"] = threads = given.pop("pool", None)
    if not isinstance(threads, (int, type(None))):
        raise NotImplementedError(f"pool must be a number of threads while PyTorch traces a call, got {threads!r}")
    for name, x in given.items():
        if name in _FLOATS and isinstance(x, torch.Tensor):
            refuse_gradients(name, x)
        elif name in _NUMBERS and x is not None:
            given[name] = _as_tensor(x)
    given["window"] = _as_list(given.get("window"))
    flag("causal", given.get("causal", False))  # an operator would take None for False
    suffix = "_lse" if flag("return_lse", given.pop("return_lse", False)) else ""
    return getattr(torch.ops.tilewise, function + suffix)(**given)


def _as_tensor(x: Any) -> Any:
    if isinstance(x, (torch.Tensor, np.ndarray, list, tuple)):
        return torch.as_tensor(x)
    return torch.full((), x, dtype=torch.int64)


def _as_list(window: Any) -> Any:
    """A window as operators have it."""
    sides = arguments.window(window)
    return [-1 if side is None else side for side in sides] if isinstance(sides, tuple) else sides and [sides]


def _as_window(sides: Any) -> Any:
    if sides is None or len(sides) == 1:
        return None if sides is None else sides[0]
    return tuple(None if side == -1 else side for side in sides)


def _define(function: str, return_lse: bool) -> None:
    """Register the operator of a function, and what it returns for fake tensors."""
    signature = _SIGNATURES[function]
    names = [parameter.split("=")[0].split()[-1] for parameter in signature.split(", ")]

    def compute(*values: Any, **named: Any) -> Any:
        given = {**dict(zip(names, values, strict=False)), **named}
        given["pool"] = given.pop("threads", None)
        given["window"] = _as_window(given.get("window"))
        return _call_core(function, {**given, "return_lse": return_lse})

    def shapes(*values: Any, **named: Any) -> Any:
        given = {**dict(zip(names, values, strict=False)), **named}
        q, v = given[names[0]], given[names[2]]
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        heads = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
        return (o, q.new_empty(heads, dtype=torch.float32)) if return_lse else o

    name = f"tilewise::{function}" + ("_lse" if return_lse else "")
    schema = f"({signature}) -> " + ("(Tensor, Tensor)" if return_lse else "Tensor")
    register: Callable[..., Any] = torch.library.custom_op
    register(name, compute, mutates_args=(), schema=schema).register_fake(shapes)


for _function in _SIGNATURES:
    for _return_lse in (False, True):
        _define(_function, _return_lse)
