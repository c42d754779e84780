"""Log of a save in the catalog: an intent before the first upload, a record after the commit. Also the run's owner.

A named run claims its folders before its first save. Other runs are refused. For a writer without a manager,
`RunRetention` finds the run of each save, and prunes it by a policy.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bucketpoint.catalog.catalog import Catalog, other_run
from bucketpoint.catalog.notes import report
from bucketpoint.catalog.records import process_name, write_record
from bucketpoint.errors import BucketpointError, ObjectNotFoundError
from bucketpoint.forks import process_lock
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import AttemptKey, UploadKey
from bucketpoint.format.record import CommitRecord
from bucketpoint.location import Location, parent_and_name
from bucketpoint.retention.rows import FULL, KINDS
from bucketpoint.stores import delete_all

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.worker import PruneWorker
    from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)


def ensure(catalog: Catalog) -> None:
    """Claim the folders for this run before a save. One GET; at the first save also a LIST and two writes.

    Raises:
        OtherRunError: the folders belong to another run, or to a run without a name.
    """
    mine = catalog.run
    if mine is None:
        return
    owner = claimed_by(catalog)
    if owner is None and mine:
        owner = _take(catalog, mine)
    if (owner or "") != mine:
        raise other_run(catalog, owner)


def claimed_by(catalog: Catalog) -> str | None:
    """Return the name of the run that has claimed the folders, or None. One GET."""
    try:
        data, _ = catalog.store.get(catalog.own_key(catalog_keys.CLAIM), first=1 << 16)
    except ObjectNotFoundError:
        return None
    name = catalog_keys.content_of(data).get("run")
    return name if isinstance(name, str) and name else None


def name_run(catalog: Catalog, name: str) -> str:
    """Claim the folders for the run `name`, whatever they contain. Return the owner's name: the first claim wins."""
    copy = catalog.own_key(catalog_keys.STEPS, catalog_keys.encode([catalog_keys.RUN, name]))
    # The copy among the steps is written first: any listing that shows a checkpoint then shows the run's name, too.
    catalog.write(copy)
    body = json.dumps({"run": name, "version": 1}, sort_keys=True).encode()
    if catalog.create(catalog.own_key(catalog_keys.CLAIM), body):
        return name
    owner = claimed_by(catalog)
    if owner is not None and owner != name:
        catalog.store.delete([copy])
    return owner or name


def unname(catalog: Catalog) -> str | None:
    """Remove the name of a run, so that jobs without a name may save there. Return the name; None if it had none."""
    owner = claimed_by(catalog)
    names = {*catalog.listed_steps().runs, *([owner] if owner else [])} - {""}
    copies = [catalog.own_key(catalog_keys.STEPS, catalog_keys.encode([catalog_keys.RUN, name])) for name in names]
    delete_all(catalog.store, [catalog.own_key(catalog_keys.CLAIM), *copies] if names else [])
    return owner or min(names, default=None)


def _take(catalog: Catalog, name: str) -> str | None:
    there = catalog.listed_steps()
    others = sorted(there.runs - {name})
    if others:
        return others[0]
    # Existing checkpoints belong to a run without a name, unless a listing names their run.
    if name not in there.runs and (there.checkpoints or there.attempts):
        return None
    return name_run(catalog, name)


