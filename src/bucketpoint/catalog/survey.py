"""Survey of a run of any writer, and errors for URLs that are no run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice

from bucketpoint.catalog.catalog import Catalog, committed_info
from bucketpoint.catalog.run import template_of
from bucketpoint.catalog.snapshot import Notes, Snapshot
from bucketpoint.errors import CheckpointNotFoundError, first_of
from bucketpoint.format import keys
from bucketpoint.stores import Store, check_url, this_url

LOOKED_AT = 1000
_NAMED_AT_MOST = 3
_MODEL = "model.safetensors"


def survey(catalog: Catalog) -> Snapshot:
    """Return the snapshot of an existing run, including checkpoints without a record.

    One LIST for each 1,000 records, each 1,000 notes and each 1,000 folders; one small GET for each folder without a
    record.

    Raises:
        CheckpointNotFoundError: the run has no checkpoint, no save and no note.
    """
    snapshot = catalog.with_unrecorded(catalog.snapshot())
    noted = snapshot.notes != Notes() or snapshot.attempts or snapshot.finished or snapshot.runs
    if not snapshot.checkpoints and not noted and not catalog.folders():
        raise _nothing(catalog)
    return snapshot


def size_of(catalog: Catalog, folder: str) -> int:
    """Return the bytes of data in the folder of a checkpoint without a record. One LIST for each 1,000 objects."""
    listed = catalog.objects_of(folder)
    # Objects in deeper folders without a token in their name may belong to another run.
    data = (path for path in listed if keys.token_of(path) or ("/" not in path and keys.may_be_data(path)))
    return sum(listed[path].size for path in data)


def at_checkpoint(catalog: Catalog) -> CheckpointNotFoundError | None:
    """Return the error for a root that is a checkpoint and not a run, or None. One small GET."""
    if committed_info(catalog.store, catalog.key(keys.METADATA)) is None:
        return None
    return CheckpointNotFoundError(
        "The URL is that of a checkpoint, not of a run",
        url=catalog.url,
        remedy="Pass the folder above the checkpoint, or use `bucketpoint show` for the checkpoint",
    )


def names_below(store: Store, prefix: str) -> list[str]:
    """List the first 1,000 keys below a prefix, relative to it. The `folder/` objects of consoles are left out."""
    above = f"{prefix}/" if prefix else ""
    return [info.key[len(above) :] for info in islice(store.list(above), LOOKED_AT) if not info.key.endswith("/")]


def other_files(names: Sequence[str], url: str) -> CheckpointNotFoundError | None:
    """Return the error for a folder of files in another format, or for the URL of such a file; else None.

    `names` are the keys below the URL.
    """
    found = [name for name in names if "/" not in name and name.endswith(keys.FILE_SUFFIXES)]
    if not found and (names or not url.endswith(keys.FILE_SUFFIXES)):
        return None
    whole = not found or any(name.startswith(_MODEL) for name in names)
    source = shlex.quote(url if whole else f"{url.rstrip('/')}/{found[0]}")
    remedy = f"`bucketpoint convert {source} TARGET` reads files of torch.save and safetensors"
    if found and whole:
        remedy += f"; loads and `bucketpoint show {source}` read this folder too, and the store's own tools delete it"
    if len(found) > 1 and not whole:
        remedy += (
            ". If they are parts of one model, save it as safetensors with an index, as save_pretrained of "
            "transformers does, and convert that folder"
        )
    what = f"The folder holds no .metadata, but {first_of(found, _NAMED_AT_MOST)}" if found else "There is no folder"
    return CheckpointNotFoundError(what, url=url, remedy=remedy)


def _nothing(catalog: Catalog) -> CheckpointNotFoundError:
    here = names_below(catalog.store, catalog.prefix)
    files = None if any(f"/{keys.METADATA}" in name for name in here) else other_files(here, catalog.url)
    if (error := at_checkpoint(catalog) or files) is not None:
        return error
    above = catalog.key("")
    names = [name[len(above) :].rstrip("/") for name in islice(catalog.store.list_folders(above), _NAMED_AT_MOST)]
    if names:
        text = next((template.text for template in map(template_of, names) if template is not None), "NAME-{step}")
        return CheckpointNotFoundError(
            f"No folder of the run is named {catalog.template.text}; its folders are {', '.join(names)}",
            url=catalog.url,
            remedy=f"Check the URL, or set the names of the run's folders (--step-dir {shlex.quote(text)}, layout: "
            "{step_dir: ...})",
        )
    return CheckpointNotFoundError(
        f"There is no run at {this_url(catalog.store)}: it has no objects",
        url=catalog.url,
        remedy=check_url(catalog.store, catalog.url),
    )
