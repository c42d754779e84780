"""Export of a checkpoint's weights as safetensors by all ranks of a job, each of which writes some of the files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bucketpoint.convert.pipeline import CONVERT_OPTIONS, commit_conversion, plan_conversion, run_conversion
from bucketpoint.convert.plan import SHARD_BYTES, Converted, ConvertOptions, ConvertPlan
from bucketpoint.convert.source import SAFETENSORS
from bucketpoint.dcp.meeting import Meeting
from bucketpoint.dcp.process_groups import ranks_of, this_rank
from bucketpoint.errors import CommitConflictError
from bucketpoint.format.item_names import Renaming
from bucketpoint.location import Place
from bucketpoint.transfer import ProgressCallback, TransferOptions

DEADLINE_S = 3600.0


def export_safetensors(
    url: Place,
    target: Place,
    process_group: Any = None,
    names: Renaming | Mapping[str, str | None] | str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    prefix: str = "",
    exclude: str | Sequence[str] = (),
    overwrite: bool = False,
    trusted: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    target_fs: Any = None,
    transfer: TransferOptions = CONVERT_OPTIONS,
    deadline_s: float = DEADLINE_S,
    progress: ProgressCallback | None = None,
) -> Converted:
    """Write the tensors of a checkpoint as safetensors in Hugging Face's layout. Called on all ranks of a group.

    Each rank writes its share of the files, balanced by bytes, and reads only the ranges of the checkpoint that it
    needs. The first rank writes the index last: a killed export leaves no new index, and continues where it stopped if
    it is run again on the same number of ranks. If there is one file, it appears as a whole. config.json and the
    tokenizer's files beside the checkpoint are copied.

    Args:
        url: URL of a committed checkpoint.
        target: URL of the folder.
        process_group: torch's group of the ranks that share the work; None for all ranks of the job, or for a single
            process.
        names: new names of the tensors, without `prefix`: a function, a mapping, or a JSON file with a mapping. The new
            name None leaves a tensor out.
        shard_bytes: bytes of tensors in one file.
        prefix, exclude, trusted: as in `ConvertOptions`.
        overwrite: replace the index of weights at the target by the new one, then delete the former files.
        storage_options, fs: storage options and fsspec filesystem of the checkpoint.
        target_options, target_fs: storage options and fsspec filesystem of the target.
        transfer: sizes and limits of the transfer, for each rank.
        deadline_s: limit on the seconds that a rank waits for the other ranks.
        progress: called with a `Progress` as bytes are written.

    Returns:
        The result of this rank's share.

    Raises:
        BucketpointError: as in `plan_conversion` and `run_conversion`; on all ranks, after the failure of one.
    """
    ranks = ranks_of(process_group)
    worker = (ranks.index(this_rank()), len(ranks))
    what = f"the export to {os.fspath(target) if isinstance(target, (str, os.PathLike)) else target.url}"

    plan: ConvertPlan | None = None

    @contextmanager
    def together(stage: str) -> Iterator[None]:
        """Wait at the end of the block for all ranks, with equal plans. The error of one rank is raised on all."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (raised on all ranks)
            failure = error
        if len(ranks) > 1:
            digest = plan.digest if plan is not None else ""
            Meeting.begin(ranks, f"{what}: {stage} {digest[:16]}", purpose="exports", error=failure).wait(deadline_s)
        elif failure is not None:
            raise failure

    with together("plan"):
        plan = plan_conversion(
            url,
            target,
            to_format=SAFETENSORS,
            options=ConvertOptions(
                prefix, shard_bytes, trusted=trusted, exclude=exclude, names=names, overwrite=overwrite
            ),
            source_options=storage_options,
            target_options=target_options,
            source_fs=fs,
            target_fs=target_fs,
            transfer=transfer,
            worker=worker,
        )
    with together("files"):
        done = run_conversion(plan, progress=progress, commit=False)
    with together("index"):
        if worker[0] == 0 and not plan.finished and not commit_conversion(plan):
            raise CommitConflictError("Another process wrote to the target during the export", url=plan.place.url)
    return replace(done, committed=True)


def refuse_export(error: Exception, process_group: Any = None) -> None:
    """Raise an error of this rank on the group's other ranks, which would otherwise wait for this rank's export."""
    ranks = ranks_of(process_group)
    if len(ranks) > 1:
        Meeting.begin(ranks, "the export", purpose="exports", error=error)
