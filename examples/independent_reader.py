"""A reader of bucketpoint's checkpoints without bucketpoint and without torch: docs/format.md as a program.

    python examples/independent_reader.py s3://bucket/run/step-500

prints a line of JSON for each name in the state: dtype, shape and SHA-256 of a tensor, or a value as Python writes it.
It needs boto3 and numpy. `AWS_ENDPOINT_URL` names a store other than Amazon S3; a local folder is read as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pickle import UnpicklingError
from typing import Any

import numpy as np

from independent_formats import Unpickler, in_numpy, items_of_index, unarchived

FIRST_BYTES = 128 << 10  # of `.metadata`: they name the index, if there is one, and then the rest is not needed
INDEX_NAMED = re.compile(rb"bucketpoint-index/2 (data/\S+) (\d{16}) ([0-9a-f]{64})")
DELETED = b'{"bucketpoint":"deleted"'
CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [entry >> 1 ^ 0x82F63B78 * (entry & 1) for entry in CRC_TABLE]


def load(url: str, name: str = ".metadata", *, verify: bool = True) -> dict[str, tuple[str | None, Any]]:
    """Return (dtype, elements) of each tensor by its name, and (None, value) of every other value.

    Elements that numpy does not have, such as those of bfloat16, are returned as their bits. For what is pickled with a
    class that is unknown here, the error is returned that names the class.

    Args:
        name: `__3.metadata` for the part of rank 3 in a checkpoint that was saved without collectives.
        verify: compare each item with its CRC32C, which takes 0.1 s for each MB: there are libraries that are faster.
    """
    read = opened(url)
    state: dict[str, tuple[str | None, Any]] = {}
    missing: dict[str, int] = {}
    for fqn, dtype, shape, offset, sizes, place in items_of(read, name):
        if place.transform_descriptors:
            raise NotImplementedError(f"{fqn} was saved through {place.transform_descriptors}")
        # Where `bp_po` says where the elements are, the archive of torch.save around them need not be read.
        bare = place.bp_po is not None
        start, nbytes = (place.offset + place.bp_po, place.bp_pn) if bare else (place.offset, place.length)
        data = read(place.relative_path, start, nbytes)
        if len(data) < nbytes or (verify and place.bp_crc is not None and crc32c(data) != place.bp_crc):
            raise ValueError(f"{fqn} is damaged: bytes {start} to {start + nbytes} of {place.relative_path}")
        try:
            value: Any = np.frombuffer(data, in_numpy(dtype)) if bare else unarchived(data)
        except UnpicklingError as error:
            value = error
        if dtype is None or isinstance(value, UnpicklingError):
            state[fqn] = dtype, value
            continue
        _, whole = state.setdefault(fqn, (dtype, np.zeros(shape, in_numpy(dtype))))
        chunk = (value if bare else value[1]).reshape(sizes)
        whole[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))] = chunk
        missing[fqn] = missing.get(fqn, whole.size) - math.prod(sizes)
    if any(missing.values()):
        raise ValueError(f"chunks are missing of {[fqn for fqn, count in missing.items() if count]}")
    return state


def opened(url: str) -> Callable[..., bytes]:
    """Return a function that reads bytes of an object by its path below the URL."""
    bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
    if url.startswith("s3://"):
        import boto3

        client = boto3.client("s3")

    def read(path: str, start: int = 0, nbytes: int = 1 << 40) -> bytes:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path} leads out of the checkpoint")
        if not nbytes:
            return b""
        if not url.startswith("s3://"):
            with open(f"{url}/{path}", "rb") as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(start)
                return file.read(min(nbytes, size))
        key, wanted = f"{prefix}/{path}".lstrip("/"), f"bytes={start}-{start + nbytes - 1}"
        try:
            return bytes(client.get_object(Bucket=bucket, Key=key, Range=wanted)["Body"].read())
        except client.exceptions.NoSuchKey:
            raise FileNotFoundError(f"there is no {key} in the bucket {bucket}") from None

    return read


def items_of(read: Callable[..., bytes], name: str) -> Iterator[tuple[Any, ...]]:
    """Yield name, dtype, shape, offset, sizes and place of each item. The dtype of a pickled value is None.

    The offset and the sizes are those of a chunk in its tensor; the place is where the chunk lies in the checkpoint.
    """
    head = read(name, 0, FIRST_BYTES)
    if head.startswith(DELETED):
        raise FileNotFoundError(f"the checkpoint was deleted: {head.decode()}")
    if named := INDEX_NAMED.search(head[:512]):
        with contextlib.suppress(FileNotFoundError):
            index = read(named[1].decode(), 0, int(named[2]))
            # An index that is lost or damaged is no loss: `.metadata` says the same.
            if hashlib.sha256(index).hexdigest() == named[3].decode():
                yield from items_of_index(index)
                return
    data = head if len(head) < FIRST_BYTES else read(name)
    if data.endswith(b"BPC1") and zlib.crc32(data[:-8]) != int.from_bytes(data[-8:-4], "little"):
        raise ValueError(f"{name} is damaged")
    metadata = Unpickler(io.BytesIO(data)).load()
    if (metadata.bucketpoint or {}).get("format", 1) > 1:
        raise NotImplementedError("a newer version of bucketpoint wrote the checkpoint, in another format")
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    for fqn, entry in metadata.state_dict_metadata.items():
        if entry.chunks is None:
            yield fqn, None, (), None, (), places[fqn, None]
        for chunk in entry.chunks or ():
            dtype = entry.properties.state[0]
            yield fqn, dtype, entry.size, chunk.offsets, chunk.sizes, places[fqn, chunk.offsets]


def crc32c(data: bytes) -> int:
    """Return the CRC32C (Castagnoli), with the usual inversions at the begin and at the end."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def main(url: str, name: str = ".metadata") -> None:
    """Print what the checkpoint holds."""
    for fqn, (dtype, value) in load(url, name).items():
        if isinstance(value, np.ndarray):
            print(json.dumps([fqn, dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest()]))
        else:
            print(json.dumps([fqn, repr(value)]))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
