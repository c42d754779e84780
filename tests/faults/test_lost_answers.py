"""A save that survives: each request in turn meets each fault once, and what the store did with no answer stays done.

An answer that is lost after the store has acted is the worst of them: the repeated commit is refused with 412, the
repeated Complete finds no upload, and both must be known for what they are.
"""

from __future__ import annotations

import pytest

from bucketpoint.testing import CutRequest, ErrorInBody, Fault, Refuse, Reset, Script, always
from bucketpoint.testing.plugin import MakeProxy
from bucketpoint.testing.servers import S3Server
from bucketpoint.testing.tally import Tally
from faults.saves import Place

OLD, NEW, NEXT = 1, 2, 3

pytestmark = [pytest.mark.contract, pytest.mark.slow]


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
@pytest.mark.parametrize(
    "fault",
    [
        Reset(acted=True),
        Refuse(503, "SlowDown", acted=True),
        ErrorInBody(acted=True),
        ErrorInBody(),
        Reset(),
        CutRequest(),
    ],
    ids=lambda fault: fault.name,
)
def test_a_save_survives_a_fault_at_each_request(
    minio: S3Server, fault_proxy: MakeProxy, bucketpoint_tally: Tally, fault: Fault, over: bool
) -> None:
    proxy = fault_proxy(minio)
    bucket = minio.make_bucket("lost")
    number = 0
    while True:
        place = Place(minio, bucket, f"{number}", 1)
        if over:
            place.save(OLD)
        proxy.clear()
        proxy.play(always(fault, skip=number, times=1))
        place.through(proxy.url).save(NEW)
        seen = proxy.exchanges
        if not any(one.fault for one in seen):
            break
        struck = next(one.request for one in seen if one.fault)
        where = f"{fault.name} at request {number + 1}, {struck.kind} {struck.key}"
        bucketpoint_tally.made("requests of a save that each met a fault once")
        place.sweep()
        assert place.load(verified=True) == NEW, where
        litter = place.litter(seen)
        if struck.kind == "CreateMultipartUpload" and getattr(fault, "acted", False):
            # The id of that upload was in the answer. Stores that list uploads by prefix show it to `gc --deep`; on
            # MinIO only its exact key would, and a lifecycle rule ends it.
            assert all(one.startswith("upload of ") for one in litter), where
        else:
            assert litter == [], where
        number += 1
    assert number >= (1 if isinstance(fault, (ErrorInBody, CutRequest)) else 10)


def test_a_save_whose_credentials_expire_in_the_middle_commits_nothing(minio: S3Server, fault_proxy: MakeProxy) -> None:
    import torch.distributed.checkpoint as dcp

    from bucketpoint.errors import CredentialsError
    from bucketpoint.testing import ExpireCredentials

    proxy = fault_proxy(minio)
    place = Place(minio, minio.make_bucket("expired"), "run", 1)
    place.save(OLD)
    proxy.play(always(ExpireCredentials(), kinds=["UploadPart"], times=1))
    with pytest.raises(dcp.CheckpointException) as caught:
        place.through(proxy.url).save(NEW)
    assert isinstance(caught.value.failures[0][0], CredentialsError)
    proxy.play(Script())
    place.sweep()
    assert place.load(verified=True) == OLD
    assert place.litter(proxy.exchanges) == []
    place.through(proxy.url).save(NEXT)
    assert place.load() == NEXT
