"""Large objects composed of component objects, which are uploaded in parallel and deleted afterwards.

Composing works at any GCS endpoint. The service does not know these uploads: an upload consists of the component
objects with the upload's id in their names. The name of a component begins with the key of the final object, so that a
listing of the data of a save attempt also finds the components that the attempt left.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from awscrt import checksums

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError, StoreError, UploadNotFoundError
from bucketpoint.stores.base import Buffers, Capabilities, ObjectInfo, OpenUpload, Part
from bucketpoint.stores.gcs.api import OBJECT_FIELDS, Bucket, described
from bucketpoint.stores.gcs.body import BINARY
from bucketpoint.stores.http_body import crc_of, encoded_crc

logger = logging.getLogger(__name__)

# https://cloud.google.com/storage/docs/composite-objects
MAX_COMPONENTS = 32
# https://cloud.google.com/storage/quotas#objects
MAX_OBJECT_BYTES = 5 << 40

CAPABILITIES = Capabilities(
    conditional_put=True,
    checksums=True,
    multipart=True,
    pinned_reads=True,
    streams_ranges=True,
    max_part_bytes=MAX_OBJECT_BYTES,
    # Two levels of composing. More levels would write every byte once more, and no object needs so many parts.
    max_parts=MAX_COMPONENTS * MAX_COMPONENTS,
    max_put_bytes=MAX_OBJECT_BYTES,
    conditional_delete=True,  # https://cloud.google.com/storage/docs/request-preconditions
)

_ID = "compose-"
_COMPONENT = re.compile(r"(?P<key>.*)\.bucketpoint-part-(?P<id>[0-9a-f]{16})-[pg][0-9]{5}", re.ASCII | re.DOTALL)


def is_component(key: str) -> bool:
    """Return True if a key names a component, not an object that a caller put."""
    return _COMPONENT.fullmatch(key) is not None


def is_composed(upload_id: str) -> bool:
    """Return True if an upload id was made by `create` of this module."""
    return upload_id.startswith(_ID)


def create() -> str:
    return _ID + os.urandom(8).hex()


def put_part(bucket: Bucket, key: str, upload_id: str, number: int, body: Buffers, crc32c: int | None) -> Part:
    crc = crc_of(body, crc32c)
    info = bucket.insert(_component(key, upload_id, "p", number), body, crc32c=crc)
    return Part(number, info.size, info.etag or "", crc)


def complete(bucket: Bucket, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
    """Compose the object from its parts, through intermediate groups if there are more than one request accepts."""
    ordered = sorted(parts, key=lambda part: part.number)
    sources = [(_component(key, upload_id, "p", part.number), part.etag) for part in ordered]
    used = dict(sources)
    numbers = itertools.count(1)
    while len(sources) > MAX_COMPONENTS:
        groups: list[tuple[str, str]] = []
        for start in range(0, len(sources), MAX_COMPONENTS):
            name = _component(key, upload_id, "g", next(numbers))
            resource = _compose(bucket, key, name, sources[start : start + MAX_COMPONENTS])
            groups.append((name, str(resource["generation"])))
        used.update(groups)
        sources = groups
    resource = _compose(bucket, key, key, sources)
    if not fits(resource.get("crc32c"), ordered):
        bucket.delete([key], {key: str(resource["generation"])})
        raise CorruptDataError("the CRC32C of the composed object is not that of its parts", url=bucket.url, key=key)
    _discard(bucket, key, used)
    return described(resource, key)


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    prefix = _component(key, upload_id, "p", 0)[: -len("p00000")]
    items = [item for page in bucket.pages(prefix) for item in page.get("items", [])]
    generations = {str(item["name"]): str(item["generation"]) for item in items}
    failures = bucket.delete(list(generations), generations)
    if failures:
        raise StoreError(
            f"{len(failures)} components could not be deleted: {failures[0].message}",
            url=bucket.url,
            key=failures[0].key,
        )


def open_uploads(bucket: Bucket, prefix: str) -> Iterator[OpenUpload]:
    """Yield the uploads that have components."""

    def components() -> Iterator[tuple[tuple[str, str], float | None]]:
        for page in bucket.pages(prefix):
            for item in page.get("items", []):
                info = described(item, "")
                match = _COMPONENT.fullmatch(info.key)
                if match is not None and match["key"].startswith(prefix):
                    yield (match["key"], match["id"]), info.modified

    # The components of one upload share a prefix, so a listing returns them one after the other.
    for (key, number), found in itertools.groupby(components(), key=lambda component: component[0]):
        times = [moment for _, moment in found if moment is not None]
        yield OpenUpload(key, _ID + number, min(times, default=None))


def fits(reported: Any, parts: Sequence[Part]) -> bool:
    """Return True if the reported CRC32C of an object fits those of its parts, or if one of these is not known."""
    if not reported:
        return True
    crc = 0
    for part in parts:
        if part.crc32c is None:
            return True
        if part.size:
            crc = int(checksums.combine_crc32c(crc, part.crc32c, part.size))
    return bool(encoded_crc(crc) == reported)


def _component(key: str, upload_id: str, kind: str, number: int) -> str:
    return f"{key}.bucketpoint-part-{upload_id.removeprefix(_ID)}-{kind}{number:05}"


def _compose(bucket: Bucket, key: str, target: str, sources: Sequence[tuple[str, str]]) -> dict[str, Any]:
    query = {"fields": OBJECT_FIELDS}
    if bucket.options.kms_key_name is not None:
        query["kmsKeyName"] = bucket.options.kms_key_name
    # Sources are named with their generations. A component that was sent again, because an answer was lost, has a newer
    # generation: composing then takes the same bytes, or is refused.
    listed = [{"name": name, "generation": generation} for name, generation in sources]
    try:
        reply = bucket.call(
            "objects.compose",
            key,
            "POST",
            f"{bucket.path(target)}/compose",
            query=bucket.billed(query),
            headers={"Content-Type": "application/json"},
            body=json.dumps({"sourceObjects": listed, "destination": {"contentType": BINARY}}).encode(),
            of_object=True,
        )
    except ObjectNotFoundError as error:
        gone = UploadNotFoundError(error.message, url=error.url)
    else:
        return reply.json()
    raise gone


def _discard(bucket: Bucket, key: str, generations: dict[str, str]) -> None:
    """Delete the components of a finished upload. A failure is only logged.

    The object is complete, so components that remain must not fail the upload. A sweep deletes them later.
    """
    try:
        # By generation, so that a bucket with versioning does not keep them: noncurrent components are billed like the
        # object.
        left = len(bucket.delete(list(generations), generations))
    except StoreError as error:
        logger.warning(
            "the components of %s/%s could not be deleted, and stay until the next sweep: %s", bucket.url, key, error
        )
        return
    if left:
        logger.warning(
            "%d components of %s/%s could not be deleted, and stay until the next sweep", left, bucket.url, key
        )
