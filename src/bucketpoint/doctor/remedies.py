"""Texts of the remedies for findings of `doctor`, in the terms of the examined store."""

from __future__ import annotations

from bucketpoint.stores import Store
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.s3 import S3Store

_NEEDED = {
    "put": "Saves need the right to write below this URL",
    "put data": "Saves need the right to write below this URL",
    "get": "Loads, and overwriting saves, need the right to read",
    "list": "Saves and loads do not need it; finding the latest and pruning need the right to list",
    "delete": "Saves and loads do not need it; pruning needs the right to delete",
    "delete notes": "Saves and loads do not need it; `bucketpoint gc` removes the remains. Jobs with a retention "
    "policy need the right to delete below _bucketpoint/",
    "put notes": "Pruning needs the right to write below _bucketpoint/",
    "put .metadata": "Pruning does not need it; thinning needs the right to write .metadata",
}
_RIGHTS: dict[type, dict[str, str]] = {
    S3Store: {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
    GCSStore: {
        "put": "storage.objects.create",
        "get": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
}
_WITHOUT_CONDITIONS = (
    "a save checks the URL, writes its commit, and checks again: safe against crashes, but not against two jobs that "
    "save to one URL at the same time. Give every job its own URL"
)


def needed(store: Store, check: str) -> str:
    """Return the text that explains the permission behind a check, with this store's name for the permission."""
    right = _RIGHTS.get(type(store), {}).get(check.partition(" ")[0])
    text = f"{_NEEDED[check]} ({right})" if right else _NEEDED[check]
    if isinstance(store, S3Store) and store.plain_http:
        text += ". The endpoint is plain HTTP, and a bucket policy may require TLS: try https://"
    return text


def lack_of_conditions(store: Store) -> str:
    """Return the message for a store that is used without conditional writes."""
    if isinstance(store, S3Store) and store.options.conditional_puts is False:
        return "conditional_puts=false in storage_options: saves use no conditional writes"
    return "this store has no conditional writes"


def without_conditions(store: Store) -> str:
    """Return the text about saves without conditional writes, with the option to set if saves rely on them."""
    if isinstance(store, S3Store) and store.capabilities.conditional_put:
        return f'Set {{"conditional_puts": false}} in storage_options: then {_WITHOUT_CONDITIONS}'
    return _WITHOUT_CONDITIONS[0].upper() + _WITHOUT_CONDITIONS[1:]


def removal(store: Store, prefix: str) -> str:
    """Return the text on how to remove objects that an examination could not delete."""
    url = f"{store.url}/{prefix}" if prefix else store.url
    return (
        f"`bucketpoint gc {url}` removes objects of doctor that are older than 48 h, with credentials that may delete"
    )


UNLISTED_UPLOADS = "The uploads of a killed save can then be aborted only by a lifecycle rule"
