"""Identification of the service behind an S3 bucket by trial requests, which write only to keys given by the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bucketpoint.doctor.bucket import Finding
from bucketpoint.errors import CorruptDataError, PreconditionFailedError, StoreError
from bucketpoint.stores import S3Store
from bucketpoint.stores.s3.inspect import server_header
from bucketpoint.stores.s3.services import SERVICES, S3Service, by_header
from bucketpoint.transfer.checksum import crc32c

_CHECK = "service"
_OPTIONS = {"conditional_put": "conditional_puts", "checksums": "checksums"}
"""Probed features that have an option of their own: the feature's name and the option's name."""

# Differences from the options that need no remedy, by whether the store has the feature. A feature that the store has
# but the options do not rely on costs one more request; a checksum that the store ignores costs no request.
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
        told = by_header(server_header(store) or "")
        found = _probe(store, new_key, begin)
    except StoreError as error:
        return Finding(_CHECK, "warn", f"the properties of the store cannot be read: {error.message}")
    used = store.service
    said = "; ".join(_SAID[name][not does] for name, does in found.items())
    who = f"{told.name} by its Server header" if told else f"{used.name} by the endpoint or the options"
    differ = [name for name, does in found.items() if getattr(used, name) != does and name not in _HARMLESS[does]]
    message = f"{who}: {said}{_parts(told or used)}"
    if not differ:
        return Finding(_CHECK, "ok", message)
    return Finding(_CHECK, "warn", message, _remedy(told, found, differ))


def _probe(store: S3Store, new_key: Callable[[str], str], begin: Callable[[str], str]) -> dict[str, bool]:
    # All features are switched on for the probe, so that the store decides and not the options.
    sure = store
    if not (store.service.conditional_put and store.service.checksums):
        sure = S3Store(store.bucket, store.options.replace(conditional_puts=True, checksums=True))
    return {
        "conditional_put": _refuses_conditions(sure, new_key("service-condition")),
        "checksums": _refuses_bad_checksum(sure, new_key("service-checksum")),
        "lists_uploads": _lists_by_prefix(store, new_key("service-upload"), begin),
    }


def _refuses_conditions(store: S3Store, key: str) -> bool:
    body = [memoryview(b"x")]
    store.put(key, body)
    conditions: tuple[dict[str, Any], ...] = ({"if_none_match": True}, {"if_match": "0" * 32})
    for condition in conditions:
        try:
            store.put(key, body, **condition)
        except PreconditionFailedError:
            continue
        except StoreError:
            return False
        return False
    return True


def _refuses_bad_checksum(store: S3Store, key: str) -> bool:
    body = memoryview(b"checksum")
    try:
        store.put(key, [body], crc32c=crc32c(body) ^ 1)
    except CorruptDataError:
        return True
    except StoreError:
        return False
    return False


def _lists_by_prefix(store: S3Store, key: str, begin: Callable[[str], str]) -> bool:
    upload = begin(key)
    return any(one.upload_id == upload for one in store.list_multipart(key[:-1]))


def _parts(service: S3Service) -> str:
    if not service.equal_parts:
        return ""
    return "; all parts of an upload but the last must have one size, as those of bucketpoint have"


def _remedy(told: S3Service | None, found: Mapping[str, bool], differ: list[str]) -> str:
    fitting = [one.name for one in SERVICES.values() if all(getattr(one, name) == does for name, does in found.items())]
    if told is not None and told.name in fitting:
        return f'Say {{"service": "{told.name}"}} in storage_options'
    options = [f'"{_OPTIONS[name]}": {str(found[name]).lower()}' for name in differ if name in _OPTIONS]
    if options:
        return f"Say {{{', '.join(options)}}} in storage_options"
    if fitting:
        return f'Say {{"service": "{fitting[0]}"}} in storage_options: {fitting[0]} does the same'
    return "Uploads that cannot be listed by prefix cannot be swept: use a lifecycle rule"
