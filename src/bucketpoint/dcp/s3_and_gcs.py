"""`BucketWriter` and `BucketReader` for the URLs of one kind of store.

Each signature is spelt out, and equal to that of the base class except for `engine`: a type checker and `help()` show
what may be passed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.dcp.cooperative.decision import Bandwidths
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.saving.stale import OnStale
from bucketpoint.dcp.writer import BucketWriter, Unchanged
from bucketpoint.format.groups import DEFAULT_RULES, GroupRule
from bucketpoint.retention import RetentionPolicy
from bucketpoint.staging import StagingOptions
from bucketpoint.stores.registry import GCS_SCHEMES, S3_SCHEMES
from bucketpoint.stores.s3.options import with_engine
from bucketpoint.transfer import ProgressCallback, TransferOptions


class S3Writer(BucketWriter):
    """`BucketWriter` for `s3://` URLs: Amazon S3, MinIO and every other store that speaks its protocol.

    All other arguments are as for `BucketWriter`.

    Args:
        engine: the client that moves large bodies: "boto3", "crt" or "auto". The same as the storage option `engine`.
    """

    schemes = S3_SCHEMES

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        transfer: TransferOptions | None = None,
        target_object_bytes: int | None = None,
        groups: Sequence[GroupRule] = DEFAULT_RULES,
        progress: ProgressCallback | bool | None = None,
        staging: StagingOptions | Any = None,
        retention: RetentionPolicy | str | os.PathLike[str] | None = None,
        log: SaveLog | None = None,
        unchanged: Unchanged = "send",
        on_stale: OnStale = None,
        check_finite: bool = False,
        engine: str | None = None,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            storage_options=with_engine(storage_options, engine),
            fs=fs,
            transfer=transfer,
            target_object_bytes=target_object_bytes,
            groups=groups,
            progress=progress,
            staging=staging,
            retention=retention,
            log=log,
            unchanged=unchanged,
            on_stale=on_stale,
            check_finite=check_finite,
        )


class S3Reader(BucketReader):
    """`BucketReader` for `s3://` URLs: Amazon S3, MinIO and every other store that speaks its protocol.

    All other arguments are as for `BucketReader`.

    Args:
        engine: the client that moves large bodies: "boto3", "crt" or "auto". The same as the storage option `engine`.
    """

    schemes = S3_SCHEMES

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        _extension_registry: Any = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        transfer: TransferOptions | None = None,
        trusted: bool = False,
        progress: ProgressCallback | bool | None = None,
        cooperative: str = "off",
        process_group: Any = None,
        bandwidths: Bandwidths | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(
            path,
            _extension_registry,
            storage_options=with_engine(storage_options, engine),
            fs=fs,
            transfer=transfer,
            trusted=trusted,
            progress=progress,
            cooperative=cooperative,
            process_group=process_group,
            bandwidths=bandwidths,
        )


class GCSWriter(BucketWriter):
    """`BucketWriter` for `gs://` URLs: Google Cloud Storage."""

    schemes = GCS_SCHEMES


class GCSReader(BucketReader):
    """`BucketReader` for `gs://` URLs: Google Cloud Storage."""

    schemes = GCS_SCHEMES
