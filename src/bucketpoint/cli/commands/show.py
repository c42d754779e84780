"""`bucketpoint show`: command around `checkpoint.summary`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import run_lines, text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import checkpoint_argument, trusted_option

if TYPE_CHECKING:
    from bucketpoint.checkpoint.summary import Summary, SummaryEntry
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


def entry_document(entry: SummaryEntry) -> dict[str, Any]:
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
        "entries" if whole else "largest": [entry_document(entry) for entry in _listed(summary, whole)],
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
