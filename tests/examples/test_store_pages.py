"""The pages of the stores: what is there to be copied runs, and the table of guarantees says what the code does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from bucketpoint.doctor.bucket import bucket_findings
from bucketpoint.stores import Capabilities, LocalStore
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import options as s3_services
from cli.conftest import enter
from gcs_server import GCSServer
from kit import servers
from kit.servers import S3Server

DOCS = Path(__file__).resolve().parents[2] / "docs"
BUCKET = "checkpoints"
COMMIT = "run/step-500/.metadata"


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    _, _, text = f"\n{(DOCS / page).read_text(encoding='utf-8')}".partition(f"\n{heading}")
    return [found[1] for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def start(page: str) -> str:
    """The first Python of a page, which saves and loads in a bucket named `checkpoints`."""
    return blocks(page, "python")[0]


def exported(page: str, heading: str) -> dict[str, str]:
    """What the first shell example below a heading puts into the environment."""
    lines = [line for line in blocks(page, "bash", heading)[0].splitlines() if line.startswith("export ")]
    return dict(pair.split("=", 1) for line in lines for pair in shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("page", ["s3.md", "gcs.md"])
def test_begins_each_page_with_what_to_install_and_the_same_ten_lines(page: str) -> None:
    shell = blocks(page, "bash")[0]
    above, _, _ = (DOCS / page).read_text(encoding="utf-8").partition(shell)
    assert "(quickstart.md#install)" in above
    assert ("the extra `gcs`" in above) == (page == "gcs.md")
    assert f"bucketpoint doctor {'gs' if page == 'gcs.md' else 's3'}://{BUCKET}/run" in shell
    same = start("s3.md").replace("S3", "GCS").replace("s3://", "gs://") if page == "gcs.md" else start("s3.md")
    assert start(page) == same


@pytest.mark.parametrize("region", ["us-east-1", "auto"], ids=["as on AWS", "as on R2"])
def test_runs_the_start_for_s3(minio: S3Server, monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    bucket = minio.make_bucket()
    enter(monkeypatch, {**minio.env, "AWS_REGION": region})
    exec(start("s3.md").replace(f"s3://{BUCKET}", f"s3://{bucket}"), {})
    assert COMMIT in minio.keys(bucket)


def test_runs_the_start_for_gcs(gcs: GCSServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = gcs.make_bucket()
    enter(monkeypatch, gcs.env)
    exec(start("gcs.md").replace(f"gs://{BUCKET}", f"gs://{bucket}"), {})
    assert COMMIT in gcs.keys(bucket)


def defaulted(text: str) -> str:
    """With the defaults of what Compose takes from its environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_starts_by_the_compose_file_a_server_on_which_the_start_runs(
    bucketpoint_minio_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command and environment, given to a server that is no container."""
    (text,) = blocks("s3.md", "yaml")
    services = yaml.safe_load(text)["services"]
    server, maker = services["minio"], services["bucket"]
    assert server["image"] == maker["image"]
    assert re.fullmatch(r"minio/minio:RELEASE\.\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", server["image"])
    assert maker["depends_on"] == {"minio": {"condition": "service_healthy"}}
    assert server["healthcheck"]["test"] == ["CMD", "mc", "ready", "local"]
    assert server["ports"][0] == "127.0.0.1:9000:9000"
    assert server["volumes"] == [f"{next(iter(yaml.safe_load(text)['volumes']))}:/data"]
    environment = {name: defaulted(value) for name, value in server["environment"].items()}
    settings = exported("s3.md", "## MinIO")
    assert settings.pop("AWS_ENDPOINT_URL") == "http://127.0.0.1:9000"
    key, secret = environment["MINIO_ROOT_USER"], environment["MINIO_ROOT_PASSWORD"]
    assert settings == {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    assert defaulted(maker["environment"]["MC_HOST_here"]) == f"http://{key}:{secret}@minio:9000"
    assert maker["entrypoint"] == ["mc", "mb", "--ignore-existing", f"here/{BUCKET}"]

    def command(scratch: Path, port: int) -> list[str]:
        words = server["command"].replace("/data", str(scratch / "data")).replace(":9001", "127.0.0.1:0").split()
        return [str(bucketpoint_minio_binary), *words, "--address", f"127.0.0.1:{port}", "--certs-dir", str(scratch)]

    # MINIO_CI_CD: a folder of the root disk is no drive to MinIO otherwise. A volume of its own is one.
    with servers._running(command, {**environment, "MINIO_CI_CD": "1"}) as (_, port, _):
        running = S3Server("minio", f"http://127.0.0.1:{port}", key, secret)
        servers._wait_until_served(running)
        running.client().create_bucket(Bucket=BUCKET)
        enter(monkeypatch, {**settings, "AWS_ENDPOINT_URL": running.endpoint})
        exec(start("s3.md"), {})
        assert COMMIT in running.keys(BUCKET)


def test_satisfies_doctor_by_the_lifecycle_rule_for_s3(moto: S3Server) -> None:
    bucket = moto.make_bucket()
    client = moto.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    (rules,) = blocks("s3.md", "json")
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=json.loads(rules))
    store = S3Store(bucket, S3Options.from_storage_options(moto.options))
    found = {one.check: one.status for one in bucket_findings(store, "run")}
    assert {found[check] for check in ("versioning", "lifecycle expiry", "lifecycle multipart")} == {"ok"}


def guarantees() -> dict[str, list[str]]:
    text = (DOCS / "stores.md").read_text(encoding="utf-8")
    table = re.search(r"^\| store \|.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def told(able: Capabilities) -> list[str]:
    """The cells that say this."""
    flags = (able.conditional_put and able.conditional_replace, able.checksums, able.multipart, able.pinned_reads)
    uploads = "by prefix" if able.lists_uploads else "by whole key"
    deletes = "yes" if able.conditional_delete else "by time" if able.expiring_delete else "a trial tells"
    return [*("yes" if flag else "no" for flag in flags), uploads, deletes]


@pytest.mark.parametrize("name", [*s3_services.SERVICES, "another S3 endpoint"])
def test_says_of_each_s3_service_in_the_table_what_the_store_says(name: str) -> None:
    options: dict[str, Any] = {"endpoint_url": "https://s3.example", "key": "k", "secret": "s"}
    if name in s3_services.SERVICES:
        options["service"] = name
    store = S3Store("bucket", S3Options.from_storage_options(options))
    assert guarantees()[name][:6] == told(store.capabilities)


def test_says_of_the_others_in_the_table_what_the_store_says(tmp_path: Path) -> None:
    assert guarantees()["gs://"][:6] == told(GCSStore("bucket").capabilities)
    folder = [cell.partition(",")[0] for cell in guarantees()["a folder"][:6]]
    assert folder == told(LocalStore(str(tmp_path)).capabilities)
    assert len(guarantees()) == len(s3_services.SERVICES) + 5
