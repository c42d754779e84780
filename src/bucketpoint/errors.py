"""The exception classes of bucketpoint, all derived from `BucketpointError`.

Each class pickles as (message, fields), because DCP sends the exception of one rank to every other rank: an exception
that cannot be unpickled there would hang the job instead of failing it.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def first_of(names: Sequence[object], most: int = 5, between: str = ", ", last: str = " and ") -> str:
    """List at most `most` names for a message, followed by the number of others: `a, b and 3 more`."""
    listed = between.join(map(str, names[:most]))
    return f"{listed}{last}{len(names) - most} more" if len(names) > most else listed


_OWN_OBJECT = re.compile("/_bucketpoint/([^/]*N[^/]*/.*)?$")

LISTED = (
    "`bucketpoint ls ROOT` lists a run's checkpoints, bucketpoint.latest_checkpoint(root) names the newest whole one"
)
"""The end of a remedy: the ways to find a checkpoint, from a shell and from Python."""

# Not `pip install bucketpoint[gcs]`, which could replace an installed checkout by a release from the package index.
INSTALL_GCS = "pip install 'google-cloud-storage>=3', or install bucketpoint with its extra gcs"


class BucketpointError(Exception):
    """Base class of all errors that bucketpoint raises on purpose.

    Args:
        message: what went wrong, in one sentence, without secrets.
        url: URL of the checkpoint or object concerned.
        key: object key or state-dict key concerned.
        rank: rank on which the error happened.
        remedy: what the user can do about the error.
    """

    remedy_default: str | None = None

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        # The user has named the run, and not an object of its catalog, so the URL is cut after the run.
        self.url = _OWN_OBJECT.sub("", url) if url is not None else None
        self.key = key
        self.rank = rank
        self.remedy = remedy if remedy is not None else self.remedy_default

    def __str__(self) -> str:
        given = [(name, value) for name, value in self.fields().items() if name != "remedy"]
        where = [f"{name}={value}" for name, value in given if value not in (None, ())]
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        return f"{text}. {self.remedy}" if self.remedy else text

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments that rebuild this error."""
        return {"url": self.url, "key": self.key, "rank": self.rank, "remedy": self.remedy}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields())


def _rebuild(kind: type[BucketpointError], message: str, fields: dict[str, Any]) -> BucketpointError:
    return kind(message, **fields)


class PeerFailedError(BucketpointError):
    """Another rank of the same save or load failed, or was lost; this rank had no error."""


class InvalidURLError(BucketpointError):
    """The URL has no scheme, no bucket, or a scheme that the called class does not serve."""


class Action(enum.Enum):
    """The reaction to a failed request: retry, slow down, wait, refresh credentials, or give up."""

    RETRY = "retry"
    THROTTLE = "throttle"
    OUTAGE = "wait for the store"
    REFRESH = "refresh credentials"
    FATAL = "fatal"


class StoreError(BucketpointError):
    """A request to the store failed.

    Attributes:
        action: the reaction to the failure; FATAL after the last attempt.
        wait_s: minimum wait before another attempt, in seconds, as the service asked.
        limit_s: limit on the time for all attempts of the request, in seconds, from the options of the store.
    """

    action: Action = Action.FATAL
    wait_s: float = 0.0
    limit_s: float = math.inf


class EndpointError(StoreError):
    """The endpoint could not be reached, or its TLS certificate was not accepted."""

    remedy_default = "Check the endpoint URL, the network and the CA bundle (AWS_ENDPOINT_URL, AWS_CA_BUNDLE)"


class CredentialsError(StoreError):
    """The credentials are missing, malformed or expired."""

    remedy_default = "Check that AWS_PROFILE or AWS_ACCESS_KEY_ID belongs to this endpoint's store and has not expired"


class AccessDeniedError(StoreError):
    """The store recognised the credentials but refused the request."""

    remedy_default = (
        "A trainer needs GetObject, PutObject and AbortMultipartUpload below the checkpoint's URL; "
        "a reader needs GetObject"
    )


