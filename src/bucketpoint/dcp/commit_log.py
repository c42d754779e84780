"""What a save tells whoever keeps a catalogue of commits. The catalogue itself is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bucketpoint.format.record import CommitRecord


class CommitLog(Protocol):
    """One per writer, on every rank, for saves with collectives. It must pickle."""

    def begin(self, url: str, token: str) -> None:
        """Coordinator: an attempt begins. No rank has sent anything yet, and none will before this returns.

        What it raises fails the save before a byte is sent.
        """
        ...

    def uploading(self, url: str, token: str, rank: int, paths: Sequence[str]) -> None:
        """Each rank, before it begins multipart uploads to these paths below `url`.

        Called only where the store cannot list the uploads of a prefix. What it raises fails the save.
        """
        ...

    def uploaded(self, url: str, token: str, rank: int) -> None:
        """The same rank, once all of these uploads are complete. A BucketpointError raised here is logged."""
        ...

    def facts(self, url: str) -> dict[str, Any]:
        """Coordinator: plain values to put into `.metadata`: step, kind, metrics, git_sha, config_hash."""
        ...

    def committed(self, url: str, record: CommitRecord) -> None:
        """Coordinator: the checkpoint exists. What is raised here is logged, as the record can be rebuilt."""
        ...
