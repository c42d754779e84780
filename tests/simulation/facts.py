"""What the judge knows: operations, commits, pins, and the tombstones that keys name."""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import NoteKey
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import ObjectInfo


class ViolationError(Exception):
    """Something that must hold does not. `kind` names what."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(eq=False)
class Op:
    """Something that an actor does: its kind, and by whom. It starts at `asked`; its first change is `began`."""

    kind: str
    actor: str
    text: str = ""
    policy: RetentionPolicy | None = None
    began: int | None = None
    overwrite: bool = True
    value: float | None = None
    discards: frozenset[int] = frozenset()
    rolled_back_to: int | None = None
    wanted: int | None = None
    asked: int = 0
    parts: int = 0
    """Ranks whose parts of the state its commit must hold."""
    at: float | None = None
    """The true time of its first change."""
    seen: dict[str, dict[str, ObjectInfo]] = field(default_factory=dict)
    """By prefix: what its last listing of a catalog's steps or notes has shown, if it is a prune."""

    def __str__(self) -> str:
        return f"{self.actor}: {self.kind} {self.text}".rstrip()


@dataclass(frozen=True)
class Commit:
    """What a `.metadata` that can be loaded says."""

    key: str
    prefix: str
    id: str
    kind: str
    names: frozenset[str]
    values: tuple[tuple[str, str, int, int], ...]
    """(name, key, from, to) of each tensor's bytes."""
    etag: str
    seq: int
    step: int | None


@dataclass
class Pinned:
    root: str
    step: int
    until: float
    """By the true time."""
    what: str


def tombstone_of(key: str) -> tuple[str, str, str] | None:
    """The id, the action and the folder that a tombstone's key names; None if `key` is no such tombstone."""
    return stone[:3] if (stone := ordered_by(key)) is not None else None


def ordered_by(key: str) -> tuple[str, str, str, bool] | None:
    """The same, and whether a policy wrote it."""
    note = NoteKey.parse(key.rpartition("/")[2])
    if note is None or note.kind != catalog_keys.TOMBSTONE or len(note.fields) not in (5, 6):
        return None
    token, _, action, _, folder, *author = note.fields
    return token, action, folder, bool(author)
