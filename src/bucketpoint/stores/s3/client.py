"""boto3 clients: one per process for each set of options, shared by all stores with these options."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import botocore
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import CredentialRetrievalError
from botocore.parsers import ResponseParserError

from bucketpoint.errors import BucketpointError, EndpointError
from bucketpoint.stores.client_cache import ClientCache, is_loopback, user_agent
from bucketpoint.stores.cutoff import give_up_when_cut, make_cuttable
from bucketpoint.stores.http_store import DEFAULT_MAX_ATTEMPTS
from bucketpoint.stores.retry import ConcurrencyLimiter, RetryPolicy
from bucketpoint.stores.s3 import options as s3_services
from bucketpoint.stores.s3.errors import OPERATIONS
from bucketpoint.stores.s3.exchange import S3Exchange
from bucketpoint.stores.s3.options import S3Options, S3Service

DEFAULT_REGION = "us-east-1"
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60

# CopyObject accepts these parameters only with a directive to replace the values of the source object.
_NOT_WITHOUT_DIRECTIVE = {"Tagging": "TaggingDirective", "Metadata": "MetadataDirective"}


_NEEDED = {
    "HeadObject": {"ContentLength"},
    "CreateMultipartUpload": {"UploadId"},
    "CopyObject": {"CopyObjectResult"},
    "UploadPartCopy": {"CopyPartResult"},
    "CopyPartResult": {"ETag"},
    "Contents": {"Key", "Size"},
    "CommonPrefixes": {"Prefix"},
    "Uploads": {"Key", "UploadId"},
}
"""Required fields, by operation or by element of a reply. botocore also accepts a reply without them."""


def _hide_signature(record: logging.LogRecord) -> bool:
    """Remove the query of presigned URLs, which contains signature and session token, from a log record of urllib3."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg.partition("?")[0] if isinstance(arg, str) and "X-Amz-Signature=" in arg else arg for arg in record.args
        )
    return True


logging.getLogger("urllib3.connectionpool").addFilter(_hide_signature)


@dataclass(frozen=True)
class S3Client:
    """A boto3 client with its retry policy and the parameters that the options add to each operation.

    boto3 makes only one attempt of each request; `retry` makes all others.

    Attributes:
        parameters: additional parameters, by operation.
        service: the service behind the endpoint; the options may override its features.
        exchange: sends each request, and checks that the answer is the store's.
        gate: limit on concurrent requests.
        deletes: `service` with the results of the trial of deletions, by bucket.
    """

    api: Any
    region: str
    parameters: Mapping[str, Mapping[str, Any]]
    policy: RetryPolicy
    service: S3Service
    exchange: S3Exchange
    gate: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)
    deletes: dict[str, S3Service] = field(default_factory=dict)

    def call(self, operation: str, **parameters: Any) -> Any:
        method = getattr(self.api, botocore.xform_name(operation))
        given = {**self.parameters[operation], **parameters}
        reply = give_up_when_cut(lambda: method(**given), operation)
        for part, names in _NEEDED.items():
            for entry in [reply] if part == operation else _entries(reply.get(part)):
                if not names <= entry.keys():
                    raise ResponseParserError(f"{part} has no {', '.join(sorted(names - entry.keys()))}")
        return reply


def _entries(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part] if isinstance(part, dict) else []


# Cached, because building a client takes about 100 ms. Threads can share a client.
clients = ClientCache[S3Client](
    lambda options: build_client(options),
    ("AWS_", "BOTO_"),
    credentials=frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN"}),
)


def renewed_client(options: S3Options, stale: S3Client) -> S3Client:
    """Build a client with newly fetched credentials.

    Raises:
        CredentialRetrievalError: the source of the credentials does not answer. The stale client stays.
    """
    # A new session asks every source of credentials again. The service stays the same, so the limit on requests and the
    # results of trials are kept.
    made = replace(build_client(options), gate=stale.gate, deletes=stale.deletes)
    if getattr(getattr(made.api, "_request_signer", None), "_credentials", made) is None:
        # Keep the stale client: one without credentials would fail every later request, even once the source is back.
        raise CredentialRetrievalError(provider="every source", error_msg="no source has credentials")
    return made


@functools.lru_cache(maxsize=8)
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """Return botocore's loader of its description of S3. All clients share it: a parsed description takes 12 MB."""
    return botocore.loaders.create_loader(data_path)


