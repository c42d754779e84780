"""Totals of a test run, for the summary at the end: faults made, kills, and cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.proxied_connection import Counts


@dataclass
class Tally:
    """Counts by name."""

    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)

    def passed(self, counts: Counts) -> None:
        """Add the counts of a proxy."""
        self.requests += counts.requests.total()
        self.faults.update(counts.faults)

    def made(self, case: str, number: int = 1) -> None:
        """Add cases of a kind, such as `kills of 4 ranks`."""
        self.cases[case] += number

    def as_dict(self) -> dict[str, object]:
        return {"requests": self.requests, "faults": dict(self.faults), "cases": dict(self.cases)}

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the result of `as_dict` from another process."""
        self.requests += other["requests"]
        self.faults.update(other["faults"])
        self.cases.update(other["cases"])

    def lines(self) -> list[str]:
        """Return the summary for a person; empty if nothing happened."""
        found = []
        if self.faults:
            found.append(f"{self.faults.total():,} faults in {self.requests:,} requests")
            found += [f"  {count:6,}  {name}" for name, count in self.faults.most_common()]
        found += [f"{count:,} {case}" for case, count in sorted(self.cases.items())]
        return found
