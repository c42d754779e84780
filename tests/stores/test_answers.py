"""Rows of one table: an operation, the answer of a provider, the error that it becomes, and a word of the remedy."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from bucketpoint.errors import (
    DAMAGE,
    AccessDeniedError,
    Action,
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UnsupportedRequestError,
    UploadNotFoundError,
    WrongRegionError,
)
from bucketpoint.manager import CheckpointManager
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import retry
from bucketpoint.stores.fsspec.errors import translate
from bucketpoint.stores.gcs.errors import failure_of
from bucketpoint.stores.s3.errors import translate as translate_s3
from stores.engines import ENGINES
from stores.scripted import Answer, scripted
from stores.scripted import error as s3_error


class AzureFailure(Exception):
    """As azure.core raises it: the status and the code are in fields."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__("refused")
        self.status_code, self.error_code = status, code


def azure(operation: str, status: int, code: str, asked: str) -> StoreError:
    # adlfs wraps some answers in Python's own exceptions.
    wrapped: Exception = FileNotFoundError("wrapped") if status == 404 else FileExistsError("wrapped")
    wrapped.__cause__ = AzureFailure(status, code or None)
    bare, wrapped = (
        translate(error, operation, "az://c/k", conditional=bool(asked))
        for error in (AzureFailure(status, code or None), wrapped if code else AzureFailure(status, None))
    )
    assert type(bare) is type(wrapped)
    assert bare.remedy == wrapped.remedy
    return bare


def s3fs(operation: str, status: int, code: str, asked: str) -> StoreError:
    error = FileNotFoundError("wrapped")
    error.__cause__ = botocore.exceptions.ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
        operation,
    )
    return translate(error, operation, "s3://b/k", conditional=bool(asked))


def gcs(operation: str, status: int, code: str, asked: str) -> StoreError:
    body = json.dumps({"error": {"message": "said", "errors": [{"reason": code}]}}).encode() if code else b""
    json_api, _ = failure_of(status, body, operation, "gs://b/k", conditional=bool(asked))
    xml = f"<Error><Code>{code[:1].upper()}{code[1:]}</Code><Message>said</Message></Error>".encode() if code else b""
    xml_api, _ = failure_of(status, xml, operation, "gs://b/k", conditional=bool(asked))
    assert type(json_api) is type(xml_api)
    assert json_api.remedy == xml_api.remedy
    return json_api


def s3(operation: str, status: int, code: str, asked: str) -> StoreError:
    reply: Any = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = botocore.exceptions.ClientError(reply, operation)
    return translate_s3(error, operation, "s3://b/k", asked=("Key", *asked.split()))


