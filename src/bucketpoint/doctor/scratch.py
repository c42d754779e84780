"""Keys to which `doctor` writes, and removal of objects left there by runs that were killed or could not delete."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketpoint.errors import AccessDeniedError
from bucketpoint.format.catalog_keys import CATALOG
from bucketpoint.stores import Store

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.sweep import Swept

_NOTES = f"{CATALOG}/doctor/"
"""Folder of the examinations. The policies in `policies/` allow a trainer to delete there."""

_NAMES = (
    r"access|deleted|create-only|race|if-match|pinned|checksum|multipart|aborted|latency|speed-[0-9]+|service-[a-z]+"
)
_DATA_FOLDER = "bucketpoint-doctor-"
_OURS = re.compile(
    # The folder of an examination; the one object that is written if nothing can be deleted; a folder beside the
    # checkpoints, from version 0.1.0 or from the check of the permissions on data.
    rf"(?:{_NOTES}(?:[0-9a-f]{{12}}/(?:{_NAMES}|\.bucketpoint-probe-[0-9a-f]{{16}}(?:-sum)?)|access)"
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
        notes, data = f"{above}{_NOTES}", f"{above}{_DATA_FOLDER}{run}/"
        return cls(f"{notes}{run}/", f"{notes}access", f"{data}access", f"{data}.metadata")


def sweep_leftovers(store: Store, prefix: str, swept: Swept, *, dry_run: bool = False) -> None:
    """Delete objects and uploads that `doctor` left below `prefix` before `swept.oldest`, and add them to `swept`.

    Only keys in the form that `doctor` makes are deleted. Uploads are found only if the store lists them by prefix.
    Costs four small LISTs.
    """
    above = f"{prefix}/" if prefix else ""
    left = []

    def old(key: str, moment: float | None) -> bool:
        # An object without a date is kept, because it may be new.
        return moment is not None and moment < swept.oldest and _OURS.fullmatch(key[len(above) :]) is not None

    for folder in (f"{above}{_NOTES}", f"{above}{_DATA_FOLDER}"):
        left += [info for info in store.list(folder) if old(info.key, info.modified)]
        # Without the permission to list uploads, no upload can be aborted.
        with contextlib.suppress(AccessDeniedError):
            for upload in [upload for upload in store.list_multipart(folder) if old(upload.key, upload.started)]:
                swept.uploads.append(upload.key)
                if not dry_run:
                    store.abort_multipart(upload.key, upload.upload_id)
    swept.objects += [info.key for info in left]
    swept.bytes += sum(info.size for info in left)
    if left and not dry_run:
        swept.failures += store.delete([info.key for info in left])
