"""The run that a policy names, or that a checkpoint's URL belongs to; its survey, and errors for other URLs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from bucketpoint.catalog.catalog import Catalog, committed_info, latest_checkpoint, open_catalog
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.snapshot import Notes, Snapshot
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, InvalidURLError, first_of
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.record import CommitRecord
from bucketpoint.location import Location, Place, parent_and_name
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import Store, as_url, check_url, parse_url, this_url

_NUMBERED = re.compile(r"(.*?)([0-9]{1,16})([^0-9]*)", re.ASCII | re.DOTALL)


class OneFolder(StepTemplate):
    """Template that matches a single folder, whose name has no number, as step 0."""

    def folder(self, step: int) -> str:
        return self.text

    def step_of(self, folder: str) -> int | None:
        return 0 if folder == self.text else None

    def _parts(self) -> tuple[str, str]:
        return self.text, ""


def open_run(policy: RetentionPolicy, root: Place | None = None) -> Catalog:
    """Open the catalog of the run at `root`, by default the policy's `root`. Sends no request.

    Raises:
        BucketpointError: neither `root` nor the policy names the URL of the run.
    """
    place = Location.of(policy.root if root is None else root)
    if not place.url and policy.root is None:
        raise BucketpointError(
            "The policy does not name the URL of its run", remedy="Pass root=, or set root: in the policy"
        )
    catalog = open_catalog(place, template=policy.layout.step_dir)
    return replace(catalog, run=policy.run or "")


def refuse_other_root(policy: RetentionPolicy, catalog: Catalog, place: Location) -> None:
    """Check that the run opened at `place` is at the policy's root. Sends no request.

    Raises:
        BucketpointError: the policy's root is another place.
    """
    if policy.root is None:
        return
    meant = open_catalog(place.at(policy.root), template=policy.layout.step_dir)
    # Several URLs may denote one place, so the stores are compared and not the URLs.
    if (meant.store.identity, meant.prefix) != (catalog.store.identity, catalog.prefix):
        raise BucketpointError(
            f"root= differs from the root of the policy, which is {meant.url}",
            url=catalog.url,
            remedy="Leave out one of the two, or make them the same",
        )


def is_elsewhere(root: str, catalog: Catalog) -> bool:
    """Return True if a policy's root is another place than the run. Compares URLs only, so it needs no credentials."""
    with contextlib.suppress(InvalidURLError):
        return _parts_of(root) != _parts_of(catalog.url)
    return True


def _parts_of(url: str) -> tuple[str, str, str]:
    scheme, top, prefix = parse_url(as_url(url) or "")
    scheme = {"s3a": "s3", "gcs": "gs", "file": "", "local": ""}.get(scheme, scheme)
    return scheme, top if scheme else os.path.realpath(top), prefix


def catalog_above(place: Location) -> tuple[Catalog, str] | None:
    """Return the catalog above the checkpoint at a place, and the checkpoint's folder. One LIST.

    None if no catalog above the checkpoint has a template that fits the folder's name.

    Raises:
        AccessDeniedError: the folder above may not be listed.
    """
    split = parent_and_name(place.url)
    if split is None:
        return None
    above, folder = split
    try:
        catalog = open_catalog(place.at(above))
    except InvalidURLError:
        return None
    for template in _known_templates(catalog):
        if template.step_of(folder) is not None:
            return replace(catalog, template=template), folder
    return None


def run_of(place: Location) -> tuple[Catalog, str]:
    """Return the catalog of a checkpoint's run, and the checkpoint's folder.

    Without a catalog above the checkpoint, the template is derived from the folder's name.
    """
    split = parent_and_name(place.url)
    if split is None:
        raise InvalidURLError(
            "The URL names no folder: a checkpoint at the root of a bucket cannot be distinguished from other objects",
            url=place.url,
            remedy="Pass a URL such as s3://bucket/run/step-5, or delete .metadata, then data/, with the store's tool",
        )
    known = catalog_above(place)
    if known is not None:
        return known
    root, folder = split
    return replace(open_catalog(place.at(root)), template=template_of(folder) or OneFolder(folder)), folder


def checkpoint_at_or_below(place: Location) -> str | None:
    """Return the URL of the checkpoint at `place`, or else of the newest whole checkpoint below; None without one."""
    store, prefix = place.opened
    # If other checkpoints lie below a checkpoint, the one at the given URL is meant.
    if committed_info(store, keys.join(prefix, keys.METADATA)) is not None:
        return place.url
    return latest_checkpoint(place)


def record_above(place: Location) -> CommitRecord | None:
    """Return the record of the checkpoint at a place from the catalog above it, or None. Two small LISTs and a GET.

    Raises the errors of `catalog_above` and `read_record`.
    """
    above = catalog_above(place)
    if above is None:
        return None
    catalog, folder = above
    recorded = catalog.step(catalog.template.step_of(folder) or 0).checkpoints
    key = next((checkpoint.key for checkpoint in recorded if checkpoint.folder == folder), None)
    return read_record(catalog, key) if key is not None else None


def fitted(catalog: Catalog) -> Catalog:
    """Return the catalog with a template that fits folders of the run.

    Candidates in order: the catalog's own template, the templates by which the run was saved, and the name of a folder
    with a commit. The first costs one LIST for each 1,000 folders; the second one LIST more, and one for each template;
    the third another LIST, and a GET for each folder with a number in its name.
    """
    if catalog.folders():
        return catalog
    known = list(_known_templates(catalog))
    fitting = (replace(catalog, template=template) for template in known)
    found = next((catalog for catalog in fitting if catalog.folders()), None)
    if found is not None or catalog.template.namespace in {template.namespace for template in known}:
        return found or catalog
    above = catalog.key("")
    # A number in a folder's name proves nothing, so the folder must have a commit.
    for name in (path[len(above) :].rstrip("/") for path in catalog.store.list_folders(above)):
        template = template_of(name)
        if template is not None and catalog.metadata_info(name):
            return replace(catalog, template=template)
    return catalog


def _known_templates(catalog: Catalog) -> Iterator[StepTemplate]:
    """Yield the templates by which the run was saved, from the names of the folders in `_bucketpoint`. One LIST."""
    for path in sorted(catalog.store.list_folders(catalog.key(catalog_keys.CATALOG) + "/")):
        yield from templates_of(path.rstrip("/").rpartition("/")[2])


def template_of(folder: str) -> StepTemplate | None:
    """Return the template of a folder's name, with `{step}` for its last number; None without a number."""
    match = _NUMBERED.fullmatch(folder)
    if match is None or {"{", "}"} & set(folder):
        return None
    before, digits, after = match.groups()
    padded = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    with contextlib.suppress(InvalidURLError):
        return StepTemplate(f"{before}{{step{padded}}}{after}")
    return None


def templates_of(namespace: str) -> Iterator[StepTemplate]:
    """Yield the possible templates of the runs whose catalog is in the folder `namespace`, without padding of steps."""
    parts = catalog_keys.decode(namespace)
    text = parts[0] if parts is not None and len(parts) == 1 else ""
    for at, letter in enumerate(text):
        if letter != "N" or "{" in text or "}" in text:
            continue
        try:
            yield StepTemplate(f"{text[:at]}{{step}}{text[at + 1 :]}")
        except InvalidURLError:
            continue


# -- what a run has, and URLs that are no run --------------------------------------------------------------------------

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
