"""The example in Prometheus: its files are valid, its alerts fire when they should, its panels have data."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.servers import S3Server, free_port
from observability.demo_run import EXAMPLE, running

LIMIT_S = 120
"""Far above the few seconds that anything here takes: only a hang reaches it."""


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(
            f"there is no {name} here: `apt-get install prometheus`, or put a release of Prometheus on the PATH"
        )
    return path


@pytest.fixture(scope="session")
def promtool() -> str:
    return _found("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _found("prometheus")


def test_validates_the_example_by_promtool(promtool: str) -> None:
    # The rules are checked with it.
    checked = subprocess.run(
        [promtool, "check", "config", EXAMPLE / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout
    assert "3 rules found" in checked.stdout


def test_fires_each_alert_when_it_should_and_not_otherwise(promtool: str) -> None:
    tests = Path(__file__).with_name("alerts_test.yml")
    tested = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


class Server:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the HTTP API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """Return the values of the series of an expression."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError):  # It does not listen yet.
            if condition():
                return
        assert time.monotonic() < ends, what
        time.sleep(0.1)


@contextlib.contextmanager
def scraping(program: str, folder: Path, port: int) -> Iterator[Server]:
    """Run Prometheus with the example's rules, scraping a port each second."""
    folder.mkdir()
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(EXAMPLE / "alerts.yml")],
        "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings), encoding="utf-8")  # YAML too
    own = free_port()
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield Server(own)
        finally:
            process.terminate()
            process.wait(LIMIT_S)


@pytest.mark.slow
def test_has_data_in_every_panel_and_keeps_the_age_after_the_job(
    prometheus: str, minio: S3Server, tmp_path: Path
) -> None:
    dashboard = json.loads((EXAMPLE / "dashboard.json").read_text(encoding="utf-8"))
    queries = {
        (panel["title"], target["refId"]): target["expr"].replace("$run", ".*").replace("$window", "5m")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    with (
        running(minio, tmp_path / "log", saves=20, pause_s=1.0) as demo,
        scraping(prometheus, tmp_path / "prometheus", demo.port) as server,
    ):
        assert len(list(demo.lines())) == 21, (tmp_path / "log").read_text(encoding="utf-8")
        # The last round of pruning has been scraped, and with it all that came before.
        wait_for(lambda: server.query("bucketpoint_prune_deleted_total") == [16], "16 of 19 checkpoints are deleted")

        values = {title: server.query(query) for title, query in queries.items()}
        assert {title: found for title, found in values.items() if not found or any(map(math.isnan, found))} == {}
        assert 0 <= values["Age of the newest checkpoint", "A"][0] < 600
        assert values["Failed saves", "A"] == values["Failed rounds of pruning", "A"] == [1]
        assert values["Checkpoints that are kept", "A"] == [3]
        size = values["Bytes per checkpoint", "A"][0]
        assert values["Bytes of the checkpoints that are kept", "A"] == [3 * size]
        assert values["Upload throughput of a rank", "A"][0] > 0
        assert server.get("label/bucketpoint_run/values", **{"match[]": '{__name__=~"bucketpoint_.+"}'}) == [demo.run]
        rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        assert [(rule["health"], rule["state"]) for rule in rules] == [("ok", "inactive")] * 3, rules

        demo.process.kill()
        wait_for(lambda: server.query("up") == [0], "the job is gone")
        assert server.query("bucketpoint_checkpoint_committed_seconds") == []
        assert server.query(queries["Age of the newest checkpoint", "A"])[0] >= 0
