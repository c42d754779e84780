"""`bucketpoint convert`: command around `convert`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import ByteCount, between_stores
from bucketpoint.errors import first_of

if TYPE_CHECKING:
    from bucketpoint.convert import Converted, ConvertPlan
    from bucketpoint.location import Location


@command("convert")
@click.option(
    "--from",
    "from_format",
    type=click.Choice(("auto", "bucketpoint", "dcp", "torch", "safetensors")),
    default="auto",
    show_default=True,
    help="Format of the source. auto: detect it.",
)
@click.option(
    "--to",
    "to_format",
    type=click.Choice(("auto", "bucketpoint", "torch", "safetensors")),
    default="auto",
    show_default=True,
    help="Format to write. auto: torch if the target ends in .pt, .pth, .bin or .ckpt, safetensors if it ends in "
    ".safetensors, else bucketpoint.",
)
@click.option(
    "--prefix",
    default="",
    help="First part of the keys, such as model. When writing safetensors, only keys with it are written, and it is "
    "removed from them; when reading safetensors, it is added to every key.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out the keys of the source that match this pattern, such as '*.rope.*'. A pattern without wildcards "
    "also leaves out every key below it. May be given several times.",
)
@click.option(
    "--max-shard-size",
    type=ByteCount(least=1),
    default="5GB",
    show_default=True,
    help="Largest size of one safetensors file.",
)
@click.option(
    "--names",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file with new names of tensors in safetensors, without --prefix. {} matches a number between dots, "
    "null as the new name leaves the tensor out.",
)
@click.option(
    "--workers",
    metavar="I/N",
    callback=lambda context, option, value: _worker(value),
    help="Write only the files of worker I (0 to N-1) of N that share a conversion to safetensors, on any machines. "
    "The last one to finish writes the index. If a worker died, run it again.",
)
@click.option("--overwrite", is_flag=True, help="Replace the target. Not possible with --to safetensors.")
@click.option("--verify", "verified", is_flag=True, help="Read the target again after the conversion, and check it.")
@between_stores
def convert(
    source: Location,
    target: Location,
    from_format: str,
    to_format: str,
    prefix: str,
    exclude: Sequence[str],
    max_shard_size: int,
    names: str | None,
    workers: tuple[int, int] | None,
    overwrite: bool,
    dry_run: bool,
    verified: bool,
    trusted: bool,
    progress: bool | None,
) -> CommandResult:
    """Convert a checkpoint between DCP, torch.save and safetensors.

    The formats are `bucketpoint` (DCP with an index and checksums, which torch's own readers read), `dcp` (as torch
    itself writes it, a source only), `torch` (one file of torch.save) and `safetensors` (files with an index). Source
    and target may lie in any two stores. Tensors are streamed in pieces, within 256 MiB of memory, in addition to
    torch's own. The target appears whole at the end, or not at all. Run the command again to continue an interrupted
    conversion.
    """
    from bucketpoint.convert import ConvertOptions, plan_conversion, run_conversion
    from bucketpoint.dcp.progress_bar import progress_callback

    if workers and overwrite:
        raise click.UsageError("--workers does not replace a target: delete it first")
    plan = plan_conversion(
        source,
        target,
        from_format=from_format,
        to_format=to_format,
        options=ConvertOptions(
            prefix, max_shard_size, overwrite=overwrite, trusted=trusted, exclude=exclude, names=names
        ),
        worker=workers,
    )
    if dry_run:
        return CommandResult(_document(plan, None), _plan_lines(plan))
    with progress_callback(progress, 0) as callback:
        done = run_conversion(plan, verify=verified, progress=callback)
    return CommandResult(_document(plan, done), _lines(plan, done), not done.damaged)


def _worker(value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise click.BadParameter(f"{value!r} is not a worker's number, from 0, and the number of all, such as 0/4")
    return int(number), int(count)


def _document(plan: ConvertPlan, done: Converted | None) -> dict[str, Any]:
    verification = None
    if done is not None and done.verified_bytes is not None:
        verification = {"read_bytes": done.verified_bytes, "damaged": list(done.damaged)}
    return {
        "source": plan.source.url,
        "target": plan.place.url,
        "from": plan.source.format,
        "to": plan.format,
        "dry_run": done is None,
        "objects": len(plan.objects),
        "bytes": plan.nbytes,
        "tensors": plan.layout.tensors,
        "already_there": len(plan.there),
        "committed": done is not None and done.committed,
        "replaces": plan.replaces,
        "excluded": sorted(plan.source.excluded),
        "left_out": list(plan.layout.left_out),
        "text_keys": plan.source.text_keys(plan.format),
        "recorded_in": plan.log.catalog.url if plan.log is not None else None,
        "checked_bytes": None if done is None else done.checked_bytes,
        "verification": verification,
    }


def _plan_lines(plan: ConvertPlan) -> Iterator[str]:
    yield f"{'an earlier run wrote' if plan.finished else 'would write'} {_what(plan)}, to {plan.place.url}"
    if plan.there:
        there, left = text.count(len(plan.there), "object"), text.size(plan.left_nbytes)
        yield f"  {there} of an interrupted conversion are at the target already; {left} remain to write"
    yield from _notes(plan)
    if plan.replaces:
        yield "  REPLACES what is at the target"


def _lines(plan: ConvertPlan, done: Converted) -> Iterator[str]:
    checked = f"{text.size(done.checked_bytes)} compared with the source's checksums"
    checked = checked if done.checked_bytes else "the source has no checksums to compare"
    yield f"{'an earlier run ' if plan.finished else ''}wrote {_what(plan)}, to {plan.place.url}: {checked}"
    if done.skipped:
        yield f"  {text.count(done.skipped, 'object')} of an interrupted conversion were at the target already"
    if not done.committed:
        yield "  the target is not whole yet: it waits for other workers"
    yield from _notes(plan)
    if done.verified_bytes is not None:
        for path in done.damaged:
            yield f"DAMAGED {path}: its bytes differ from those that were written"
        yield f"  {text.size(done.verified_bytes)} read again, {text.count(len(done.damaged), 'object')} damaged"


def _what(plan: ConvertPlan) -> str:
    objects, tensors = text.count(len(plan.objects), "object"), text.count(plan.layout.tensors, "tensor")
    return f"{objects}, {text.size(plan.nbytes)}, {tensors}, {plan.source.format} to {plan.format}"


def _notes(plan: ConvertPlan) -> Iterator[str]:
    if plan.source.excluded:
        yield f"  left out by --exclude: {first_of(sorted(plan.source.excluded))}"
    left_out = plan.layout.left_out
    if left_out:
        named = first_of(left_out)
        yield f"  left out, because {plan.format} cannot hold them or their keys lack --prefix: {named}"
    text_keys = plan.source.text_keys(plan.format)
    if text_keys:
        named = first_of(text_keys)
        yield f"  keys that look like integers are text, because the source does not record integer keys, in: {named}"
    if plan.log is not None:
        yield f"  the catalog of the run at {plan.log.catalog.url} gets a record of the checkpoint"
