"""A save that survives: each request in turn meets each fault once, and what the store did with no answer stays done.

An answer that is lost after the store has acted is the worst of them: the repeated commit is refused with 412, the
repeated Complete finds no upload, and both must be known for what they are. On GCS the repeated commit is refused by
its generation. And death after the commit of an overwrite: the new checkpoint stands, and what it replaced is removed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from bucketpoint.errors import CredentialsError
from faults.saves import Place
from kit import (
    CutRequest,
    ErrorInBody,
    ExpireCredentials,
    Fault,
    FaultProxy,
    Kill,
    Refuse,
    Reset,
    Rule,
    Script,
    always,
)
from kit.failures import failure_of
from kit.tally import Tally
from services import Server

OLD, NEW, NEXT = 1, 2, 3

pytestmark = pytest.mark.contract

LOST: list[Fault] = [Reset(acted=True), Refuse(503, "SlowDown", acted=True)]
OF_S3: list[Fault] = [ErrorInBody(acted=True), ErrorInBody()]
NEVER_ARRIVED: list[Fault] = [Reset(), CutRequest()]


def cases(server: str, faults: list[Fault], **marks: Any) -> list[Any]:
    return [pytest.param(server, fault, id=f"{server}-{fault.name}", **marks) for fault in faults]


CASES = [
    *cases("minio", LOST + OF_S3 + NEVER_ARRIVED),
    *cases("gcs", LOST),
    *cases("gcs", NEVER_ARRIVED, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("over", "copies"), [(False, False), (True, False), (True, True)], ids=["fresh", "over an old one", "with copies"]
)
@pytest.mark.parametrize(("server", "fault"), CASES, indirect=["server"])
def test_saves_through_a_fault_at_each_request(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally, fault: Fault, over: bool, copies: bool
) -> None:
    bucket = server.make_bucket("lost")
    # What never changes has an object of its own, which can be copied, from the second save on.
    for value in [OLD, OLD + 100][: over + copies]:
        Place(server, bucket, "run", 1, copies).save(value)
    number = 0
    while True:
        # What was saved over an old one is the old one of the next.
        place, new = Place(server, bucket, "run" if over else f"run-{number}", 1, copies), NEW + number
        proxy.clear()
        proxy.play(always(fault, skip=number, times=1))
        # Who may not overwrite must know his own commit by its bytes when the store says that one is there.
        place.through(proxy.url).save(new, overwrite=over)
        seen = proxy.exchanges
        assert not copies or any(one.request.kind == "CopyObject" for one in seen)
        if not any(one.fault for one in seen):
            break
        struck = next(one.request for one in seen if one.fault)
        where = f"{fault.name} at request {number + 1}, {struck.kind} {struck.key}"
        bucketpoint_tally.made("requests of a save that each met a fault once")
        place.sweep()
        assert place.load(verified=True) == new, where
        litter = place.litter(seen)
        if struck.kind == "CreateMultipartUpload" and getattr(fault, "acted", False):
            # The id of that upload was in the answer. Stores that list uploads by prefix show it to `gc --deep`; on
            # MinIO only its exact key would, and a lifecycle rule ends it.
            assert all(one.startswith("upload of ") for one in litter), where
        else:
            assert litter == [], where
        number += 1
    assert number >= (1 if isinstance(fault, (ErrorInBody, CutRequest)) else 8)


def test_commits_nothing_if_credentials_expire_in_the_middle(server: Server, proxy: FaultProxy) -> None:
    place = Place(server, server.make_bucket("expired"), "run", 1)
    place.save(OLD)
    # The second object of the data, or the second part of it.
    proxy.play(always(ExpireCredentials(), kinds=["UploadPart", "PutObject"], keys="*.distcp*", skip=1, times=1))
    assert isinstance(failure_of(lambda: place.through(proxy.url).save(NEW)), CredentialsError)
    proxy.play(Script())
    place.sweep()
    assert place.load(verified=True) == OLD
    assert place.litter(proxy.exchanges) == []
    place.through(proxy.url).save(NEXT)
    assert place.load() == NEXT


THE_COMMIT = Rule((Kill(()),), kinds=("PutObject",), keys="*/.metadata")

THE_CLEAN_UP = Rule((Kill((), acted=False),), kinds=("DeleteObjects",), skip=1)
"""The first delete takes away the note of the uploads."""

THE_RECORD = Rule((Kill((), acted=False),), kinds=("PutObject",), keys="*/steps/*__model.*")


@pytest.mark.parametrize("dies_at", [THE_COMMIT, THE_CLEAN_UP, THE_RECORD], ids=["commit", "clean-up", "record"])
def test_sweeps_what_an_overwrite_replaced_though_its_save_died(
    server: Server, proxy: FaultProxy, dies_at: Rule
) -> None:
    place = Place(server, server.make_bucket("after"), "run", 1)
    place.save(OLD)
    proxy.play(Script((dies_at,)))
    with contextlib.suppress(dcp.CheckpointException):
        # Cut off at the commit, it cannot know whether that arrived. Its store does not come back, so it need not wait.
        place.through(proxy.url).save(NEW, **server.attempts(1), retry_deadline_s=1)
    seen = proxy.exchanges
    assert "kill" in {one.fault for one in seen}
    assert place.load() == NEW
    place.sweep()
    assert place.load(verified=True) == NEW
    assert place.litter(seen) == []
