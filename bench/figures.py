"""Medians, paired ratios and their intervals, from the list of measurements. No text and no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Measurement = dict[str, Any]
Metric = Callable[[Measurement], float]


def wall(measurement: Measurement) -> float:
    return float(measurement["wall_s"])


def cpu_per_gb(measurement: Measurement) -> float:
    """Client CPU seconds, user and system, for each 10^9 bytes that the process needed moved."""
    return float(measurement["user_s"] + measurement["system_s"]) / (measurement["needed_bytes"] / 1e9)


def peak_mb(measurement: Measurement) -> float:
    return float(measurement["peak_bytes"]) / 1e6


@dataclass(frozen=True)
class Spread:
    """A median and the range around it.

    The smallest and the largest of n values enclose the true median with probability 1 - 2^(1 - n): 98.4 % for 7.
    """

    middle: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class Results:
    """All measurements of a run, asked by contender, operation and place."""

    measurements: Sequence[Measurement]

    def of(self, contender: str, op: str, where: str) -> list[Measurement]:
        return [
            found
            for found in self.measurements
            if (found["contender"], found["op"], found["where"]) == (contender, op, where)
            and "error" not in found
            and "not_run" not in found
        ]

    def spread(self, contender: str, op: str, where: str, metric: Metric) -> Spread | None:
        return Spread.of([metric(found) for found in self.of(contender, op, where)])

    def ratio(self, contender: str, other: str, op: str, where: str, metric: Metric) -> Spread | None:
        """Ratios of neighbours in time: both of the same round."""
        theirs = {found["round"]: metric(found) for found in self.of(other, op, where)}
        ours = [
            (metric(found), theirs[found["round"]])
            for found in self.of(contender, op, where)
            if found["round"] in theirs
        ]
        return Spread.of([mine / its for mine, its in ours if its])

    def counted(self, contender: str, op: str) -> Measurement | None:
        """The one measurement of an operation whose requests were written down."""
        found = [one for one in self.of(contender, op, "count") if "requests" in one]
        return found[0] if found else None

    def moved_per_needed(self, contender: str, op: str) -> float | None:
        found = self.counted(contender, op)
        if found is None:
            return None
        moved: int = found["requests"]["sent" if op in ("save", "overwrite") else "received"]
        return moved / int(found["needed_bytes"])

    def errors(self) -> list[Measurement]:
        return [found for found in self.measurements if "error" in found]
