"""The group of commands, and what becomes of errors: one clear line on stderr and exit code 2, no traceback."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import click

import tilewise as tw
from tilewise.cli import BAD_USE
from tilewise.cli.checks import parity, verify
from tilewise.cli.info import info
from tilewise.cli.run import run_command
from tilewise.cli.show import show

INTERRUPTED = 130  # what shells report for SIGINT
CLOSED_PIPE = 141  # and for SIGPIPE


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tw.__version__, prog_name="tilewise")
@click.pass_context
def group(context: click.Context) -> None:
    """Exact attention on the CPU, one tile of keys at a time: the bits of a row never move."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


group.add_command(run_command, "run")
for command in (verify, parity, info, show):
    group.add_command(command)
if importlib.util.find_spec("tilewise.bench") is not None:
    bench = getattr(importlib.import_module("tilewise.bench"), "bench_command", None)
    if bench is not None:
        group.add_command(bench, "bench")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Only a bug in tilewise gets past here as an exception."""
    try:
        code = group.main(args=arguments, prog_name="tilewise", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        return _complain(error.format_message(), context.command_path if context else "tilewise")
    except (tw.InvalidArgument, tw.ShapeError, tw.TargetError) as error:
        return _complain(str(error))
    except MemoryError as error:
        return _complain(str(error) or "out of memory")
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its exit
        return CLOSED_PIPE


def _complain(message: str, who: str = "tilewise") -> int:
    click.echo(f"{who}: {' '.join(message.split())}", err=True)
    return BAD_USE
