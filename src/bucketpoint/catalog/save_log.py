"""The log of a save in the catalog: an intent before the first upload, a record after the commit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.notes import report
from bucketpoint.catalog.records import process_name, write_record
from bucketpoint.catalog.run_owner import ensure
from bucketpoint.errors import BucketpointError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import AttemptKey, UploadKey
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention.row import FULL, KINDS

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.worker import PruneWorker

logger = logging.getLogger(__name__)


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