class BucketNotFoundError(StoreError):
    """The bucket does not exist."""

    remedy_default = "Check the bucket's name; to save, create the bucket first: bucketpoint never creates buckets"


class WrongRegionError(StoreError):
    """The bucket is in another region than the one that the request was sent to."""

    remedy_default = "Set AWS_REGION (or region=) to the bucket's region"


class ObjectNotFoundError(StoreError):
    """The object does not exist."""


class PreconditionFailedError(StoreError):
    """A conditional request was refused: the object exists, or is not the expected version (HTTP 409 and 412)."""


class UploadNotFoundError(StoreError):
    """The multipart upload does not exist (any more): aborted, expired, or already completed."""


class UnsupportedRequestError(StoreError):
    """The service does not support the request, or something that the request asks for (HTTP 501)."""


class ThrottledError(StoreError):
    """The store asked for fewer requests up to the last attempt."""

    action = Action.THROTTLE


class TransientStoreError(StoreError):
    """The request may succeed when it is sent again: timeout, connection reset, short body, 5xx."""

    action = Action.RETRY


class CorruptDataError(StoreError):
    """The bytes read differ from the bytes written, in checksum or in length."""

    remedy_default = "The object was changed, truncated or replaced; load an older checkpoint, or restore the object"


class CheckpointNotFoundError(BucketpointError):
    """There is no checkpoint at this URL."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """The checkpoint has data but no commit: its save was interrupted, is still running, or failed."""


class CheckpointDeletedError(CheckpointNotFoundError):
    """The checkpoint was deleted by a policy or a person; its data is being removed or is already gone."""

    remedy_default = f"Load another checkpoint: {LISTED}"


class CheckpointExistsError(BucketpointError):
    """A checkpoint is already committed at this URL, and overwrite=False."""

    remedy_default = (
        "Save to another URL, or pass overwrite=True. If training continues from an earlier step, call "
        "CheckpointManager.restore(..., rollback=True)"
    )


class OtherRunError(BucketpointError):
    """The folders belong to a run of another name. Nothing was read or written there."""


class CommitConflictError(BucketpointError):
    """Another job committed to the same URL during this save, or load. The other job's checkpoint is kept."""


class RanksDisagreeError(BucketpointError):
    """The ranks of a save or a load disagree on a value that must be the same on all. Nothing was committed or read."""


class IncompleteSaveError(BucketpointError):
    """The save lacks planned items or parts of the state, or its data was deleted; nothing was committed."""


class MetadataError(BucketpointError):
    """The metadata object cannot be read as DCP metadata."""


class NewerFormatError(MetadataError):
    """The metadata was written by a newer version of bucketpoint, in a format that this version cannot read."""


class UnsafeDataError(BucketpointError):
    """A pickle names a class or function outside the allow-list. No code from the pickle was run."""

    remedy_default = (
        "If you trust the writer of this checkpoint, pass trusted=True to the reader, to bucketpoint.load or to "
        "CheckpointManager"
    )


DAMAGE = (CheckpointNotFoundError, CorruptDataError, MetadataError, ObjectNotFoundError, UnsafeDataError)
"""Errors caused by the checkpoint, and not by the store, the state or the network: another checkpoint may load."""

NOT_UNDERSTOOD = (UnsafeDataError, NewerFormatError)
"""Errors of `DAMAGE` that an undamaged checkpoint may cause too: a load that raises one tries no older checkpoint."""


class MismatchError(BucketpointError):
    """The checkpoint does not fit the state to load into: missing keys or different shapes."""


UNSAVEABLE = (
    "Remove the value from the state, or replace it with numbers, strings, tensors, or lists and dicts of them, from "
    "which it can be rebuilt"
)
"""The remedy for a value that cannot be copied or pickled."""


