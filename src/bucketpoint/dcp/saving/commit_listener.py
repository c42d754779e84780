"""Interface through which a save reports to a catalog of commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bucketpoint.format.record import CommitRecord


class CommitLog(Protocol):
    """Receiver of the events of saves: one for each writer, on every rank, for saves with collectives.

    An implementation must be picklable.
    """

    def begin(self, url: str, token: str) -> None:
        """Note that an attempt begins. Called on the coordinator. No rank sends data before this method returns.

        An error raised here fails the save before a byte is sent.
        """
        ...

    def uploading(self, url: str, token: str, rank: int, paths: Sequence[str]) -> None:
        """Note the paths below `url` to which a rank is about to begin multipart uploads. Called on each rank.

        Called only if the store cannot list the uploads of a prefix. An error raised here fails the save.
        """
        ...

    def uploaded(self, url: str, token: str, rank: int) -> None:
        """Note that all of these uploads are complete. Called on the same rank. A BucketpointError here is logged."""
        ...

    def facts(self, url: str) -> dict[str, Any]:
        """Return plain values to put into `.metadata`: step, kind, metrics, git_sha, config_hash.

        Called on the coordinator.
        """
        ...

    def committed(self, url: str, record: CommitRecord, *, intent_stays: bool) -> None:
        """Record that the checkpoint exists. Called on the coordinator.

        With `intent_stays` an earlier request of the same commit may still arrive, so that the note of `begin` has to
        protect the checkpoint from deletion for an hour.

        A BucketpointError raised here is logged, as the record can be rebuilt.
        """
        ...
