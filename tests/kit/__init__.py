"""The fault kit: scripted faults of stores and networks, in front of any S3 or GCS endpoint. See `docs/testing.md`."""

from bucketpoint.testing.faults import (
    TRANSIENT,
    CutReply,
    CutRequest,
    Delay,
    ErrorInBody,
    ExpireCredentials,
    Fault,
    FlipReply,
    FlipRequest,
    Kill,
    Refuse,
    Reset,
    Rule,
    Script,
    SkewClock,
    Slow,
    Stale,
    Stall,
    always,
    mixed,
)
from bucketpoint.testing.http import Wire
from bucketpoint.testing.proxied_connection import Counts
from bucketpoint.testing.proxy import FaultProxy

__all__ = [
    "TRANSIENT",
    "Counts",
    "CutReply",
    "CutRequest",
    "Delay",
    "ErrorInBody",
    "ExpireCredentials",
    "Fault",
    "FaultProxy",
    "FlipReply",
    "FlipRequest",
    "Kill",
    "Refuse",
    "Reset",
    "Rule",
    "Script",
    "SkewClock",
    "Slow",
    "Stale",
    "Stall",
    "Wire",
    "always",
    "mixed",
]
