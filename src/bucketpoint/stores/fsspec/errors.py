"""Translation of the exceptions of fsspec's filesystems to the classes in `bucketpoint.errors`.

Each filesystem raises the exceptions of its client library: Python's built-in exceptions, or exceptions whose
attributes contain an HTTP status and the service's code. The chain of causes is searched for both; the text of
an exception is never used.
"""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BucketpointError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.stores.foreign import ARCHIVED, Asked, ErrorRule, RuleKey, answers, asked_by, find_rule, rule_of
from bucketpoint.stores.redact import describe

CHECK_ENDPOINT = "Check the endpoint, the host or the connection string in storage_options, and the network"

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_UNREACHABLE = (ConnectionRefusedError, socket.gaierror)
_PASSING = (TimeoutError, ConnectionError)

# s3fs translates InternalError, RequestTimeout and SlowDown to some of these numbers. Only Linux has EREMOTEIO.
_PASSING_NUMBERS = frozenset(
    {errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EBUSY)}
)
_UNREACHABLE_NUMBERS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})

_RIGHTS = {
    **dict.fromkeys(("put", "create_multipart", "put_part", "complete_multipart", "abort_multipart"), "write"),
    **dict.fromkeys(("get", "head"), "read"),
    "list_multipart": "list",
    "copy": "read and to write",
}
"""Permission that an operation needs, for messages, where it differs from the operation's name."""

_ARCHIVED = (
    "The object is in an archive tier: rehydrate it to an online tier (`az storage blob set-tier --tier Hot`) and try "
    "again, and leave checkpoints out of the rule that archives them"
)
_LEASED = "A lease on the blob or its container refuses the change: break it (`az storage blob lease break`)"
_IMMUTABLE = (
    "An immutability policy or a legal hold keeps the blob: wait for its end, remove it (az storage blob legal-hold), "
    "or use a container without one"
)
_VAULT = (
    "Check the key in Azure Key Vault that encrypts the account: it must be enabled, and the account's identity needs "
    "get, wrapKey and unwrapKey"
)
_DISABLED = "The account or the container is disabled, or is being deleted: ask who administers the storage account"
_KMS = "Check the KMS key of the bucket or of the request: it must be enabled, and allow these credentials to use it"
_CREDENTIALS = "Check the credentials in storage_options"


def _unauthorised(asked: Asked, role: str) -> dict[RuleKey, ErrorRule]:
    return answers(
        "AuthorizationFailure AuthorizationPermissionMismatch AuthorizationSourceIPMismatch "
        "InsufficientAccountPermissions UnauthorizedBlobOverwrite",
        AccessDeniedError,
        f"Assign the role Storage Blob Data {role} to this identity, and check the firewall of the storage account",
        asked=asked,
    )


# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes and common-rest-api-error-codes.
# S3's codes, which s3fs keeps in the exception's cause, are listed only where the status alone would be misleading.
RULES: dict[RuleKey, ErrorRule] = {
    **answers(
        "BlobNotFound PathNotFound ResourceNotFound SourcePathNotFound NoSuchKey NoSuchVersion NotFound 404",
        ObjectNotFoundError,
    ),
    **answers("ContainerNotFound FilesystemNotFound NoSuchBucket", BucketNotFoundError),
    **answers("NoSuchUpload", UploadNotFoundError),
    **answers(
        "BlobAlreadyExists ConditionNotMet TargetConditionNotMet PathAlreadyExists PreconditionFailed "
        "ConditionalRequestConflict 409 412",
        PreconditionFailedError,
        asked=Asked.CONDITION,
    ),
    # Azure's library reads a large blob in pieces, on the condition that its ETag is still that of the first piece.
    **answers("ConditionNotMet", PreconditionFailedError, asked=Asked.READ),
    **answers("BlobArchived BlobBeingRehydrated", StoreError, _ARCHIVED),
    **answers("InvalidObjectState", StoreError, ARCHIVED),
    **answers(
        "LeaseIdMissing LeaseIdMismatchWithBlobOperation LeaseIdMismatchWithContainerOperation LeaseLost "
        "LeaseNotPresentWithBlobOperation",
        AccessDeniedError,
        _LEASED,
    ),
    **answers(
        "BlobImmutableDueToPolicy BlobImmutableDueToLegalHold ContainerHasLegalHold ContainerImmutabilityPolicyLocked",
        AccessDeniedError,
        _IMMUTABLE,
    ),
    **answers(
        "KeyVaultAccessTokenCannotBeAcquired KeyVaultEncryptionKeyNotFound KeyVaultVaultNotFound", StoreError, _VAULT
    ),
    **answers(
        "KMS.DisabledException KMS.InvalidKeyUsageException KMS.KMSInvalidStateException KMS.NotFoundException "
        "kms:KeyNotFound",
        StoreError,
        _KMS,
    ),
    **answers("AccountIsDisabled ContainerDisabled ContainerBeingDeleted", StoreError, _DISABLED),
    **answers("SnapshotsPresent", StoreError, "Delete the snapshots of the blob first"),
    **answers("PendingCopyOperation", TransientStoreError),
    **_unauthorised(Asked.READ, "Reader"),
    **_unauthorised(Asked.LIST, "Reader"),
    **_unauthorised(Asked.WRITE, "Contributor"),
    **_unauthorised(Asked.DELETE, "Contributor"),
    **answers(
        "AuthenticationFailed InvalidAuthenticationInfo NoAuthenticationInformation",
        CredentialsError,
        f"{_CREDENTIALS}, the end of a SAS token, and this machine's clock",
    ),
    **answers("PublicAccessNotPermitted", CredentialsError, f"{_CREDENTIALS}: the account refuses anonymous requests"),
    **answers("401", CredentialsError, _CREDENTIALS),
    **answers("403", AccessDeniedError),
    **answers("429 503", ThrottledError),
}


