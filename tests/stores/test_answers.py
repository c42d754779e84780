"""Rows of one table: an operation, the answer of a provider, the error that it becomes, and a word of the remedy."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

import bucketpoint
from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.manager import CheckpointManager
from bucketpoint.manager.loading import DAMAGE
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores.fsspec.errors import translate
from bucketpoint.stores.gcs.errors import failure_of
from bucketpoint.stores.s3.errors import translate as translate_s3


class AzureFailure(Exception):
    """As azure.core raises it: the status and the code are in fields."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__("refused")
        self.status_code, self.error_code = status, code


def azure(operation: str, status: int, code: str, conditional: bool) -> StoreError:
    # adlfs wraps some answers in Python's own exceptions.
    wrapped: Exception = FileNotFoundError("wrapped") if status == 404 else FileExistsError("wrapped")
    wrapped.__cause__ = AzureFailure(status, code or None)
    bare, wrapped = (
        translate(error, operation, "az://c/k", conditional=conditional)
        for error in (AzureFailure(status, code or None), wrapped if code else AzureFailure(status, None))
    )
    assert type(bare) is type(wrapped)
    assert bare.remedy == wrapped.remedy
    return bare


def s3fs(operation: str, status: int, code: str, conditional: bool) -> StoreError:
    error = FileNotFoundError("wrapped")
    error.__cause__ = botocore.exceptions.ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
        operation,
    )
    return translate(error, operation, "s3://b/k", conditional=conditional)


def gcs(operation: str, status: int, code: str, conditional: bool) -> StoreError:
    body = json.dumps({"error": {"message": "said", "errors": [{"reason": code}]}}).encode() if code else b""
    json_api, _ = failure_of(status, body, operation, "gs://b/k", conditional=conditional)
    xml = f"<Error><Code>{code[:1].upper()}{code[1:]}</Code><Message>said</Message></Error>".encode() if code else b""
    xml_api, _ = failure_of(status, xml, operation, "gs://b/k", conditional=conditional)
    assert type(json_api) is type(xml_api)
    assert json_api.remedy == xml_api.remedy
    return json_api


def s3(operation: str, status: int, code: str, conditional: bool) -> StoreError:
    reply: Any = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    asked = ("Key", "IfMatch") if conditional else ("Key",)
    return translate_s3(botocore.exceptions.ClientError(reply, operation), operation, "s3://b/k", asked=asked)


ROWS: list[tuple[Any, str, int, str, bool, type[StoreError], str]] = [
    (azure, "get", 409, "BlobArchived", False, StoreError, "rehydrate"),
    (azure, "get", 409, "BlobBeingRehydrated", False, StoreError, "rehydrate"),
    (azure, "get", 409, "NotYetKnown", False, StoreError, ""),
    (azure, "get", 404, "NotYetKnown", False, StoreError, ""),
    (azure, "get", 412, "", False, StoreError, ""),
    (azure, "get", 412, "ConditionNotMet", False, PreconditionFailedError, ""),
    (azure, "get", 404, "BlobNotFound", False, ObjectNotFoundError, ""),
    (azure, "get", 404, "ContainerNotFound", False, BucketNotFoundError, "create the bucket"),
    (azure, "get", 409, "ContainerBeingDeleted", False, StoreError, "deleted"),
    (azure, "get", 403, "KeyVaultEncryptionKeyNotFound", False, StoreError, "Key Vault"),
    (azure, "get", 403, "AuthorizationPermissionMismatch", False, AccessDeniedError, "Storage Blob Data Reader"),
    (azure, "put", 403, "AuthorizationPermissionMismatch", False, AccessDeniedError, "Storage Blob Data Contributor"),
    (azure, "put", 403, "AuthenticationFailed", False, CredentialsError, "SAS"),
    (azure, "put", 412, "LeaseIdMissing", True, AccessDeniedError, "lease break"),
    (azure, "put", 409, "BlobImmutableDueToPolicy", True, AccessDeniedError, "immutability"),
    (azure, "put", 409, "NotYetKnown", True, StoreError, ""),
    (azure, "put", 409, "BlobAlreadyExists", True, PreconditionFailedError, ""),
    (azure, "put", 412, "ConditionNotMet", True, PreconditionFailedError, ""),
    (azure, "put", 412, "", True, PreconditionFailedError, ""),
    (azure, "put", 412, "", False, StoreError, ""),
    (azure, "put", 503, "ServerBusy", True, ThrottledError, ""),
    (azure, "put", 500, "OperationTimedOut", True, TransientStoreError, ""),
    (azure, "delete", 409, "BlobImmutableDueToLegalHold", False, AccessDeniedError, "hold"),
    (azure, "delete", 409, "SnapshotsPresent", False, StoreError, "snapshots"),
    (s3fs, "get", 404, "NoSuchKey", False, ObjectNotFoundError, ""),
    (s3fs, "get", 404, "kms:KeyNotFound", False, StoreError, "key"),
    (s3fs, "get", 404, "NotYetKnown", False, StoreError, ""),
    (s3fs, "get", 403, "InvalidObjectState", False, StoreError, "restore"),
    (gcs, "objects.get", 403, "forbidden", False, AccessDeniedError, "storage.objects.get"),
    (gcs, "objects.insert", 403, "forbidden", False, AccessDeniedError, "storage.objects.create"),
    (gcs, "objects.insert", 403, "retentionPolicyNotMet", True, AccessDeniedError, "retention"),
    (gcs, "objects.delete", 403, "objectUnderActiveHold", False, AccessDeniedError, "hold"),
    (gcs, "objects.insert", 403, "accountDisabled", False, AccessDeniedError, "billing"),
    (gcs, "objects.get", 403, "vpcServiceControls", False, AccessDeniedError, "perimeter"),
    (gcs, "objects.get", 403, "notYetKnown", False, AccessDeniedError, "the code"),
    (gcs, "objects.insert", 400, "cloudKmsDisabledKey", False, StoreError, "cloudkms"),
    (gcs, "objects.insert", 412, "orgPolicyConstraintFailed", True, AccessDeniedError, "organisation"),
    (gcs, "objects.insert", 412, "conditionNotMet", True, PreconditionFailedError, ""),
    (gcs, "objects.insert", 412, "conditionNotMet", False, StoreError, ""),
    (gcs, "objects.get", 404, "notFound", False, ObjectNotFoundError, ""),
    (gcs, "objects.get", 404, "notYetKnown", False, StoreError, ""),
    (gcs, "objects.insert", 409, "conflict", True, TransientStoreError, ""),
    (s3, "GetObject", 403, "InvalidObjectState", False, StoreError, "restore-object"),
    (s3, "GetObject", 404, "kms:KeyNotFound", False, StoreError, "key"),
    (s3, "GetObject", 404, "NotYetKnown", False, StoreError, ""),
    (s3, "HeadObject", 404, "", False, ObjectNotFoundError, ""),
    (s3, "PutObject", 412, "PreconditionFailed", True, PreconditionFailedError, ""),
    (s3, "PutObject", 412, "PreconditionFailed", False, StoreError, ""),
    (s3, "PutObject", 409, "ConditionalRequestConflict", True, PreconditionFailedError, ""),
    (s3, "HeadObject", 412, "", True, PreconditionFailedError, ""),
    (s3, "DeleteObject", 400, "ObjectLocked", False, AccessDeniedError, "retention"),
    (s3, "PutObject", 403, "QuotaExceeded", False, StoreError, "quota"),
]


