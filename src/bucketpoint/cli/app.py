"""`bucketpoint`: the group of commands and the program's entry. A command's module is imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from bucketpoint.cli.exits import INTERRUPTED
from bucketpoint.cli.terminal import printed_safely
from bucketpoint.version import __version__

COMMANDS = {
    "adopt": "bucketpoint.cli.sweep:adopt",
    "convert": "bucketpoint.cli.convert:convert",
    "cost": "bucketpoint.cli.cost:cost",
    "cp": "bucketpoint.cli.cp:cp",
    "diff": "bucketpoint.cli.diff:diff",
    "doctor": "bucketpoint.cli.doctor:doctor",
    "gc": "bucketpoint.cli.sweep:gc",
    "ls": "bucketpoint.cli.ls:ls",
    "name": "bucketpoint.cli.notes:name",
    "pin": "bucketpoint.cli.notes:pin",
    "plan": "bucketpoint.cli.keep:plan",
    "prune": "bucketpoint.cli.keep:prune",
    "report": "bucketpoint.cli.notes:report",
    "rm": "bucketpoint.cli.rm:rm",
    "rollback": "bucketpoint.cli.rollback:rollback",
    "show": "bucketpoint.cli.show:show",
    "undo": "bucketpoint.cli.notes:undo",
    "unpin": "bucketpoint.cli.notes:unpin",
    "verify": "bucketpoint.cli.verify:verify",
}
"""Where each command is. Their modules import click and nothing large: `--help` reads all of them."""

PROGRAM = "bucketpoint"


class Commands(click.Group):
    """A group whose commands are looked up in `COMMANDS`."""

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
    """Look at, check, copy, keep and delete PyTorch distributed checkpoints in a bucket.

    What lists or deletes takes the URL of a run, above its checkpoints; plan and prune take its policy, which names it.

    A URL is s3://bucket/prefix, a local path, or anything that fsspec knows. Credentials and endpoints are found as the
    library finds them (AWS_PROFILE, AWS_ENDPOINT_URL, and so on).

    \b
    Exit codes: 0 fine, 1 something is wrong with what was looked at, 2 usage, 3 not found, 4 no permission,
    5 in the way, 6 the store failed, 70 an error of bucketpoint itself, 130 interrupted.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. Nothing that it prints makes a terminal do anything."""
    with printed_safely():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not click's own way out: it gives an interrupted program the same code as one that found damage.
        code = app.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    sys.exit(run())
