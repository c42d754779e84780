"""Checks that CHANGELOG.md names what is gone of the last release's names, options, settings, commands and exit codes.

`python tools/check_surface.py --list > tools/surface-VERSION.json` writes the list of a release.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import click

import bucketpoint
from bucketpoint.cli import text
from bucketpoint.cli.app import app
from bucketpoint.stores.gcs import GCSOptions
from bucketpoint.stores.s3 import S3Options

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "0.2"


def surface() -> list[str]:
    """Return one line for each name."""
    return sorted({*_python(), *_policy(_schema()), *_program()})


def _python() -> Iterator[str]:
    public = {name: getattr(bucketpoint, name) for name in bucketpoint.__all__}
    public |= {f"{store} storage_options": options for store, options in (("S3", S3Options), ("GCS", GCSOptions))}
    for name, value in public.items():
        yield name
        if is_dataclass(value):
            yield from (f"{name}({field.name}=)" for field in fields(value))
        elif callable(value) and not (isinstance(value, type) and issubclass(value, BaseException)):
            yield from (f"{name}({parameter}=)" for parameter in signature(value).parameters)


def _schema() -> Mapping[str, Any]:
    text = files("bucketpoint.retention").joinpath("policy.schema.json").read_text(encoding="utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


def _policy(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield from (f"policy: {name}" for name in schema["properties"])
        for part in schema.values():
            yield from _policy(part)


def _program() -> Iterator[str]:
    context = click.Context(app)
    for name in app.list_commands(context):
        yield f"bucketpoint {name}"
        command = app.get_command(context, name)
        for parameter in command.params if command is not None else ():
            yield from (f"bucketpoint {name} {flag}" for flag in parameter.opts if flag.startswith("-"))
    yield from (f"exit code {code}" for code in vars(text).values() if isinstance(code, int))


def faults() -> list[str]:
    """Return the names of the release that are gone, and that the changes since then do not mention."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    since = text.partition("## [Unreleased]")[2].partition(f"## [{RELEASE}")[0]
    words = set(re.findall(r"[\w-]+", since))
    released = json.loads((ROOT / f"tools/surface-{RELEASE}.json").read_text(encoding="utf-8"))
    gone = {*released} - {*surface()}
    # A word about a class or a command is one about its parameters and options.
    whole = [name for name in sorted(gone) if re.split(r"\(| --", name)[0] not in gone - {name}]
    return [name for name in whole if re.findall(r"[\w-]+", name)[-1] not in words]


def main() -> int:
    if "--list" in sys.argv[1:]:
        print(json.dumps(surface(), indent=0))
        return 0
    gone = faults()
    for name in gone:
        print(f"{name} was in {RELEASE} and is gone: say in CHANGELOG.md what to use instead")
    print(f"{len(gone)} names gone without a word")
    return 1 if gone else 0


if __name__ == "__main__":
    raise SystemExit(main())
