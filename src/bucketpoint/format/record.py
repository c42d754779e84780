"""The small JSON record beside `.metadata`: a cache of it that listings and tools read without torch."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from bucketpoint.errors import MetadataError, NewerFormatError

RECORD_VERSION = 1

MAX_RECORD_BYTES = 1 << 20
"""Limit far above the size of any record; a reader need not fetch more."""

FUTURE_S = 300.0
"""Limit on the seconds by which a record may claim to be younger than it is. Synchronised clocks differ by less."""


@dataclass(frozen=True)
class CommitRecord:
    """Summary of a committed checkpoint.

    Attributes:
        version: format version of the record and of the metadata extension.
        token: token of the attempt that committed; None if another writer did.
        created: seconds since the epoch at the coordinator's commit; None if not recorded.
        seconds: from the call of the save to its commit, at the coordinator; None if not recorded.
        bytes, objects: size and number of the data objects, without the metadata.
        items, tensors: stored items (chunks and bytes); distinct tensors.
        world_size: number of ranks that saved; None if not recorded.
        torch, bucketpoint: versions of the writer.
        metadata_etag, metadata_crc32c: of the `.metadata` object from which this record was made.
        groups: bytes of each object group.
        step: training step; None if the caller gave none.
        kind: `full`, `weights`, `export` or `emergency`.
        metrics: values known at the save, NaN and infinite ones included.
        git_sha, config_hash: of the job's code and configuration, as the caller gave them.
        covers: the checkpoint holds its tensors as a whole, see `uncovered`; None in records of versions before 0.3.
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
        """Encode the record as one line of JSON with sorted keys, so that equal records are equal bytes."""
        content = {**asdict(self), "metrics": plain_metrics(self.metrics)}
        return json.dumps({**content, _CHECK: _check(content)}, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes_, *, url: str | None = None) -> CommitRecord:
        """Parse a stored record. Fields that this version does not know are dropped.

        Raises:
            MetadataError: `data` is not a sound record; NewerFormatError if its version is higher than RECORD_VERSION.
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
    """Return a checksum of all other fields, unknown ones too. Not of the bytes: other tools may reformat the JSON."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics in JSON's terms. JSON has no NaN and no infinities, so their names stand for them."""
    return {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}


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
    """Give a record the store's time of the commit if the clock of the machine that saved is behind.

    Otherwise rules by time would treat the checkpoint as an old one.
    """
    behind = (modified or 0.0) - (record.created or 0.0) > FUTURE_S
    return replace(record, created=modified) if behind else record
