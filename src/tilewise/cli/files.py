"""Tensors from .npz and .safetensors files. Whatever is wrong with a file is one line that names the file."""

from __future__ import annotations

import importlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LAYER = "SmolLM2-135M, layer 15, on 512 tokens of Alice's Adventures in Wonderland"
NPY_MAGIC = b"\x93NUMPY"
UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


class Tensors:
    """The arrays of a file, read when they are asked for."""

    def __init__(self, path: Path, names: list[str], source: Any, dtypes: Mapping[str, str]) -> None:
        self.path, self.names, self._source, self._dtypes = path, names, source, dtypes

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> Array:
        """A float32 array, its last axis contiguous."""
        if name not in self.names:
            held = ", ".join(sorted(self.names)[:12]) or "no array at all"
            raise click.ClickException(f"{self.path}: there is no array {name!r}; the file holds {held}")
        if self._dtypes.get(name, "F32") != "F32":
            raise _not_float32(self.path, name, self._dtypes[name])
        try:
            x: Array = self._source.get_tensor(name) if self._dtypes else self._source[name]
        except (*UNREADABLE, MemoryError) as error:
            raise _unreadable(self.path, error, f"array {name!r}") from None
        if x.dtype != np.float32:
            raise _not_float32(self.path, name, str(x.dtype))
        # the file may hold Fortran order or another byte order; the library itself never copies
        return np.asarray(x, np.float32, order="C" if x.ndim and x.strides[-1] != x.itemsize else "K")


@contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """The arrays of a .npz or .safetensors file, while it is open."""
    kind = path.suffix.lower()
    if kind not in (".npz", ".safetensors"):
        raise click.ClickException(f"{path}: expected a .npz or .safetensors file")
    if path.is_dir():
        raise click.ClickException(f"{path}: is a directory")
    with _open_npz(path) if kind == ".npz" else _open_safetensors(path) as tensors:
        yield tensors


@contextmanager
def captured_layer() -> Iterator[Tensors]:
    """q, k, v of one layer of a real language model on a real text; see data/NOTICE.md."""
    with resources.as_file(resources.files("tilewise") / "data" / "smollm2_layer.npz") as path, open_tensors(path) as t:
        yield t


@contextmanager
def _open_npz(path: Path) -> Iterator[Tensors]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            magic = file.read(6)
            if not magic.startswith((b"PK", NPY_MAGIC)):  # NumPy would take it for a pickle
                raise ValueError("it is not a .npz file")
            file.seek(0)
            source = np.load(file, allow_pickle=False)  # a pickle could run code
        except UNREADABLE as error:
            raise _unreadable(path, error) from None
        if magic == NPY_MAGIC:
            raise click.ClickException(f"{path}: holds a single array, expected a .npz with q, k and v")
        yield Tensors(path, list(source.files), source, {})


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Tensors]:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise click.ClickException(f"{path}: needs safetensors: pip install 'tilewise[cli]'") from None
    with ExitStack() as stack:
        try:
            source = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            names = list(source.keys())
            dtypes = {name: str(source.get_slice(name).get_dtype()) for name in names}
        except (*UNREADABLE, safetensors.SafetensorError) as error:
            raise _unreadable(path, error) from None
        yield Tensors(path, names, source, dtypes)


def _not_float32(path: Path, name: str, dtype: str) -> click.ClickException:
    known = {"F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    return click.ClickException(
        f"{path}: {name} is {known.get(dtype, dtype)}; only float32 is supported now: convert it first"
    )


def _unreadable(path: Path, error: BaseException, what: str = "the file") -> click.ClickException:
    if isinstance(error, FileNotFoundError):
        return click.ClickException(f"{path}: no such file")
    if isinstance(error, PermissionError):
        return click.ClickException(f"{path}: permission denied")
    reason = str(error) or type(error).__name__
    if "allow_pickle" in reason:
        reason = "it holds Python objects (a pickle), which could run code"
    return click.ClickException(f"{path}: cannot read {what}: {reason}")
