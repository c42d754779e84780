"""Pruning from cron: the examples ask for no right too many, and their very commands prune a run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.location import Location
from bucketpoint.retention import from_yaml
from catalog.memory import save
from kit.servers import S3Server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
"""Far above the few seconds it takes: only a hang reaches it."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """The objects of the Kubernetes example, by kind."""
    with (ROOT / "examples/cron/kubernetes.yaml").open(encoding="utf-8") as file:
        return {one["kind"]: one for one in yaml.safe_load_all(file)}


@pytest.fixture
def root(minio: S3Server) -> str:
    """A run of five checkpoints on MinIO."""
    bucket = minio.make_bucket()
    url = minio.url(bucket, "run")
    catalog = open_catalog(Location.of(url, minio.options))
    for step in (9_000, 10_000, 11_000, 12_000, 13_000):
        save(catalog, step)
    return url


def run(server: S3Server, command: list[str], **env: str) -> str:
    """What the command says; it must succeed. The program is this environment's."""
    program = [str(Path(sys.executable).with_name("bucketpoint")), *command[1:]]
    done = subprocess.run(
        program,
        env=os.environ | server.env | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


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
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])
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
    manifest: dict[str, dict[str, Any]], minio: S3Server, root: str, tmp_path: Path
) -> None:
    (container,) = manifest["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    for name, text in manifest["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    mount = container["volumeMounts"][0]["mountPath"]
    command = [part.replace(mount, str(tmp_path)) for part in container["command"]]
    assert command[0] == "bucketpoint"
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["BUCKETPOINT_ROOT"].startswith("s3://")
    # Terraform's output of the same name is the folder above the runs.
    above, _, name = root.rpartition("/")
    where = {"BUCKETPOINT_ROOT": above, "RUN_NAME": name}
    assert set(where) <= set(env)
    said = run(minio, command, **where)
    # The policy keeps the latest three, the first of 10,000 steps, and what has no metric yet.
    assert said.splitlines() == ["step 9000 got a tombstone"]
    policy = from_yaml(manifest["ConfigMap"]["data"]["policy.yaml"], environ=where)
    assert policy.prune.when == "manual"
    rows = open_catalog(Location.of(root, minio.options)).snapshot().rows()
    left = [row.step for row in rows if row.tombstone is None]
    assert left == [10_000, 11_000, 12_000, 13_000]


def test_prunes_a_run_by_the_crontab_line_of_the_documentation(minio: S3Server, root: str, tmp_path: Path) -> None:
    text = (ROOT / "docs/retention.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```crontab\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (line,) = [line for line in block.splitlines() if not line.startswith("#")]
    found = re.fullmatch(r"((?:\S+ ){4}\S+) +(/\S+/bucketpoint prune (/\S+))", line)
    assert found, line
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nroot: {root}\nkeep: {{latest: 2}}\nprune: {{max_delete: {{fraction: 1.0}}}}\n")
    command = [str(policy) if part == found[3] else part for part in shlex.split(found[2])]
    said = run(minio, command)
    assert said.splitlines() == [f"step {step} got a tombstone" for step in (9_000, 10_000, 11_000)]
    rows = open_catalog(Location.of(root, minio.options)).snapshot().rows()
    left = [row.step for row in rows if row.tombstone is None]
    assert left == [12_000, 13_000]
