"""`doctor --chaos`: what it tries on a real store, what it tells, and that it finds a loss where there is one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.doctor import chaos as trials
from bucketpoint.doctor.chaos import chaos
from bucketpoint.doctor.scratch import sweep_leftovers
from bucketpoint.errors import InvalidURLError
from bucketpoint.stores import S3Options, S3Store
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


def test_a_killed_trial_is_swept(minio: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_clean_up", lambda *left_behind: None)
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="runs/mine", Body=b"stays")
    chaos(f"s3://{bucket}/runs", storage_options=minio.options, saves=3, probability=0.0)
    assert len(minio.keys(bucket)) > 5
    store = S3Store(bucket, S3Options.from_storage_options(minio.options))
    assert sweep_leftovers(store, "runs", oldest=time.time() - 3600).objects == []
    sweep_leftovers(store, "runs", oldest=time.time() + 3600)
    assert minio.keys(bucket) == ["runs/mine"]


def test_a_trial_trusts_the_bundle_of_the_profile(
    s3_tls: S3Server, bucket_tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(f"[profile trainer]\nca_bundle = {s3_tls.ca}\n")
    options = {"endpoint_url": s3_tls.endpoint, "key": s3_tls.key, "secret": s3_tls.secret, "profile": "trainer"}
    report = chaos(f"s3://{bucket_tls}", storage_options=options, saves=1, probability=0.0)
    assert (report.committed, report.loaded, report.losses) == (1, 1, [])


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

    return Committed(0, 0, 0, None, {})


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
