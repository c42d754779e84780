"""The dashboard and the alerts name only what the demo really exposes, and leave no metric out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bucketpoint.telemetry import METRICS
from kit.servers import S3Server
from observability.demo_run import EXAMPLE, running

_SELECTED = r"\{([^{}]*)\}"
_GROUPED = r"\b(?:by|on) \(([^()]*)\)"
_LABELS = re.compile(f"{_SELECTED}|{_GROUPED}")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((EXAMPLE / "dashboard.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((EXAMPLE / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]


def labels_in(expression: str) -> set[str]:
    """The labels that an expression selects, groups or matches by."""
    return {
        re.split(r"[=!]", label)[0].strip()
        for found in _LABELS.finditer(expression)
        for label in (found[1] or found[2]).split(",")
    }


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bbucketpoint_\w+", _LABELS.sub("", expression)))


def names_of_the_readme() -> dict[str, set[str]]:
    """Each metric, and what the README says that Prometheus has of it."""
    rows = re.findall(
        r"^\| `(bucketpoint\.[a-z.]+)` \| `(\w+)`(.*) \|$",
        (EXAMPLE / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {
        metric: {name, *(name.removesuffix("_bucket") + more for more in re.findall(r"`(_\w+)`", rest))}
        for metric, name, rest in rows
    }


def exposed(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the labels of each sample."""
    for name, labels in re.findall(r"^(bucketpoint_\w+)\{(.*)\} ", text, re.MULTILINE):
        yield name, set(re.findall(r'(\w+)="', labels))


def test_uses_only_names_and_labels_that_the_demo_exposes(
    minio: S3Server, tmp_path: Path, dashboard: dict[str, Any], rules: list[dict[str, Any]]
) -> None:
    log = tmp_path / "log"
    with running(minio, log, saves=6, pause_s=0.0) as demo:
        lines = list(demo.lines())
        assert len(lines) == 7, (lines, log.read_text(encoding="utf-8"))
        found = dict(exposed(demo.scrape()))
    assert {name for name in found if not name.endswith("_created")} == set().union(*names_of_the_readme().values())
    for expression in expressions(dashboard, rules):
        assert names_in(expression), expression
        assert names_in(expression) <= set(found), expression
        assert labels_in(expression) <= set().union(*(found[name] for name in names_in(expression))), expression


def test_uses_every_metric_in_a_panel_or_an_alert(dashboard: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    used = set().union(*map(names_in, expressions(dashboard, rules)))
    names = names_of_the_readme()
    assert set(names) == set(METRICS)
    assert [metric for metric, exported in names.items() if not exported & used] == []


def test_gives_the_dashboard_a_source_and_runs_and_places_its_panels_apart(
    dashboard: dict[str, Any],
) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert {name: variable["type"] for name, variable in variables.items()} == {
        "datasource": "datasource",
        "run": "query",
        "window": "interval",
    }
    assert dashboard["schemaVersion"] >= 38
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["run"]["datasource"] == chosen
    places = [
        (x, y)
        for each in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert panel["datasource"] == target["datasource"] == chosen
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= set(variables)
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels_in(target["expr"])
            # Every series of the panel is one of a chosen run.
            selectors = re.findall(r"bucketpoint_\w+(?:\{[^}]*\})?", re.sub(_GROUPED, "", target["expr"]))
            assert all(selector.endswith('{bucketpoint_run=~"$run"}') for selector in selectors), selectors


def test_names_the_run_and_what_to_do_in_each_alert(rules: list[dict[str, Any]]) -> None:
    assert [rule["alert"] for rule in rules] == [
        "BucketpointNoCommit",
        "BucketpointSlowCommit",
        "BucketpointPruningFails",
    ]
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        text = " ".join(rule["annotations"].values())
        assert "{{ $labels.bucketpoint_run }}" in rule["annotations"]["summary"]
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels_in(rule["expr"])


def test_points_prometheus_to_where_the_demo_serves_its_metrics() -> None:
    settings = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text(encoding="utf-8"))
    assert settings["rule_files"] == ["alerts.yml"]
    (job,) = settings["scrape_configs"]
    (port,) = re.findall(r'"--port", type=int, default=(\d+)', (EXAMPLE / "demo.py").read_text(encoding="utf-8"))
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
