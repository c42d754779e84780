"""Keys to which `doctor` writes, and removal of objects left there by runs that were killed or could not delete."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field

from bucketpoint.errors import AccessDeniedError
from bucketpoint.stores import DeleteFailure, ObjectInfo, Store

_NOTES = "_bucketpoint"
"""Folder of the catalogs (`format.catalog_keys`). The policies in `policies/` allow a trainer to delete there."""

_NAMES = (
    r"access|deleted|create-only|race|if-match|pinned|checksum|multipart|aborted|latency|speed-[0-9]+|service-[a-z]+"
)
_DATA_FOLDER = "bucketpoint-doctor-"
_OURS = re.compile(
    # The folder of an examination; the one object that is written if nothing can be deleted; a folder beside the
    # checkpoints, from version 0.1.0 or from the check of the permissions on data.
    rf"(?:{_NOTES}/doctor/(?:[0-9a-f]{{12}}/(?:{_NAMES}|\.bucketpoint-probe-[0-9a-f]{{16}}(?:-sum)?)|access)"
    rf"|{_DATA_FOLDER}[0-9a-f]{{12}}/(?:{_NAMES}|\.metadata))"
)


@dataclass(frozen=True)
class ScratchKeys:
    """Keys to which one examination may write.

    Attributes:
        folder: folder of the objects that are deleted at the end.
        lasting: key of the one object that is written if nothing can be deleted; the same for each examination.
        data: key of an object outside the catalog, among the checkpoints.
        metadata: key of a commit (`.metadata`) beside `data`.
    """

    folder: str
    lasting: str
    data: str
    metadata: str

    @classmethod
    def below(cls, prefix: str) -> ScratchKeys:
        """Make the keys for an examination below `prefix`. All but `lasting` contain a random name."""
        above, run = f"{prefix}/" if prefix else "", os.urandom(6).hex()
        notes, data = f"{above}{_NOTES}/doctor/", f"{above}{_DATA_FOLDER}{run}/"
        return cls(f"{notes}{run}/", f"{notes}access", f"{data}access", f"{data}.metadata")


@dataclass
class Leftovers:
    """Objects and uploads left by `doctor` that a sweep removed, or would remove in a dry run."""

    objects: list[ObjectInfo] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    failures: list[DeleteFailure] = field(default_factory=list)


def sweep_leftovers(store: Store, prefix: str, *, oldest: float, dry_run: bool = False) -> Leftovers:
    """Delete objects and uploads that `doctor` left below `prefix` before the time `oldest`. Costs four small LISTs.

    Only keys in the form that `doctor` makes are deleted. Uploads are found only if the store lists them by prefix.
    """
    above = f"{prefix}/" if prefix else ""
    left = Leftovers()

    def old(key: str, moment: float | None) -> bool:
        # An object without a date is kept, because it may be new.
        return moment is not None and moment < oldest and _OURS.fullmatch(key[len(above) :]) is not None

    for folder in (f"{above}{_NOTES}/doctor/", f"{above}{_DATA_FOLDER}"):
        left.objects += [info for info in store.list(folder) if old(info.key, info.modified)]
        # Without the permission to list uploads, no upload can be aborted.
        with contextlib.suppress(AccessDeniedError):
            for upload in [upload for upload in store.list_multipart(folder) if old(upload.key, upload.started)]:
                left.uploads.append(upload.key)
                if not dry_run:
                    store.abort_multipart(upload.key, upload.upload_id)
    if left.objects and not dry_run:
        left.failures = store.delete([info.key for info in left.objects])
    return left
