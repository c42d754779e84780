"""`GCSOptions`: the settings of the connection to a bucket and of its requests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.http_store import StoreOptions

UPLOADS = ("auto", "xml")

# With these tokens gcsfs signs in through a browser, or from its own cache of such logins. A training job has neither.
_INTERACTIVE = ("browser", "cache", "connect")


@dataclass(frozen=True)
class GCSOptions(StoreOptions):
    """Settings of the connection to a bucket and its requests. Everything not set is left to google-cloud-storage.

    Attributes:
        token: as in gcsfs: "google_default" (application default credentials, which support workload identity), "anon",
            "cloud" (the machine's own account), the path of a credentials file, the contents of such a file as a dict,
            or a `google.auth.credentials.Credentials`. Default: application default credentials, or none for an
            emulator.
        project: the project that is charged if `requester_pays` is True.
        endpoint_url: another endpoint. Default: STORAGE_EMULATOR_HOST, then API_ENDPOINT_OVERRIDE, then Google's.
        requester_pays: as in gcsfs: True to charge `project`, or the name of the project to charge.
        kms_key_name: the Cloud KMS key to encrypt with, `projects/P/locations/L/keyRings/R/cryptoKeys/K`. Default: the
            bucket's.
        storage_class: the storage class of every object written. Default: the bucket's.
        uploads: "xml" to upload large objects in parts, by multipart uploads of the XML API; "auto" for "xml" at Google
            (`googleapis.com`), and for whole objects elsewhere, because no emulator supports multipart uploads.
        user_agent: added to the user agent, after bucketpoint's own name.
        max_attempts: attempts of one request, including the first. Default: 6. With the default, throttled attempts
            (429, 503) are not counted: a throttled request is retried until the deadline.
        ca_bundle: a file of certificates to trust. Default: REQUESTS_CA_BUNDLE, then those of the certifi package.
    """

    service_name: ClassVar[str] = "GCS"
    tuning: ClassVar[str] = (
        "access block_size cache_timeout check_connection consistency default_location secure_serialize"
    )

    token: Any = field(default=None, repr=False)
    project: str | None = None
    requester_pays: bool | str = False
    kms_key_name: str | None = None
    storage_class: str | None = None
    uploads: str = "auto"
    user_agent: str | None = None
    max_attempts: int | None = None
    ca_bundle: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_attempts")
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
        return (*super().cache_key(), self.endpoint, self.anonymous)

    def __getstate__(self) -> dict[str, Any]:
        if self.token is not None and not isinstance(self.token, str):
            raise BucketpointError(
                "credentials that a program holds in memory are not sent to another process",
                remedy="Pass token= the path of a credentials file, or use application default credentials",
            )
        return dict(self.__dict__)


def emulator() -> str | None:
    """Return the URL of the emulator in STORAGE_EMULATOR_HOST, or None.

    Adds a missing scheme, which Google's Python client requires, but the Go client and many scripts leave out.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return None
    return host if "://" in host else f"http://{host}"
