"""Deletions that expire: requests signed before they are sent, and a trial of a service's support for deletions.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

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
from bucketpoint.stores.base import Capabilities, Store
from bucketpoint.stores.s3.client import DeletesFound, S3Client, http_session
from bucketpoint.stores.s3.errors import FAILURES, translate
from bucketpoint.stores.trials import SCRATCH, UNDECIDED

if TYPE_CHECKING:
    from bucketpoint.stores.s3.store import S3Store

_OPERATION = "DeleteObject"

# Lifetimes of the trial's signed requests: one long enough to arrive in time, and the shortest possible one with a wait
# that is certainly longer.
_LONG_S, _SHORT_S, _WAIT_S = 60, 1, 2.5


@dataclass(frozen=True)
class SignedDelete:
    """A signed deletion of one object. Each call sends the request; see `ExpiringDeletes`."""

    client: S3Client = field(repr=False)
    signed_url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    url: str
    ends: float
    """The whole second, by this machine's clock, after which the service refuses the request."""

    @classmethod
    def of(cls, client: S3Client, bucket: str, key: str, seconds: int, url: str) -> SignedDelete:
        api, ends = client.api, float(int(time.time()) + seconds)
        given = {**client.parameters[_OPERATION], "Bucket": bucket, "Key": key}
        signed_url = api.generate_presigned_url(botocore.xform_name(_OPERATION), Params=given, ExpiresIn=seconds)
        members = api.meta.service_model.operation_model(_OPERATION).input_shape.members
        # Parameters that travel as headers are signed, too, so these headers have to be sent.
        headers = {
            members[name].serialization["name"]: str(value)
            for name, value in given.items()
            if members[name].serialization.get("location") == "header"
        }
        return cls(client, signed_url, {**headers, "User-Agent": api.meta.config.user_agent}, url, ends)

    def __call__(self) -> bool:
        refusal, when = self._send()
        if refusal is None or isinstance(refusal, ObjectNotFoundError):
            return True
        # A service answers an expired request like one without permission, so the service's clock decides which it was.
        if isinstance(refusal, AccessDeniedError | CredentialsError) and when >= self.ends:
            return False
        raise refusal

    def _send(self) -> tuple[StoreError | None, float]:
        """Send the request.

        Returns:
            The error with which the service refused the request, or None; and the time by the service's clock, 0 if
            there was no reply.
        """
        api = self.client.api
        try:
            reply = http_session(api).send(AWSRequest("DELETE", self.signed_url, headers=dict(self.headers)).prepare())
            content = {"status_code": reply.status_code, "headers": reply.headers, "body": reply.content}
            said = reply.headers.get("Date")
            when = parsedate_to_datetime(said).timestamp() if said else time.time()
            if reply.status_code < 300:
                return None, when
            shape = api.meta.service_model.operation_model(_OPERATION).output_shape
            answer = botocore.parsers.create_parser("rest-xml").parse(content, shape)
            refusal: Exception = botocore.exceptions.ClientError(answer, _OPERATION)
        except FAILURES as error:
            refusal, when = error, 0.0
        return translate(refusal, _OPERATION, self.url, region=self.client.region), when


def proven_deletes(store: Store, prefix: str) -> Capabilities:
    """Return the capabilities of a store, with `conditional_delete` and `expiring_delete` found by trial if necessary.

    The trial is made once per process for each bucket, with a scratch object below `prefix`, where the caller must be
    allowed to write and delete.

    Raises:
        StoreError: the trial was undecided.
    """
    # Not by isinstance: from Python 3.12 on a protocol does not see methods that a wrapper, such as a paced store,
    # forwards.
    prove: Callable[[str], Capabilities] | None = getattr(store, "prove_deletes", None)
    return store.capabilities if prove is None else prove(prefix)


def tried(store: S3Store, prefix: str) -> DeletesFound:
    """Try out deletions of a scratch object, with at most eight small requests and 3 seconds."""
    key = f"{prefix}/{SCRATCH}" if prefix else SCRATCH
    key += secrets.token_hex(8)
    try:
        conditional = _found(lambda: _is_conditional(store, key))
        expiring = not conditional and _found(lambda: _expires(store, key))
    finally:
        with contextlib.suppress(StoreError):
            store.delete([key])
    return DeletesFound(conditional, expiring)


def _found(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except UNDECIDED:
        raise
    except StoreError:
        return False


def _is_conditional(store: S3Store, key: str) -> bool:
    before = store.put(key, [memoryview(b"first")]).etag or ""
    now = store.put(key, [memoryview(b"second")]).etag or ""
    try:
        store.delete_unseen(key, before)
    except PreconditionFailedError:
        # The second deletion must succeed: a service that refuses every condition would never delete anything.
        store.delete_unseen(key, now)
        return True
    return False


def _expires(store: S3Store, key: str) -> bool:
    body: list[Any] = [memoryview(b"third")]
    store.put(key, body)
    if not store.expiring_delete(key, _LONG_S)():
        return False
    store.put(key, body)
    late = store.expiring_delete(key, _SHORT_S)
    retry.pause(_WAIT_S)
    return not late()
