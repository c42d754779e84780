"""The deletion marker, which replaces `.metadata` before the data of a checkpoint is deleted."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, replace

_MAGIC = b'{"bucketpoint":"deleted"'

MARKER_HEAD_BYTES = 64
"""Number of first bytes that suffice to recognise a marker: no pickle begins with the same bytes."""


@dataclass(frozen=True)
class DeletionMarker:
    """Time and reason of a checkpoint's deletion.

    Readers refuse a marker, and torch's readers cannot load it. A save may replace it, as the checkpoint no longer
    exists.

    Attributes:
        token: token of the attempt whose commit the marker replaced.
        at: time of the deletion in seconds since the epoch, by the store's clock, or the pruner's if the store returns
            no time.
        reason: reason that the policy or the person gave.
        tokens: tokens of all ranks of the attempt, by which the objects to delete are found.
        paths: paths of the objects to delete whose names have no token, as other writers made them.
        seen: time in seconds since the epoch at which a sweep began to remove the marker.
    """

    token: str
    at: float
    reason: str = ""
    tokens: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seen: float = 0.0

    def again(self, moment: float) -> DeletionMarker:
        """Return the marker with another `seen`, so that its object gets another ETag."""
        return replace(self, seen=moment)

    def encode(self) -> bytes:
        content = {name: value for name, value in asdict(self).items() if value}
        return _MAGIC + b"," + json.dumps(content, sort_keys=True).encode()[1:] + b"\n"

    @property
    def text(self) -> str:
        """The marker's content as a sentence without a full stop."""
        moment = datetime.datetime.fromtimestamp(self.at, datetime.timezone.utc)
        why = f": {self.reason}" if self.reason else ""
        return f"This checkpoint was deleted at {moment:%Y-%m-%d %H:%M:%S} UTC{why}"


def is_marker(head: bytes) -> bool:
    """Return True if an object that begins with `head` is a deletion marker. `MARKER_HEAD_BYTES` suffice."""
    return head.startswith(_MAGIC)


def parse_marker(data: bytes) -> DeletionMarker | None:
    """Parse a marker; None for other data. For a damaged marker, return one without token and paths."""
    if not is_marker(data):
        return None
    try:
        content = json.loads(data)
        texts = [content.get(name, "") for name in ("token", "reason")]
        moments = [float(content.get(name, 0.0)) for name in ("at", "seen")]
        tokens, paths = content.get("tokens", []), content.get("paths", [])
        if not isinstance(tokens, list) or not isinstance(paths, list):
            raise ValueError("a field has another type")
        if not all(isinstance(text, str) for text in [*texts, *tokens, *paths]):
            raise ValueError("a field has another type")
        if not all(0 <= moment < 1e11 for moment in moments):
            raise ValueError("a time is out of range")
        return DeletionMarker(texts[0], moments[0], texts[1], tuple(tokens), tuple(paths), moments[1])
    except (ValueError, TypeError, OverflowError, RecursionError):
        return DeletionMarker("", 0.0)
