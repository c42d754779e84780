"""The commit record, and the deletion marker, which replaces `.metadata` before a checkpoint's data is deleted.

The record is a small JSON object that repeats facts of `.metadata` for listings and tools without torch.
"""

from __future__ import annotations

import datetime
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from bucketpoint.errors import MetadataError, NewerFormatError

RECORD_VERSION = 1

MAX_RECORD_BYTES = 1 << 20
"""Limit on the size of a record, far above any real one: readers need not fetch more."""

FUTURE_S = 300.0
"""Largest tolerated difference, in seconds, between a machine's clock and the store's."""


@dataclass(frozen=True)
class CommitRecord:
    """Summary of a committed checkpoint.

    Attributes:
        version: format version of the record and of the metadata extension.
        token: token of the attempt that committed; None if another writer did.
        created: seconds since the epoch at the coordinator's commit; None if not recorded.
        seconds: time from the call of the save to its commit, at the coordinator; None if not recorded.
        bytes, objects: size and number of the data objects, without the metadata.
        items, tensors: number of stored items (chunks and other values), and of distinct tensors.
        world_size: number of ranks that saved; None if not recorded.
        torch, bucketpoint: versions that the writer used.
        metadata_etag, metadata_crc32c: ETag and CRC32C of the `.metadata` object from which this record was made.
        groups: bytes of each object group.
        step: training step; None if the caller gave none.
        kind: `full`, `weights`, `export` or `emergency`.
        metrics: values known at the save, NaN and infinite ones included.
        git_sha, config_hash: commit of the job's code and hash of its configuration, given by the caller.
        covers: True if no part of a tensor is missing, see `uncovered`; None in records of versions before 0.3.
        host: host name and process id of the coordinator that committed, as `HOST-PID`; None if not recorded.
    """

    version: int = RECORD_VERSION
    token: str | None = None
    created: float | None = None
    seconds: float | None = None
    bytes: int = 0
    objects: int = 0
    items: int = 0
    tensors: int = 0
    world_size: int | None = None
    torch: str | None = None
    bucketpoint: str | None = None
    metadata_etag: str | None = None
    metadata_crc32c: int | None = None
    groups: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    kind: str = "full"
    metrics: dict[str, float] = field(default_factory=dict)
    git_sha: str | None = None
    config_hash: str | None = None
    covers: bool | None = None
    host: str | None = None

    def to_json(self) -> bytes_:
        """Encode the record as one line of JSON, with sorted keys so that equal records have equal bytes."""
        # JSON lacks NaN and the infinities, which become their names.
        metrics = {name: value if math.isfinite(value) else repr(value) for name, value in self.metrics.items()}
        content = {**asdict(self), "metrics": metrics}
        return json.dumps({**content, _CHECK: _check(content)}, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes_, *, url: str | None = None) -> CommitRecord:
        """Parse a stored record. Unknown fields are dropped.

        Raises:
            MetadataError: `data` is not a valid record; NewerFormatError if its version is higher than RECORD_VERSION.
        """
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f"{len(data)} bytes are too many")
            value = json.loads(data.decode("utf-8"))
            # Records written before the check field existed have none.
            sound = not isinstance(value, dict) or value.pop(_CHECK, None) in (None, _check(value))
        except (ValueError, RecursionError) as error:
            raise MetadataError(f"The commit record is not JSON: {error}", url=url) from None
        if not isinstance(value, dict):
            raise MetadataError("The commit record is not a JSON object", url=url)
        if not sound:
            raise MetadataError("The commit record is damaged: its checksum differs", url=url)
        known = {one.name for one in fields(cls)}
        given = {name: content for name, content in value.items() if name in known}
        for name, content in given.items():
            if not _fits(name, content):
                raise MetadataError(f"The commit record has a wrong {name}", url=url, key=name)
        if "version" not in given:
            raise MetadataError("The commit record has no version", url=url, key="version")
        if given["version"] > RECORD_VERSION:
            number = given["version"]
            raise NewerFormatError(f"The commit record has version {number}", url=url, remedy="Upgrade bucketpoint")
        if "metrics" in given:
            given["metrics"] = {name: float(content) for name, content in given["metrics"].items()}
        return cls(**given)


_CHECK = "check"


def _check(content: Mapping[str, Any]) -> int:
    """Return a checksum of all other fields, unknown ones included; not of the bytes, as tools may reformat JSON."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


bytes_ = bytes  # an alias, since the class has a field named `bytes`

_COUNTS = {"version", "bytes", "objects", "items", "tensors"}
_OPTIONAL_COUNTS = {"world_size", "metadata_crc32c", "step"}
_NOT_FINITE = {"nan", "inf", "-inf"}


def _fits(name: str, content: Any) -> bool:
    if name in _COUNTS:
        return _is_count(content)
    if name in _OPTIONAL_COUNTS:
        return content is None or _is_count(content)
    if name in ("created", "seconds"):
        # NaN and the infinities, which Python's JSON parser accepts, fail the comparison.
        return content is None or (type(content) in (int, float) and 0 <= content < 1e12)
    if name == "groups":
        return isinstance(content, dict) and all(map(_is_count, content.values()))
    if name == "kind":
        return isinstance(content, str)
    if name == "metrics":
        return isinstance(content, dict) and all(map(_is_metric, content.values()))
    if name == "covers":
        return content is None or type(content) is bool
    return content is None or isinstance(content, str)


def _is_metric(content: Any) -> bool:
    if type(content) is int:
        return abs(content) < 1 << 62  # a larger one may not fit a float
    return type(content) is float or (isinstance(content, str) and content in _NOT_FINITE)


def _is_count(content: Any) -> bool:
    return type(content) is int and 0 <= content < 1 << 62


def dated(record: CommitRecord, modified: float | None) -> CommitRecord:
    """Return the record, with the store's commit time if the record's time is earlier by more than `FUTURE_S`.

    With the earlier time, rules by age would treat the checkpoint as an old one.
    """
    behind = (modified or 0.0) - (record.created or 0.0) > FUTURE_S
    return replace(record, created=modified) if behind else record


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
        seen: time in seconds since the epoch at which a sweep began to remove the marker, so that its object then gets
            another ETag.
    """

    token: str
    at: float
    reason: str = ""
    tokens: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seen: float = 0.0

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
