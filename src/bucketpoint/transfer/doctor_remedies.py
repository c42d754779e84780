"""What to do about what `doctor` finds, in the terms of the store it looked at. No requests, and no findings."""

from __future__ import annotations

from bucketpoint.stores import GCSStore, S3Store, Store

_NEEDED = {
    "put": "Saves need the right to write below this URL",
    "get": "Loads, and overwriting saves, need the right to read",
    "list": "Saves and loads do without; finding the latest and pruning need the right to list",
    "delete": "Saves and loads do without; pruning needs the right to delete",
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
    "saves look, write and look again: safe against crashes, not against two jobs that save to one URL in one instant. "
    "Give every job a URL of its own"
)


def needed(store: Store, check: str) -> str:
    """What a right is for (`check` is put, get, list or delete), and what this store calls it."""
    right = _RIGHTS.get(type(store), {}).get(check)
    return f"{_NEEDED[check]} ({right})" if right else _NEEDED[check]


def without_conditions(store: Store) -> str:
    """What saves do where conditions are not kept, and how to make them do it where they rely on conditions."""
    if isinstance(store, S3Store) and store.capabilities.conditional_put:
        return f'Say {{"conditional_puts": false}} in storage_options: then {_WITHOUT_CONDITIONS}'
    return _WITHOUT_CONDITIONS[0].upper() + _WITHOUT_CONDITIONS[1:]
