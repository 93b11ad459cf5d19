"""ONNX's Attention operator (opsets 23 to 25) on NumPy arrays, and as an operator of ONNX's ReferenceEvaluator.

`import tilewise.onnx as to`, then `to.attention(Q, K, V, is_causal=1)`, which needs no onnx, or
`ReferenceEvaluator(model, new_ops=[to.Attention])`, which does.
"""

from typing import Any

from tilewise.frontends.onnx import Results, attention, attention_op

__all__ = ["Results", "attention"]  # and Attention, which a star import must not make: it imports onnx


def __getattr__(name: str) -> Any:
    """`Attention`, made when it is first asked for."""
    if name == "Attention":
        return attention_op()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
