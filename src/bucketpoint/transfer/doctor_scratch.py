"""Keys that `doctor` writes to, and the removal of what an examination that was killed or refused left there."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field

from bucketpoint.errors import AccessDeniedError
from bucketpoint.stores import DeleteFailure, ObjectInfo, Store

_NOTES = "_bucketpoint"
"""The folder of catalogs (`format.catalogue.CATALOGUE`): a trainer may delete there, by the policies in `policies/`."""

_NAMES = (
    r"access|deleted|create-only|race|if-match|pinned|checksum|multipart|aborted|latency|speed-[0-9]+|service-[a-z]+"
)
_DATA_FOLDER = "bucketpoint-doctor-"
_OURS = re.compile(
    # A folder of each run; the one object that is written where nothing can be deleted; and, of a run of 0.1.0 or of
    # the trial of the rights on data, a folder beside the checkpoints.
    rf"(?:{_NOTES}/doctor/(?:[0-9a-f]{{12}}/(?:{_NAMES}|\.bucketpoint-probe-[0-9a-f]{{16}}(?:-sum)?)|access)"
    rf"|{_DATA_FOLDER}[0-9a-f]{{12}}/(?:{_NAMES}|\.metadata))"
)


@dataclass(frozen=True)
class ScratchKeys:
    """Keys to which one examination of a place may write.

    Attributes:
        folder: of objects that are deleted again.
        lasting: the key of the one object that is written where nothing can be deleted: the same each time.
        data: of an object outside of any catalog, where checkpoints lie.
        metadata: of a commit beside it.
    """

    folder: str
    lasting: str
    data: str
    metadata: str

    @classmethod
    def below(cls, prefix: str) -> ScratchKeys:
        """Keys for an examination of the place at `prefix`, with a random name in those that are deleted again."""
        above, run = f"{prefix}/" if prefix else "", os.urandom(6).hex()
        notes, data = f"{above}{_NOTES}/doctor/", f"{above}{_DATA_FOLDER}{run}/"
        return cls(f"{notes}{run}/", f"{notes}access", f"{data}access", f"{data}.metadata")


@dataclass
class Leftovers:
    """Report of a sweep of what examinations left: removed, or to remove in a dry run."""

    objects: list[ObjectInfo] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    failures: list[DeleteFailure] = field(default_factory=list)


def sweep_leftovers(store: Store, prefix: str, *, oldest: float, dry_run: bool = False) -> Leftovers:
    """Delete what examinations of the place at `prefix` wrote there before the moment `oldest`. Two small LISTs.

    Only keys that `doctor` makes are touched. Uploads are found where the store lists them by prefix.
    """
    above = f"{prefix}/" if prefix else ""
    found = Leftovers()

    def old(key: str, moment: float | None) -> bool:
        # What the store does not date is not known to be old.
        return moment is not None and moment < oldest and _OURS.fullmatch(key[len(above) :]) is not None

    for folder in (f"{above}{_NOTES}/doctor/", f"{above}{_DATA_FOLDER}"):
        found.objects += [info for info in store.list(folder) if old(info.key, info.modified)]
        # Without the right to see uploads there is nothing to abort either.
        with contextlib.suppress(AccessDeniedError):
            for upload in [one for one in store.list_multipart(folder) if old(one.key, one.started)]:
                found.uploads.append(upload.key)
                if not dry_run:
                    store.abort_multipart(upload.key, upload.upload_id)
    if found.objects and not dry_run:
        found.failures = store.delete([info.key for info in found.objects])
    return found
