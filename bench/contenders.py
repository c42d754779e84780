"""Each contender's save and load, set up as its own documentation says. No measuring here.

Everything is reached through the standard environment (endpoint, credentials, CA), so every contender talks to the same
server. Libraries are imported where they are used: the contenders live in environments that exclude each other.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

State = dict[str, Any]

S3_OPS = ("save", "load", "quarter0", "quarter1")
RAW_OPS = ("save", "load")

CHILD_POLL_S = 0.02
CHILD_PEAK_BYTES: list[int] = []
"""Peak memory of a command-line contender, as seen while it ran."""


@dataclass(frozen=True)
class Setting:
    """What an operation is given besides the state: where the checkpoint is, and what the raw transfers move.

    Attributes:
        url: the checkpoint, `s3://bucket/prefix` or a folder.
        layout: sizes of the data objects, for the contenders that move bytes and know no state.
        files: a folder on tmpfs that holds files of those sizes, for a command-line tool.
        s5cmd: path of the s5cmd binary.
    """

    url: str
    layout: Sequence[int] = ()
    files: str = ""
    s5cmd: str = ""


@dataclass(frozen=True)
class Contender:
    """`save(state, setting)` and `load(state, setting)`; `prepare` runs before the clock starts.

    `loads_of` names a contender whose objects are laid out alike: loading those, instead of its own, keeps one copy of
    the state less in the server's memory.
    """

    title: str
    save: Callable[[State, Setting], None]
    load: Callable[[State, Setting], None]
    modules: Sequence[str] = ()
    ops: Sequence[str] = S3_OPS
    env: str = "main"
    knows_state: bool = True
    loads_of: str | None = None
    prepare: Callable[[str, Setting], None] = lambda op, setting: None


def _dcp() -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp


def _save_bucketpoint(state: State, setting: Setting) -> None:
    from bucketpoint import S3Writer

    _dcp().save(state, checkpoint_id=setting.url, storage_writer=S3Writer(), no_dist=True)


def _load_bucketpoint(state: State, setting: Setting) -> None:
    from bucketpoint import S3Reader

    _dcp().load(state, checkpoint_id=setting.url, storage_reader=S3Reader(), no_dist=True)


def _lean() -> Any:
    from bucketpoint.transfer.options import TransferOptions

    return TransferOptions(max_inflight_bytes=TransferOptions().max_inflight_bytes // 4)


def _save_lean(state: State, setting: Setting) -> None:
    from bucketpoint import S3Writer

    _dcp().save(state, checkpoint_id=setting.url, storage_writer=S3Writer(transfer=_lean()), no_dist=True)


def _load_lean(state: State, setting: Setting) -> None:
    from bucketpoint import S3Reader

    _dcp().load(state, checkpoint_id=setting.url, storage_reader=S3Reader(transfer=_lean()), no_dist=True)


def _s3torch_config() -> Any:
    from s3torchconnector import S3ClientConfig

    # Path-style because the server is an IP address; everything else is the library's default.
    return S3ClientConfig(force_path_style=True)


def _save_s3torch(state: State, setting: Setting) -> None:
    from s3torchconnector.dcp import S3StorageWriter

    writer = S3StorageWriter(os.environ["AWS_REGION"], setting.url, s3client_config=_s3torch_config())
    _dcp().save(state, storage_writer=writer, no_dist=True)


def _load_s3torch(state: State, setting: Setting) -> None:
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader

    reader = S3StorageReader(
        os.environ["AWS_REGION"],
        setting.url,
        s3client_config=_s3torch_config(),
        reader_constructor=S3ReaderConstructor.dcp_optimized(),
    )
    _dcp().load(state, storage_reader=reader, no_dist=True)


def _save_fsspec(state: State, setting: Setting) -> None:
    from torch.distributed.checkpoint import FsspecWriter

    _dcp().save(state, storage_writer=FsspecWriter(setting.url), no_dist=True)


def _load_fsspec(state: State, setting: Setting) -> None:
    from torch.distributed.checkpoint import FsspecReader

    _dcp().load(state, storage_reader=FsspecReader(setting.url), no_dist=True)


def _save_disk(state: State, setting: Setting) -> None:
    dcp = _dcp()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(setting.url), no_dist=True)


def _load_disk(state: State, setting: Setting) -> None:
    dcp = _dcp()
    dcp.load(state, storage_reader=dcp.FileSystemReader(setting.url), no_dist=True)


@dataclass
class RawEngine:
    """bucketpoint's own store, moving bytes between one prepared buffer and the bucket: same parts, same connections.

    What is left out is everything that makes the bytes a checkpoint. With `checksums` each part's CRC32C is computed
    and sent, or computed on what was received, as a save and a load do.
    """

    checksums: bool
    _buffers: list[memoryview] = field(default_factory=list)

    def prepare(self, op: str, setting: Setting) -> None:
        from bucketpoint.stores.registry import open_store  # noqa: F401  (imported before the clock starts)

        self._buffers = [_filled(size, random=op == "save") for size in setting.layout]

    def save(self, state: State, setting: Setting) -> None:
        store, prefix = _open(setting.url)
        jobs = [(f"{prefix}/{index}.distcp", parts) for index, parts in enumerate(_cut_as_save(self._buffers, store))]

        def put(key: str, upload_id: str, number: int, body: memoryview) -> Any:
            return store.put_part(key, upload_id, number, [body], crc32c=self._crc(body))

        with ThreadPoolExecutor(_options().connections) as pool:
            ids = pool.map(store.create_multipart, [key for key, _ in jobs])
            sent = [
                (
                    key,
                    upload_id,
                    [pool.submit(put, key, upload_id, number, part) for number, part in enumerate(parts, 1)],
                )
                for (key, parts), upload_id in zip(jobs, ids, strict=True)
            ]
            for key, upload_id, futures in sent:
                store.complete_multipart(key, upload_id, [future.result() for future in futures])

    def load(self, state: State, setting: Setting) -> None:
        store, prefix = _open(setting.url)
        size = _options().part_bytes

        def get(key: str, offset: int, body: memoryview) -> None:
            store.read_into(key, offset, [body])
            self._crc(body)

        with ThreadPoolExecutor(_options().connections) as pool:
            futures = [
                pool.submit(get, f"{prefix}/{index}.distcp", at, buffer[at : at + size])
                for index, buffer in enumerate(self._buffers)
                for at in range(0, len(buffer), size)
            ]
            for future in futures:
                future.result()

    def _crc(self, body: memoryview) -> int | None:
        if not self.checksums:
            return None
        from awscrt import checksums

        crc: int = checksums.crc32c(body)
        return crc


def _open(url: str) -> tuple[Any, str]:
    from bucketpoint.stores.registry import open_store

    store, prefix = open_store(url)
    return store, prefix


def _options() -> Any:
    from bucketpoint.transfer.options import TransferOptions

    return TransferOptions()


def _cut_as_save(buffers: Sequence[memoryview], store: Any) -> list[list[memoryview]]:
    from bucketpoint.transfer.pieces import common_part_bytes, plan_parts

    size = common_part_bytes([len(buffer) for buffer in buffers], _options())
    plans = [plan_parts(len(buffer), size, store.capabilities) for buffer in buffers]
    return [
        [buffer[slice(*plan.bounds(number))] for number in range(1, plan.count + 1)]
        for buffer, plan in zip(buffers, plans, strict=True)
    ]


def _filled(size: int, *, random: bool) -> memoryview:
    """Resident memory: random bytes to send, or zeros to receive into."""
    memory = mmap.mmap(-1, max(size, 1))
    block = os.urandom(1 << 20) if random else bytes(1 << 20)
    for at in range(0, size, len(block)):
        memory[at : min(at + len(block), size)] = block[: min(len(block), size - at)]
    return memoryview(memory)[:size]


def _s5cmd(setting: Setting, *arguments: str) -> None:
    command = [setting.s5cmd, "--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "--log", "error", "cp"]
    command += ["--concurrency", str(_options().connections), "--part-size", str(_options().part_bytes >> 20)]
    with subprocess.Popen([*command, *arguments]) as process:
        # The kernel's figure for a child begins with the memory of the process that forked it: look for ourselves.
        while process.poll() is None:
            CHILD_PEAK_BYTES.append(_peak_bytes(process.pid))
            time.sleep(CHILD_POLL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return max((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), default=0)


def _save_s5cmd(state: State, setting: Setting) -> None:
    _s5cmd(setting, f"{setting.files}/up/", f"{setting.url}/")


def _load_s5cmd(state: State, setting: Setting) -> None:
    _s5cmd(setting, f"{setting.url}/*", f"{setting.files}/down/")


def _prepare_s5cmd(op: str, setting: Setting) -> None:
    folder = Path(setting.files, "up" if op == "save" else "down")
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(setting.layout):
        path = folder / str(index)
        if op == "load":
            path.unlink(missing_ok=True)
        elif not path.exists() or path.stat().st_size != size:
            path.write_bytes(_filled(size, random=True))


_RAW, _RAW_CRC = RawEngine(checksums=False), RawEngine(checksums=True)

CONTENDERS: dict[str, Contender] = {
    "bucketpoint": Contender("bucketpoint", _save_bucketpoint, _load_bucketpoint, ("bucketpoint", "boto3", "awscrt")),
    "s3torchconnector": Contender("s3torchconnector", _save_s3torch, _load_s3torch, ("s3torchconnector.dcp",)),
    "s3fs": Contender("torch FsspecWriter + s3fs", _save_fsspec, _load_fsspec, ("s3fs",), env="s3fs"),
    "disk": Contender("torch FileSystemWriter, local disk", _save_disk, _load_disk),
    "bucketpoint-lean": Contender(
        "bucketpoint, a quarter of the budget",
        _save_lean,
        _load_lean,
        ("bucketpoint", "boto3", "awscrt"),
        loads_of="bucketpoint",
    ),
    "raw": Contender(
        "raw engine", _RAW.save, _RAW.load, ("bucketpoint", "boto3"), RAW_OPS, knows_state=False, prepare=_RAW.prepare
    ),
    "raw-crc": Contender(
        "raw engine with CRC32C",
        _RAW_CRC.save,
        _RAW_CRC.load,
        ("bucketpoint", "boto3", "awscrt"),
        RAW_OPS,
        knows_state=False,
        loads_of="raw",
        prepare=_RAW_CRC.prepare,
    ),
    "s5cmd": Contender(
        "s5cmd", _save_s5cmd, _load_s5cmd, (), RAW_OPS, knows_state=False, loads_of="raw", prepare=_prepare_s5cmd
    ),
}


def bucket_and_prefix(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.lstrip("/")
