"""Retention policies, and plans: the decisions of a policy on a run's checkpoints."""

from bucketpoint.retention.plans import Entry, Plan, Reason, Verdict, circuit_breaker, plan
from bucketpoint.retention.policy import (
    InFlight,
    Keep,
    Layout,
    MaxDelete,
    Prune,
    RetentionPolicy,
    Save,
    SaveEvery,
    SaveEveryMinutes,
)
from bucketpoint.retention.rows import Row
from bucketpoint.retention.rules import Await, Best, EveryHours, EverySteps
from bucketpoint.retention.yaml_text import from_yaml, to_yaml

__all__ = [
    "Await",
    "Best",
    "Entry",
    "EveryHours",
    "EverySteps",
    "InFlight",
    "Keep",
    "Layout",
    "MaxDelete",
    "Plan",
    "Prune",
    "Reason",
    "RetentionPolicy",
    "Row",
    "Save",
    "SaveEvery",
    "SaveEveryMinutes",
    "Verdict",
    "circuit_breaker",
    "from_yaml",
    "plan",
    "to_yaml",
]
