"""`bucketpoint`: the group of commands and the program's entry. A command's module is imported on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from bucketpoint.cli.text import INTERRUPTED, OUTPUT_FAILED, OutputError, printed_safely
from bucketpoint.version import __version__

GROUPS = {
    "Look at runs and checkpoints": {
        "ls": "ls",
        "show": "show",
        "diff": "show",
        "watch": "watch",
        "overview": "overview",
    },
    "Keep and delete checkpoints": {
        "prune": "prune",
        "rollback": "notes",
        "undo": "notes",
        "pin": "notes",
        "report": "notes",
        "rm": "rm",
    },
    "Check and repair": {"verify": "verify", "doctor": "doctor", "gc": "gc"},
    "Move checkpoints": {"cp": "cp", "convert": "convert"},
}
"""Module of each command, by its heading in `--help`. `--help` imports all modules, so they import nothing large."""

COMMANDS = {name: module for commands in GROUPS.values() for name, module in commands.items()}

REPLACED = {
    "adopt": "gc ROOT --adopt",
    "cost": "overview ROOT",
    "name": "gc ROOT --name NAME",
    "plan": "prune POLICY --dry-run",
    "unpin": "pin ROOT STEP --remove",
}
"""Commands of older versions, and their replacements."""

PROGRAM = "bucketpoint"


class Commands(click.Group):
    """Group that looks its commands up in `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"bucketpoint.cli.commands.{COMMANDS[cmd_name]}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in REPLACED and not ctx.resilient_parsing:
            ctx.fail(f"The command '{args[0]}' was removed. Use `{PROGRAM} {REPLACED[args[0]]}`.")
        import difflib

        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0] not in COMMANDS and near and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            limit = formatter.width - width - 6
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), one.get_short_help_str(limit)) for name, one in commands.items() if one]
                )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def app() -> None:
    """Inspect, verify, copy, convert and delete PyTorch distributed checkpoints in a bucket.

    Commands that list or delete take the URL of a run, the folder above its checkpoints. `prune` takes a policy file,
    which names the run.

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
        # Otherwise Python flushes the streams at its exit, fails again, and exits with another code.
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(null, stream.fileno())
    sys.exit(code)
