"""The fault kit: scripted faults of stores and networks, in front of any S3 or GCS endpoint."""

from kit.faults import (
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
    Slow,
    Stale,
    Stall,
    always,
    mixed,
)
from kit.http import Wire
from kit.proxy import FaultProxy

__all__ = [
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
    "Slow",
    "Stale",
    "Stall",
    "Wire",
    "always",
    "mixed",
]
