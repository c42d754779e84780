"""Common parts of all commands: results as text or JSON, errors, and the options for stores."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.text import FINE, FOUND, INTERNAL, exit_code
from bucketpoint.errors import BucketpointError, PolicyError

if TYPE_CHECKING:
    from bucketpoint.location import Location

SCHEMA = 2
"""Version of the JSON documents. Raised when a field changes its meaning or is removed, not for new fields."""

_COMMON = {"--endpoint-url", "--storage-option", "--json", "--debug", "--help"}

# Options with these words in their name stay text: a key or a password may consist of digits only.
_TEXT = ("key", "secret", "token", "password", "user", "id", "profile")


@dataclass(frozen=True)
class CommandResult:
    """Result of a command.

    Attributes:
        document: fields for the JSON document. Plain values only.
        lines: the same content as text.
        ok: False if the command found a problem in what it checked.
    """

    document: Mapping[str, Any]
    lines: Iterable[str] = field(default_factory=list)
    ok: bool = True


class _Command(click.Command):
    """Command whose help lists its own options first, and those of all commands after them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], "Common options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                rows["Options" if _COMMON.isdisjoint(parameter.opts) else "Common options"].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command(name: str) -> Callable[[Callable[..., CommandResult]], click.Command]:
    """Make a command from a function that returns a `CommandResult`.

    The command has `--json`, `--debug` and the options for stores, which the function receives as `access`.
    """

    def wrap(function: Callable[..., CommandResult]) -> click.Command:
        @click.command(name, cls=_Command)
        @click.option("--endpoint-url", help="Endpoint of s3:// URLs, for services other than AWS.")
        @click.option(
            *("--storage-option", "pairs"),
            multiple=True,
            metavar="NAME=VALUE",
            help="One storage option, named as in `storage_options`. May be given several times. Pass secrets in "
            "environment variables, because other users of the machine can see arguments.",
        )
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
        @click.option("--debug", is_flag=True, help="Print a traceback when the command fails.")
        @functools.wraps(function)
        def run(as_json: bool, debug: bool, pairs: Sequence[str], endpoint_url: str | None, **arguments: Any) -> int:
            try:
                result = function(access=Access(parse_options(pairs), endpoint_url), **arguments)
            except BucketpointError as error:
                return _failed(name, error, exit_code(error), as_json=as_json, debug=debug)
            except click.ClickException:
                raise
            except Exception as error:  # noqa: BLE001 (reported as ours, with the way to its traceback)
                fault = BucketpointError(
                    f"This is a bug in bucketpoint: {type(error).__name__}: {error}",
                    remedy="Run the command again with --debug, and report the traceback that it prints",
                )
                fault.__cause__ = error
                return _failed(name, fault, INTERNAL, as_json=as_json, debug=debug)
            if as_json:
                _say_json(name, result.document, ok=result.ok)
            else:
                for line in result.lines:
                    say(line)
            return FINE if result.ok else FOUND

        return run

    return wrap


def as_json() -> bool:
    """Return True if the running command is to print one JSON document, and nothing else on standard output."""
    return bool(click.get_current_context().params["as_json"])


def agreed(question: str, *, required: bool = True) -> bool:
    """Ask for confirmation. Without a terminal, raise UsageError if it is `required`, otherwise return True."""
    if not as_json() and sys.stdin.isatty():
        return click.confirm(text.printable(question), err=True)
    if required:
        raise click.UsageError("There is no terminal on which to ask for confirmation: pass --yes")
    return True


def say(line: str, *, err: bool = False) -> None:
    """Print one line as text. A line break in a name is escaped, so that it does not start another line."""
    click.echo(text.printable(line), err=err)


def write_file(file: str, content: str, what: str) -> None:
    """Write a text file. If this fails, raise BucketpointError, which calls the file `what`."""
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise BucketpointError(
            f"The {what} cannot be written: {error}",
            url=file,
            remedy="Name a file in a folder that exists and is writable",
        ) from error


def _say_json(name: str, fields: Mapping[str, Any], *, ok: bool) -> None:
    document = {"schema": SCHEMA, "command": name, "ok": ok, **fields}
    # DEL is the one control character that json.dumps does not escape.
    click.echo(json.dumps(document, allow_nan=False).replace("\x7f", "\\u007f"))


def _failed(name: str, error: BucketpointError, code: int, *, as_json: bool, debug: bool) -> int:
    if debug:
        for line in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
            say(line, err=True)
    fields = {"url": error.url, "key": error.key, "remedy": error.remedy}
    say(f"Error: {error.message}", err=True)
    faults = error.faults if isinstance(error, PolicyError) else ()
    if faults:
        # The text of each fault has a remedy. The error's own remedy is only that of the first fault.
        fields["remedy"] = None
    for fault in faults:
        place = "" if fault.line is None else f"line {fault.line}, column {fault.column}: "
        say(f"  {place}{fault}", err=True)
    for label, value in fields.items():
        if value:
            say(f"  {label + ':':<8}{value}", err=True)
    if as_json:
        kind = "InternalError" if code == INTERNAL else type(error).__name__
        failure: dict[str, Any] = {"kind": kind, "message": error.message, **fields, "exit_code": code}
        if faults:
            failure["faults"] = [
                {"line": fault.line, "column": fault.column, "message": str(fault)} for fault in faults
            ]
        _say_json(name, {"error": failure}, ok=False)
    return code


@dataclass(frozen=True)
class Access:
    """Settings for access to stores, from the command line."""

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    endpoint_url: str | None = None

    def at(self, url: str, extra: Mapping[str, Any] | None = None) -> Location:
        """Return a URL's location, with the options that apply: `follow_links` for local paths, the endpoint for S3."""
        from bucketpoint.location import Location
        from bucketpoint.stores import FOLLOW_LINKS, parse_url

        scheme = parse_url(url)[0]
        local = scheme in ("", "file", "local")
        options = {name: value for name, value in self.options.items() if (name == FOLLOW_LINKS) == local}
        endpoint = {"endpoint_url": self.endpoint_url} if self.endpoint_url and scheme in ("s3", "s3a") else {}
        return Location.of(url, {**options, **endpoint, **(extra or {})})


def parse_options(pairs: Sequence[str], name: str = "--storage-option") -> dict[str, Any]:
    """Parse `name=value` options: booleans, null, integers, JSON in brackets or quotes; else text.

    Raises BadParameter for a text that is no such pair. The message omits the value, which may be a secret.
    """
    return dict(_option(pair, name) for pair in pairs)


def _option(pair: str, option: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if not equals or not name:
        # The text may be a secret.
        raise click.BadParameter("An option has no name or no value: write NAME=VALUE", param_hint=option)
    if not any(part in name for part in _TEXT) and value.removeprefix("-").isdecimal():
        return name, int(value)
    if value not in ("true", "false", "null") and value[:1] not in ("{", "[", '"'):
        return name, value
    try:
        return name, json.loads(value)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not JSON"
        raise click.BadParameter(f"the value of {name} is not JSON: {reason}", param_hint=option) from None
