"""The `Catalog` of a run, and discovery of checkpoints: folders with a `.metadata`."""

from __future__ import annotations

import contextlib
import pickle
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bucketpoint.catalog.listing import read_notes, read_steps
from bucketpoint.catalog.snapshot import BY_STEP, Checkpoint, Snapshot
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    InvalidURLError,
    ObjectNotFoundError,
    OtherRunError,
    PreconditionFailedError,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.index.ref import HEAD_BYTES
from bucketpoint.format.metadata.facts import MAX_METADATA_BYTES
from bucketpoint.format.record import MARKER_HEAD_BYTES, is_marker
from bucketpoint.location import Location, Place
from bucketpoint.retention.rows import FULL
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import for_each

_STEP = re.compile(r"(?:.*\D)?(\d+)")


@dataclass(frozen=True)
class Catalog:
    """Catalog of one run: its checkpoints and the notes on them. Nothing is cached: every call reads the store.

    `docs/catalog.md` lists the keys, who writes them and when.

    Attributes:
        url: URL of the run's root, without a slash at its end.
        store, prefix: the opened store, and the root's key prefix in it.
        template: template of the names of the run's checkpoint folders.
        clock: returns seconds since the epoch by this machine's clock. It may be wrong, so no age is computed from it.
        now: the store's time, read from an object that this process has just written; None for readers.
        run: name of the job's run, or empty; catalogs of other runs are refused. None in tools, which read any run.
    """

    url: str
    store: Store
    prefix: str
    template: StepTemplate = field(default_factory=StepTemplate)
    clock: Callable[[], float] = time.time
    run: str | None = None
    now: float | None = None

    # -- keys --------------------------------------------------------------------------------------------------------

    def key(self, relative: str) -> str:
        return f"{self.prefix}/{relative}" if self.prefix else relative

    def own_key(self, *parts: str) -> str:
        return self.key("/".join([catalog_keys.CATALOG, self.template.namespace, *parts]))

    @property
    def arguments(self) -> str:
        """The run as arguments of a command: its URL, and `--step-dir` unless the template is the default."""
        other = [] if self.template.text == StepTemplate().text else ["--step-dir", self.template.text]
        return shlex.join([self.url, *other])

    def url_of(self, step: int) -> str:
        return self.url_of_folder(self.template.folder(step))

    def url_of_folder(self, folder: str) -> str:
        return f"{self.url}/{folder}"

    def folder_of(self, url: str) -> tuple[str, int]:
        """Return the folder and the step of a checkpoint's URL.

        Raises:
            InvalidURLError: `url` is not that of a checkpoint of this run.
        """
        folder = url.rstrip("/")[len(self.url) + 1 :] if url.startswith(self.url + "/") else ""
        step = self.template.step_of(folder)
        if step is None:
            raise InvalidURLError(
                f"The URL is not that of a checkpoint of the run at {self.url}",
                url=url,
                remedy=f"Save to a URL such as {self.url_of(100)}",
            )
        return folder, step

    # -- listings ----------------------------------------------------------------------------------------------------

    def steps(self) -> Snapshot:
        """List commits, attempts under way and tombstones, without notes. One LIST for each 1,000 keys.

        Raises:
            OtherRunError: the folders belong to a run of another name.
        """
        snapshot = self.listed_steps()
        runs = snapshot.runs
        if self.run is not None and self.run not in runs and (runs or (self.run and snapshot.checkpoints)):
            raise other_run(self, next(iter(runs), None))
        return snapshot

    def listed_steps(self, first: str = "") -> Snapshot:
        """List as `steps`, without a check of the run's name, or list only the keys that begin with `first`.

        One small GET of `.metadata` for each folder with several records whose order is uncertain, as after a second
        save of the step by a job whose clock is behind: `.metadata` decides which record counts.
        """
        listed = self.listed(catalog_keys.STEPS, first)
        snapshot = read_steps(listed, self.template, taken=self.time_of(listed))
        for records in snapshot.doubtful():
            current = self.committed(records)
            if current is not None:
                snapshot = snapshot.with_current(current, records)
        return snapshot

    def step(self, step: int) -> Snapshot:
        """List as `listed_steps`, but only one step. One LIST."""
        return self.listed_steps(catalog_keys.encode([f"{step:016d}", ""]))

    def committed(self, records: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return which of a folder's records describes its present `.metadata`, or None. One small GET."""
        info = self.metadata_info(records[0].folder)
        mark = catalog_keys.mark_of(info.etag if info is not None else None)
        return next((record for record in records if record.mark == mark != catalog_keys.UNKNOWN), None)

    def snapshot(self) -> Snapshot:
        """List steps and notes, all that a plan needs. One LIST for each 1,000 keys of either; GETs as in `steps`."""
        # Steps are listed first, so that the metrics of each listed checkpoint are listed too: a save writes metrics
        # before the record. In the other order, the best checkpoint could seem to have no metrics, and be deleted.
        snapshot = self.steps()
        noted = self.listed(catalog_keys.NOTES)
        times = (snapshot.taken, self.time_of(noted))
        taken = max((time for time in times if time is not None), default=None)
        return replace(snapshot, taken=taken).with_notes(read_notes(noted))

    def with_unrecorded(self, snapshot: Snapshot) -> Snapshot:
        """Add checkpoints without a record to a snapshot, such as those of plain writers, of torch and of dead jobs.

        A checkpoint whose folder is missing moves to `gone`. One LIST for each 1,000 folders, and one small GET for
        each folder without a record, several at a time.
        """
        unrecorded: list[Checkpoint | None] = []
        folders = self.folders()
        snapshot = snapshot.without_gone([one for one in snapshot.recorded if one.folder not in {*folders}])
        for_each(
            self._without_record(snapshot, folders),
            lambda folder: unrecorded.append(self.unrecorded(folder)),
            TransferOptions(),
        )
        both = [*snapshot.checkpoints, *filter(None, unrecorded)]
        return replace(snapshot, checkpoints=tuple(sorted(both, key=BY_STEP)))

    def candidates(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints to restore from, newest first; those with a tombstone for deletion come last.

        A checkpoint with a record is yielded without a request for its `.metadata`. If that is gone, the caller tries
        the next checkpoint. A folder without a record costs one small GET when its turn comes.
        """
        snapshot = self.steps()
        # After a rollback the highest steps have tombstones: a restarted job must not resume from them.
        leaving = self.leaving(snapshot)
        # Of equal steps, a checkpoint with a record comes first: it has been committed.
        ranked: list[tuple[bool, int, bool, Checkpoint | str]] = [
            (checkpoint.folder not in leaving, checkpoint.step, True, checkpoint) for checkpoint in snapshot.full
        ]
        for folder in self._without_record(snapshot, self.folders()):
            ranked.append((folder not in leaving, self.template.step_of(folder) or 0, False, folder))
        for *_, one in sorted(ranked, key=lambda entry: entry[:3], reverse=True):
            checkpoint = self.unrecorded(one) if isinstance(one, str) else one
            if checkpoint is not None:
                yield checkpoint

    def leaving(self, snapshot: Snapshot) -> set[str]:
        """Return the folders whose present checkpoint has a tombstone for deletion.

        If a folder has no record, or has an attempt under way, the tombstone may be that of an earlier checkpoint in
        the folder. One small GET for each such tombstone checks this.
        """
        going, begun = snapshot.going(), {attempt.folder for attempt in snapshot.attempts}
        recorded = {one.folder: one.id for one in snapshot.checkpoints if one.folder not in begun}

        def is_present(folder: str, token: str, mark: str) -> bool:
            if folder in recorded:
                return recorded[folder] == token
            info = self.metadata_info(folder)
            return info is None or catalog_keys.mark_of(info.etag) == mark

        stones = [stone for stone in snapshot.notes.tombstones if stone.name in going]
        return {stone.folder for stone in stones if is_present(stone.folder, stone.id, stone.mark)}

    @staticmethod
    def _without_record(snapshot: Snapshot, folders: Iterable[str]) -> list[str]:
        return sorted({*folders, *(attempt.folder for attempt in snapshot.attempts)} - snapshot.folders)

    def unrecorded(self, folder: str) -> Checkpoint | None:
        """Return the checkpoint in a folder without a record; None if nothing is committed there. One small GET.

        The metadata is not read, so token and sizes are missing.
        """
        committed, step = self.metadata_info(folder), self.template.step_of(folder)
        if committed is None or step is None:
            return None
        return Checkpoint(step, committed.modified or 0.0, "", FULL, catalog_keys.mark_of(committed.etag), folder)

    def folders(self) -> list[str]:
        """Return the run's checkpoint folders, committed or not, sorted by name. One LIST for each 1,000."""
        above = self.key(self.template.parent)
        above = above if not above or above.endswith("/") else above + "/"
        names = [self.template.parent + name[len(above) :].rstrip("/") for name in self.store.list_folders(above)]
        return [name for name in names if self.template.step_of(name) is not None]

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose `.metadata` exists, or None. One small GET for each candidate."""
        for one in self.candidates():
            if is_whole(self.metadata_info(one.folder)):
                return one
        return None

    def metadata_info(self, folder: str) -> ObjectInfo | None:
        """Return a folder's `.metadata` object; None if it is missing or a deletion marker. One small GET."""
        return committed_info(self.store, self.metadata_key(folder))

    def objects_of(self, folder: str) -> dict[str, ObjectInfo]:
        """List the objects in a folder, by path within the folder. One LIST for each 1,000."""
        above = self.key(f"{folder}/")
        return {info.key[len(above) :]: info for info in self.store.list(above)}

    def metadata_key(self, folder: str) -> str:
        return self.key(f"{folder}/{keys.METADATA}")

    def listed(self, where: str, first: str = "") -> list[tuple[str, ObjectInfo]]:
        """List the names in the folder `where` of the catalog, or only those that begin with `first`."""
        above = self.own_key(where, "")
        return [(info.key[len(above) :], info) for info in self.store.list(above + first)]

    # -- the store's time --------------------------------------------------------------------------------------------

    def dated(self, written: ObjectInfo) -> Catalog:
        """Return a copy of the catalog whose `now` is the store's time of an object that was just written.

        One HEAD if the reply to the write did not contain the time.
        """
        modified = written.modified
        if modified is None:
            with contextlib.suppress(ObjectNotFoundError):
                modified = self.store.head(written.key).modified
        return replace(self, now=modified)

    def at_store_time(self) -> Catalog:
        """Return a copy of the catalog whose `now` is the store's time. A PUT of an empty object, and a DELETE."""
        dated = self.dated(self.write(self.own_key(catalog_keys.CLOCK)))
        with contextlib.suppress(AccessDeniedError):
            self.store.delete([self.own_key(catalog_keys.CLOCK)])
        return dated

    def time_of(self, listed: Iterable[tuple[str, ObjectInfo]]) -> float | None:
        """Return `now`, or, for readers, the newest time in the listing. None if the store returns no times.

        The newest time in a listing is never later than the store's present time, so no object seems older than it is.
        """
        if self.now is not None:
            return self.now
        return max((info.modified for _, info in listed if info.modified is not None), default=None)

    def due(self, grace: float) -> float:
        """Return the time of a deletion that is due in `grace` seconds, by the store's clock."""
        if self.now is not None:
            return self.now + grace
        # On a store without times, only a tombstone without grace is ever due: `Tombstone.is_due`.
        return self.clock() + grace if grace else 0.0

    # -- small writes ------------------------------------------------------------------------------------------------

    def write(self, key: str, data: bytes = b"", *, if_match: str | None = None) -> ObjectInfo:
        body = memoryview(data)
        return self.store.put(key, [body] if data else [], crc32c=crc32c(body), if_match=if_match)

    def create(self, key: str, data: bytes) -> ObjectInfo | None:
        """Write an object that must not exist yet. Return None if it exists with other content.

        Equal content counts as success: a first request, whose answer was lost, may have written it.
        """
        body = memoryview(data)
        try:
            return self.store.put(key, [body], crc32c=crc32c(body), if_none_match=True)
        except PreconditionFailedError:
            with contextlib.suppress(CorruptDataError, ObjectNotFoundError):
                there, info = self.store.get(key, max_bytes=len(data))
                return info if there == data else None
        return None


def committed_info(store: Store, key: str) -> ObjectInfo | None:
    """Return the `.metadata` object at `key`; None if it is missing or a deletion marker. One small GET."""
    try:
        head, info = store.get(key, first=MARKER_HEAD_BYTES)
    except ObjectNotFoundError:
        return None
    return None if is_marker(head) else info


def is_whole(committed: ObjectInfo | None) -> bool:
    """Return True if there is a commit of at least one byte: copies that fail half-way leave empty objects."""
    return committed is not None and committed.size > 0


def get_metadata(store: Store, key: str, *, max_bytes: int = MAX_METADATA_BYTES) -> tuple[bytes, ObjectInfo]:
    """Read a `.metadata` object. Return its bytes and ObjectInfo. Two GETs if it is larger than 128 KiB.

    Only the head is read if the object is larger than `max_bytes` or is no metadata: it cannot be decoded, and its
    whole content could exceed the memory of a pruner.

    Raises:
        ObjectNotFoundError: there is no object.
    """
    head, info = store.get(key, first=HEAD_BYTES)
    # Every writer's pickle begins with the opcode PROTO, of protocol 2 or later.
    if info.size <= len(head) or info.size > max_bytes or not (is_marker(head) or head.startswith(pickle.PROTO)):
        return head, info
    return store.get(key, max_bytes=max_bytes)


def other_run(catalog: Catalog, owner: str | None) -> OtherRunError:
    """Return the error for a job that uses the folders of the run `owner`."""
    whose = f"run {owner!r}" if owner else "a run that has no name"
    mine = f"this job is run {catalog.run!r}" if catalog.run else "this job has no run name"
    apart = "give this job another root or other folders (layout: {step_dir: ...})"
    if owner:
        remedy = f"To continue that run, set run: {owner} in the policy. Otherwise {apart}"
    else:
        name = f"bucketpoint gc {catalog.arguments} --name {catalog.run}"
        remedy = f"If it is the same run, name it once: {name}. Otherwise {apart}"
    return OtherRunError(f"The checkpoints at this URL belong to {whose}, and {mine}", url=catalog.url, remedy=remedy)


_CHAINED = re.compile(r"(?!(?:s3a?|gc?s|file|local)://)[^:/]+://.*::", re.IGNORECASE | re.DOTALL)


def open_catalog(root: Place, *, template: str | None = None) -> Catalog:
    """Open the catalog of the run at `root`. Sends no request.

    Raises:
        InvalidURLError: `root` is empty, or names its folder before `::`, or `template` names no folders.
    """
    place = Location.of(root)
    if not place.url.rstrip("/"):
        raise InvalidURLError("The URL of the run is empty", remedy="Pass a URL such as s3://bucket/run")
    store, prefix = place.opened
    if place.fs is None and _CHAINED.match(place.url):
        # The folder of a step is joined to the end of the URL, which is that of the other filesystem.
        remedy = "Pass the URL of the folder after ::, or make the filesystem and pass it as fs="
        raise InvalidURLError("A run cannot be at a chained URL with a path before ::", url=place.url, remedy=remedy)
    return Catalog(place.url, store, prefix, StepTemplate() if template is None else StepTemplate(template))


def latest_checkpoint(root: Place, *, storage_options: Mapping[str, Any] | None = None, fs: Any = None) -> str | None:
    """Return the URL of the newest whole checkpoint in the folders below `root`, or None.

    The newest checkpoint has the highest number at the end of its folder's name (`step-500`, `step-00000500`,
    `epoch=3-step=500`); folders without a number, and a checkpoint at `root` itself, are ignored. Checkpoints with a
    tombstone in the run's catalog come last, because a rollback gives tombstones to the newer ones. One LIST per 1,000
    folders, one more if there is a catalog, and one small GET for each folder, newest first, until one is whole. Call
    this function on one rank and broadcast the result.

    Args:
        root: URL of the folder that contains the checkpoints' folders.
        storage_options: as for `BucketReader`.
        fs: an fsspec filesystem to use for the URL.

    Raises:
        InvalidURLError: `root` is no URL of a store.
        StoreError: the store cannot be reached, or refuses a request.
    """
    catalog = open_catalog(Location.of(root, storage_options, fs))
    folder = newest_folder(catalog.store, catalog.prefix)
    return None if folder is None else catalog.url_of_folder(folder)


def newest_folder(store: Store, prefix: str) -> str | None:
    """Return the name of the folder whose URL `latest_checkpoint` returns, or None."""
    folders = []
    leaving: set[str] = set()
    for folder in store.list_folders(prefix + "/" if prefix else ""):
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        match = _STEP.fullmatch(name)
        if match:
            folders.append((int(match.group(1)), name))
        elif name == catalog_keys.CATALOG:
            catalog = Catalog(store.url, store, prefix)
            leaving = catalog.leaving(catalog.steps())
    for _, _, name in sorted(((name not in leaving, step, name) for step, name in folders), reverse=True):
        if is_whole(committed_info(store, keys.join(keys.join(prefix, name), keys.METADATA))):
            return name
    return None
