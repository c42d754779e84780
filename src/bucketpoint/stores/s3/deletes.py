"""Expiring deletions: presigned requests, and a trial that shows which deletions a service supports.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import botocore.exceptions
import botocore.parsers
from botocore.awsrequest import AWSRequest

from bucketpoint.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from bucketpoint.stores import retry
from bucketpoint.stores.base import UNDECIDED, ExpiringDeletes, Store, scratch_key
from bucketpoint.stores.http_store import http_seconds
from bucketpoint.stores.s3.client import S3Client
from bucketpoint.stores.s3.errors import FAILURES, translate
from bucketpoint.stores.s3.options import S3Service

_OPERATION = "DeleteObject"

# Seconds of the trial: the lifetime of a request that must arrive in time, the shortest possible lifetime, and a wait
# that is certainly longer than the shortest lifetime.
_LONG_S, _SHORT_S, _WAIT_S = 60, 1, 2.5


def _hide_signature(record: logging.LogRecord) -> bool:
    """Remove the query of presigned URLs, which contains signature and session token, from a log record of urllib3."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg.partition("?")[0] if isinstance(arg, str) and "X-Amz-Signature=" in arg else arg for arg in record.args
        )
    return True


logging.getLogger("urllib3.connectionpool").addFilter(_hide_signature)


def signed_delete(client: S3Client, bucket: str, key: str, seconds: int, url: str) -> Callable[[], bool]:
    """Sign the deletion of one object, and return the function that sends the request: see `ExpiringDeletes`."""
    api = client.api
    # The whole second, by this machine's clock, after which the service refuses the request.
    ends = int(time.time()) + seconds
    given = {**client.parameters[_OPERATION], "Bucket": bucket, "Key": key}
    signed_url = api.generate_presigned_url(botocore.xform_name(_OPERATION), Params=given, ExpiresIn=seconds)
    model = api.meta.service_model.operation_model(_OPERATION)
    # Parameters that are sent as headers are signed, too, so the request must contain these headers.
    members = {name: model.input_shape.members[name].serialization for name in given}
    headers = {where["name"]: str(given[name]) for name, where in members.items() if where.get("location") == "header"}

    def send() -> bool:
        # Time of the reply by the service's clock; 0 without a reply.
        when = 0.0
        try:
            request = AWSRequest("DELETE", signed_url, headers={**headers, "User-Agent": api.meta.config.user_agent})
            reply = client.exchange(request.prepare(), _OPERATION)
            content = {"status_code": reply.status_code, "headers": reply.headers, "body": reply.content}
            when = http_seconds(reply.headers.get("Date")) or time.time()
            if reply.status_code < 300:
                return True
            answer = botocore.parsers.create_parser("rest-xml").parse(content, model.output_shape)
            raise botocore.exceptions.ClientError(answer, _OPERATION)
        except FAILURES as error:
            refusal = translate(error, _OPERATION, url, region=client.region)
        if isinstance(refusal, ObjectNotFoundError):
            return True
        # A service answers an expired request like one without permission, so the service's clock decides which it was.
        if isinstance(refusal, AccessDeniedError | CredentialsError) and when >= ends:
            return False
        raise refusal

    return send


class _Deletes(ExpiringDeletes, Store, Protocol):
    """A store with `delete_unseen`, which relies on the service's condition alone."""

    def delete_unseen(self, key: str, etag: str) -> None: ...


def tried(store: _Deletes, prefix: str, service: S3Service) -> S3Service:
    """Return the service with its support for deletions, found by a trial of at most nine small requests and 3 s."""
    key = scratch_key(prefix)
    try:
        conditional = _found(lambda: _is_conditional(store, key))
        expiring = not conditional and _found(lambda: _expires(store, key))
    finally:
        with contextlib.suppress(StoreError):
            store.delete([key])
    return replace(service, conditional_delete=conditional, expiring_delete=expiring)


def _found(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except UNDECIDED:
        raise
    except StoreError:
        return False


def _is_conditional(store: _Deletes, key: str) -> bool:
    before = store.put(key, [memoryview(b"first")]).etag or ""
    now = store.put(key, [memoryview(b"second")]).etag or ""
    try:
        store.delete_unseen(key, before)
    except PreconditionFailedError:
        # The second deletion must succeed: a service that refuses every condition would never delete anything.
        store.delete_unseen(key, now)
        return True
    return False


def _expires(store: _Deletes, key: str) -> bool:
    body: list[Any] = [memoryview(b"third")]
    store.put(key, body)
    if not store.expiring_delete(key, _LONG_S)():
        return False
    store.put(key, body)
    late = store.expiring_delete(key, _SHORT_S)
    retry.pause(_WAIT_S)
    return not late()
