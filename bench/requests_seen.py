"""What a proxy's log of requests means in S3's terms: kinds, bytes, and how soon a checkpoint became visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

DATA_SUFFIX = ".distcp"
METADATA = ".metadata"
DATA_KINDS = ("UploadPart", "PutObject", "CreateMultipartUpload", "CompleteMultipartUpload", "GetObject")
UNWANTED_KINDS = ("ListObjects", "HeadObject", "HeadBucket", "CopyObject", "DeleteObject", "DeleteObjects")

Record = dict[str, Any]


def kind_of(record: Record) -> str:
    """The S3 operation of one log line, by its usual name."""
    return str(record["kind"])


def key_of(record: Record) -> str:
    """The object key of one log line."""
    return str(record["key"])


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """What the report needs of one operation's requests."""
    control = [record for record in records if not _is_data(record)]
    return {
        "kinds": dict(Counter(map(kind_of, records))),
        "control": dict(Counter(map(kind_of, control))),
        "control_keys": [f"{kind_of(record)} {key_of(record).rpartition('/')[2]}" for record in control],
        "sent": sum(record["sent"] for record in records),
        "received": sum(record["received"] for record in records),
        "connections": len({record["connection"] for record in records}),
        "failed": sum(record["status"] >= 400 for record in records),
        "visible_after": visible_after(records),
    }


def _is_data(record: Record) -> bool:
    return key_of(record).endswith(DATA_SUFFIX) and kind_of(record) in DATA_KINDS


def visible_after(records: Sequence[Record]) -> int | None:
    """Round trips from the last acknowledged data to a visible `.metadata`.

    That is the longest chain of requests, each of which began after the one before it had ended.
    """
    data = [record["end"] for record in records if _is_data(record) and kind_of(record) in ("UploadPart", "PutObject")]
    # Writers that rename write a temporary name first; the last write under the final name is the one that counts.
    commits = [
        record["end"]
        for record in records
        if key_of(record).endswith(METADATA)
        and kind_of(record) in ("PutObject", "CopyObject", "CompleteMultipartUpload")
    ]
    if not data or not commits:
        return None
    between = [record for record in records if record["start"] >= max(data) and record["end"] <= max(commits)]
    chain, free_at = 0, max(data)
    for record in sorted(between, key=lambda record: float(record["end"])):
        if record["start"] >= free_at:
            chain, free_at = chain + 1, record["end"]
    return chain
