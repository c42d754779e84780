"""The deletion marker, which replaces `.metadata` before the data of a checkpoint is deleted."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, replace

_MAGIC = b'{"bucketpoint":"deleted"'

MARKER_HEAD_BYTES = 64
"""Enough of the beginning of an object to tell whether it is a marker. No pickle begins as a marker does."""


@dataclass(frozen=True)
class DeletionMarker:
    """When and why a checkpoint was deleted.

    Readers refuse a marker, and no reader of torch can load it. A save may replace it, as there is no checkpoint.

    Attributes:
        token: the attempt whose commit was replaced, as its record names it.
        at: seconds since the epoch, by the clock of the pruner.
        reason: what the policy, or a person, says.
        tokens: those of all its ranks, by which the objects that go are known.
        paths: the objects that go, where their names have no token: those of other writers.
        seen: seconds since the epoch at which a sweep came to remove the marker.
    """

    token: str
    at: float
    reason: str = ""
    tokens: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seen: float = 0.0

    def again(self, moment: float) -> DeletionMarker:
        """The same marker with other bytes, and so with another ETag."""
        return replace(self, seen=moment)

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
    """True if an object that begins so is a deletion marker. `MARKER_HEAD_BYTES` are enough."""
    return head.startswith(_MAGIC)


def parse_marker(data: bytes) -> DeletionMarker | None:
    """The marker, or None for anything else. A damaged one has no token and names no paths."""
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
            raise ValueError("a time is none")
        return DeletionMarker(texts[0], moments[0], texts[1], tuple(tokens), tuple(paths), moments[1])
    except (ValueError, TypeError, RecursionError):
        return DeletionMarker("", 0.0)
