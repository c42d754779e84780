"""Pruning from cron: the examples ask for no right too many, and their very commands prune a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.retention import from_yaml
from catalog.memory import save
from cli.conftest import Program, enter
from kit.servers import S3Server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """The objects of the Kubernetes example, by kind."""
    with (ROOT / "examples/cron/kubernetes.yaml").open(encoding="utf-8") as file:
        return {one["kind"]: one for one in yaml.safe_load_all(file)}


@pytest.fixture
def root(reached: S3Server) -> str:
    """A run of five checkpoints on MinIO."""
    url = reached.url(reached.make_bucket(), "run")
    catalog = open_catalog(url)
    for step in (9_000, 10_000, 11_000, 12_000, 13_000):
        save(catalog, step)
    return url


def left(root: str) -> list[int]:
    return [row.step for row in open_catalog(root).snapshot().rows() if row.tombstone is None]


def test_gives_the_kubernetes_job_no_more_than_it_must_do(manifest: dict[str, dict[str, Any]]) -> None:
    assert set(manifest) == {"ServiceAccount", "ConfigMap", "CronJob"}
    job = manifest["CronJob"]["spec"]
    assert manifest["CronJob"]["apiVersion"] == "batch/v1"
    assert job["concurrencyPolicy"] == "Forbid"
    assert re.fullmatch(r"(\S+ ){4}\S+", job["schedule"])
    assert job["jobTemplate"]["spec"]["activeDeadlineSeconds"] < 3600
    pod = job["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    account = manifest["ServiceAccount"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert account["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsUser"] > 0
    (container,) = pod["containers"]
    assert "cpu" in container["resources"]["limits"]
    assert not any("SECRET" in one["name"] or "KEY" in one["name"] for one in container["env"])
    assert {one["metadata"]["namespace"] for one in manifest.values()} == {"training"}
    # All of the manifest's references lead somewhere.
    (volume,) = pod["volumes"]
    assert volume["configMap"]["name"] == manifest["ConfigMap"]["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"] is True
    assert Path(container["command"][-1]).parent == Path(mount["mountPath"])
    assert Path(container["command"][-1]).name in manifest["ConfigMap"]["data"]


def test_prunes_a_run_by_the_command_of_the_kubernetes_job(
    manifest: dict[str, dict[str, Any]], program: Program, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = manifest["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    for name, text in manifest["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    mount = container["volumeMounts"][0]["mountPath"]
    name, *command = [part.replace(mount, str(tmp_path)) for part in container["command"]]
    assert name == "bucketpoint"
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["BUCKETPOINT_ROOT"].startswith("s3://")
    # Terraform's output of the same name is the folder above the runs.
    above, _, name = root.rpartition("/")
    where = {"BUCKETPOINT_ROOT": above, "RUN_NAME": name}
    assert set(where) <= set(env)
    enter(monkeypatch, where)
    done = program(*command)
    # The policy keeps the latest three, the first of 10,000 steps, and what has no metric yet.
    assert (done.code, done.out) == (0, "step 9000 got a tombstone\n"), done.err
    policy = from_yaml(manifest["ConfigMap"]["data"]["policy.yaml"], environ=where)
    assert policy.prune.when == "manual"
    assert left(root) == [10_000, 11_000, 12_000, 13_000]


def test_prunes_a_run_by_the_crontab_line_of_the_documentation(program: Program, root: str, tmp_path: Path) -> None:
    text = (ROOT / "docs/retention.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```crontab\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (line,) = [line for line in block.splitlines() if not line.startswith("#")]
    found = re.fullmatch(r"((?:\S+ ){4}\S+) +(/\S+/bucketpoint prune (/\S+))", line)
    assert found, line
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nroot: {root}\nkeep: {{latest: 2}}\nprune: {{max_delete: {{fraction: 1.0}}}}\n")
    _, *command = [str(policy) if part == found[3] else part for part in shlex.split(found[2])]
    done = program(*command)
    assert done.out.splitlines() == [f"step {step} got a tombstone" for step in (9_000, 10_000, 11_000)], done.err
    assert left(root) == [12_000, 13_000]
