"""The deletion marker: what `.metadata` is replaced by before the data of a checkpoint is deleted."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

_MAGIC = b'{"bucketpoint":"deleted"'

MARKER_HEAD_BYTES = 64
"""Enough of the beginning of an object to tell whether it is a marker. No pickle begins as a marker does."""

MAX_MARKER_BYTES = 64 << 20
"""Far above what the list of paths in a marker takes."""


@dataclass(frozen=True)
class DeletionMarker:
    """When and why a checkpoint was deleted.

    Readers refuse a marker, and no reader of torch can load it. A save may replace it, as there is no checkpoint.

    Attributes:
        token: the attempt whose commit was replaced.
        at: seconds since the epoch, by the clock of the pruner.
        reason: what the policy, or a person, says.
        paths: the objects that go, where their names do not tell which attempt they are of: those of other writers.
    """

    token: str
    at: float
    reason: str = ""
    paths: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The bytes that are stored."""
        content = {name: value for name, value in asdict(self).items() if value}
        return _MAGIC + b"," + json.dumps(content, sort_keys=True).encode()[1:] + b"\n"

    @property
    def text(self) -> str:
        """The marker as a sentence without a full stop."""
        moment = datetime.datetime.fromtimestamp(self.at, datetime.timezone.utc)
        why = f": {self.reason}" if self.reason else ""
        return f"This checkpoint was deleted at {moment:%Y-%m-%d %H:%M:%S} UTC{why}"


def is_marker(head: bytes) -> bool:
    """Whether an object that begins so is a deletion marker. `MARKER_HEAD_BYTES` are enough."""
    return head.startswith(_MAGIC)


def parse_marker(data: bytes) -> DeletionMarker | None:
    """The marker, or None for anything else. A damaged one has no token and names no paths."""
    if not is_marker(data):
        return None
    try:
        content = json.loads(data)
        known = {one.name: content[one.name] for one in fields(DeletionMarker) if one.name in content}
        texts: Sequence[object] = [known.get(name, "") for name in ("token", "reason")]
        paths = known.get("paths", [])
        at = known.get("at", 0.0)
        sound = all(isinstance(text, str) for text in texts) and isinstance(paths, list)
        if not sound or not all(isinstance(path, str) for path in paths) or not 0 <= float(at) < 1e11:
            raise ValueError("a field has another type")
        return DeletionMarker(**{"token": "", **known, "at": float(at), "paths": tuple(paths)})
    except (ValueError, TypeError, RecursionError):
        return DeletionMarker("", 0.0)
