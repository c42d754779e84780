"""Deletion of objects below a `BucketStorage`'s root that remain of killed saves and of deleted or replaced files."""

from __future__ import annotations

import time

from bucketpoint.integrations.torch_checkpointing import names
from bucketpoint.integrations.torch_checkpointing.storage import BucketStorage
from bucketpoint.transfer.pieces import abort

DAY_S = 24 * 3600.0


def sweep(storage: BucketStorage, *, older_than_s: float = DAY_S, dry_run: bool = False) -> list[str]:
    """Delete objects that no checkpoint and no file needs, and abort incomplete multipart uploads.

    Args:
        storage: the storage whose root is swept.
        older_than_s: age in seconds; younger objects are kept, as they may belong to a save under way. The age
            is computed from the store's date of the object and this machine's clock.
        dry_run: delete nothing.

    Returns:
        the keys of the objects, and of the uploads, that were found.
    """
    oldest = time.time() - older_than_s
    top = f"{storage.where.prefix}/" if storage.where.prefix else ""
    infos = list(storage.store.list(top))
    needed = {file.key for path, file in storage.trees.read(infos).items() if not storage.where.temporary(path)}
    # A file written into a checkpoint may hide a file of the manifest, whose object is still needed.
    needed |= {file.key for _, files in storage.trees.manifests(infos) for file in files.values()}
    garbage = [
        info.key
        for info in infos
        if info.key not in needed
        and info.key.rpartition("/")[2].startswith((names.FILE, names.OTHER_FILE))
        and info.modified is not None
        and info.modified < oldest
    ]
    uploads = [
        upload for upload in storage.store.list_multipart(top) if upload.started is not None and upload.started < oldest
    ]
    if not dry_run:
        storage.trees.delete(garbage)
        for upload in uploads:
            abort(storage.store, upload.key, upload.upload_id)
    return sorted(garbage) + sorted(upload.key for upload in uploads)
