"""Sessions with GCS: one for each set of options and process, shared by every store that has them. No operations.

Credentials and their renewal are google-cloud-storage's. Requests are made on its session, but with bodies of our own:
its own calls copy what they send and what they receive.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import ssl
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from bucketpoint.errors import CredentialsError, EndpointError
from bucketpoint.stores import retry
from bucketpoint.stores.client_cache import ClientCache, Pin
from bucketpoint.stores.cut import make_cuttable
from bucketpoint.stores.gcs_errors import failures, from_reply, translate
from bucketpoint.stores.gcs_options import DEFAULT_MAX_ATTEMPTS, GCSOptions
from bucketpoint.stores.retry import Gate, RetryPolicy
from bucketpoint.stores.wording import clean, hide

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
# Until an object of thousands of parts is made: "several minutes" by
# https://cloud.google.com/storage/docs/xml-api/post-object-complete
COMPLETE_TIMEOUT_S = 600

INSTALL = "pip install 'bucketpoint[gcs]'"


@dataclass(frozen=True)
class Client:
    """A session, and what every request of it has. `buckets` are those that have answered: they are known to exist."""

    session: Any
    endpoint: str
    policy: RetryPolicy
    headers: Mapping[str, str] = field(repr=False)
    gate: Gate = field(default_factory=Gate)
    buckets: set[str] = field(default_factory=set)

    def request(
        self,
        method: str,
        path: str,
        *,
        operation: str,
        url: str,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = b"",
        stream: bool = False,
        timeout: float = READ_TIMEOUT_S,
    ) -> Any:
        """Send one request, again after failures that may pass, and return the reply of the one that succeeded.

        Args:
            path: of the resource, percent-encoded.
            operation, url: for messages.
            body: bytes, or something with a length whose iteration gives them, any number of times.
            stream: leave the reply's body on its connection.

        Raises:
            StoreError: the reply is an error, or there is none. Each failure is named by its kind.
        """
        target = f"{self.endpoint}{path}?{urlencode(query)}" if query else f"{self.endpoint}{path}"

        def attempt() -> Any:
            try:
                reply = self.session.request(
                    method,
                    target,
                    data=body,
                    headers={**self.headers, **(headers or {})},
                    timeout=(CONNECT_TIMEOUT_S, timeout),
                    stream=stream,
                    # A redirect is not part of this API, and would take the credentials elsewhere.
                    allow_redirects=False,
                )
                if reply.status_code < 300:
                    return reply
                failure = from_reply(reply.status_code, reply.content, operation, url)
                asked = reply.headers.get("Retry-After", "")
                failure.wait_s = float(asked) if asked.isdecimal() else 0.0
            except failures() as error:
                failure = translate(error, operation, url, self.endpoint)
            # Raised here, where no exception is being handled, so that none of the library's hangs on it: they hold
            # the request, headers and all.
            raise failure

        return retry.run(attempt, self.policy, gate=self.gate)

    def close(self) -> None:
        """Close the idle connections. The session stays usable."""
        for adapter in self.session.adapters.values():
            adapter.close()


class _Clients(ClientCache[GCSOptions, Client]):
    """Making a client takes a second the first time, as the library is imported."""

    prefixes = ("GOOGLE_", "CLOUDSDK_", "GCE_", "GCLOUD_")
    variables = frozenset({"API_ENDPOINT_OVERRIDE", "NO_GCE_CHECK", "STORAGE_EMULATOR_HOST"})

    def build(self, options: GCSOptions) -> Client:
        return build_client(options)


_clients = _Clients()


def client_for(options: GCSOptions, pin: Pin | None = None) -> Client:
    """The client of this process for these options, built at the first call."""
    return _clients.get(options, pin)


def close_client(options: GCSOptions, pin: Pin | None = None) -> None:
    """Close the idle connections of the client for these options. It stays usable."""
    client = _clients.found(options, pin)
    if client is not None:
        client.close()


def build_client(options: GCSOptions) -> Client:
    """A new client. Use `client_for`, unless the client is to be changed.

    Raises:
        StoreError: there are no credentials, or the endpoint is none.
    """
    try:
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud.storage import Client as Library
    except ImportError as error:
        raise EndpointError(f"GCS needs google-cloud-storage: {error}", remedy=INSTALL) from None
    endpoint = options.endpoint
    if endpoint is not None:
        _check_endpoint(endpoint, secret=not options.anonymous)
    settings = {"api_endpoint": endpoint, "universe_domain": os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN")}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        # A project would be asked for otherwise, which only the making of buckets needs.
        library = Library(project=None, credentials=_credentials(options, Library.SCOPE), client_options=given or None)
    except failures() as error:
        failure = translate(error, "making the GCS client", clean(endpoint or "gs://"))
        raise type(failure)(hide(failure.message, _given(options)), **failure.fields()) from None
    except ValueError as error:
        # google-auth's answer to credentials that are none.
        raise CredentialsError(f"the GCS client cannot be made: {hide(str(error), _given(options))}") from None
    session = library._http
    if isinstance(session, AuthorizedSession) and not session.is_mtls:
        session.mount("https://", _adapter(options))
        session.mount("http://", _adapter(options))
    agent = [f"bucketpoint/{_version('bucketpoint')}", options.user_agent]
    agent.append(f"google-cloud-storage/{_version('google-cloud-storage')}")
    headers = {
        "User-Agent": " ".join(name for name in agent if name),
        # Without it an object that is stored compressed comes expanded, and ranges of it are not its bytes.
        "Accept-Encoding": "gzip",
    }
    policy = RetryPolicy(
        attempts=options.max_attempts or DEFAULT_MAX_ATTEMPTS,
        deadline_s=options.retry_deadline_s,
        counts_throttled=options.max_attempts is not None,
    )
    return Client(session, library.api_endpoint.rstrip("/"), policy, headers)


def _given(options: GCSOptions) -> dict[str, Any]:
    """What errors may not quote: a token that somebody passed in place of a file's path, and what a dict holds."""
    token = options.token
    is_path = isinstance(token, str) and (os.sep in token or token.endswith(".json"))
    return {} if is_path else {"token": token}


