"""What a writer tells the catalogue: an intent before the first upload, a record after the commit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.claim import hold
from bucketpoint.catalog.notes import report
from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, ObjectNotFoundError
from bucketpoint.format import catalogue
from bucketpoint.format.catalogue import AttemptKey, CommitKey, UploadKey
from bucketpoint.format.groups import OTHER
from bucketpoint.format.record import MAX_RECORD_BYTES, CommitRecord
from bucketpoint.retention.row import FULL, KINDS

if TYPE_CHECKING:
    from bucketpoint.catalog.pruning import PruneWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveLog:
    """Give it to a writer as `log=`: its commits are then in the catalogue.

    A save costs a small PUT and a DELETE more than one without; its record lies in the catalogue and not beside
    `.metadata`. Where uploads are listed by their exact key only, so does each rank that uploads in parts. A trainer
    without the right to delete leaves its intents, which the pruner removes.

    Attributes:
        kind: of checkpoint.
        metrics: known at save. They are in the record, and reported like any others.
        git_sha, config_hash: of what the job runs.
        pruner: told of each commit, so that it carries out a policy.
    """

    catalog: Catalog
    kind: str = FULL
    metrics: Mapping[str, float] = field(default_factory=dict)
    git_sha: str | None = None
    config_hash: str | None = None
    pruner: PruneWorker | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BucketpointError(f"There is no kind {self.kind!r} of checkpoints", remedy=f"Use {', '.join(KINDS)}")

    def begin(self, url: str, token: str) -> None:
        catalog = self.catalog
        folder, step = catalog.folder_of(url)
        hold(catalog)
        body = {"version": 1, "token": token, "url": url, "started": catalog.clock()}
        # A checkpoint of this step that has a tombstone keeps it: it may be one that the run has given up, which a save
        # that dies must not bring back. Its deletion goes by its own tokens, and the pruner waits for this attempt.
        catalog.write(self._attempt(folder, step, token), _json(body))

    def uploading(self, url: str, token: str, rank: int, paths: Sequence[str]) -> None:
        body = {"version": 1, "paths": list(paths), "started": self.catalog.clock()}
        self.catalog.write(self._uploads(url, token, rank), _json(body))

    def uploaded(self, url: str, token: str, rank: int) -> None:
        self.catalog.store.delete([self._uploads(url, token, rank)])

    def facts(self, url: str) -> dict[str, Any]:
        return {
            "step": self.catalog.folder_of(url)[1],
            "kind": self.kind,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "git_sha": self.git_sha,
            "config_hash": self.config_hash,
        }

    def committed(self, url: str, record: CommitRecord) -> None:
        folder, step = self.catalog.folder_of(url)
        write_record(self.catalog, folder, step, record)
        try:
            self._note_metrics(step)
            self._delete_intent(folder, step, record.token)
        except BucketpointError as error:
            # A trainer may lack the right to delete, and its pruner has more to say about that.
            logger.warning("step %d is committed and recorded; what should have followed did not: %s", step, error)
        if self.pruner is not None:
            self.pruner.after_commit(step)

    def _note_metrics(self, step: int) -> None:
        if self.metrics:
            report(self.catalog, step, self.metrics)

    def _delete_intent(self, folder: str, step: int, token: str | None) -> None:
        failures = self.catalog.store.delete([self._attempt(folder, step, token)]) if token is not None else []
        if failures:
            logger.info("an intent stays until the next prune: %s", failures[0].code)

    def _uploads(self, url: str, token: str, rank: int) -> str:
        folder, step = self.catalog.folder_of(url)
        return self.catalog.own_key(catalogue.UPLOADS, UploadKey(step, token, rank, folder).name())

    def _attempt(self, folder: str, step: int, token: str) -> str:
        return self.catalog.own_key(catalogue.STEPS, AttemptKey(step, token, folder).name())


def write_record(catalog: Catalog, folder: str, step: int, record: CommitRecord) -> str:
    """Put the record of a commit under the key that says the same, and return the key."""
    mark = catalogue.mark_of(record.metadata_etag)
    token = record.token or ""
    # What no group is known of, as in the objects of other writers, counts as well.
    groups = {**record.groups, OTHER: record.groups.get(OTHER, 0) + record.bytes - sum(record.groups.values())}
    name = CommitKey(step, record.created or 0.0, token, record.kind, mark, folder, groups).name()
    key = catalog.own_key(catalogue.STEPS, name)
    # The key names the commit whole: whatever is there already says the same.
    catalog.create(key, replace(record, step=step).to_json())
    return key


def read_record(catalog: Catalog, key: str) -> CommitRecord | None:
    """The record itself, which says more than its key; None where it is gone.

    Raises:
        MetadataError: there is something else.
    """
    url = f"{catalog.store.url}/{key}"
    try:
        data, _ = catalog.store.get(key, max_bytes=MAX_RECORD_BYTES)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        raise MetadataError(f"This is no commit record: {error.message}", url=url) from None
    return CommitRecord.from_json(data, url=url)


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode() + b"\n"
