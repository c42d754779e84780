"""Reads and writes of the node's copy (`NodeCopy`) in loads and saves. Loads read the copy before the bucket.

Only verified bytes are copied, so this is not a wrapper of a store: a store does not have the checksums of a request.
Ranges without a checksum, such as those of other writers' objects, are always read from the bucket.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence

from bucketpoint.errors import CorruptDataError
from bucketpoint.stores import Store
from bucketpoint.stores.node_copy import CopiedObject, NodeFolder
from bucketpoint.transfer.download import Request, cut, deliver
from bucketpoint.transfer.options import MIB, Meter, NodeCopy, TransferOptions
from bucketpoint.transfer.tasks import TaskGroup
from bucketpoint.transfer.upload import ObjectSource, Uploaded

NICE = 19

Stretches = list[tuple[int, int, str | None]]


class NodeBytes:
    """Access of one load to the node's copy."""

    def __init__(self, copy: NodeCopy, store: Store, options: TransferOptions, meter: Meter) -> None:
        self._folder = NodeFolder(copy.path, copy.max_bytes)
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
            of = next(filter(None, map(self._of, left)), None)
            with self._folder.claim(of, left[0].start, left[-1].stop) if of else contextlib.nullcontext():
                for missing in self._left(left, lease, partly=True):
                    receive(missing)

    def keep(self, request: Request, buffers: Sequence[memoryview]) -> None:
        """Store the bytes of a request in the node's copy, if they have been verified."""
        self._keep(self._of(request), [(request.start, request.stop, None)], buffers)

    def look(self) -> None:
        """Delete copies of objects that are no longer in the bucket."""
        self._folder.look(self._store)

    def _left(self, requests: Sequence[Request], lease: memoryview, *, partly: bool) -> list[list[Request]]:
        """Deliver the requests whose bytes are in the copy. Return the others, grouped by neighbours.

        With `partly`, a part in the copy is enough: the rest of the request is read from the bucket.
        """
        runs = itertools.groupby(requests, lambda request: self._delivered(request, lease, partly=partly))
        return [list(run) for delivered, run in runs if not delivered]

    def _delivered(self, request: Request, lease: memoryview, *, partly: bool) -> bool:
        of = self._of(request)
        if of is None:
            return False
        stretches = self._folder.cover(of, request.start, request.stop)
        held = sum(stop - start for start, stop, name in stretches if name is not None)
        if held < (1 if partly else request.nbytes):
            return False
        read = functools.partial(self._read, of, stretches)
        try:
            deliver(self._store.url, request, lease, read, self._options, functools.partial(self._keep, of, stretches))
        except CorruptDataError:
            self._folder.drop(of, {name for *_, name in stretches if name is not None})
            return False
        self._meter.add(request.nbytes, requests=0, from_node=held)
        return True

    def _read(self, of: CopiedObject, stretches: Stretches, buffers: list[memoryview]) -> None:
        for start, name, piece in _pieces(stretches, buffers):
            if name is None:
                self._meter.add(0)
                self._store.read_into(of.key, start, piece, if_match=of.etag)
                continue
            try:
                self._folder.read(of, name, start, piece)
            except OSError as error:
                raise CorruptDataError(f"the node's copy cannot be read: {error.strerror}", key=of.key) from error

    def _keep(self, of: CopiedObject | None, stretches: Stretches, buffers: Sequence[memoryview]) -> None:
        for start, name, piece in _pieces(stretches, buffers):
            if of is not None and name is None:
                self._folder.put(of, start, piece, sum(map(len, piece)))

    def _of(self, request: Request) -> CopiedObject | None:
        """Return the object of a request; None if its bytes cannot be verified without those of other requests."""
        alone = all(extent.blocks or extent.check is not None or not extent.nbytes for extent in request.extents)
        return CopiedObject(self._store.identity, request.key, request.etag) if request.etag and alone else None


def _pieces(stretches: Stretches, buffers: Sequence[memoryview]) -> Iterator[tuple[int, str | None, list[memoryview]]]:
    """Yield start and file of each stretch, and its memory in `buffers`."""
    pieces = cut(buffers, [stop - start for start, stop, _ in stretches])
    return ((start, name, piece) for (start, _, name), piece in zip(stretches, pieces, strict=True))


def keep_uploaded(
    store: Store, sources: Sequence[ObjectSource], uploaded: Sequence[Uploaded], options: TransferOptions
) -> None:
    """Store the bytes of uploaded objects in the node's copy, on a thread of the lowest priority."""
    if options.node_copy is None:
        return
    folder = NodeFolder(options.node_copy.path, options.node_copy.max_bytes)
    with TaskGroup(1, name="bucketpoint-node-copy", nice=NICE) as group:
        for source, done in zip(sources, uploaded, strict=True):
            if done.info.etag is not None:
                of = CopiedObject(store.identity, source.key, done.info.etag)
                group.start(functools.partial(folder.put, of, 0, _bytes_of(source, done), source.nbytes))


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
