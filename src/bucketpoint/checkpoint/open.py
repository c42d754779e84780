"""A committed checkpoint in a store: its metadata, the places of its objects and items, and checks of the objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bucketpoint.checkpoint.metadata_source import MetadataSource, committed_etags
from bucketpoint.errors import (
    DAMAGE,
    NOT_UNDERSTOOD,
    AccessDeniedError,
    CheckpointDeletedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptDataError,
    ObjectNotFoundError,
    first_of,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.index.ref import IndexRef, ref_of
from bucketpoint.format.item_info import ItemInfo, read_item
from bucketpoint.format.metadata.facts import FILES, SAFETENSORS, extra, record_of
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import CommitRecord
from bucketpoint.location import Location, Place, parent_and_name
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.format.index.view import ChunkShapes
    from bucketpoint.retention import Best


@dataclass(frozen=True)
class SavedCheckpoint:
    """The checkpoint that `open_checkpoint` found.

    `data` and `info` are the `.metadata` object, and the store's description of it.
    """

    url: str
    store: Store
    prefix: str
    data: bytes = field(repr=False)
    info: ObjectInfo
    metadata: Metadata = field(repr=False)
    place: Location

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that bucketpoint adds to DCP's fields of the metadata; empty for checkpoints of other writers."""
        return extra(self.metadata)

    @cached_property
    def items(self) -> list[tuple[MetadataIndex, ItemInfo]]:
        """All stored items. Raises MetadataError if one is malformed."""
        stored = self.metadata.storage_data or {}
        return [(index, read_item(info, url=self.url)) for index, info in stored.items()]

    @cached_property
    def by_object(self) -> dict[str, list[tuple[MetadataIndex, ItemInfo]]]:
        """The items of each object, by its path within the checkpoint, in the order of their offsets."""
        objects: dict[str, list[tuple[MetadataIndex, ItemInfo]]] = {path: [] for path in self.facts.get("objects", {})}
        for index, info in self.items:
            objects.setdefault(info.path, []).append((index, info))
        for members in objects.values():
            members.sort(key=lambda member: (member[1].offset, member[1].length))
        return dict(sorted(objects.items()))

    @cached_property
    def shapes(self) -> ChunkShapes:
        # Imported here: metadata of plain classes is used without torch.
        from bucketpoint.format.index.view import ChunkShapes

        return ChunkShapes(self.metadata)

    @cached_property
    def record(self) -> CommitRecord:
        """The commit record, made from the metadata: the checkpoint in a few numbers."""
        return record_of(self.metadata, self.data, metadata_etag=self.info.etag)

    @cached_property
    def etags(self) -> dict[str, str]:
        """The ETags that a load requires of the objects, by path."""
        return committed_etags(self.metadata, self.store, self.url)

    @cached_property
    def index(self) -> IndexRef | None:
        """The metadata's reference to its index, or None."""
        return ref_of(self.metadata)

    @property
    def is_safetensors(self) -> bool:
        """True if the metadata was made from the headers of safetensors."""
        return self.facts.get(FILES) == SAFETENSORS

    def key(self, path: str) -> str:
        """Return the key of a path within the checkpoint. Raises UnsafeDataError if the path leads out of it."""
        return keys.join(self.prefix, path)


def open_checkpoint(
    place: Place, *, trusted: bool = False, plain: bool = False, safetensors: bool = True
) -> SavedCheckpoint:
    """Read and decode the metadata of a checkpoint of any writer.

    Args:
        trusted: unpickle without the allow-list.
        plain: decode to plain classes without torch, for inspection only. No effect with `trusted`.
        safetensors: a folder of safetensors counts as a checkpoint.

    Raises:
        CheckpointNotFoundError: no checkpoint is committed here. IncompleteCheckpointError if there is data,
            CheckpointDeletedError if a checkpoint was deleted.
        MetadataError, UnsafeDataError: the metadata cannot or must not be read.
    """
    place = Location.of(place)
    store, prefix = place.opened
    source = MetadataSource(store, prefix, place.url)
    try:
        data, info = source.read_whole() if safetensors else source.get(keys.METADATA)
    except CheckpointDeletedError:
        raise
    except CheckpointNotFoundError:
        raise source.nothing_here() from None
    if plain and not trusted:
        metadata = read_metadata(data, url=place.url)
    else:
        from bucketpoint.format.metadata.codec import decode_metadata

        metadata = decode_metadata(data, trusted=trusted, url=place.url)
    return SavedCheckpoint(place.url, store, prefix, data, info, metadata, place)


def open_safetensors(url: str, store: Store, prefix: str, file: str | None = None) -> SavedCheckpoint:
    """Read the headers of all safetensors in a folder, or of one `file`. A `.metadata` in the folder is ignored.

    Raises:
        BucketpointError: as `SafetensorsFolder.read`.
    """
    from bucketpoint.checkpoint.safetensors_folder import SafetensorsFolder
    from bucketpoint.format.metadata.codec import decode_metadata

    data, info = SafetensorsFolder(store, prefix, url).read(file)
    return SavedCheckpoint(url, store, prefix, data, info, decode_metadata(data, url=url), Location.of(url))


