"""Secrets that are planted, and the search for them: in texts, errors with all that hangs on them, and pickles."""

from __future__ import annotations

import base64
import json
import pickle
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.errors import BucketpointError
from bucketpoint.format import keys
from bucketpoint.location import Location
from bucketpoint.stores import open_store

SECRETS = {
    "access key": "AKIAPLANTEDACCESSKEY",
    "secret key": "planted/secret+KEY-1234567890",
    "session token": "planted//session==TOKEN",
    "customer key": "planted-customer-key-of-32-bytes",
    "proxy password": "planted-proxy-password",
    "url password": "planted-url-password",
    "url signature": "planted-url-signature",
}
FORMS = sorted(
    {
        form
        for secret in SECRETS.values()
        for form in (secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode())
    }
)


def assert_clean(text: Any, where: str) -> None:
    raw = text if isinstance(text, bytes) else str(text).encode()
    assert [form for form in FORMS if form.encode() in raw] == [], where


def chain(failure: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [failure]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]
        if isinstance(one, dcp.CheckpointException):
            todo += [wrapped[0] for wrapped in one.failures.values()]


def assert_failure_is_clean(failure: BaseException, where: str) -> None:
    for one in chain(failure):
        assert_clean("".join(traceback.format_exception(one)), f"{where}: traceback")
        assert_clean(repr(one), f"{where}: repr")
        assert_clean(vars(one), f"{where}: attributes")
        if isinstance(one, BucketpointError):
            assert_clean(pickle.dumps(one), f"{where}: pickle")
            assert_clean(json.dumps({"message": one.message, **one.fields()}, default=str), f"{where}: fields")


def clean_failures(url: str, options: dict[str, Any], writer: Any, reader: Any, *others: Any) -> list[BaseException]:
    """The errors of a save, a load and two reads that fail: none of them tells a secret, nor does what made them."""
    store, prefix = open_store(url, storage_options=options)
    for what in (writer, reader, store, *others):
        assert_clean(repr(what), "repr")
        assert_clean(f"{what}", "str")
    failures = []
    for call in (
        lambda: dcp.save({"w": torch.ones(2)}, checkpoint_id=url, storage_writer=writer, no_dist=True),
        lambda: dcp.load({"w": torch.ones(2)}, checkpoint_id=url, storage_reader=reader, no_dist=True),
        lambda: open_checkpoint(Location.of(url, options)),
        lambda: store.get(keys.join(prefix, keys.METADATA)),
    ):
        with pytest.raises((dcp.CheckpointException, BucketpointError)) as caught:
            call()
        assert_failure_is_clean(caught.value, url)
        failures.append(caught.value)
    return failures
