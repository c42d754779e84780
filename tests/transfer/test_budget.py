"""Memory under one limit: who waits for it, who does without, and what the system does not have."""

from __future__ import annotations

import pytest

from bucketpoint import BucketpointError
from bucketpoint.transfer import BufferPool

MIB = 1 << 20


def test_what_the_system_does_not_have_is_a_named_error_and_holds_nothing() -> None:
    pool = BufferPool(4 * MIB)
    for nbytes in (1 << 60, 1 << 80):
        with pytest.raises(BucketpointError, match="cannot be had"), pool.lease(nbytes):
            pass
    with pool.lease(4 * MIB) as view:
        assert len(view) == 4 * MIB
