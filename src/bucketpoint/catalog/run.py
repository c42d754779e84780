"""The run of a checkpoint: the catalog of a policy's run, and the catalog above a checkpoint's URL."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.records import read_record
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.record import CommitRecord
from bucketpoint.location import Location, Place, parent_and_name
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import as_url

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
    url = as_url(root) or ""
    if "://" in url or "://" in catalog.url:
        return url != catalog.url
    return os.path.realpath(url) != os.path.realpath(catalog.url)


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
    for path in sorted(catalog.store.list_folders(catalog.key(catalog_keys.CATALOG) + "/")):
        for template in templates_of(path.rstrip("/").rpartition("/")[2]):
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
    """Return the catalog with a template that fits folders of the run: its own, or one made from a folder's name.

    One LIST for each 1,000 folders; two more if its own template fits none.
    """
    if catalog.folders():
        return catalog
    above = catalog.key("")
    names = [name[len(above) :].rstrip("/") for name in catalog.store.list_folders(above)]
    templates = [template for name in names if (template := template_of(name)) is not None]
    if catalog_keys.CATALOG in names:
        own = catalog.store.list_folders(catalog.key(catalog_keys.CATALOG) + "/")
        known = [template for path in own for template in templates_of(path.rstrip("/").rpartition("/")[2])]
        templates = [*known, *templates]
    fitting = (replace(catalog, template=template) for template in templates)
    return next((catalog for catalog in fitting if catalog.folders()), catalog)


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
