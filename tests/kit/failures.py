"""The error of ours that an action ends with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketpointError


def failure_of(action: Callable[[], object]) -> BucketpointError:
    """Return the error that an action raises, which DCP may have wrapped."""
    with pytest.raises((BucketpointError, dcp.CheckpointException)) as caught:
        action()
    error = next(iter(getattr(caught.value, "failures", {0: (caught.value,)}).values()))[0]
    assert isinstance(error, BucketpointError), error
    return error
