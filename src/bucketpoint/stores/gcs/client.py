"""Sessions with GCS: one per process for each set of options, shared by all stores with these options.

google-cloud-storage provides and renews the credentials. Requests use the library's HTTP session, but not its calls,
which copy the bytes that they send and receive.
"""

from __future__ import annotations

import functools
import os
import ssl
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from bucketpoint.errors import INSTALL_GCS, CredentialsError, EndpointError
from bucketpoint.stores import retry
from bucketpoint.stores.client_cache import ClientCache, is_loopback, user_agent
from bucketpoint.stores.cutoff import give_up_when_cut, make_cuttable
from bucketpoint.stores.gcs.errors import OPERATIONS, failure_of, failures, translate, translated
from bucketpoint.stores.gcs.messages import GCSReply, received
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.http_store import DEFAULT_MAX_ATTEMPTS
from bucketpoint.stores.redact import clean, hide
from bucketpoint.stores.retry import ConcurrencyLimiter, RetryPolicy

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
# Completing an upload of thousands of parts can take "several minutes":
# https://cloud.google.com/storage/docs/xml-api/post-object-complete
COMPLETE_TIMEOUT_S = 600


@dataclass(frozen=True)
class GCSClient:
    """An HTTP session, with the settings of its requests.

    Attributes:
        session: authorized session of the `requests` library.
        headers: headers of every request.
        gate: limit on concurrent requests.
        buckets: names of buckets that have answered a request, and therefore exist.
    """

    session: Any
    endpoint: str
    policy: RetryPolicy
    headers: Mapping[str, str] = field(repr=False)
    gate: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)
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
    ) -> GCSReply:
        """Send one request, retry it after transient failures, and return the successful reply.

        Args:
            path: path of the resource, percent-encoded.
            operation, url: names of the operation and of the object, for error messages.
            body: bytes, or an object with a length that can be iterated over any number of times and yields bytes.
            stream: do not read the reply's body.

        Raises:
            StoreError: the reply is an error, or there was no reply.
        """
        target = f"{self.endpoint}{path}?{urlencode(query)}" if query else f"{self.endpoint}{path}"

        def send() -> GCSReply:
            request = functools.partial(
                self.session.request,
                method,
                target,
                data=body,
                headers={**self.headers, **(headers or {})},
                timeout=(CONNECT_TIMEOUT_S, timeout),
                # `received` reads the body, up to a limit.
                stream=True,
                # The API has no redirects, and following one would send the credentials to another server.
                allow_redirects=False,
            )
            answer = received(give_up_when_cut(request, operation), operation, stream=stream)
            if answer.status_code < 300:
                return answer
            conditional = any(name.startswith("if") for name in query or ())
            failure = failure_of(answer.status_code, answer.content, operation, url, conditional=conditional)[0]
            asked = answer.headers.get("Retry-After", "")
            failure.wait_s = float(asked) if asked.isdecimal() else 0.0
            raise failure

        def attempt() -> GCSReply:
            return translated(send, operation, url, self.endpoint)

        return retry.run(attempt, self.policy, gate=self.gate, kind=OPERATIONS[operation].kind)


# Building the first client takes a second, because the library is imported.
clients = ClientCache[GCSClient](
    lambda options: build_client(options),
    ("GOOGLE_", "CLOUDSDK_", "GCE_", "GCLOUD_"),
    variables=frozenset({"API_ENDPOINT_OVERRIDE", "NO_GCE_CHECK", "STORAGE_EMULATOR_HOST"}),
)


