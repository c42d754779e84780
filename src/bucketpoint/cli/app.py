"""`bucketpoint`: the group of commands and the program's entry. A command's module is imported on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from bucketpoint.cli.exits import INTERRUPTED, OUTPUT_FAILED
from bucketpoint.cli.terminal import OutputError, printed_safely
from bucketpoint.version import __version__

COMMANDS = {
    "adopt": "bucketpoint.cli.commands.sweep:adopt",
    "convert": "bucketpoint.cli.commands.convert:convert",
    "cost": "bucketpoint.cli.commands.cost:cost",
    "cp": "bucketpoint.cli.commands.cp:cp",
    "diff": "bucketpoint.cli.commands.diff:diff",
    "doctor": "bucketpoint.cli.commands.doctor:doctor",
    "gc": "bucketpoint.cli.commands.sweep:gc",
    "ls": "bucketpoint.cli.commands.ls:ls",
    "name": "bucketpoint.cli.commands.notes:name",
    "overview": "bucketpoint.cli.commands.overview:overview",
    "pin": "bucketpoint.cli.commands.notes:pin",
    "plan": "bucketpoint.cli.commands.plan_prune:plan",
    "prune": "bucketpoint.cli.commands.plan_prune:prune",
    "report": "bucketpoint.cli.commands.notes:report",
    "rm": "bucketpoint.cli.commands.rm:rm",
    "rollback": "bucketpoint.cli.commands.rollback:rollback",
    "show": "bucketpoint.cli.commands.show:show",
    "undo": "bucketpoint.cli.commands.notes:undo",
    "unpin": "bucketpoint.cli.commands.notes:unpin",
    "verify": "bucketpoint.cli.commands.verify:verify",
    "watch": "bucketpoint.cli.commands.watch:watch",
}
"""Module and name of each command. The modules import click and nothing large, because `--help` reads all of them."""

PROGRAM = "bucketpoint"


class Commands(click.Group):
    """Group that looks its commands up in `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def app() -> None:
    """Inspect, verify, copy, convert and delete PyTorch distributed checkpoints in a bucket.

    Commands that list or delete take the URL of a run, the folder above its checkpoints. `plan` and `prune` take a
    policy file, which names the run.

    A URL is s3://bucket/prefix, a local path, or anything that fsspec knows. Credentials and endpoints come from the
    usual places (AWS_PROFILE, AWS_ENDPOINT_URL, and so on).

    Exit codes: 0 success, 1 the command found a problem (damage, a difference, a refusal), 2 wrong usage, 3 not found,
    4 no permission, 5 the target exists already, 6 the store failed, 70 a bug in bucketpoint, 74 the output cannot be
    written, 130 interrupted.
    """


@printed_safely()
def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. Control characters in printed text are escaped."""
    try:
        return _run(arguments)
    except OutputError as error:
        error.show()
        return error.exit_code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not click's standalone mode: it exits with the same code for an interrupted program as for one that found
        # damage.
        code = app.main(arguments, prog_name=PROGRAM, standalone_mode=False)
        click.echo(nl=False)
    except OutputError:
        raise
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    code = run()
    if code == OUTPUT_FAILED:
        # Otherwise Python writes what is left at its end, fails again, and exits with another code.
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(null, stream.fileno())
    sys.exit(code)
