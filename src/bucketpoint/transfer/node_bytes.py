"""Reads and writes of the node's copy (`NodeCopy`) in loads and saves. Loads read the copy before the bucket.

Only verified bytes are copied, so this is not a wrapper of a store: a store does not have the checksums of a request.
Ranges without a checksum, such as those of other writers' objects, are always read from the bucket.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence

from bucketpoint.errors import CorruptDataError
from bucketpoint.stores import Store
from bucketpoint.stores.node_copy import CopiedObject, NodeCopy, NodeFolder
from bucketpoint.transfer.download import Request, cut, deliver
from bucketpoint.transfer.options import MIB, Meter, TransferOptions
from bucketpoint.transfer.tasks import TaskGroup
from bucketpoint.transfer.upload import ObjectSource, Uploaded

NICE = 19

Stretches = list[tuple[int, int, str | None]]


class NodeBytes:
    """Access of one load to the node's copy."""

    def __init__(self, copy: NodeCopy, store: Store, options: TransferOptions, meter: Meter) -> None:
        self._folder = NodeFolder(copy)
        self._store = store
        self._options = options
        self._meter = meter

    def deliver_or(
        self, receive: Callable[[list[Request]], None], requests: Sequence[Request], lease: memoryview
    ) -> None:
        """Deliver neighbouring requests of one object from the node's copy, and `receive` the others from the bucket.

        Waits for bytes that another process is receiving.
        """
        for left in self._left(requests, lease, partly=False):
            of = self._of(left[0])
            if of is None:
                receive(left)
                continue
            with self._folder.claim(of, left[0].start, left[-1].stop):
                for missing in self._left(left, lease, partly=True):
                    receive(missing)

    def keep(self, request: Request, buffers: Sequence[memoryview]) -> None:
        """Store the bytes of a request in the node's copy, if they have been verified."""
        of = self._of(request)
        if of is not None and _is_verified(request):
            self._folder.put(of, request.start, buffers, request.nbytes)

    def look(self) -> None:
        """Delete copies of objects that are no longer in the bucket."""
        self._folder.look(self._store)

    def _left(self, requests: Sequence[Request], lease: memoryview, *, partly: bool) -> list[list[Request]]:
        """Deliver the requests whose bytes are in the copy. Return the others, grouped by neighbours.

        With `partly`, a part in the copy is enough: the rest of the request is read from the bucket.
        """
        runs: list[list[Request]] = [[]]
        for request in requests:
            if self._delivered(request, lease, partly=partly):
                runs.append([])
            else:
                runs[-1].append(request)
        return [run for run in runs if run]

    def _delivered(self, request: Request, lease: memoryview, *, partly: bool) -> bool:
        of = self._of(request)
        if of is None or not _is_verified(request):
            return False
        stretches = self._folder.cover(of, request.start, request.stop)
        held = sum(stop - start for start, stop, name in stretches if name is not None)
        if held < (1 if partly else request.nbytes):
            return False
        read = functools.partial(self._read, of, stretches)
        kept = functools.partial(self._keep_missing, of, stretches)
        try:
            deliver(self._store.url, request, lease, read, self._options, kept)
        except CorruptDataError:
            self._drop(of, stretches)
            return False
        self._meter.add(request.nbytes, requests=0, from_node=held)
        return True

    def _read(self, of: CopiedObject, stretches: Stretches, buffers: list[memoryview]) -> None:
        pieces = cut(buffers, [stop - start for start, stop, _ in stretches])
        for (start, _, name), piece in zip(stretches, pieces, strict=True):
            if name is None:
                self._meter.add(0)
                self._store.read_into(of.key, start, piece, if_match=of.etag)
                continue
            try:
                self._folder.read(of, name, start, piece)
            except OSError as error:
                raise CorruptDataError(f"the node's copy cannot be read: {error.strerror}", key=of.key) from error

    def _keep_missing(self, of: CopiedObject, stretches: Stretches, buffers: list[memoryview]) -> None:
        pieces = cut(buffers, [stop - start for start, stop, _ in stretches])
        for (start, stop, name), piece in zip(stretches, pieces, strict=True):
            if name is None:
                self._folder.put(of, start, piece, stop - start)

    def _drop(self, of: CopiedObject, stretches: Stretches) -> None:
        self._folder.drop(of, {name for *_, name in stretches if name is not None})

    def _of(self, request: Request) -> CopiedObject | None:
        return None if request.etag is None else CopiedObject(self._store.identity, request.key, request.etag)


def _is_verified(request: Request) -> bool:
    """Return True if every extent of a request can be verified without bytes of other requests."""
    return all(extent.blocks or extent.check is not None or not extent.nbytes for extent in request.extents)


def keep_uploaded(
    store: Store, sources: Sequence[ObjectSource], uploaded: Sequence[Uploaded], options: TransferOptions
) -> None:
    """Store the bytes of uploaded objects in the node's copy, on a thread of the lowest priority."""
    if options.node_copy is None:
        return
    folder = NodeFolder(options.node_copy)
    with TaskGroup(1, name="bucketpoint-node-copy", nice=NICE) as group:
        for source, done in zip(sources, uploaded, strict=True):
            if done.info.etag is not None:
                of = CopiedObject(store.identity, source.key, done.info.etag)
                group.start(functools.partial(folder.put, of, 0, _bytes_of(source, done), source.nbytes))
        group.start(functools.partial(folder.look, store))


def _bytes_of(source: ObjectSource, uploaded: Uploaded) -> Iterator[memoryview]:
    for segment in source.segments:
        if segment.fill is not None:
            for start in range(0, segment.nbytes, MIB):
                piece = memoryview(bytearray(min(MIB, segment.nbytes - start)))
                segment.fill(start, piece)
                yield piece
        elif segment.table_of:
            crcs = [crc for index in segment.table_of for crc in uploaded.block_crcs[index]]
            yield memoryview(struct.pack(f"<{len(crcs)}I", *crcs))
        else:
            for index in segment.digests_of:
                yield memoryview(uploaded.digests[index] or b"")
            yield segment.data or memoryview(b"")
