"""The run of a checkpoint: the catalog of a policy's run, and the catalog above a checkpoint's URL."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog, committed_info, latest_checkpoint, open_catalog
from bucketpoint.catalog.records import read_record
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.record import CommitRecord
from bucketpoint.location import Location, Place, parent_and_name
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import as_url, parse_url

_NUMBERED = re.compile(r"(.*?)([0-9]{1,16})([^0-9]*)", re.ASCII | re.DOTALL)


class OneFolder(StepTemplate):
    """The template of a folder whose name has no number: it fits this folder alone, as step 0."""

    def folder(self, step: int) -> str:
        return self.text

    def step_of(self, folder: str) -> int | None:
        return 0 if folder == self.text else None

    def _parts(self) -> tuple[str, str]:
        return self.text, ""


def open_run(policy: RetentionPolicy, root: Place | None = None) -> Catalog:
    """Open the catalog of the run that a policy is for. Makes no request.

    Args:
        root: place of the run; by default the policy's `root`.

    Raises:
        BucketpointError: neither `root` nor the policy says where the run is.
    """
    place = Location.of(policy.root if root is None else root)
    if not place.url and policy.root is None:
        raise BucketpointError(
            "The policy does not name the URL of its run", remedy="Pass root=, or set root: in the policy"
        )
    catalog = open_catalog(place, template=policy.layout.step_dir)
    return replace(catalog, run=policy.run or "")


def refuse_other_root(policy: RetentionPolicy, catalog: Catalog, place: Location) -> None:
    """Compare the run that a job has opened at `place` with the root in its policy. Makes no request.

    Raises:
        BucketpointError: they are not the same place.
    """
    if policy.root is None:
        return
    meant = open_catalog(place.at(policy.root), template=policy.layout.step_dir)
    # One place may have several URLs, so the stores are compared.
    if (meant.store.identity, meant.prefix) != (catalog.store.identity, catalog.prefix):
        raise BucketpointError(
            f"root= differs from the root of the policy, which is {meant.url}",
            url=catalog.url,
            remedy="Leave out one of the two, or make them the same",
        )


def is_elsewhere(root: str, catalog: Catalog) -> bool:
    """Return True if the root in a policy is another place than the run, as far as URLs tell it without credentials."""
    with contextlib.suppress(InvalidURLError):
        return _parts_of(root) != _parts_of(catalog.url)
    return True


def _parts_of(url: str) -> tuple[str, str, str]:
    scheme, top, prefix = parse_url(as_url(url) or "")
    scheme = {"s3a": "s3", "gcs": "gs", "file": "", "local": ""}.get(scheme, scheme)
    return scheme, top if scheme or "::" in top else os.path.realpath(top), prefix


def catalog_above(place: Location) -> tuple[Catalog, str] | None:
    """Find the catalog of the checkpoint at a place, and the checkpoint's folder in it. One LIST.

    None if no catalog above it has a run with folders of such a name. No catalog is created for a single checkpoint: a
    policy would not see the checkpoints beside it.

    Raises:
        AccessDeniedError: listing there is not allowed.
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
    """Return the run of a checkpoint, and its folder there. Without a catalog the folder's name gives the template."""
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
    """Return the URL if there is a checkpoint, else that of the newest whole one below it; None if there is none."""
    store, prefix = place.opened
    # Checkpoints may lie within another one: the named one is used.
    if committed_info(store, keys.join(prefix, keys.METADATA)) is not None:
        return place.url
    return latest_checkpoint(place)


def record_above(place: Location) -> CommitRecord | None:
    """Return the record of the checkpoint at a place from the catalog above it, or None. Two small LISTs and a GET.

    Raises as `catalog_above` and `read_record`.
    """
    above = catalog_above(place)
    if above is None:
        return None
    catalog, folder = above
    recorded = catalog.record_of(folder)
    return read_record(catalog, recorded.key) if recorded is not None and recorded.key is not None else None


def fitted(catalog: Catalog) -> Catalog:
    """Return the catalog with a template that fits folders of the run: its own, one that it was saved by, or a guess.

    One LIST for each 1,000 folders. If its own template fits none: one more, and one for each template that the run was
    saved by. Without such a template: another one, and a GET for each folder with a number in its name.
    """
    if catalog.folders():
        return catalog
    known = list(_known_templates(catalog))
    fitting = (replace(catalog, template=template) for template in known)
    found = next((catalog for catalog in fitting if catalog.folders()), None)
    if found is not None or catalog.template.namespace in {template.namespace for template in known}:
        return found or catalog
    above = catalog.key("")
    # A folder with a number in its name may be anything, so it counts only with a commit.
    for name in (path[len(above) :].rstrip("/") for path in catalog.store.list_folders(above)):
        template = template_of(name)
        if template is not None and catalog.metadata_info(name):
            return replace(catalog, template=template)
    return catalog


def _known_templates(catalog: Catalog) -> Iterator[StepTemplate]:
    """Yield the templates by which the run was saved, as the folders of its catalog show them. One LIST."""
    for path in sorted(catalog.store.list_folders(catalog.key(catalog_keys.CATALOG) + "/")):
        yield from templates_of(path.rstrip("/").rpartition("/")[2])


def template_of(folder: str) -> StepTemplate | None:
    """Return the template that the last number in a folder's name tells; None if there is none."""
    match = _NUMBERED.fullmatch(folder)
    if match is None or {"{", "}"} & set(folder):
        return None
    before, digits, after = match.groups()
    padded = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    with contextlib.suppress(InvalidURLError):
        return StepTemplate(f"{before}{{step{padded}}}{after}")
    return None


def templates_of(namespace: str) -> Iterator[StepTemplate]:
    """Yield the templates of runs whose catalog is in this folder. The name does not show the padding of steps."""
    parts = catalog_keys.decode(namespace)
    text = parts[0] if parts is not None and len(parts) == 1 else ""
    for at, letter in enumerate(text):
        if letter != "N" or "{" in text or "}" in text:
            continue
        try:
            yield StepTemplate(f"{text[:at]}{{step}}{text[at + 1 :]}")
        except InvalidURLError:
            continue
