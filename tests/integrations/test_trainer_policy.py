"""Metrics that a trainer reports, of which some have names too long for a checkpoint."""

from __future__ import annotations

import pytest

from bucketpoint.integrations.trainer_policy import fitting_metrics
from bucketpoint.retention import Best, Keep, RetentionPolicy


def test_leaves_out_metrics_with_too_long_names_unless_the_policy_ranks_by_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long, left_out = "val/" + "x" * 120, set[str]()
    metrics = {long: 1.0, "short": 2.0}
    for _ in range(2):
        assert fitting_metrics(metrics, RetentionPolicy(Keep(latest=1)), left_out) == {"short": 2.0}
    assert len([record for record in caplog.records if long in record.getMessage()]) == 1
    # The manager refuses it.
    ranking = RetentionPolicy(Keep(latest=1, best=[Best(long, "min")]))
    assert fitting_metrics(metrics, ranking, set()) == metrics