@pytest.mark.parametrize(("provider", "operation", "status", "code", "conditional", "kind", "word"), ROWS)
def test_classifies_an_answer_by_what_was_asked(
    provider: Any, operation: str, status: int, code: str, conditional: bool, kind: type[StoreError], word: str
) -> None:
    failure = provider(operation, status, code, conditional)
    assert type(failure) is kind
    assert word in (failure.remedy or "")
    assert failure.action is kind.action
    if provider in (azure, gcs):
        assert not any(name in str(failure) for name in ("AWS", "s3:", "aws/", "PutObject"))
    if code not in ("BlobNotFound", "NoSuchKey", "notFound", ""):
        # Nothing that may change is a proof that a checkpoint is damaged.
        assert not isinstance(failure, DAMAGE)


class Azure(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory filesystem, whose `refused` objects answer as Azure does."""

    cachable = False
    refused: tuple[str, int, str] | None = None

    def _check(self, path: str) -> None:
        if Azure.refused and Azure.refused[0] in path:
            raise AzureFailure(*Azure.refused[1:])

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        self._check(path)
        return super().cat_file(path, *args, **options)

    def cat_ranges(self, paths: list[str], *args: Any, **options: Any) -> Any:
        for path in paths:
            self._check(path)
        return super().cat_ranges(paths, *args, **options)

    def pipe_file(self, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith(".metadata"):
            self._check(path)
        return super().pipe_file(path, *args, **options)


@pytest.fixture(autouse=True)
def _nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Azure, "refused", None)
    monkeypatch.setattr(MemoryFileSystem, "store", {})


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "BlobArchived"),
        (409, "NotYetKnown"),
        (412, "LeaseIdMissing"),
        (403, "KeyVaultVaultNotFound"),
        (404, "NotYetKnown"),
    ],
)
@pytest.mark.parametrize("what", ["step-3/data", "step-3/.metadata"])
def test_keeps_a_checkpoint_that_cannot_be_read_for_now(status: int, code: str, what: str, tmp_path: Path) -> None:
    root = f"memory://answers/{tmp_path.name}"
    policy = RetentionPolicy(root=root, keep=Keep(latest=10), prune=Prune(grace=timedelta(0)))
    with CheckpointManager(policy=policy, fs=Azure()) as manager:
        for step in (2, 3):
            manager.save(step, {"w": torch.full((4,), float(step))})
            manager.wait()
    Azure.refused = (what, status, code)
    with CheckpointManager(policy=policy, fs=Azure()) as manager:
        with pytest.raises(StoreError) as caught:
            manager.restore({"w": torch.zeros(4)})
        assert not isinstance(caught.value, DAMAGE)
        manager.save(4, {"w": torch.zeros(4)})
        manager.wait()
        manager.prune()
    Azure.refused = None
    with CheckpointManager(policy=policy, fs=Azure()) as manager:
        assert manager.steps() == [2, 3, 4]


def test_names_a_lease_at_the_commit_and_no_other_job(tmp_path: Path) -> None:
    url = f"memory://answers/{tmp_path.name}/step-1"
    writer = bucketpoint.BucketWriter(fs=Azure())
    dcp.save({"w": torch.ones(4)}, checkpoint_id=url, storage_writer=writer, no_dist=True)
    Azure.refused = (".metadata", 412, "LeaseIdMissing")
    with pytest.raises(dcp.CheckpointException, match="lease break"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=url, storage_writer=writer, no_dist=True)
