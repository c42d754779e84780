"""What every command has in common: its answer as text or JSON, its errors, and the options that lead to a store."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.exits import FINE, FOUND, INTERNAL, exit_code
from bucketpoint.errors import BucketpointError, PolicyError

SCHEMA = 1
"""Of the JSON documents. Raised when a field changes its meaning or goes; new fields alone do not raise it."""

# Values of these are text whatever they look like: a key may consist of digits.
_TEXT = ("key", "secret", "token", "password", "user", "id", "profile")


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        document: its fields in the JSON document. Plain values only.
        lines: the same for a person.
        ok: False where what was looked at is not as it should be.
    """

    document: Mapping[str, Any]
    lines: Iterable[str] = field(default_factory=list)
    ok: bool = True


def command(name: str) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function that returns an `Answer`.

    It gets `--json` and `--debug`; the first is passed on as `as_json`, for a command that speaks while it works.
    """

    def wrap(function: Callable[..., Answer]) -> click.Command:
        @click.command(name)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
        @click.option("--debug", is_flag=True, help="Print a traceback with an error.")
        @functools.wraps(function)
        def run(as_json: bool, debug: bool, **arguments: Any) -> int:
            try:
                answer = function(as_json=as_json, **arguments)
            except BucketpointError as error:
                return _failed(name, error, exit_code(error), as_json=as_json, debug=debug)
            except click.ClickException:
                raise
            except Exception as error:  # noqa: BLE001 (reported as ours, with the way to its traceback)
                fault = BucketpointError(
                    f"This is a fault of bucketpoint: {type(error).__name__}: {error}",
                    remedy="Run it again with --debug and report what it prints",
                )
                fault.__cause__ = error
                return _failed(name, fault, INTERNAL, as_json=as_json, debug=debug)
            if as_json:
                _say_json({**_head(name, ok=answer.ok), **answer.document})
            else:
                for line in answer.lines:
                    say(line)
            return FINE if answer.ok else FOUND

        return run

    return wrap


def say(line: str, *, err: bool = False) -> None:
    """Print one line, as text: a line break in a name does not begin another."""
    click.echo(text.printable(line), err=err)


def _say_json(document: Mapping[str, Any]) -> None:
    # The one control character that JSON leaves as it is.
    click.echo(json.dumps(document, allow_nan=False).replace("\x7f", "\\u007f"))


def _head(name: str, *, ok: bool) -> dict[str, Any]:
    return {"schema": SCHEMA, "command": name, "ok": ok}


def _failed(name: str, error: BucketpointError, code: int, *, as_json: bool, debug: bool) -> int:
    if debug:
        for line in "".join(traceback.format_exception(error)).rstrip("\n").split("\n"):
            say(line, err=True)
    fields = {"url": error.url, "key": error.key, "remedy": error.remedy}
    say(f"Error: {error.message}", err=True)
    faults = error.faults if isinstance(error, PolicyError) else ()
    if faults:
        # Each says what to write instead; the error's own remedy is that of the first.
        fields["remedy"] = None
    for fault in faults:
        say(f"  line {fault.line}, column {fault.column}: {fault}", err=True)
    for label, value in fields.items():
        if value:
            say(f"  {label + ':':<8}{value}", err=True)
    if as_json:
        kind = "InternalError" if code == INTERNAL else type(error).__name__
        told: dict[str, Any] = {"kind": kind, "message": error.message, **fields, "exit_code": code}
        if faults:
            told["faults"] = [{"line": one.line, "column": one.column, "message": str(one)} for one in faults]
        _say_json({**_head(name, ok=False), "error": told})
    return code


def store_options(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """The options that lead to a store. The function gets them as one `Access`, named `access`."""

    @click.option(
        *("--storage-option", "pairs"),
        multiple=True,
        metavar="NAME=VALUE",
        help="What storage_options takes, by its name. May be given many times. Secrets are better left in the "
        "environment, where other users of the machine do not see them.",
    )
    @click.option("--endpoint-url", help="Of a store other than AWS, for s3:// URLs.")
    @functools.wraps(function)
    def call(pairs: Sequence[str], endpoint_url: str | None, **arguments: Any) -> Answer:
        return function(access=Access(parse_options(pairs), endpoint_url), **arguments)

    return call


@dataclass(frozen=True)
class Access:
    """How to reach stores, as the command line says it."""

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    endpoint_url: str | None = None

    def for_url(self, url: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The `storage_options` for one URL. A local path takes none, and only S3 has endpoints."""
        from bucketpoint.stores import parse_url

        scheme = parse_url(url)[0]
        if scheme in ("", "file", "local") and "::" not in url:
            return dict(extra or {})
        endpoint = {"endpoint_url": self.endpoint_url} if self.endpoint_url and scheme in ("s3", "s3a") else {}
        return {**self.options, **endpoint, **(extra or {})}


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Storage options from `name=value`: booleans, numbers and JSON as such, everything else as text.

    Raises:
        BadParameter: one is no pair. Its value is not repeated: it may be a secret.
    """
    return dict(map(_option, pairs))


def _option(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{name!r} has no value: write NAME=VALUE", param_hint="--storage-option")
    if value in ("true", "false", "null") or value[:1] in ("{", "[", '"'):
        return name, _parsed(name, value)
    if not any(part in name for part in _TEXT) and value.removeprefix("-").isdecimal():
        return name, int(value)
    return name, value


def _parsed(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not JSON"
        raise click.BadParameter(f"the value of {name} is not JSON: {reason}", param_hint="--storage-option") from None
