"""Choice of the objects that go when a file or a directory is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bucketpoint.errors import StoreError
from bucketpoint.integrations.torch_checkpointing.names import Parts
from bucketpoint.integrations.torch_checkpointing.tree import Files, Listing, Trees
from bucketpoint.stores import Store


@dataclass(frozen=True)
class ChosenObjects:
    """The objects of a deletion.

    Attributes:
        marked: a marker has to hide the path, before anything else: a manifest above names its files, or their objects
            have to stay.
        manifests: keys of manifests, which are deleted before any of their files.
        keys: keys of all other objects to delete.
    """

    marked: bool
    manifests: list[str]
    keys: list[str]


def plan(trees: Trees, listing: Listing, parts: Parts, found: Files) -> ChosenObjects:
    """Choose what to delete of the files `found` at or below a path, and of older objects there.

    Objects that a rename has moved, or may have moved, stay: files elsewhere may need them. `sweep` deletes them once
    nothing does, since it knows all files.
    """
    manifests = {path: trees.manifest(info) for path, info in listing.manifests.items()}
    own = manifests.get(parts)
    elsewhere = {
        file.key
        for path, manifest in manifests.items()
        if path[: len(parts)] != parts
        for file in manifest.files.values()
    }

    def moved(key: str, token: str) -> bool:
        return any(key.startswith(marker.folder) and token < marker.token for marker in listing.markers)

    def going(path: Parts, token: str) -> bool:
        # Also what killed saves have left in the temporary directory of a checkpoint. Newer files there are of a save
        # that may be under way.
        consumed = own is not None and path[: len(own.source)] == own.source and token < own.token
        return consumed or path[: len(parts)] == parts

    # Of a rename that was killed or is under way, both ends can be seen.
    begun = [marker for marker in listing.markers if marker.info.size]
    stay = {
        file.key
        for path, file in found.items()
        if any(path[: len(marker.path)] == marker.path and file.token < marker.token for marker in begun)
    }
    keys = {file.key for file in found.values()} - stay
    objects = [(path, one.token, one.key) for path, versions in listing.versions.items() for one in versions]
    objects += [(path, link.token, link.info.key) for path, links in listing.links.items() for link in links]
    keys |= {
        key for path, token, key in objects if going(path, token) and key not in elsewhere and not moved(key, token)
    }
    return ChosenObjects(
        marked=bool(stay) or any(file.key in elsewhere for file in found.values()),
        manifests=[
            listing.manifests[path].key
            for path, manifest in manifests.items()
            if path[: len(parts)] == parts and not moved(listing.manifests[path].key, manifest.token)
        ],
        keys=sorted(keys - stay),
    )


def delete_all(store: Store, keys: Sequence[str]) -> None:
    """Delete objects.

    Raises:
        StoreError: the store refused to delete some of them.
    """
    failures = store.delete(keys) if keys else []
    if failures:
        first = failures[0]
        raise StoreError(
            f"The store did not delete {len(failures)} of {len(keys)} objects: {first.code} {first.message}",
            url=store.url,
            key=first.key,
        )
