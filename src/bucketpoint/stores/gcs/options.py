"""`GCSOptions`: the settings of the connection to a bucket and of its requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.client_cache import frozen
from bucketpoint.stores.retry import DEADLINE_S

DEFAULT_CONNECTIONS = 32
"""Connections kept open, as for S3."""

DEFAULT_MAX_ATTEMPTS = 6
"""Attempts of one request, as for S3."""

UPLOADS = ("auto", "xml")

# With these tokens gcsfs signs in through a browser, or from its own cache of such logins. A training job has neither.
_INTERACTIVE = ("browser", "cache", "connect")

# Options of gcsfs that are ignored: they have no meaning for a client that does not cache, create buckets, or run an
# event loop.
_GCSFS_MEANINGLESS = frozenset(
    {
        "access",
        "asynchronous",
        "batch_size",
        "block_size",
        "cache_timeout",
        "check_connection",
        "consistency",
        "default_location",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "secure_serialize",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)


@dataclass(frozen=True)
class GCSOptions:
    """Settings of the connection to a bucket and of each request.

    Everything not set here is left to google-cloud-storage.

    Attributes:
        token: as in gcsfs: "google_default" (application default credentials, which support workload identity), "anon",
            "cloud" (the machine's own account), the path of a credentials file, the contents of such a file as a dict,
            or a `google.auth.credentials.Credentials`. Default: application default credentials, or none for an
            emulator.
        project: the project that is charged if `requester_pays` is True.
        endpoint_url: another endpoint. Default: STORAGE_EMULATOR_HOST, then Google's.
        requester_pays: as in gcsfs: True to charge `project`, or the name of the project to charge.
        kms_key_name: the Cloud KMS key to encrypt with, `projects/P/locations/L/keyRings/R/cryptoKeys/K`. Default: the
            bucket's.
        storage_class: the storage class of every object written. Default: the bucket's.
        uploads: "xml" to upload large objects in parts, by multipart uploads of the XML API; "auto" for that at Google
            (`googleapis.com`), and for whole objects elsewhere, because no emulator supports multipart uploads.
        user_agent: added to the user agent, after bucketpoint's own name.
        connections: connections kept open in the pool.
        max_attempts: attempts of one request, the first included. Default: 6. With the default, throttled attempts
            (429, 503) are not counted: a throttled request is retried until the deadline.
        retry_deadline_s: seconds for all attempts of one request together.
        ca_bundle: a file of certificates to trust. Default: REQUESTS_CA_BUNDLE, then those of the certifi package.
    """

    token: Any = field(default=None, repr=False)
    project: str | None = None
    endpoint_url: str | None = field(default=None, repr=False)
    requester_pays: bool | str = False
    kms_key_name: str | None = None
    storage_class: str | None = None
    uploads: str = "auto"
    user_agent: str | None = None
    connections: int = DEFAULT_CONNECTIONS
    max_attempts: int | None = None
    retry_deadline_s: float = DEADLINE_S
    ca_bundle: str | None = None

    def __post_init__(self) -> None:
        if self.uploads not in UPLOADS:
            raise BucketpointError(
                f"uploads={self.uploads!r} is none of {', '.join(UPLOADS)}",
                remedy="Leave it out: where there are no multipart uploads, objects are uploaded whole",
            )
        if isinstance(self.token, str) and self.token in _INTERACTIVE:
            raise BucketpointError(
                f"token={self.token!r} needs a person at a browser",
                remedy="Use application default credentials: `gcloud auth application-default login`",
            )
        if self.requester_pays is True and not self.project:
            raise BucketpointError(
                "requester_pays=True needs a project to charge", remedy="Name the project: requester_pays='my-project'"
            )
        for name in ("connections", "max_attempts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BucketpointError(f"{name} must be at least 1, not {value}")

    @classmethod
    def from_storage_options(cls, storage_options: Mapping[str, Any] | None = None) -> GCSOptions:
        """Make options from a dict with the option names of gcsfs, of this class, or both.

        Raises:
            BucketpointError: an option is not known, or its value is not valid.
        """
        known = {option.name for option in fields(cls)}
        given = {name: value for name, value in (storage_options or {}).items() if name not in _GCSFS_MEANINGLESS}
        unknown = sorted(set(given) - known)
        if unknown:
            raise BucketpointError(
                f"unknown storage options for GCS: {', '.join(unknown)}",
                remedy=f"These are known: {', '.join(sorted(known))}",
            )
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def user_project(self) -> str | None:
        """The project that is charged for requests; None if the bucket's owner is charged."""
        if isinstance(self.requester_pays, str):
            return self.requester_pays or None
        return self.project if self.requester_pays else None

    @property
    def endpoint(self) -> str | None:
        """The endpoint from these options and the environment, without a slash at the end; None for Google's."""
        url = self.endpoint_url or emulator() or os.environ.get("API_ENDPOINT_OVERRIDE") or None
        return None if url is None else url.rstrip("/")

    @property
    def anonymous(self) -> bool:
        """True if requests carry no credentials."""
        if self.token is None:
            # As in google-cloud-storage: requests to an emulator carry no credentials, those to other endpoints do.
            return not self.endpoint_url and emulator() is not None
        return isinstance(self.token, str) and self.token == "anon"

    @property
    def multipart(self) -> bool:
        """True if large objects are uploaded by the XML API's multipart uploads."""
        host = urlsplit(self.endpoint or "https://storage.googleapis.com").hostname or ""
        return self.uploads == "xml" or host.endswith(".googleapis.com")

    def cache_key(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for options that can share one client, in this environment."""
        values = (frozen(getattr(self, option.name)) for option in fields(self))
        return (*values, self.endpoint, self.anonymous)

    def __getstate__(self) -> dict[str, Any]:
        if self.token is not None and not isinstance(self.token, str):
            raise BucketpointError(
                "credentials that a program holds in memory are not sent to another process",
                remedy="Pass token= the path of a credentials file, or use application default credentials",
            )
        return dict(self.__dict__)


def emulator() -> str | None:
    """Return the URL of the emulator in STORAGE_EMULATOR_HOST, or None.

    A missing scheme is added: Google's Python client needs one there, but the Go client and many scripts leave it out.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return None
    return host if "://" in host else f"http://{host}"
