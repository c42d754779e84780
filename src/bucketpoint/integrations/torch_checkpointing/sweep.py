"""Deletion of what killed saves and deleted or replaced files have left below the root of a `BucketStorage`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bucketpoint.integrations.torch_checkpointing import names
from bucketpoint.integrations.torch_checkpointing.removal import delete_all
from bucketpoint.integrations.torch_checkpointing.tree import Listing
from bucketpoint.transfer.parts import abort

if TYPE_CHECKING:
    from bucketpoint.integrations.torch_checkpointing.storage import BucketStorage

DAY_S = 24 * 3600.0


def sweep(storage: BucketStorage, *, older_than_s: float = DAY_S, dry_run: bool = False) -> list[str]:
    """Delete objects that no checkpoint and no file needs, and abort multipart uploads that nobody completed.

    Args:
        storage: the storage whose root is swept.
        older_than_s: age in seconds; leave alone what is younger, as it may be of a save that is under way. By the
            store's clock, and this machine's.
        dry_run: delete nothing.

    Returns:
        the keys of the objects, and of the uploads, that were found.
    """
    oldest = time.time() - older_than_s
    top = f"{storage.where.prefix}/" if storage.where.prefix else ""
    infos = list(storage.store.list(top))
    listing = Listing()
    listing.take(storage.where, infos)
    # A file that was renamed a moment ago may have been listed at neither of its places.
    listing.markers = [one for one in listing.markers if one.info.modified is not None and one.info.modified < oldest]
    needed = set()
    for path, file in storage.trees.files(listing, ()).items():
        if names.STAGED not in storage.where.components(path):
            needed.add(file.key)
    for info in listing.manifests.values():
        needed.add(info.key)
        needed |= {file.key for file in storage.trees.manifest(info).files.values()}
    for links in listing.links.values():
        needed.add(links[-1].info.key)
    garbage = [
        info.key
        for info in infos
        if info.key not in needed
        and info.key.rpartition("/")[2].startswith((names.FILE, names.LINK))
        and info.modified is not None
        and info.modified < oldest
    ]
    uploads = [
        upload for upload in storage.store.list_multipart(top) if upload.started is not None and upload.started < oldest
    ]
    if not dry_run:
        delete_all(storage.store, garbage)
        for upload in uploads:
            abort(storage.store, upload.key, upload.upload_id)
    return sorted(garbage) + sorted(upload.key for upload in uploads)
