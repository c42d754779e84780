"""`doctor --chaos`: what it tries on a real store, what it tells, and that it finds a loss where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bucketpoint.doctor.chaos import chaos
from bucketpoint.errors import InvalidURLError
from bucketpoint.testing import servers
from bucketpoint.testing.servers import S3Server
from gcs_server import GCSServer


def test_a_trial_survives_its_faults_and_leaves_nothing(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="runs/mine", Body=b"stays")
    lines: list[str] = []
    report = chaos(
        f"s3://{bucket}/runs", storage_options=minio.options, seed=3, saves=6, probability=0.15, told=lines.append
    )
    assert report.ok, report.losses
    assert report.committed + report.refused.total() == 6
    assert report.committed >= 3
    assert report.faults.total() >= 5
    assert len(lines) == report.refused.total() + report.failed_loads.total()
    assert report.left == []
    assert minio.keys(bucket) == ["runs/mine"]


def test_a_trial_before_gcs_survives_its_faults_and_leaves_nothing(gcs: GCSServer) -> None:
    bucket = gcs.make_bucket()
    gcs.write(bucket, "runs/mine", b"stays")
    options = {"token": "anon", "endpoint_url": gcs.endpoint}
    report = chaos(f"gs://{bucket}/runs", storage_options=options, seed=3, saves=2, probability=0.2)
    assert report.ok, report.losses
    assert report.committed + report.refused.total() == 2
    assert report.faults.total() >= 3
    assert report.left == []
    assert gcs.keys(bucket) == ["runs/mine"]


def test_without_faults_everything_commits_and_loads(minio: S3Server) -> None:
    report = chaos(f"s3://{minio.make_bucket()}", storage_options=minio.options, saves=2, probability=0.0)
    assert (report.committed, report.loaded, report.faults.total()) == (2, 2, 0)
    assert report.ok


def test_a_loss_is_found(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that says it has committed and has not."""
    from bucketpoint.dcp import writer

    monkeypatch.setattr(writer, "commit", lambda *args, **kwargs: _nothing())
    report = chaos(f"s3://{minio.make_bucket()}", storage_options=minio.options, saves=1, probability=0.0)
    assert not report.ok
    assert "cannot be loaded" in report.losses[0]


def _nothing() -> Any:
    from bucketpoint.dcp.saving.commit import Committed

    return Committed(0, 0, 0)


def test_a_store_that_no_proxy_stands_before_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidURLError, match="only for S3 and GCS"):
        chaos(str(tmp_path))


def test_the_program_tells_what_was_survived(
    minio: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from bucketpoint.cli.app import run

    for name, value in minio.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{minio.make_bucket()}/scratch"
    assert run(["doctor", url, "--size", "0", "--chaos", "--saves", "2", "--seed", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "no checkpoint was lost"
    assert any("seed 4" in line for line in said)
    assert run(["doctor", url, "--size", "0", "--chaos", "--saves", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["chaos"]
    assert told["committed"] + sum(told["refused"].values()) == 1
    assert told["losses"] == []


def test_minio_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIO", "/somewhere/minio")
    assert servers.find_minio() == Path("/somewhere/minio")
