"""Memory under one limit: who waits for it, who does without, and what the system does not have."""

from __future__ import annotations

import pytest

from bucketpoint import BucketpointError
from bucketpoint.transfer import BufferPool

MIB = 1 << 20


def test_whoever_must_not_wait_gets_what_is_free_or_nothing() -> None:
    pool = BufferPool(4 * MIB)
    with pool.lease(3 * MIB), pool.lease_now(2 * MIB) as too_much, pool.lease_now(MIB) as enough:
        assert too_much is None
        assert enough is not None
        assert len(enough) == MIB
    with pool.lease_now(4 * MIB) as all_of_it:
        assert all_of_it is not None
    # Where nothing else is leased a larger one is granted, but only to those who can wait for that.
    with pool.lease_now(4 * MIB + 1) as more:
        assert more is None
    with pool.lease(5 * MIB) as view:
        assert len(view) == 5 * MIB
    with pool.lease_now(0) as nothing:
        assert nothing is not None


def test_what_the_system_does_not_have_is_a_named_error_and_holds_nothing() -> None:
    pool = BufferPool(4 * MIB)
    for nbytes in (1 << 60, 1 << 80):
        with pytest.raises(BucketpointError, match="cannot be had"), pool.lease(nbytes):
            pass
    with pool.lease_now(4 * MIB) as view:
        assert view is not None