@dataclass(frozen=True)
class SaveLog:
    """Log of a writer's saves in the catalog, passed to the writer as `log=`.

    A log costs a small PUT and a DELETE for each save; the record is stored in the catalog and not beside `.metadata`.
    On stores that list uploads by exact key only, each rank that uploads in parts sends another PUT and DELETE. The
    intents of a trainer without permission to delete stay until a prune.

    Attributes:
        kind: kind of the checkpoints.
        metrics: metrics known when the save begins, for the record and a report.
        git_sha, config_hash: commit and configuration of the job's program.
        pruner: worker that prunes after each commit.
    """

    catalog: Catalog
    kind: str = FULL
    metrics: Mapping[str, float] = field(default_factory=dict)
    git_sha: str | None = None
    config_hash: str | None = None
    pruner: PruneWorker | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BucketpointError(f"{self.kind!r} is not a kind of checkpoint", remedy=f"Use {', '.join(KINDS)}")

    def begin(self, url: str, token: str) -> None:
        """Write the intent of an attempt, on the coordinator, before any rank sends data. An error fails the save."""
        folder, step = self.catalog.folder_of(url)
        ensure(self.catalog)
        body = {"version": 1, "token": token, "url": url, "started": self.catalog.clock()}
        # A tombstone of an existing checkpoint of this step stays: the checkpoint may be given up, and must not come
        # back if this save dies. Its deletion spares this attempt's data, which has other tokens, and waits while the
        # attempt is under way.
        self.catalog.write(self._attempt(folder, step, token), _json(body))

    def uploading(self, url: str, token: str, rank: int, paths: Sequence[str]) -> None:
        """Record the paths below `url` of the multipart uploads that a rank is about to begin. An error fails the save.

        Called on each rank, only if the store cannot list uploads by prefix.
        """
        body = {"version": 1, "paths": list(paths), "started": self.catalog.clock()}
        self.catalog.write(self._uploads(url, token, rank), _json(body))

    def uploaded(self, url: str, token: str, rank: int) -> None:
        """Delete the note of the rank's uploads, which are complete. A BucketpointError is logged by the caller."""
        self.catalog.store.delete([self._uploads(url, token, rank)])

    def facts(self, url: str) -> dict[str, Any]:
        ranked = self.pruner.policy.keep.best if self.pruner is not None else ()
        return {
            **({"best": [ranked[0].metric, ranked[0].mode]} if ranked else {}),
            "step": self.catalog.folder_of(url)[1],
            "kind": self.kind,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "git_sha": self.git_sha,
            "config_hash": self.config_hash,
        }

    def committed(self, url: str, record: CommitRecord, *, intent_stays: bool = False) -> None:
        """Write metrics and record of a commit, and delete the intent. A BucketpointError is logged by the caller.

        `intent_stays`: True if an earlier request of the same commit may still arrive. The intent then stays, and
        protects the checkpoint from deletion for an hour.
        """
        folder, step = self.catalog.folder_of(url)
        # Metrics come before the record. If the job is killed between them, the next prune finds the intent, and writes
        # both.
        if self.metrics:
            report(self.catalog, step, self.metrics, token=record.token)
        # The host is not stored in `.metadata`, which may be published with the weights.
        write_record(self.catalog, folder, step, replace(record, host=process_name()))
        try:
            if not intent_stays and record.token is not None:
                self._delete_intent(folder, step, record.token)
        except BucketpointError as error:
            # A trainer without permission to delete must still be able to save. The pruner reports the error in detail.
            logger.warning("step %d is committed and recorded, but its intent could not be deleted: %s", step, error)
        if self.pruner is not None:
            self.pruner.after_commit(step)

    def _delete_intent(self, folder: str, step: int, token: str) -> None:
        failures = self.catalog.store.delete([self._attempt(folder, step, token)])
        if failures:
            logger.info(
                "the intent of a committed save was not deleted, and stays until the next prune: %s", failures[0].code
            )

    def _uploads(self, url: str, token: str, rank: int) -> str:
        folder, step = self.catalog.folder_of(url)
        return self.catalog.own_key(catalog_keys.UPLOADS, UploadKey(step, token, rank, folder).name())

    def _attempt(self, folder: str, step: int, token: str) -> str:
        return self.catalog.own_key(catalog_keys.STEPS, AttemptKey(step, token, folder).name())


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode() + b"\n"


# -- saves by a policy without a manager -------------------------------------------------------------------------------


class RunRetention:
    """Factory of the `SaveLog` for a save's URL. The log records the commit and starts a prune.

    The root of the run is the policy's `root`, or by default the parent of the checkpoint's folder. The step is parsed
    from the folder's name by the policy's `layout`.

    Raises:
        PolicyError: the policy's file has faults; the error lists all of them.
        InvalidURLError: the policy's root or layout is invalid.
    """

    def __init__(
        self,
        policy: RetentionPolicy | str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
    ) -> None:
        from bucketpoint.catalog.policy_file import policy_of

        self.policy = policy_of(policy)
        self._storage_options, self._fs = storage_options, fs
        self._root = self._open(self.policy.root) if self.policy.root is not None else None
        self._logs: dict[str, SaveLog] = {}
        self._warned = False
        self._lock = process_lock()
        self.pruning: PruneWorker | None = None
        """The worker of the run of this process's last save."""

    def log_of(self, url: str) -> SaveLog | None:
        """Return the log for a save to `url`. If `url` is no step of a run, log one warning and return None."""
        split = parent_and_name(url)
        with self._lock:
            log = self._log(*split) if split is not None else None
            if log is not None:
                self.pruning = log.pruner
            elif not self._warned:
                self._warned = True
                of = f"the run at {self.policy.root}" if self._root is not None else "a run"
                logger.warning(
                    "%s is saved, but gets no record and is not pruned, because it is not a step of %s, whose "
                    "folders are named %s",
                    url,
                    of,
                    self.policy.layout.step_dir,
                )
            return log

    def _open(self, root: str) -> Catalog:
        from bucketpoint.catalog.run import open_run

        return open_run(self.policy, Location.of(root, self._storage_options, self._fs))

    def _log(self, root: str, folder: str) -> SaveLog | None:
        from bucketpoint.catalog.deletion.worker import worker_of

        if root not in self._logs:
            catalog = self._open(root)
            if self._root is not None:
                # Several URLs may denote one place.
                if (catalog.store.identity, catalog.prefix) != (self._root.store.identity, self._root.prefix):
                    return None
                catalog = replace(self._root, url=root)
            self._logs[root] = SaveLog(catalog, pruner=worker_of(catalog, self.policy))
        log = self._logs[root]
        return log if log.catalog.template.step_of(folder) is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes its own worker: see `worker_of`.
        return {**self.__dict__, "_lock": None, "_logs": {}, "pruning": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = process_lock()
