"""Options, plan and result of a conversion."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.convert.journal import Journal
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.shares import Worker, share_of
from bucketpoint.convert.source import Source
from bucketpoint.convert.target import TargetLayout, TargetPlace
from bucketpoint.format.renaming import Renaming
from bucketpoint.transfer import ObjectSource, TransferOptions, Uploaded

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one safetensors file: the default of transformers, "5GB"."""

OBJECT_BYTES = 1 << 30
"""Bytes of one object of a checkpoint: the most that an interruption costs, yet large enough for few objects."""


@dataclass(frozen=True)
class ConvertOptions:
    """Options that decide the content of the target.

    Attributes:
        prefix: prefix of the keys in the DCP checkpoint, such as `model`, to which a dot is added. Writing safetensors
            removes it, and leaves out other keys; reading safetensors puts it before each key.
        shard_bytes: bytes of tensors in one safetensors file.
        object_bytes: bytes of one object of a checkpoint of bucketpoint.
        overwrite: replace an existing target, if the format allows it in one atomic step.
        trusted: unpickle without the allow-list.
        exclude: patterns of keys to leave out, as the source has them: of `fnmatch`, such as `model.rope.*`. A pattern
            without wildcards also leaves out every key below it.
        names: new names of the tensors in safetensors, without `prefix`: see `format.renaming`.
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
        place: the store and the keys of the target.
        layout: the objects of the target, with the bytes of each.
        filling: conversion of the source's bytes to those of the target's objects.
        transfer: sizes and limits of the transfer.
        journal: None if there is only one object, which appears whole or not at all.
        other: journal of another conversion that was found at the target.
        finished: True if an earlier run has committed, and only its journal is left.
        log: log of the run in which the target becomes a checkpoint; None if it lies in no run.
        token: token of the attempt, in the keys of the objects that it writes.
        there: objects that an interrupted run has written, by key.
        replaces: a checkpoint or file is at the target, and will be replaced.
        worker: the worker that carries the plan out; None if it is not shared.
        digest: digest of everything that decides the target's bytes; empty for a file that the target names.
        watch: raises CommitConflictError if another process has written to a target that this conversion would replace.
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
        """The objects that are to be written, by this worker if there are several."""
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
        verified_bytes: bytes read again at the target; None if that was not requested.
        damaged: objects that did not read back as they were written.
        peak_bytes: most memory held for bytes in flight.
        committed: the target is whole. False while objects of other workers are missing.
    """

    objects: int
    nbytes: int
    skipped: int
    checked_bytes: int
    verified_bytes: int | None
    damaged: Sequence[str]
    peak_bytes: int
    committed: bool = True
