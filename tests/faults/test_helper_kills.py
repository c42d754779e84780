"""The kill matrix with the helper as the victim: it dies after each request of a save, and the save succeeds."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from faults.saves import Place, slow_on_gcs, state
from kit import FaultProxy, Kill, Script, always
from services import Server

STARTS_S = 60.0


def helper_of(writer: BucketWriter) -> int:
    """The process id of a helper that has started and waits for an order."""
    writer.prefault(state(1, 0))
    ends = time.monotonic() + STARTS_S
    # It leads a process group of its own once it runs.
    while (process := writer.uploads.process_id) is None or os.getpgid(process) != process:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return process


@slow_on_gcs
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an old one"])
def test_saves_though_its_helper_is_killed_after_each_request(server: Server, proxy: FaultProxy, over: bool) -> None:
    bucket = server.make_bucket("helper")
    died = requests = 0
    # The first save is not disturbed. Requests of the trainer are counted too: the helper then dies with nothing to do.
    for number in itertools.count():
        if number > requests and number:
            break
        place = Place(server, bucket, "run" if over else f"run-{number}", 1)
        writer = place.through(proxy.url).writer(background="process")
        helper = helper_of(writer)
        proxy.clear()
        proxy.play(always(Kill((helper,), others_live=True), skip=number - 1, times=1) if number else Script())
        dcp.async_save(state(1, 1 + number, own=0), storage_writer=writer, no_dist=True).result()  # type: ignore[union-attr]
        died += writer.uploads.process_id != helper
        requests = requests or len(proxy.exchanges)
        writer.close()
        assert place.load(verified=True) == 1 + number, f"killed after request {number}"
        place.sweep()
        assert place.litter(proxy.exchanges) == [], f"killed after request {number}"
    assert requests >= 10
    assert died >= 3
