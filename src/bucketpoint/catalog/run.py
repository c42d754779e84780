"""Which run a checkpoint is one of: the catalogue of a policy's run, and that which lies above a checkpoint's URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.save_log import read_record
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format import catalogue
from bucketpoint.format.catalogue import StepTemplate
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention import RetentionPolicy


def open_run(
    policy: RetentionPolicy,
    root: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
) -> Catalog:
    """The catalogue of the run that a policy is for. Makes no request.

    Args:
        root: of the run; by default the policy's.

    Raises:
        BucketpointError: neither says where the run is.
    """
    where = root if root is not None else policy.root
    if where is None:
        raise BucketpointError("The policy does not say where its run is", remedy="Pass root=, or set root: in it")
    opened = open_catalog(where, template=policy.layout.step_dir, storage_options=storage_options, fs=fs)
    return replace(opened, run=policy.run or "")


def parent_and_name(url: str) -> tuple[str, str] | None:
    """The root and the folder of a checkpoint's URL; None for a URL that has nothing above it that could be a root."""
    above, slash, name = url.rstrip("/").rpartition("/")
    if not name or name in (".", "..") or above.endswith((":", "/")) or (slash and not above):
        return None
    # A bucket is no folder: `s3://bucket` has a scheme's slash above it, which is caught as well.
    return above or ".", name


def catalog_above(
    url: str, *, storage_options: Mapping[str, Any] | None = None, fs: Any = None
) -> tuple[Catalog, str] | None:
    """The catalogue that the checkpoint at `url` belongs into, and the checkpoint's folder there. One LIST.

    None if there is no catalogue above it whose run has folders of such a name. One is not begun for a single
    checkpoint: no policy would see its neighbours.

    Raises:
        AccessDeniedError: one may not list there.
    """
    split = parent_and_name(url)
    if split is None:
        return None
    above, folder = split
    try:
        catalog = open_catalog(above, storage_options=storage_options, fs=fs)
    except InvalidURLError:
        return None
    for path in sorted(catalog.store.list_folders(catalog.key(catalogue.CATALOGUE) + "/")):
        for template in templates_of(path.rstrip("/").rpartition("/")[2]):
            if template.step_of(folder) is not None:
                return replace(catalog, template=template), folder
    return None


def record_above(url: str, *, storage_options: Mapping[str, Any] | None = None, fs: Any = None) -> CommitRecord | None:
    """The record of the checkpoint at `url` in the catalogue above it, or None. Two small LISTs and a GET.

    Raises:
        AccessDeniedError: one may not list there.
        MetadataError: what lies there is no record.
    """
    found = catalog_above(url, storage_options=storage_options, fs=fs)
    if found is None:
        return None
    catalog, folder = found
    recorded = catalog.record_of(folder)
    return read_record(catalog, recorded.key) if recorded is not None and recorded.key is not None else None


def templates_of(namespace: str) -> Iterator[StepTemplate]:
    """The templates whose runs have this folder for their catalogue. Padding is not told by it."""
    parts = catalogue.decode(namespace)
    text = parts[0] if parts is not None and len(parts) == 1 else ""
    for at, letter in enumerate(text):
        if letter != "N" or "{" in text or "}" in text:
            continue
        try:
            yield StepTemplate(f"{text[:at]}{{step}}{text[at + 1 :]}")
        except InvalidURLError:
            continue