def build_client(options: GCSOptions) -> GCSClient:
    """Build a client that is not cached, for callers that modify it. All others use `clients.get`.

    Raises:
        StoreError: there are no credentials, or the endpoint is not valid.
    """
    try:
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud.storage import Client as Library
        from google.cloud.storage import __version__ as version
    except ImportError as error:
        raise EndpointError(f"GCS needs google-cloud-storage: {error}", remedy=INSTALL_GCS) from None
    endpoint = options.endpoint
    if endpoint is not None:
        _check_endpoint(endpoint, secret=not options.anonymous)
    settings = {"api_endpoint": endpoint, "universe_domain": os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN")}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        # project=None keeps the library from looking for a project, which only the creation of buckets needs.
        library = Library(project=None, credentials=_credentials(options, Library.SCOPE), client_options=given or None)
    except failures() as error:
        failure = translate(error, "making the GCS client", clean(endpoint or "gs://"))
        raise type(failure)(hide(failure.message, _given(options)), **failure.fields()) from None
    except ValueError as error:
        # google-auth raises ValueError for malformed credentials.
        raise CredentialsError(
            f"the GCS client cannot be made: {hide(str(error), _given(options))}",
            remedy="Check `token` in storage_options, or the file that GOOGLE_APPLICATION_CREDENTIALS names",
        ) from None
    session = library._http
    if isinstance(session, AuthorizedSession) and not session.is_mtls:
        session.mount("https://", _adapter(options))
        session.mount("http://", _adapter(options))
    headers = {
        "User-Agent": user_agent(options.user_agent, f"google-cloud-storage/{version}"),
        # Without this header GCS decompresses an object that is stored compressed, and a range is then not a range of
        # the stored bytes.
        "Accept-Encoding": "gzip",
    }
    policy = RetryPolicy(
        attempts=options.max_attempts or DEFAULT_MAX_ATTEMPTS,
        deadline_s=options.retry_deadline_s,
        counts_throttled=options.max_attempts is not None,
    )
    return GCSClient(session, library.api_endpoint.rstrip("/"), policy, headers)


def _given(options: GCSOptions) -> dict[str, Any]:
    """Return the options that errors must not quote: `token`, unless it is the path of a file."""
    token = options.token
    is_path = isinstance(token, str) and (os.sep in token or token.endswith(".json"))
    return {} if is_path else {"token": token}


def _credentials(options: GCSOptions, scopes: Any) -> Any:
    """Return the credentials for `token`; None to let the library find application default credentials."""
    import google.auth
    import google.auth.compute_engine
    from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

    token = options.token
    if options.anonymous:
        return AnonymousCredentials()
    if token is None or (isinstance(token, str) and token == "google_default"):
        # The library could also load this file, but would then look up the name of a workload's project, which is not
        # used here and needs another permission.
        token = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if not token:
            return None
    if isinstance(token, str) and token == "cloud":
        return google.auth.compute_engine.Credentials()
    if not isinstance(token, str | os.PathLike | Mapping):
        return token
    if isinstance(token, str) and token == options.token and not (os.path.isabs(token) or os.path.exists(token)):
        # The message does not quote the value, which may be an access token.
        raise CredentialsError(
            "token in storage_options is not a credentials file",
            remedy="Pass the path of such a file, its content as a dict, or a google.auth Credentials object",
        )
    with warnings.catch_warnings():
        # google-auth warns about credential configurations from untrusted sources. This one comes from the person who
        # runs the program, like the file that GOOGLE_APPLICATION_CREDENTIALS names.
        warnings.simplefilter("ignore", DeprecationWarning)
        if isinstance(token, Mapping):
            found, _ = google.auth.load_credentials_from_dict(dict(token))
        else:
            found, _ = google.auth.load_credentials_from_file(os.fspath(token))
    return with_scopes_if_required(found, scopes)


def _check_endpoint(endpoint: str, *, secret: bool) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or ("@" in endpoint and "@" not in parts.netloc):
        # A slash in a password ends the host. The message does not quote the endpoint, which may contain a password.
        raise EndpointError("the endpoint is not a URL", remedy="Pass something like http://127.0.0.1:4443")
    if secret and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise EndpointError(
            "credentials would be sent in clear over plain HTTP",
            url=clean(endpoint),
            remedy="Use an https:// endpoint, or token='anon' for an emulator",
        )


def _adapter(options: GCSOptions) -> Any:
    import requests.adapters

    class Adapter(requests.adapters.HTTPAdapter):
        """HTTP adapter that reads certificates once, not for each connection (16 ms each, half a second for 32)."""

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
        raise EndpointError(
            f"the CA bundle {bundle} cannot be read: {error.strerror or error}",
            remedy="Check ca_bundle in storage_options, or REQUESTS_CA_BUNDLE",
        ) from None