def _credentials(options: GCSOptions, scopes: Any) -> Any:
    """What google-auth makes of `token`; None where the library is to look for application default credentials."""
    import google.auth
    import google.auth.compute_engine
    from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

    token = options.token
    if options.anonymous:
        return AnonymousCredentials()
    if token is None or (isinstance(token, str) and token == "google_default"):
        # The library would look the file up itself, and then ask for the name of a workload's project, which needs a
        # right of its own and serves nothing here.
        token = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if not token:
            return None
    if isinstance(token, str) and token == "cloud":
        return google.auth.compute_engine.Credentials()
    if not isinstance(token, str | os.PathLike | Mapping):
        return token
    with warnings.catch_warnings():
        # It warns of configurations that come from strangers. This one comes from whoever runs the program, like the
        # file that GOOGLE_APPLICATION_CREDENTIALS names.
        warnings.simplefilter("ignore", DeprecationWarning)
        if isinstance(token, Mapping):
            found, _ = google.auth.load_credentials_from_dict(dict(token))
        else:
            found, _ = google.auth.load_credentials_from_file(os.fspath(token))
    return with_scopes_if_required(found, scopes)


def _check_endpoint(endpoint: str, *, secret: bool) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # Not quoted: whatever it is, a password may be in it.
        raise EndpointError("the endpoint is not a URL", remedy="Pass something like http://127.0.0.1:4443")
    if secret and parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise EndpointError(
            "credentials would be sent in clear over plain HTTP",
            url=clean(endpoint),
            remedy="Use an https:// endpoint, or token='anon' for an emulator",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _adapter(options: GCSOptions) -> Any:
    import requests.adapters

    class Adapter(requests.adapters.HTTPAdapter):
        """Certificates are read once, and not again for each connection: that takes 16 ms, half a second for 32."""

        def init_poolmanager(self, *args: Any, **settings: Any) -> None:
            settings["ssl_context"] = context
            super().init_poolmanager(*args, **settings)
            make_cuttable(self.poolmanager)

        def cert_verify(self, connection: Any, url: str, verify: Any, cert: Any) -> None:
            if verify is not True or not url.startswith("https"):
                super().cert_verify(connection, url, verify, cert)

    context = _tls_context(options)
    return Adapter(pool_connections=2, pool_maxsize=options.connections, max_retries=0)


def _tls_context(options: GCSOptions) -> ssl.SSLContext:
    import certifi

    bundle = options.ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or certifi.where()
    try:
        folder = os.path.isdir(bundle)
        return ssl.create_default_context(cafile=None if folder else bundle, capath=bundle if folder else None)
    except OSError as error:
        raise EndpointError(f"the CA bundle {bundle} cannot be read: {error.strerror or error}") from None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