PLAIN: list[tuple[Any, str, type[StoreError], list[tuple[int, str]]]] = [
    (azure, "get", StoreError, [(409, "NotYetKnown"), (404, "NotYetKnown"), (412, "")]),
    (azure, "get", PreconditionFailedError, [(412, "ConditionNotMet")]),
    (azure, "get", ObjectNotFoundError, [(404, "BlobNotFound")]),
    (azure, "put", StoreError, [(412, "")]),
    (azure, "put", ObjectNotFoundError, [(404, "")]),
    (s3fs, "get", ObjectNotFoundError, [(404, "NoSuchKey")]),
    (s3fs, "get", StoreError, [(404, "NotYetKnown")]),
    (gcs, "objects.insert", StoreError, [(412, "conditionNotMet")]),
    (gcs, "objects.get", ObjectNotFoundError, [(404, "notFound")]),
    (gcs, "objects.get", StoreError, [(404, "notYetKnown"), (400, "invalid")]),
    (
        gcs,
        "objects.get",
        ThrottledError,
        [(403, "rateLimitExceeded"), (429, "rateLimitExceeded"), (503, "backendError")],
    ),
    (gcs, "objects.get", TransientStoreError, [(408, "uploadBrokenConnection"), (500, "backendError"), (502, "")]),
    (gcs, "objects.get", CorruptDataError, [(416, "requestedRangeNotSatisfiable")]),
    (gcs, "complete multipart upload", UploadNotFoundError, [(404, "noSuchUpload")]),
    (gcs, "complete multipart upload", BucketNotFoundError, [(404, "noSuchBucket")]),
    (gcs, "complete multipart upload", CorruptDataError, [(400, "badDigest")]),
    (gcs, "complete multipart upload", ThrottledError, [(503, "slowDown")]),
    (gcs, "complete multipart upload", StoreError, [(400, "entityTooSmall")]),
    (gcs, "complete multipart upload", TransientStoreError, [(200, "internalError")]),
    (s3, "GetObject", StoreError, [(404, "NotYetKnown"), (400, "InvalidArgument")]),
    (s3, "HeadObject", ObjectNotFoundError, [(404, "")]),
    (s3, "PutObject", StoreError, [(412, "PreconditionFailed")]),
    (s3, "GetObject", ObjectNotFoundError, [(404, "NoSuchKey")]),
    (s3, "GetObject", UploadNotFoundError, [(404, "NoSuchUpload")]),
    (s3, "GetObject", AccessDeniedError, [(403, "SomethingNew")]),
    (s3, "GetObject", CredentialsError, [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")]),
    (s3, "GetObject", ThrottledError, [(503, "SlowDown"), (429, "TooManyRequests")]),
    (s3, "GetObject", TransientStoreError, [(500, "InternalError"), (502, ""), (400, "RequestTimeout")]),
    (s3, "GetObject", TransientStoreError, [(500, "NotYetKnown")]),
    (
        s3,
        "GetObject",
        CorruptDataError,
        [(400, "BadDigest"), (400, "XAmzContentChecksumMismatch"), (416, "InvalidRange")],
    ),
]
"""Answers by the class of error that each of them becomes."""

ROWS: list[tuple[Any, str, int, str, str, type[StoreError], str]] = [
    *((*asked, *answer, "", kind, "") for *asked, kind, answers in PLAIN for answer in answers),
    (azure, "get", 409, "BlobArchived", "", StoreError, "rehydrate"),
    (azure, "get", 409, "BlobBeingRehydrated", "", StoreError, "rehydrate"),
    (azure, "get", 404, "ContainerNotFound", "", BucketNotFoundError, "create the bucket"),
    (azure, "get", 409, "ContainerBeingDeleted", "", StoreError, "deleted"),
    (azure, "get", 403, "KeyVaultEncryptionKeyNotFound", "", StoreError, "Key Vault"),
    (azure, "get", 403, "AuthorizationPermissionMismatch", "", AccessDeniedError, "Storage Blob Data Reader"),
    (azure, "put", 403, "AuthorizationPermissionMismatch", "", AccessDeniedError, "Storage Blob Data Contributor"),
    (azure, "put", 403, "AuthenticationFailed", "", CredentialsError, "SAS"),
    (azure, "put", 412, "LeaseIdMissing", "IfMatch", AccessDeniedError, "lease break"),
    (azure, "put", 409, "BlobImmutableDueToPolicy", "IfMatch", AccessDeniedError, "immutability"),
    (azure, "put", 409, "NotYetKnown", "IfMatch", StoreError, ""),
    (azure, "put", 409, "BlobAlreadyExists", "IfMatch", PreconditionFailedError, ""),
    (azure, "put", 412, "ConditionNotMet", "IfMatch", PreconditionFailedError, ""),
    (azure, "put", 412, "", "IfMatch", PreconditionFailedError, ""),
    (azure, "put", 503, "ServerBusy", "IfMatch", ThrottledError, ""),
    (azure, "put", 500, "OperationTimedOut", "IfMatch", TransientStoreError, ""),
    (azure, "delete", 409, "BlobImmutableDueToLegalHold", "", AccessDeniedError, "hold"),
    (azure, "delete", 409, "SnapshotsPresent", "", StoreError, "snapshots"),
    (azure, "put", 403, "", "", AccessDeniedError, "lack the right to write here"),
    (azure, "head", 403, "", "", AccessDeniedError, "lack the right to read here"),
    (azure, "delete", 403, "", "", AccessDeniedError, "lack the right to delete here"),
    (s3fs, "get", 404, "kms:KeyNotFound", "", StoreError, "key"),
    (s3fs, "get", 403, "InvalidObjectState", "", StoreError, "restore"),
    (gcs, "objects.get", 403, "forbidden", "", AccessDeniedError, "needs storage.objects.get"),
    (gcs, "objects.insert", 403, "forbidden", "", AccessDeniedError, "needs storage.objects.create"),
    (gcs, "objects.insert", 403, "retentionPolicyNotMet", "IfMatch", AccessDeniedError, "retention"),
    (gcs, "objects.delete", 403, "objectUnderActiveHold", "", AccessDeniedError, "hold"),
    (gcs, "objects.insert", 403, "accountDisabled", "", AccessDeniedError, "billing"),
    (gcs, "objects.get", 403, "vpcServiceControls", "", AccessDeniedError, "perimeter"),
    (gcs, "objects.get", 403, "notYetKnown", "", AccessDeniedError, "The code"),
    (gcs, "objects.insert", 400, "cloudKmsDisabledKey", "", StoreError, "cloudkms"),
    (gcs, "objects.insert", 412, "orgPolicyConstraintFailed", "IfMatch", AccessDeniedError, "organisation"),
    (gcs, "objects.insert", 412, "conditionNotMet", "IfMatch", PreconditionFailedError, ""),
    (gcs, "objects.insert", 409, "conflict", "IfMatch", TransientStoreError, ""),
    (gcs, "objects.get", 400, "userProjectMissing", "", AccessDeniedError, "requester_pays="),
    (gcs, "objects.get", 401, "authError", "", CredentialsError, "gcloud auth"),
    (gcs, "upload part", 403, "accessDenied", "", AccessDeniedError, "needs storage.multipartUploads.create"),
    (s3, "GetObject", 403, "InvalidObjectState", "", StoreError, "restore-object"),
    (s3, "GetObject", 404, "kms:KeyNotFound", "", StoreError, "key"),
    (s3, "PutObject", 412, "PreconditionFailed", "IfMatch", PreconditionFailedError, ""),
    (s3, "PutObject", 409, "ConditionalRequestConflict", "IfMatch", PreconditionFailedError, ""),
    (s3, "HeadObject", 412, "", "IfMatch", PreconditionFailedError, ""),
    (s3, "DeleteObject", 400, "ObjectLocked", "", AccessDeniedError, "retention"),
    (s3, "PutObject", 403, "QuotaExceeded", "", StoreError, "quota"),
    (s3, "GetObject", 400, "InvalidBucketName", "", StoreError, "S3 allows 3 to 63"),
    (s3, "GetObject", 404, "NoSuchBucket", "", BucketNotFoundError, "create"),
    (s3, "GetObject", 403, "AccessDenied", "", AccessDeniedError, "s3:GetObject"),
    (s3, "GetObject", 404, "XAdminUserNotFound", "", CredentialsError, "to this endpoint's store"),
    (s3, "GetObject", 403, "SignatureDoesNotMatch", "", CredentialsError, "The secret key is not that"),
    (s3, "GetObject", 403, "RequestTimeTooSkewed", "", CredentialsError, "timedatectl"),
    (s3, "PutObject", 400, "KMS.NotFoundException", "", StoreError, "SSEKMSKeyId in request_kwargs"),
    (s3, "PutObject", 400, "KMS.DisabledException", "", StoreError, "SSEKMSKeyId in request_kwargs"),
    (s3, "PutObject", 400, "KMS.InvalidKeyUsageException", "", StoreError, "SSEKMSKeyId in request_kwargs"),
    (s3, "PutObject", 400, "KMS.KMSInvalidStateException", "", StoreError, "SSEKMSKeyId in request_kwargs"),
    (s3, "PutObject", 403, "kms:NotAuthorized", "", StoreError, "SSEKMSKeyId in request_kwargs"),
    (s3, "PutObject", 404, "kms:KeyNotFound", "IfMatch", StoreError, "SSEKMSKeyId in request_kwargs"),
    *(
        (s3, "PutObject", 501, "NotImplemented", asked, UnsupportedRequestError, word)
        for asked, word in (
            ("IfNoneMatch", 'conditional_puts": false'),
            ("SSEKMSKeyId ServerSideEncryption", "by SSEKMSKeyId in"),
            ("ServerSideEncryption", "by ServerSideEncryption in"),
            ("ServerSideEncryption IfNoneMatch", "conditional_puts"),
        )
    ),
]


@pytest.mark.parametrize(("provider", "operation", "status", "code", "asked", "kind", "word"), ROWS)
def test_classifies_an_answer_by_what_was_asked(
    provider: Any, operation: str, status: int, code: str, asked: str, kind: type[StoreError], word: str
) -> None:
    failure = provider(operation, status, code, asked)
    assert type(failure) is kind
    assert word in (failure.remedy or "")
    assert (code or str(status)) in failure.message or provider in (azure, s3fs)
    assert failure.action is ACTIONS.get((provider, code or status), kind.action)
    if provider in (azure, gcs):
        assert not any(name in str(failure) for name in ("AWS", "s3:", "aws/", "PutObject"))
    if provider is s3 and kind is UnsupportedRequestError:
        assert ("conditional_puts" in str(failure)) == ("If" in asked)
    if kind not in (ObjectNotFoundError, CorruptDataError):
        # Nothing that may change is a proof that a checkpoint is damaged.
        assert not isinstance(failure, DAMAGE)


ACTIONS: dict[tuple[Any, str | int], Action] = {
    **{(s3, code): Action.REFRESH for code in ("ExpiredToken", "InvalidAccessKeyId", "XAdminUserNotFound")},
    **{(s3, code): Action.RETRY for code in ("BadDigest", "XAmzContentChecksumMismatch")},
    (s3, 502): Action.OUTAGE,
    (gcs, 502): Action.OUTAGE,
}
"""Reactions that are not those of the class of error."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileExistsError("x"), PreconditionFailedError),
        (AzureFailure(409, None), PreconditionFailedError),
        (AzureFailure(401, None), CredentialsError),
        (AzureFailure(403, None), AccessDeniedError),
        (AzureFailure(429, None), ThrottledError),
        (AzureFailure(500, None), TransientStoreError),
        (TimeoutError("x"), TransientStoreError),
        (OSError(16, "busy"), TransientStoreError),
        (ConnectionRefusedError("x"), EndpointError),
        (OSError(22, "invalid"), StoreError),
        (RuntimeError("x"), StoreError),
    ],
)
def test_classifies_the_exceptions_of_filesystems_and_what_wraps_them(error: Exception, kind: type[StoreError]) -> None:
    found = translate(error, "put", "s3://b/k", conditional=True)
    assert type(found) is kind
    assert found.url == "s3://b/k"
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    wrapped = OSError("wrapped")
    wrapped.__cause__ = error
    if not isinstance(error, FileExistsError | RuntimeError):
        assert type(translate(wrapped, "put", "s3://b/k", conditional=True)) is kind


def test_shows_the_first_of_the_lines_that_a_library_says_and_asks_for_credentials() -> None:
    shown = str(translate(RuntimeError("no such thing\nRequestId: 1\n<Error>"), "put", "az://c/k"))
    assert "no such thing" in shown
    assert "RequestId" not in shown
    nobody = botocore.exceptions.ProfileNotFound(profile="nobody")
    for error, said in ((botocore.exceptions.NoCredentialsError(), "Set credentials"), (nobody, "nobody")):
        failure = translate_s3(error, "PutObject", "s3://bucket/run")
        assert isinstance(failure, CredentialsError)
        assert said in str(failure)


REPLIES = [
    ("s3", 404, "NoSuchBucket", BucketNotFoundError, 1),
    ("s3", 403, "AccessDenied", AccessDeniedError, 1),
    ("s3", 400, "InvalidArgument", StoreError, 1),
    ("s3", 500, "InternalError", TransientStoreError, 3),
    ("s3", 503, "SlowDown", ThrottledError, 3),
    # Without credentials a 401 ends in google-auth, which cannot renew what is not there: its reason is not told.
    ("gcs", 401, "", CredentialsError, 1),
    ("gcs", 403, "forbidden", AccessDeniedError, 1),
    ("gcs", 416, "requestedRangeNotSatisfiable", CorruptDataError, 1),
    ("gcs", 502, "", TransientStoreError, 3),
    ("gcs", 429, "rateLimitExceeded", ThrottledError, 3),
]


@pytest.mark.contract
@pytest.mark.parametrize(("engine", "status", "code", "kind", "sent"), REPLIES)
def test_raises_one_error_without_a_secret_after_as_many_requests_as_it_calls_for(
    engine: str, status: int, code: str, kind: type[StoreError], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "gcs":
        pytest.importorskip("google.cloud.storage")
    spoken = ENGINES[engine]
    monkeypatch.setattr(retry, "pause", lambda seconds: None)
    with scripted(lambda request, number: spoken.error(status, code)) as server, pytest.raises(kind) as caught:
        spoken.at(server).get("folder/the key")
    found = caught.value
    assert (type(found), len(server.seen)) == (kind, sent)
    assert spoken.reads in found.message
    assert code in found.message
    assert found.url == f"{spoken.scheme}://bucket" + ("/folder/the key" if kind is not BucketNotFoundError else "")
    assert "hush" not in str(found)
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), str(again)) == (kind, str(found))
    assert found.__context__ is None


@pytest.mark.parametrize(
    ("reply", "remedy"),
    [
        (s3_error(400, "AuthorizationHeaderMalformed", extra="<Region>eu-north-1</Region>"), "AWS_REGION=eu-north-1"),
        (s3_error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"}), "AWS_REGION=eu-north-1"),
        (s3_error(400, "IllegalLocationConstraintException"), "Set AWS_REGION"),
        (s3_error(301, "PermanentRedirect"), "Set AWS_REGION"),
    ],
    ids=["signed for another", "redirected", "refused", "redirected nowhere"],
)
def test_names_the_region_of_a_bucket_as_far_as_the_store_does(reply: Answer, remedy: str) -> None:
    with scripted(lambda request, number: reply) as server, pytest.raises(WrongRegionError, match=remedy):
        ENGINES["s3"].at(server).get("run/step-1/.metadata")


class InArchive(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory filesystem, some of whose objects are in an archive, as Azure says it."""

    cachable = False
    holds = ""

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        if InArchive.holds and InArchive.holds in path:
            raise AzureFailure(409, "BlobArchived")
        return super().cat_file(path, *args, **options)


@pytest.mark.parametrize("what", ["step-3/data", "step-3/.metadata"])
def test_keeps_a_checkpoint_that_cannot_be_read_for_now(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    policy = RetentionPolicy(
        root=f"memory://answers/{tmp_path.name}", keep=Keep(latest=10), prune=Prune(grace=timedelta(0))
    )
    with CheckpointManager(policy=policy, fs=InArchive()) as manager:
        for step in (2, 3):
            manager.save(step, {"w": torch.full((4,), float(step))})
            manager.wait()
    with monkeypatch.context() as patch, CheckpointManager(policy=policy, fs=InArchive()) as manager:
        patch.setattr(InArchive, "holds", what)
        with pytest.raises(StoreError) as caught:
            manager.restore({"w": torch.zeros(4)})
        assert not isinstance(caught.value, DAMAGE)
        manager.save(4, {"w": torch.zeros(4)})
        manager.wait()
        manager.prune()
    with CheckpointManager(policy=policy, fs=InArchive()) as manager:
        assert manager.steps() == [2, 3, 4]