def build_client(options: S3Options) -> S3Client:
    """Build a client that is not cached, for callers that modify it. All others use `clients.get`."""
    core = botocore.session.Session(profile=options.profile)
    policy = _retry_policy(options, core)
    arguments = _client_arguments(options, core)
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    chosen = "payload_signing_enabled" in _botocore_setting(options, "s3")
    api = None
    with contextlib.suppress(ValueError):
        try:
            client = core.create_client(
                "s3", config=_config(options, sign_payload=None if chosen else False), **arguments
            )
            endpoint = urlsplit(client.meta.endpoint_url)
            if not chosen and endpoint.scheme == "http" and not is_loopback(endpoint.hostname or ""):
                # AWS documents unsigned payloads for HTTPS only: over plain HTTP only the signature protects the body
                # from changes. On the loopback interface, signing would only cost 0.8 s of SHA-256 per gigabyte.
                client = core.create_client("s3", config=_config(options, sign_payload=True), **arguments)
        except TypeError as error:
            remedy = "See boto3.session.Session.client for its arguments"
            raise BucketpointError(f"client_kwargs: {error}", remedy=remedy) from None
        api = client
    if api is None:
        # The text of botocore's ValueError is dropped: it quotes the endpoint, which may contain a password.
        raise EndpointError(
            "the S3 client cannot be made: the endpoint is not a URL",
            remedy="Write endpoint_url, or AWS_ENDPOINT_URL, with its scheme, such as http://127.0.0.1:9000",
        )
    parameters = options.request_parameters()
    _refuse_key_in_clear(api.meta.endpoint_url, parameters)
    api.meta.events.register_first("choose-signer.s3.DeleteObject", _presigned)
    session = http_session(api)
    # urllib3's pool manager; None if this version of botocore keeps it elsewhere.
    manager = getattr(session, "_manager", None)
    if manager is not None:
        _share_trust_store(manager)
        make_cuttable(manager)
    service = _service(options, api.meta.endpoint_url)
    exchange = S3Exchange(session, service)
    api.meta.events.register("before-send.s3", exchange)
    by_operation = _parameters_by_operation(api, parameters)
    return S3Client(api, str(api.meta.region_name), by_operation, policy, service, exchange)


def _refuse_key_in_clear(endpoint_url: str, parameters: Mapping[str, Any]) -> None:
    if urlsplit(endpoint_url).scheme != "https" and any(name.endswith("SSECustomerKey") for name in parameters):
        raise EndpointError("SSE-C would send the key in clear over plain HTTP", remedy="Use an https:// endpoint")


def _presigned(signature_version: Any, **_: Any) -> str | None:
    """Choose signature version 4 for presigned URLs, as for requests.

    boto3 would choose version 2, which has no regions, and which few services still accept.
    """
    return "s3v4-query" if signature_version == "v4-query" else None


def _service(options: S3Options, endpoint_url: str) -> S3Service:
    service = s3_services.named(options.service) if options.service else s3_services.at_endpoint(endpoint_url)
    checksums = service.checksums if options.checksums is None else options.checksums
    conditional_put = service.conditional_put if options.conditional_puts is None else options.conditional_puts
    return replace(service, checksums=checksums, conditional_put=conditional_put)


def _client_arguments(options: S3Options, core: Any) -> dict[str, Any]:
    named = {
        "endpoint_url": options.endpoint_url,
        "aws_access_key_id": options.access_key,
        "aws_secret_access_key": options.secret_key,
        "aws_session_token": options.session_token,
        "region_name": options.region,
    }
    given = {name: value for name, value in options.client_kwargs.items() if name not in ("config", "service_name")}
    _refuse_no_verification(options)
    arguments = {"use_ssl": options.use_ssl, **given, **{k: v for k, v in named.items() if v is not None}}
    # boto3 reads only AWS_DEFAULT_REGION; every other SDK reads AWS_REGION.
    arguments["region_name"] = (
        arguments.get("region_name")
        or os.environ.get("AWS_REGION")
        or core.get_config_variable("region")
        or DEFAULT_REGION
    )
    return arguments


