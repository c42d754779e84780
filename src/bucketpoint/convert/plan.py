"""Options, plan and result of a conversion."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.convert.journal import Journal
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import Source
from bucketpoint.convert.target import TargetLayout, TargetPlace, Worker, share_of
from bucketpoint.format.item_names import Renaming
from bucketpoint.transfer import ObjectSource, TransferOptions, Uploaded

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one safetensors file: the default of transformers, "5GB"."""

OBJECT_BYTES = 1 << 30
"""Bytes of one object of a checkpoint. An interruption costs about one object; larger objects are fewer."""


@dataclass(frozen=True)
class ConvertOptions:
    """Options that determine the content of the target.

    Attributes:
        prefix: prefix of the keys in the DCP checkpoint, such as `model`, to which a dot is added. A conversion to
            safetensors removes the prefix and leaves out other keys; one from safetensors adds it to each key.
        shard_bytes: bytes of tensors in one safetensors file.
        object_bytes: bytes of one object of a checkpoint of bucketpoint.
        overwrite: replace an existing target, if the format allows it in one atomic step.
        trusted: unpickle without the allow-list.
        exclude: `fnmatch` patterns of the source's keys to leave out, such as `model.rope.*`. A pattern without
            wildcards also leaves out every key below it.
        names: new names of the tensors in safetensors, without `prefix`: see `format.item_names`.
    """

    prefix: str = ""
    shard_bytes: int = SHARD_BYTES
    object_bytes: int = OBJECT_BYTES
    overwrite: bool = False
    trusted: bool = False
    exclude: str | Sequence[str] = ()
    names: Renaming | Mapping[str, str | None] | str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class ConvertPlan:
    """Plan of a conversion.

    Attributes:
        source: the opened source.
        format: format of the target.
        place: store and prefix of the target.
        layout: objects of the target.
        filling: reader of the source's bytes for the target's objects.
        transfer: sizes and limits of the transfer.
        journal: journal of this conversion; None for a single object, which becomes visible only as a whole.
        other: journal of another conversion that was found at the target.
        finished: True if an earlier run has already committed.
        log: log of the run that contains the target; None if the target is not in a run.
        token: token of the attempt, which is part of its objects' keys.
        there: objects that an interrupted run has written, by key.
        replaces: True if a checkpoint or file at the target will be replaced.
        worker: worker that executes the plan; None without workers.
        digest: digest of everything that determines the target's bytes; empty if the target is a single named file.
        watch: function that raises CommitConflictError if another process has written to the target meanwhile.
    """

    source: Source
    format: str
    place: TargetPlace
    layout: TargetLayout
    filling: Filling
    transfer: TransferOptions
    journal: Journal | None = None
    other: Journal | None = None
    finished: bool = False
    log: SaveLog | None = None
    token: str = ""
    there: Mapping[str, Uploaded] = field(default_factory=dict, repr=False)
    replaces: bool = False
    worker: Worker | None = None
    digest: str = ""
    watch: Callable[[], None] = lambda: None

    @cached_property
    def objects(self) -> Sequence[ObjectSource]:
        """Objects to be written: if there are several workers, those of this worker."""
        return self.layout.objects if self.worker is None else share_of(self.layout.objects, self.worker)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return 1 if self.worker is None else self.worker[1]

    @property
    def nbytes(self) -> int:
        """Bytes of `objects`, without the commit."""
        return sum(entry.nbytes for entry in self.objects)

    @property
    def left_nbytes(self) -> int:
        """Bytes of `objects` that are not at the target yet."""
        left = [entry for entry in self.objects if entry.key not in self.there and not self.finished]
        return sum(entry.nbytes for entry in left)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        objects: number of objects of the target.
        nbytes: bytes of all objects of the target.
        skipped: number of objects that an interrupted run had written.
        checked_bytes: bytes of the source that were compared with its checksums.
        verified_bytes: bytes read again at the target; None without `verify`.
        damaged: paths of the objects whose bytes, read again, differ from the sent ones.
        peak_bytes: peak of the memory for buffers and cached blocks.
        committed: True if the target is complete, False if objects of other workers were missing.
    """

    objects: int
    nbytes: int
    skipped: int
    checked_bytes: int
    verified_bytes: int | None
    damaged: Sequence[str]
    peak_bytes: int
    committed: bool = True
