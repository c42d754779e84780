"""Staging from device to host: copies of the state that training cannot change any more."""

from bucketpoint.staging.lease import Lease, SavingRanks, StagedState, current_lease, staged_for, take_turn
from bucketpoint.staging.pool import StagingOptions, as_staging_options
from bucketpoint.staging.stager import Stager

__all__ = [
    "Lease",
    "SavingRanks",
    "StagedState",
    "Stager",
    "StagingOptions",
    "as_staging_options",
    "current_lease",
    "staged_for",
    "take_turn",
]
