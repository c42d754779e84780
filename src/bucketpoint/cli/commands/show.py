"""`bucketpoint show` and `diff`: commands around `checkpoint.summary`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import run_lines, text
from bucketpoint.cli.command import Access, CommandResult, command, parse_options
from bucketpoint.cli.options import checkpoint_argument, places, trusted_option

if TYPE_CHECKING:
    from bucketpoint.checkpoint.summary import Difference, Summary, SummaryEntry
    from bucketpoint.location import Location

LARGEST = 10


@command("show")
@click.option("--tensors", is_flag=True, help="List every key of the state, not only the largest tensors.")
@trusted_option
@checkpoint_argument
def show(place: Location, tensors: bool, trusted: bool) -> CommandResult:
    """Describe a checkpoint: time, writer, size and content.

    Reads only `.metadata`.
    """
    from bucketpoint.checkpoint.open import open_checkpoint
    from bucketpoint.checkpoint.summary import summarise

    summary = summarise(open_checkpoint(place, trusted=trusted, plain=True))
    return CommandResult(_document(summary, tensors), _lines(summary, tensors))


def _entry(entry: SummaryEntry) -> dict[str, Any]:
    return {
        "key": entry.fqn,
        "dtype": entry.dtype,
        "shape": None if entry.shape is None else list(entry.shape),
        "bytes": entry.nbytes,
        "chunks": entry.chunks,
        "group": entry.group,
        "crc32c": None if entry.crc32c is None else f"{entry.crc32c:08x}",
    }


def _document(summary: Summary, whole: bool) -> dict[str, Any]:
    record = summary.record
    return {
        "url": summary.url,
        "writer": "bucketpoint" if summary.ours else "other",
        "token": record.token,
        "created": record.created,
        "seconds": record.seconds,
        "modified": summary.modified,
        "copied_from": summary.copied_from,
        "world_size": record.world_size,
        "torch": record.torch,
        "bucketpoint": record.bucketpoint,
        "bytes": record.bytes,
        "metadata_bytes": summary.metadata_nbytes,
        "objects": record.objects,
        "items": record.items,
        "keys": len(summary.entries),
        "tensors": record.tensors,
        "groups": summary.groups,
        "dtypes": {name: {"tensors": count, "bytes": nbytes} for name, (count, nbytes) in summary.by_dtype().items()},
        "entries" if whole else "largest": [_entry(entry) for entry in _listed(summary, whole)],
    }


def _lines(summary: Summary, whole: bool) -> Iterator[str]:
    record = summary.record
    yield summary.url
    rows = [("saved", text.when(record.created if record.created is not None else summary.modified))]
    if record.seconds is not None:
        rows.append(("took", run_lines.took(record.seconds)))
    writer = f"bucketpoint {record.bucketpoint}, torch {record.torch}" if summary.ours else "another writer"
    rows.append(("writer", writer + (f", token {record.token}" if record.token else "")))
    if summary.copied_from:
        rows.append(("copied from", summary.copied_from))
    rows.append(("ranks", "not recorded" if record.world_size is None else f"{record.world_size:,}"))
    objects = f"{text.count(record.objects, 'object')}, {text.count(record.items, 'item')}"
    rows.append(("size", f"{text.size(record.bytes)} in {objects}; .metadata is {text.size(summary.metadata_nbytes)}"))
    rows.append(("groups", _joined(f"{name} {text.size(nbytes)}" for name, nbytes in summary.groups.items())))
    kinds = (f"{count:,} {name} ({text.size(nbytes)})" for name, (count, nbytes) in summary.by_dtype().items())
    rows.append(("tensors", f"{record.tensors:,}: {_joined(kinds)}" if record.tensors else "none"))
    rows.append(("other keys", f"{len(summary.entries) - record.tensors:,}"))
    yield from text.table(rows)
    listed = _listed(summary, whole)
    if listed:
        yield "all keys" if whole else "largest tensors"
        yield from text.table(map(_row, listed))


def _row(entry: SummaryEntry) -> tuple[str, ...]:
    kind, shape = entry.dtype or "bytes", "" if entry.shape is None else text.shape(entry.shape)
    return entry.fqn, kind, shape, text.size(entry.nbytes), text.count(entry.chunks, "chunk"), entry.group


def _listed(summary: Summary, whole: bool) -> list[SummaryEntry]:
    if whole:
        return list(summary.entries.values())
    return sorted(summary.tensors, key=lambda entry: (-entry.nbytes, entry.fqn))[:LARGEST]


def _joined(parts: Iterator[str]) -> str:
    return ", ".join(parts) or "none"


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
    document = _difference(left, right, changes, values=values)
    return CommandResult(document, _difference_lines(left, right, changes, values=values), changes.same)


def _difference(a: Summary, b: Summary, changes: Difference, *, values: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "a": {"url": a.url, "bytes": a.record.bytes, "keys": len(a.entries)},
        "b": {"url": b.url, "bytes": b.record.bytes, "keys": len(b.entries)},
        "only_a": [_entry(entry) for entry in changes.only_a],
        "only_b": [_entry(entry) for entry in changes.only_b],
        "changed": [{"key": x.fqn, "a": _entry(x), "b": _entry(y)} for x, y in changes.changed],
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


def _difference_lines(a: Summary, b: Summary, changes: Difference, *, values: bool) -> Iterator[str]:
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
        yield f"- {entry.fqn}  {_described(entry)}"
    for entry in changes.only_b:
        yield f"+ {entry.fqn}  {_described(entry)}"
    for x, y in changes.changed:
        yield f"! {x.fqn}  {_described(x)} -> {_described(y)}"
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


def _described(entry: SummaryEntry) -> str:
    shape = "" if entry.shape is None else f"{text.shape(entry.shape)} "
    return f"{entry.dtype or 'bytes'} {shape}{text.size(entry.nbytes)}"