def named_below(place: Location) -> Iterator[tuple[str, str | None]]:
    """Yield the URLs of checkpoints and of recorded checkpoints at and below a URL, each with its record's key or None.

    The order is that of the keys, so records come first. Sends one LIST per 1,000 objects.
    """
    (store, prefix), text = place.opened, place.url
    above = prefix + "/" if prefix else ""
    for info in store.list(above):
        path = info.key[len(above) :]
        if path == keys.METADATA or path.endswith("/" + keys.METADATA):
            folder = path.removesuffix(keys.METADATA).rstrip("/")
            yield f"{text.rstrip('/')}/{folder}" if folder else text, None
            continue
        root, catalog, rest = path.rpartition(f"{catalog_keys.CATALOG}/")
        parts = rest.split("/")
        if catalog and len(parts) == 3 and parts[1] == catalog_keys.STEPS:
            commit = catalog_keys.CommitKey.parse(parts[2])
            if commit is not None:
                yield f"{text.rstrip('/')}/{root}{commit.folder}", info.key


def recorded_best(run: Location, catalog: Catalog) -> Best | None:
    """Return the first `best` rule of the job that saved the newest readable checkpoint; None without a rule."""
    from bucketpoint.retention import Best

    for newest in catalog.candidates():
        try:
            rule = open_checkpoint(run.at(catalog.url_of_folder(newest.folder))).facts.get("best")
        except NOT_UNDERSTOOD:
            raise
        except DAMAGE:
            continue
        return Best(*rule) if isinstance(rule, list) and len(rule) == 2 else None
    return None


# -- checks of the objects ---------------------------------------------------------------------------------------------

_NAMED_AT_MOST = 3

REMEDY = "Load another checkpoint; `bucketpoint verify` lists all damage of this one"


def look_at_objects(
    saved: SavedCheckpoint, look: Callable[[str], ObjectInfo], options: TransferOptions
) -> dict[str, ObjectInfo]:
    """Return the store's description of each object, by its path, after a check against the metadata.

    Args:
        look: returns the store's description of a key, or raises ObjectNotFoundError.

    Raises:
        CorruptDataError: an object is missing, has another size, does not hold all of its items, or was replaced.
    """
    infos: dict[str, ObjectInfo] = {}

    def check(path: str) -> None:
        try:
            info = look(saved.key(path))
        except ObjectNotFoundError:
            raise damaged(saved, path, "one of its objects is missing") from None
        for _, text in faults(saved, path, info):
            raise damaged(saved, path, text)
        infos[path] = info

    for_each(saved.by_object, check, options)
    return dict(sorted(infos.items()))


def faults(saved: SavedCheckpoint, path: str, info: ObjectInfo) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each difference between an object and the metadata."""
    # Other writers record no sizes.
    size, pinned = saved.facts.get("objects", {}).get(path, {}).get("size"), saved.etags.get(path)
    needed = max((item.offset + item.length for _, item in saved.by_object[path]), default=0)
    if info.size < needed or size not in (None, info.size):
        wanted = f"{size}" if size is not None else f"at least {needed}"
        yield "wrong-size", f"the object has {info.size} bytes, but {wanted} were written"
    if pinned not in (None, info.etag):
        text = "the object was replaced after the commit, so loads refuse it even if its bytes are the same"
        yield "replaced-object", text


def damaged(saved: SavedCheckpoint, path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"The checkpoint is damaged: {reason}", url=saved.url, key=path, remedy=REMEDY)


def copy_target(place: Location, saved: SavedCheckpoint, into: bool) -> Location:
    """Return the folder for a copy: `place`, or a folder below it. Sends one LIST.

    Raises:
        CheckpointExistsError: the folder has other content.
    """
    from bucketpoint.catalog.run import names_below

    (store, prefix), source = place.opened, parent_and_name(saved.url)
    try:
        names = names_below(store, prefix)
    except AccessDeniedError:
        names = []
        if not into or source is None:
            return place
    if keys.METADATA in names or source is None:
        return place
    below = f"{place.url}/{source[1]}"
    own = [name for name in names if not name.startswith(keys.FENCE_FOLDER)]
    if into or any(
        name.endswith("/" + keys.METADATA) or name.startswith((f"{source[1]}/", f"{catalog_keys.CATALOG}/"))
        for name in own
    ):
        return place.at(below)
    strangers = [name for name in own if keys.token_of(name) is None and name not in saved.by_object]
    if strangers:
        raise CheckpointExistsError(
            f"The destination is a folder with other content: {first_of(strangers, _NAMED_AT_MOST)}",
            url=place.url,
            remedy=f"Name a new folder in it, such as {below}",
        )
    return place
