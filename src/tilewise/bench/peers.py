"""Peers: one small file each, loaded when a benchmark runs. benchmarks/README.md says what such a file has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import tilewise as tw
from tilewise.arguments import Array, F32Array
from tilewise.bench.workloads import Batch, Workload

FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers"  # of a checkout; an installed wheel has none


class Ready(NamedTuple):
    """A workload that is ready to be timed: `call()` is timed, and `fetch` makes float32 of q's shape of its result.

    `before`, if there is one, runs untimed ahead of every burst of calls. `seconds(result)` is for a call that times
    itself.
    """

    call: Callable[[], Any]
    fetch: Callable[[Any], F32Array]
    before: Callable[[], None] | None = None
    seconds: Callable[[Any], float] | None = None


# None, or the reason as text, where a variant cannot do a workload
Prepare = Callable[[Any, Array, Array, Array], "Ready | str | None"]


class Peer(NamedTuple):
    """A library that is installed here."""

    name: str
    path: Path | None  # None: ours
    isolated: bool
    start: Callable[[int], str]  # (threads) -> its version
    variants: Mapping[str, Prepare]
    batches: Mapping[str, Prepare]  # the variants for a `Batch`
    types: tuple[str, ...]  # that it computes in

    def variants_for(self, w: Workload) -> Mapping[str, Prepare]:
        return self.batches if isinstance(w, Batch) else self.variants


class Missing(NamedTuple):
    name: str
    reason: str


def load_peer(path: Path) -> Peer | Missing:
    """Load the adapter, which imports its library only in `start`."""
    module = _module(path)
    name: str = module.NAME
    for library in module.NEEDS:
        if importlib.util.find_spec(library) is None:
            return Missing(name, f"needs {library}")
    reason = module.missing() if hasattr(module, "missing") else None
    if reason:
        return Missing(name, reason)
    batches, types = getattr(module, "BATCHES", {}), getattr(module, "TYPES", ("f32",))
    return Peer(name, path, getattr(module, "ISOLATED", False), module.start, module.VARIANTS, batches, types)


def load_peers(folder: Path, chosen: Sequence[str] = ()) -> tuple[list[Peer], list[Missing]]:
    """(those that are installed, those that are not), of all files of the folder or of the chosen names."""
    found = [load_peer(path) for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    if unknown := set(chosen) - {x.name for x in found}:
        names = ", ".join(x.name for x in found) or "none"
        raise tw.InvalidArgument(f"--peers: got {', '.join(sorted(unknown))}, expected names of {names}")
    wanted = [x for x in found if not chosen or x.name in chosen]
    return [x for x in wanted if isinstance(x, Peer)], [x for x in wanted if isinstance(x, Missing)]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tilewise_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise tw.InvalidArgument(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