def _refuse_no_verification(options: S3Options) -> None:
    """Refuse settings that would switch off the verification of TLS certificates, unless `insecure_tls` is set.

    Older versions of botocore take every false value for "off", even an empty environment variable.
    """
    if options.insecure_tls:
        return
    values = {
        'client_kwargs["verify"]': options.client_kwargs.get("verify"),
        **{name: os.environ.get(name) for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")},
    }
    for name, value in values.items():
        if value is not None and (not value or (isinstance(value, str) and not value.strip())):
            raise EndpointError(
                f"{name} is {value!r}, which would switch off the verification of TLS certificates",
                remedy="Name a file of certificates there, or pass insecure_tls=True as well",
            )


def _config(options: S3Options, *, sign_payload: bool | None) -> Config:
    given, service = dict(options.config_kwargs), options.service
    s3 = {
        "payload_signing_enabled": sign_payload,
        "addressing_style": service and s3_services.named(service).addressing,
        **_botocore_setting(options, "s3"),
    }
    given.pop("s3", None)
    settings: dict[str, Any] = {
        # The store sends a CRC32C with every body. botocore's default would read each body once more for a checksum,
        # and send trailers that many stores other than AWS do not support.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "tcp_keepalive": True,
        "max_pool_connections": options.connections,
        **given,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "s3": {name: value for name, value in s3.items() if value is not None},
        "user_agent_extra": user_agent(given.get("user_agent_extra")),
    }
    if options.anon:
        settings["signature_version"] = botocore.UNSIGNED
    try:
        config = Config(**settings)
    except TypeError as error:
        raise BucketpointError(
            f"config_kwargs: {error}", remedy="See botocore.config.Config for its arguments"
        ) from None
    base = options.client_kwargs.get("config")
    ours = Config(s3=settings["s3"], retries=settings["retries"])
    return config if base is None else config.merge(base).merge(ours)


def _botocore_setting(options: S3Options, name: str) -> dict[str, Any]:
    """Return a setting of botocore's, which is a dict, from a `Config` object and from `config_kwargs`."""
    base = options.client_kwargs.get("config")
    return {**dict(getattr(base, name, None) or {}), **dict(options.config_kwargs.get(name) or {})}


def _retry_policy(options: S3Options, core: Any) -> RetryPolicy:
    """Return the retry policy, with the number of attempts from the first of boto3's sources that sets it."""
    sources = {
        "config_kwargs": _configured_attempts(options),
        "AWS_MAX_ATTEMPTS": os.environ.get("AWS_MAX_ATTEMPTS"),
        "max_attempts of the AWS profile": core.get_scoped_config().get("max_attempts"),
    }
    name, given = next(((name, value) for name, value in sources.items() if value), ("", DEFAULT_MAX_ATTEMPTS))
    if not str(given).strip().isdecimal() or not int(given):
        raise BucketpointError(f"{name} is {given!r}, not a number of attempts", remedy="Set it to 1 or more")
    return RetryPolicy(attempts=int(given), deadline_s=options.retry_deadline_s, counts_throttled=bool(name))


def _configured_attempts(options: S3Options) -> Any:
    """Return the attempts in botocore's `retries` setting, whose `max_attempts` does not count the first attempt."""
    given = _botocore_setting(options, "retries")
    if "total_max_attempts" in given:
        return given["total_max_attempts"]
    return int(given["max_attempts"]) + 1 if "max_attempts" in given else None


def _parameters_by_operation(api: Any, parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    model = api.meta.service_model
    allowed = {operation: set(model.operation_model(operation).input_shape.members) for operation in OPERATIONS}
    unknown = set(parameters).difference(*allowed.values())
    if unknown:
        raise BucketpointError(
            f"s3_additional_kwargs: no S3 request has a parameter {', '.join(sorted(unknown))}",
            remedy="Use the parameter names of boto3's put_object and get_object",
        )
    chosen = {
        operation: {name: value for name, value in parameters.items() if name in names}
        for operation, names in allowed.items()
    }
    for name, directive in _NOT_WITHOUT_DIRECTIVE.items():
        if directive not in parameters:
            chosen["CopyObject"].pop(name, None)
    return chosen


class _SharedTrust(ssl.SSLContext):
    """An SSL context that reads each bundle of certificates once, rather than for every new connection."""

    _loaded: frozenset[Any]

    def load_verify_locations(self, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        bundle = (cafile, capath, cadata)
        loaded: frozenset[Any] = getattr(self, "_loaded", frozenset())
        if bundle not in loaded:
            super().load_verify_locations(cafile, capath, cadata)
            self._loaded = loaded | {bundle}


def http_session(api: Any) -> Any:
    """Return the HTTP session that sends the requests of a boto3 client; None if botocore keeps it elsewhere."""
    return getattr(getattr(api, "_endpoint", None), "http_session", None)


def _share_trust_store(manager: Any) -> None:
    """Make all connections of a pool manager share one parsed bundle of certificates.

    urllib3 parses the bundle for each connection, which takes 16 ms: half a second for 32 connections.
    """
    context = getattr(manager, "connection_pool_kw", {}).get("ssl_context")
    if type(context) is ssl.SSLContext:
        context.__class__ = _SharedTrust
