"""Identification of the service behind an S3 bucket by trial requests, which write only to the caller's keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from bucketpoint.doctor.report import Finding, refused
from bucketpoint.errors import AccessDeniedError, CorruptDataError, PreconditionFailedError, StoreError
from bucketpoint.stores.s3 import S3Store
from bucketpoint.stores.s3.inspect import server_header
from bucketpoint.stores.s3.services import SERVICES, S3Service, by_header
from bucketpoint.transfer.checksum import crc32c

_CHECK = "service"
_OPTIONS = {"conditional_put": "conditional_puts", "checksums": "checksums"}
"""Options by probed feature."""

# Differences from the options that need no remedy, by whether the store has the feature. Options that do not rely on
# `lists_uploads` cost one more request; a checksum that the store ignores costs none.
_HARMLESS = {True: ("lists_uploads",), False: ("checksums",)}

_SAID = {
    "conditional_put": ("conditional puts are honoured", "conditional puts are ignored or refused"),
    "checksums": ("bodies are compared with their CRC32C", "bodies are not compared with their CRC32C"),
    "lists_uploads": ("uploads are listed by prefix", "uploads are listed by their whole key only"),
}


def service_finding(store: S3Store, new_key: Callable[[str], str], begin: Callable[[str], str]) -> Finding:
    """Probe the features of the store, identify the service, and compare both with the options in use.

    Args:
        new_key: returns an unused key, and makes sure that its object is deleted later.
        begin: begins a multipart upload, and makes sure that the upload is aborted later.
    """
    try:
        named = by_header(server_header(store) or "")
        features = _probe(store, new_key, begin)
    except StoreError as error:
        return Finding(_CHECK, "warn", f"the properties of the store cannot be read: {error.message}")
    used = store.service
    differ = [name for name, does in features.items() if getattr(used, name) != does and name not in _HARMLESS[does]]
    does = "; ".join(_SAID[name][not has] for name, has in features.items())
    source = "its Server header" if named else "the endpoint or the options"
    message = f"{(named or used).name} by {source}: {does}"
    if (named or used).equal_parts:
        message += "; all parts of an upload but the last must have one size, as those of bucketpoint have"
    if not differ:
        return Finding(_CHECK, "ok", message)
    remedy = _needless_options(store, features, differ) or _remedy(named, features, differ)
    return Finding(_CHECK, "warn", message, remedy)


def _probe(store: S3Store, new_key: Callable[[str], str], begin: Callable[[str], str]) -> dict[str, bool]:
    # All features are switched on for the probe, so that the store decides and not the options.
    sure = store
    if not (store.service.conditional_put and store.service.checksums):
        sure = S3Store(store.bucket, store.options.replace(conditional_puts=True, checksums=True))
    body, key = memoryview(b"checksum"), new_key("service-condition")
    sure.put(key, [body])
    conditional_put = _all_refused(
        PreconditionFailedError,
        lambda: sure.put(key, [body], if_none_match=True),
        lambda: sure.put(key, [body], if_match="0" * 32),
    )
    summed = new_key("service-checksum")
    checksums = _all_refused(CorruptDataError, lambda: sure.put(summed, [body], crc32c=crc32c(body) ^ 1))
    features = {"conditional_put": conditional_put, "checksums": checksums}
    key = new_key("service-upload")
    upload = begin(key)
    # Without the permission to list uploads, which a trainer does not need, this feature is unknown.
    with contextlib.suppress(AccessDeniedError):
        features["lists_uploads"] = any(found.upload_id == upload for found in store.list_multipart(key[:-1]))
    return features


def _all_refused(kind: type[StoreError], *requests: Callable[[], object]) -> bool:
    try:
        return all(refused(kind, request) for request in requests)
    except StoreError:
        return False


def _needless_options(store: S3Store, features: Mapping[str, bool], differ: list[str]) -> str | None:
    """Return the remedy if the service that is recognised without the given options has the features; else None."""
    given = [_OPTIONS[name] for name in differ if getattr(store.options, _OPTIONS.get(name, ""), None) is not None]
    if not given:
        return None
    bare = S3Store(store.bucket, store.options.replace(**dict.fromkeys(given))).service
    if any(getattr(bare, name) != features[name] for name in differ):
        return None
    values = ", ".join(f'"{name}": {str(getattr(store.options, name)).lower()}' for name in given)
    return f"Leave {{{values}}} out of storage_options"


def _remedy(named: S3Service | None, features: Mapping[str, bool], differ: list[str]) -> str:
    fitting = [
        service.name
        for service in SERVICES.values()
        if all(getattr(service, name) == does for name, does in features.items())
    ]
    if named is not None and named.name in fitting:
        return f'Set {{"service": "{named.name}"}} in storage_options'
    options = [f'"{_OPTIONS[name]}": {str(features[name]).lower()}' for name in differ if name in _OPTIONS]
    if options:
        return f"Set {{{', '.join(options)}}} in storage_options"
    if fitting:
        return f'Set {{"service": "{fitting[0]}"}} in storage_options: {fitting[0]} behaves the same'
    return "Uploads that cannot be listed by prefix cannot be swept: use a lifecycle rule"
