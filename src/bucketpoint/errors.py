"""Every error that bucketpoint raises, as one small tree. No I/O and no imports from the other rooms.

All kinds pickle as (message, fields) because DCP ships a rank's exception to every other rank: one that could not be
unpickled there would hang the job instead of failing it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


class BucketpointError(Exception):
    """Base of all errors raised on purpose by bucketpoint.

    Args:
        message: what went wrong, in one sentence, without secrets.
        url: the checkpoint or object URL concerned.
        key: the object key or state-dict key concerned.
        rank: the rank on which it happened.
        remedy: what the user can do about it.
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
        self.url = url
        self.key = key
        self.rank = rank
        self.remedy = remedy if remedy is not None else self.remedy_default

    def __str__(self) -> str:
        where = [f"{name}={value}" for name, value in self.fields().items() if name != "remedy" and value is not None]
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        return f"{text}. {self.remedy}" if self.remedy else text

    def fields(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error."""
        return {"url": self.url, "key": self.key, "rank": self.rank, "remedy": self.remedy}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields())


def _rebuild(kind: type[BucketpointError], message: str, fields: dict[str, Any]) -> BucketpointError:
    return kind(message, **fields)


class PeerFailedError(BucketpointError):
    """Another rank of those that load together has failed, and said why: this one has nothing of its own to add."""


class InvalidURLError(BucketpointError):
    """The URL has no scheme, no bucket, or a scheme that this class does not serve."""


class Action(enum.Enum):
    """What a failed request calls for."""

    RETRY = "retry"
    THROTTLE = "throttle"
    REFRESH = "refresh credentials"
    FATAL = "fatal"


class StoreError(BucketpointError):
    """A request to the store failed.

    Attributes:
        action: what it calls for; fatal once every attempt has been made.
        wait_s: seconds that the service asked to wait at least before another attempt.
    """

    action: Action = Action.FATAL
    wait_s: float = 0.0


class EndpointError(StoreError):
    """The endpoint could not be reached, or its TLS certificate was not accepted."""

    remedy_default = "Check the endpoint URL, the network and the CA bundle (AWS_ENDPOINT_URL, AWS_CA_BUNDLE)"


class CredentialsError(StoreError):
    """No credentials, malformed credentials, or credentials that have expired."""

    remedy_default = "Refresh the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID, an instance role) and try again"


class AccessDeniedError(StoreError):
    """The store knows who is asking and says no."""

    remedy_default = (
        "A trainer needs GetObject, PutObject and AbortMultipartUpload below the checkpoint's URL; "
        "a reader needs GetObject"
    )


class BucketNotFoundError(StoreError):
    """The bucket does not exist."""

    remedy_default = "Create the bucket first: bucketpoint never makes one"


class WrongRegionError(StoreError):
    """The bucket lives in another region than the one asked."""

    remedy_default = "Set AWS_REGION (or region=) to the bucket's region"


class ObjectNotFoundError(StoreError):
    """The object does not exist."""


class PreconditionFailedError(StoreError):
    """A conditional request was refused: the object exists, or is no longer the one expected (HTTP 409 and 412)."""


class UploadNotFoundError(StoreError):
    """The multipart upload is not (or no longer) there: aborted, expired, or already completed."""


class ThrottledError(StoreError):
    """The store asked for fewer requests, and still did at the deadline."""

    action = Action.THROTTLE


class TransientStoreError(StoreError):
    """The request may succeed when it is sent again: timeouts, resets, short bodies, 5xx."""

    action = Action.RETRY


class CorruptDataError(StoreError):
    """Bytes that were read are not the bytes that were written, by checksum or by length."""

    remedy_default = "The object was altered, truncated or replaced; load an older checkpoint or restore the object"


class CheckpointNotFoundError(BucketpointError):
    """There is no checkpoint at this URL."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """Data is there but no commit: a save that was interrupted, is still running, or failed."""


class CheckpointDeletedError(CheckpointNotFoundError):
    """The checkpoint was deleted, by a policy or a person, and its data goes or is gone."""

    remedy_default = "Load another checkpoint: bucketpoint.latest_checkpoint(root) names the newest whole one"


class CheckpointExistsError(BucketpointError):
    """A checkpoint is already committed here, and overwrite=False."""

    remedy_default = (
        "Save elsewhere, or pass overwrite=True; where training goes on from an earlier step, "
        "CheckpointManager.restore(..., rollback=True) says so"
    )


class OtherRunError(BucketpointError):
    """The folders are those of a run of another name. Nothing was read or written there."""


class CommitConflictError(BucketpointError):
    """Another job committed to the same URL during this save. The other one's checkpoint stands."""


class RanksDisagreeError(BucketpointError):
    """The ranks of a save differ in what they must have in common. Nothing was committed."""


class IncompleteSaveError(BucketpointError):
    """Planned items are not accounted for, so the save must not be committed."""


class MetadataError(BucketpointError):
    """The metadata object is not readable as DCP metadata."""


class NewerFormatError(MetadataError):
    """The metadata is of a newer version of bucketpoint than this one, which cannot read it."""


class UnsafeDataError(BucketpointError):
    """A pickle names something outside the allow-list. Nothing of it was run."""

    remedy_default = "If you trust whoever wrote this checkpoint, pass trusted=True"


class MismatchError(BucketpointError):
    """The checkpoint and the state to load into do not fit: missing keys or different shapes."""


class StagingError(BucketpointError):
    """The state could not be copied to host memory: nothing of it has been saved."""


class StagingOverlapError(StagingError):
    """An earlier save still reads the staging memory, and `when_busy="error"`."""

    remedy_default = 'Wait for its future first, or choose when_busy="wait" or "double_buffer"'


class CheckpointProcessError(BucketpointError):
    """DCP's checkpoint process has died, or could not be given the state."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a policy.

    Attributes:
        message: what is wrong.
        remedy: what to write instead.
        path: the keys and the positions in lists that lead to it, from the top of the policy.
        line, column: where it stands in the file, counted from 1; None for Python objects.
    """

    message: str
    remedy: str | None = None
    path: tuple[str | int, ...] = ()
    line: int | None = None
    column: int | None = None

    def under(self, *path: str | int) -> Fault:
        """The same fault, seen from further up."""
        return replace(self, path=(*path, *self.path))

    def __str__(self) -> str:
        text = f"{self.message}. {self.remedy}" if self.remedy else self.message
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).lstrip(".")
        return f"{place}: {text}" if place else text


