"""The command line `tilewise`. Needs the extra `cli`: click and rich are imported only when a command is run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

NEEDED = ("click", "rich")
BAD_USE = 2  # exit code for a bad file, flag or installation


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `tilewise` with these arguments (sys.argv by default) and exit with its code."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"tilewise: the command line needs {name}: pip install 'tilewise[cli]'", file=sys.stderr)
            sys.exit(BAD_USE)
    from tilewise.cli.app import run

    sys.exit(run(arguments))
