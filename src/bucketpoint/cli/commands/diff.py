"""`bucketpoint diff`: command around `checkpoint.summary`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, command, parse_options
from bucketpoint.cli.options import places, trusted_option

if TYPE_CHECKING:
    from bucketpoint.checkpoint.summary import Difference, Summary, SummaryEntry


@command("diff")
@click.argument("words", nargs=-1, required=True, metavar="A [STEP] B [STEP]")
@click.option("--values", is_flag=True, help="Compare values, too, by the checksums recorded at save.")
@click.option("--a-option", multiple=True, metavar="NAME=VALUE", help="Storage option for A only.")
@click.option("--b-option", multiple=True, metavar="NAME=VALUE", help="Storage option for B only.")
@trusted_option
def diff(
    words: Sequence[str], values: bool, a_option: Sequence[str], b_option: Sequence[str], trusted: bool, access: Access
) -> CommandResult:
    """Show how two checkpoints differ: keys, dtypes, shapes, values.

    Two steps of one run may be given as ROOT STEP STEP. Values are compared with --values only, by the checksums that
    were recorded at save. Reads two `.metadata` objects and no tensor data. Exits with 1 if anything differs.
    """
    from bucketpoint.checkpoint.open import open_checkpoint
    from bucketpoint.checkpoint.summary import difference, summarise

    extra = parse_options(a_option, "--a-option"), parse_options(b_option, "--b-option")
    both = places(words, access, extra)
    left, right = (summarise(open_checkpoint(place, trusted=trusted, plain=True)) for place in both)
    changes = difference(left, right, values=values)
    document = _document(left, right, changes, values=values)
    return CommandResult(document, _lines(left, right, changes, values=values), changes.same)


def _document(a: Summary, b: Summary, changes: Difference, *, values: bool) -> dict[str, Any]:
    from bucketpoint.cli.commands.show import entry_document

    document: dict[str, Any] = {
        "a": {"url": a.url, "bytes": a.record.bytes, "keys": len(a.entries)},
        "b": {"url": b.url, "bytes": b.record.bytes, "keys": len(b.entries)},
        "only_a": [entry_document(entry) for entry in changes.only_a],
        "only_b": [entry_document(entry) for entry in changes.only_b],
        "changed": [{"key": x.fqn, "a": entry_document(x), "b": entry_document(y)} for x, y in changes.changed],
        "values": None,
    }
    if values:
        document["values"] = {
            "differ": changes.values,
            "equal": changes.equal,
            "unknown": changes.unknown,
            "groups": {name: asdict(group) for name, group in changes.groups.items()},
        }
    return document


def _lines(a: Summary, b: Summary, changes: Difference, *, values: bool) -> Iterator[str]:
    yield f"A {a.url}: {text.size(a.record.bytes)}, {text.count(len(a.entries), 'key')}"
    yield f"B {b.url}: {text.size(b.record.bytes)}, {text.count(len(b.entries), 'key')}"
    if not changes.same:
        counts = (
            f"- {len(changes.only_a)} only in A, + {len(changes.only_b)} only in B, ! {len(changes.changed)} changed"
        )
        yield counts + (f", ~ {len(changes.values)} with different values" if values else "")
    else:
        yield f"the same keys, dtypes and shapes{f', and {changes.equal} equal checksums' if values else ''}"
    for entry in changes.only_a:
        yield f"- {entry.fqn}  {_what(entry)}"
    for entry in changes.only_b:
        yield f"+ {entry.fqn}  {_what(entry)}"
    for x, y in changes.changed:
        yield f"! {x.fqn}  {_what(x)} -> {_what(y)}"
    for fqn in changes.values:
        yield f"~ {fqn}"
    if changes.unknown:
        names = ", ".join(changes.unknown[:3]) + (", ..." if len(changes.unknown) > 3 else "")
        yield f"not compared, because a checksum is missing: {text.count(len(changes.unknown), 'key')} ({names})"
    for name, group in changes.groups.items():
        if group.differing_keys:
            differing = f"{text.size(group.differing_bytes)} of {text.size(group.bytes)} differ"
            yield f"{name}: {differing}, in {group.differing_keys:,} of {text.count(group.keys, 'key')}"
        else:
            yield f"{name}: equal, {text.size(group.bytes)} in {text.count(group.keys, 'key')}"


def _what(entry: SummaryEntry) -> str:
    shape = "" if entry.shape is None else f"{text.shape(entry.shape)} "
    return f"{entry.dtype or 'bytes'} {shape}{text.size(entry.nbytes)}"