class PolicyError(BucketpointError):
    """A retention policy is wrong, or cannot be applied. Nothing was deleted.

    Attributes:
        faults: all that is wrong, in the order of the file.
        file: the policy's file, or None.
        line, column: of the first fault; None for Python objects.
    """

    def __init__(
        self,
        message: str,
        *,
        faults: Sequence[Fault] = (),
        file: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.faults = tuple(faults)
        self.file = file

    @classmethod
    def of(cls, *faults: Fault, file: str | None = None) -> PolicyError:
        """The error that lists these faults."""
        name = file or "The policy"
        message = f"{name} has {len(faults)} faults" if len(faults) > 1 else f"{name} has a fault"
        return cls(message, faults=faults, file=file, remedy=faults[0].remedy)

    @property
    def line(self) -> int | None:
        return self.faults[0].line if self.faults else None

    @property
    def column(self) -> int | None:
        return self.faults[0].column if self.faults else None

    def __str__(self) -> str:
        if not self.faults:
            return super().__str__()
        return "\n".join([f"{self.message}:", *(f"  {self._place(fault)}{fault}" for fault in self.faults)])

    def _place(self, fault: Fault) -> str:
        where = [str(part) for part in (self.file, fault.line, fault.column) if part is not None]
        return ":".join(where) + ": " if where else ""

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "faults": self.faults, "file": self.file}