def at_key(error: Exception, key: str, what: str, kind: type[BucketpointError] = BucketpointError) -> BucketpointError:
    """Return the error for a failure at the value of `key`. A `BucketpointError` keeps its class and text."""
    if isinstance(error, BucketpointError):
        error.key = error.key or key
        return error
    text = f"The value of {key} cannot be {what}: {type(error).__name__}: {error}"
    return kind(text, key=key, remedy=UNSAVEABLE if what == "saved" else None)


def first_fault(
    error: Exception,
    values: Iterable[tuple[str, T]],
    act: Callable[[str, T], object],
    kind: type[BucketpointError] = BucketpointError,
) -> Exception:
    """Return the error of the first value for which `act` fails, after `error` was raised for all values together.

    Returns `error` if `act` fails for no value. Values are tried one by one only after a failure, so success is cheap.
    """
    for key, value in values:
        try:
            act(key, value)
        except Exception as fault:  # noqa: BLE001 (any library may refuse a value)
            return at_key(fault, key, "saved", kind)
    return error


class StagingError(BucketpointError):
    """The state could not be copied to host memory; nothing has been saved."""


class StagingOverlapError(StagingError):
    """An earlier save is still reading the staging memory, and `when_busy` is `"error"`."""

    remedy_default = 'Wait for the earlier save first, or choose when_busy="wait" or "double_buffer"'


class CheckpointProcessError(BucketpointError):
    """DCP's checkpoint process died, or the state could not be passed to it."""


class HelperProcessError(BucketpointError):
    """The process that uploads for a trainer failed, died twice during one save, or could not be started."""


class HelperUnavailableError(HelperProcessError):
    """No process can upload for this trainer; nothing was sent."""

    remedy_default = 'Choose TransferOptions(background="auto"), which then uploads on threads'


_MAX_FAULTS = 100
"""Limit on the faults of a policy that an error lists."""


@dataclass(frozen=True)
class PolicyFault:
    """One fault in a retention policy.

    Attributes:
        message: what is wrong.
        remedy: what to write instead.
        path: keys and list indices from the top of the policy to the fault.
        line, column: position of the fault in the file, counted from 1; None for Python objects.
    """

    message: str
    remedy: str | None = None
    path: tuple[str | int, ...] = ()
    line: int | None = None
    column: int | None = None

    def under(self, *path: str | int) -> PolicyFault:
        """Return the fault with `path` put before its path."""
        return replace(self, path=(*path, *self.path))

    def __str__(self) -> str:
        text = f"{self.message}. {self.remedy}" if self.remedy else self.message
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).lstrip(".")
        return f"{place}: {text}" if place else text


class PolicyError(BucketpointError):
    """A retention policy is wrong, or cannot be applied. Nothing was deleted.

    Args:
        message: as for `BucketpointError`.

    Attributes:
        faults: the first 100 faults found, in the order of the file. The message contains the number of all faults.
        file: the policy's file, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        faults: Sequence[PolicyFault] = (),
        file: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.faults = tuple(faults)
        self.file = file

    @classmethod
    def of(cls, *faults: PolicyFault, file: str | None = None) -> PolicyError:
        """Return an error that lists `faults` of the policy in `file`, or of a Python object (None)."""
        name = file or "The policy"
        message = f"{name} has {len(faults)} faults" if len(faults) > 1 else f"{name} has a fault"
        if len(faults) > _MAX_FAULTS:
            message += f", of which the first {_MAX_FAULTS} are listed"
        return cls(message, faults=faults[:_MAX_FAULTS], file=file, remedy=faults[0].remedy)

    def __str__(self) -> str:
        if not self.faults:
            return super().__str__()
        return "\n".join([f"{self.message}:", *(f"  {self._place(fault)}{fault}" for fault in self.faults)])

    def _place(self, fault: PolicyFault) -> str:
        where = [str(part) for part in (self.file, fault.line, fault.column) if part is not None]
        return ":".join(where) + ": " if where else ""

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "faults": self.faults, "file": self.file}