def translate(
    error: BaseException,
    operation: str,
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    conditional: bool = False,
) -> StoreError:
    """Return the bucketpoint error for an exception. A `StoreError` is returned unchanged.

    Args:
        options: options of the filesystem, whose secrets the exception may quote.
        conditional: the request had a condition: an ETag, or that no object exists.
    """
    if isinstance(error, StoreError):
        return error
    asked = asked_by(operation)
    rule = _rule_for(error, (Asked.CONDITION, asked) if conditional else (asked,))
    remedy = None
    if rule.kind is AccessDeniedError and rule.remedy is None:
        lacking = f"The credentials lack the right to {_RIGHTS.get(operation, operation)} here"
        remedy = f"{lacking}. A trainer needs to write and to read; a reader, to read"
    # Only the first line: Azure's library quotes the reply in the following lines.
    text = error.message if isinstance(error, BucketpointError) else describe(error, options).partition("\n")[0]
    return rule.error(f"{operation} failed: {text}", url, remedy)


def code_of(error: BaseException) -> str:
    """Return the service's code in an exception or in one of its causes; empty if there is none."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        # botocore's errors have the code in the response, azure's in `error_code`, which may be a member of an enum.
        held = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        code = held or getattr(one, "error_code", None)
        if isinstance(code, str) and not code.isdigit():
            return str(getattr(code, "value", code))
    return ""


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an exception or in one of its causes, or None."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        # botocore's errors have the status in the response, azure's in `status_code`, aiohttp's in `status`, gcsfs's in
        # `code`.
        held = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for value in (held, *(getattr(one, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(value, int) and not isinstance(value, bool) and 300 <= value < 600:
                return value
    return None


def _rule_for(error: BaseException, asked: Collection[Asked]) -> ErrorRule:
    code, status = code_of(error), status_of(error)
    if not code:
        if isinstance(error, FileExistsError):
            return rule_of(PreconditionFailedError)
        if isinstance(error, _MISSING):
            return rule_of(ObjectNotFoundError)
    rule = find_rule(RULES, code, status, asked)
    if rule is not None:
        return rule
    if isinstance(error, PermissionError):
        return RULES[http.client.FORBIDDEN]
    if status is not None and status >= http.client.INTERNAL_SERVER_ERROR:
        return rule_of(TransientStoreError)
    chain = list(_chain(error))
    if any(isinstance(one, _UNREACHABLE) or _number(one) in _UNREACHABLE_NUMBERS for one in chain):
        return rule_of(EndpointError, CHECK_ENDPOINT)
    if status is None and any(isinstance(one, _PASSING) or _number(one) in _PASSING_NUMBERS for one in chain):
        return rule_of(TransientStoreError)
    return rule_of(StoreError)


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        # azure and aiohttp keep a wrapped exception in these attributes, and do not always chain it as a cause.
        inner = getattr(one, "inner_exception", None) or getattr(one, "os_error", None)
        waiting += [inner if isinstance(inner, BaseException) else None, one.__context__, one.__cause__]
