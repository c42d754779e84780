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
    """Log that records a writer's commits in the catalog: pass it to the writer as `log=`.

    A save with a log costs one small PUT and one DELETE more; its record is stored in the catalog and not beside
    `.metadata`. If the store lists uploads by their exact key only, each rank that uploads in parts costs as much
    again. A trainer without the right to delete leaves its intents, which the pruner removes.

    Attributes:
        kind: kind of the checkpoints.
        metrics: metrics known at save. They are in the record, and are reported like any others.
        git_sha, config_hash: commit and configuration of the job's program.
        pruner: called at each commit, to carry out a policy.
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
        """Record that an attempt begins: on the coordinator, before any rank sends data. An error fails the save."""
        folder, step = self.catalog.folder_of(url)
        ensure(self.catalog)
        body = {"version": 1, "token": token, "url": url, "started": self.catalog.clock()}
        # A tombstone on an existing checkpoint of this step stays: the run may have given that checkpoint up, and a
        # save that dies must not bring it back. The deletion removes only data with that checkpoint's tokens, and the
        # pruner waits for this attempt.
        self.catalog.write(self._attempt(folder, step, token), _json(body))

    def uploading(self, url: str, token: str, rank: int, paths: Sequence[str]) -> None:
        """Note the paths below `url` to which a rank is about to begin multipart uploads. An error fails the save.

        Called on each rank, and only if the store cannot list the uploads of a prefix.
        """
        body = {"version": 1, "paths": list(paths), "started": self.catalog.clock()}
        self.catalog.write(self._uploads(url, token, rank), _json(body))

    def uploaded(self, url: str, token: str, rank: int) -> None:
        """Note that all of these uploads are complete. A BucketpointError is logged."""
        self.catalog.store.delete([self._uploads(url, token, rank)])

    def facts(self, url: str) -> dict[str, Any]:
        """Return plain values to put into `.metadata`."""
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
        """Record that the checkpoint exists. A BucketpointError is logged, as the record can be rebuilt.

        With `intent_stays` an earlier request of the same commit may still arrive, so that the intent has to protect
        the checkpoint from deletion for an hour.
        """
        folder, step = self.catalog.folder_of(url)
        # Before the record: a job that is killed between them leaves an intent, from which both are written.
        if self.metrics:
            report(self.catalog, step, self.metrics, token=record.token)
        # The host is not among the facts of `.metadata`, which may be published with the weights.
        write_record(self.catalog, folder, step, replace(record, host=process_name()))
        try:
            if not intent_stays and record.token is not None:
                self._delete_intent(folder, step, record.token)
        except BucketpointError as error:
            # A trainer may lack the right to delete. That must not fail the save; the pruner reports it in detail.
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
