"""Tensors of PyTorch as the arrays that the core takes, and back: always the same memory, never a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import arguments
from tilewise.config import current
from tilewise.errors import InvalidArgument
from tilewise.kernels.captured import ARRAYS
from tilewise.runtime.pool import Pool

try:
    import torch as torch
    from torch.autograd import forward_ad
except ModuleNotFoundError as missing:
    if missing.name != "torch":  # PyTorch is there, but something that it needs is not
        raise
    raise ModuleNotFoundError(
        "this module needs PyTorch, which is not installed: pip install 'tilewise[torch]'", name="torch"
    ) from missing

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BOOLEANS = (torch.bool,)
_WORDS = {FLOATS: "float32, bfloat16 or float16", BOOLEANS: "bool"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def array(name: str, x: Any, dtypes: tuple[torch.dtype, ...] = FLOATS) -> NDArray[Any]:
    """The memory of a tensor of one of these dtypes as an array.

    Raises TypeError, InvalidArgument or NotImplementedError where an array would not mean the same as the tensor.
    """
    if type(x) not in _PLAIN or x.requires_grad or forward_ad._current_level >= 0:
        x = _detached(name, x)
    try:
        if x.dtype is torch.bfloat16:  # which NumPy does not know
            seen: NDArray[Any] = x.view(torch.int16).numpy().view(arguments.BFLOAT16)
        else:
            seen = x.numpy()
    except (RuntimeError, TypeError) as failure:
        raise _refusal(name, x, dtypes) from failure
    if x.dtype not in dtypes:
        raise _refusal(name, x, dtypes)
    return seen


def booleans(name: str, x: Any) -> NDArray[Any]:
    """The memory of a bool tensor as an array."""
    return array(name, x, BOOLEANS)


def integers(name: str, x: Any) -> Any:
    """Integers as the core takes them: a tensor as an array over its memory, anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.device.type != "cpu" or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be integers on the CPU, got a tensor of {x.dtype} on {x.device}")
    return x.numpy()


def tensor(x: NDArray[Any]) -> torch.Tensor:
    """The memory of an array that the core made as a tensor."""
    if x.dtype.kind == "f":
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def workers(pool: Pool | int | None) -> Pool | int:
    """What a call's `pool` means beside PyTorch: None is PyTorch's threads, as many as TILEWISE_THREADS says where that
    is set, else PyTorch."""
    if pool is None:
        threads = current().threads or int(torch.get_num_threads())
        if threads > 1:
            from tilewise.frontends.openmp import openmp_pool

            return openmp_pool(threads) or threads
        return threads
    return pool


def refuse_gradients(name: str, x: Any) -> None:
    """Backward is still to come, and an output that silently carries no gradient would train nothing."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{name} requires a gradient, and tilewise has no backward pass yet: call it in torch.no_grad() or "
            f"torch.inference_mode(), or pass {name}.detach()"
        )


def _detached(name: str, x: Any) -> torch.Tensor:
    """The tensor without its gradient, where nobody asked for one."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of PyTorch, got {type(x).__name__}")
    if type(x) not in _PLAIN:
        raise TypeError(f"{name} must be a plain tensor: what the subclass {type(x).__name__} means would be lost")
    refuse_gradients(name, x)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent, and tilewise has no forward-mode derivative")
    return x.detach()


def captured_array(x: torch.Tensor) -> NDArray[Any]:
    """A tensor that a score or keep function captured. Of it a copy is made anyway, in float32 or int32."""
    x = _detached("a captured tensor", x) if type(x) not in _PLAIN or x.requires_grad else x
    if x.device.type != "cpu" or x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise InvalidArgument(f"a captured tensor must be dense and on the CPU, got {x.layout} on {x.device}")
    plain = x.resolve_neg()
    found: NDArray[Any] = (plain.float() if x.dtype is torch.bfloat16 else plain).numpy()
    return found


ARRAYS[torch.Tensor] = captured_array


def _refusal(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> Exception:
    """Why a tensor cannot be seen as an array."""
    if x.device.type != "cpu":
        return InvalidArgument(f"{name} must be on the CPU, got a tensor on {x.device}")
    if x.layout != torch.strided or x.is_nested:
        return InvalidArgument(f"{name} must be dense, got the layout {'nested' if x.is_nested else x.layout}")
    if x.dtype not in dtypes:
        return TypeError(f"{name} must be {_WORDS[dtypes]}, got {x.dtype}")
    if x.is_neg():
        return InvalidArgument(f"{name} is a view that is negated when it is read: pass {name}.resolve_neg()")
    return InvalidArgument(f"{name} has no memory to read, as inside a transform of torch.func")
