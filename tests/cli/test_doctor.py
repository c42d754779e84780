"""`doctor` finds what a store cannot do, what a bucket's rules would do, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bucketpoint.doctor.bucket import bucket_findings, clock_finding
from bucketpoint.doctor.examine import Diagnosis, examine
from bucketpoint.doctor.report import Finding
from bucketpoint.doctor.throughput import LEVELS, Level, Speed, probe
from bucketpoint.errors import AccessDeniedError
from bucketpoint.stores import LocalStore, open_store
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import inspect as s3_bucket
from cli.conftest import Program, enter
from kit.servers import S3Server
from transfer.wrappers import CountingStore, FailingStore

ACCESS = ["put", "get", "list", "delete"]
CONDITIONS = ["create-only put", "put if match", "pinned read"]
MULTIPART = [f"multipart {step}" for step in ("create", "upload", "complete", "list", "abort")]


def by_check(found: Diagnosis) -> dict[str, str]:
    return {one.check: one.status for one in found.findings}


def finding_of(found: Diagnosis, check: str) -> Finding:
    return next(one for one in found.findings if one.check == check)


def store_of(server: S3Server, bucket: str, **changes: Any) -> S3Store:
    return S3Store(bucket, S3Options.from_storage_options({**server.options, **changes}))


def test_passes_a_good_place_and_leaves_nothing_there(root: str, program: Program) -> None:
    done = program("doctor", f"{root}/scratch", "--size", "2MiB", "--json")
    status = {one["check"]: one["status"] for one in done.json["findings"]}
    assert (done.code, "fail" in status.values()) == (0, False)
    assert all(status[check] == "ok" for check in ACCESS)
    assert status["clean-up"] == "ok"
    assert done.json["throughput"]["moved_bytes"] >= 2 << 20
    assert [level["connections"] for level in done.json["throughput"]["levels"]] == [count for count, _ in LEVELS]
    store, prefix = open_store(root)
    assert list(store.list(prefix)) == []
    assert list(store.list_multipart(prefix)) == []


@pytest.mark.contract
def test_passes_every_check_on_minio(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    told: list[str] = []
    found = examine(store_of(minio, bucket), "runs", probe_bytes=1 << 20, told=lambda one: told.append(one.check))
    status = by_check(found)
    assert found.ok
    assert all(status[check] == "ok" for check in [*ACCESS, "clock", *CONDITIONS, "checksum", *MULTIPART, "versioning"])
    service = finding_of(found, "service")
    assert (service.status, service.remedy) == ("ok", None)
    assert service.message.startswith("minio by its Server header: conditional puts are honoured")
    assert "by their whole key only" in service.message
    # It takes no rule for that, and sweeps by itself.
    assert status["lifecycle multipart"] == "ok"
    with pytest.raises(ClientError, match="not well-formed"):
        with_rules(below("") | ABORTS)(minio, bucket)
    assert told == [one.check for one in found.findings]
    assert minio.keys(bucket) == minio.open_uploads(bucket) == []


@pytest.mark.parametrize("linked", [True, False])
def test_passes_a_local_folder_and_tells_how_it_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not linked:
        monkeypatch.setattr(os, "link", refuse)
    found = examine(LocalStore(str(tmp_path)), "", probe_bytes=linked << 20)
    assert found.ok
    assert {by_check(found)[check] for check in [*ACCESS, *CONDITIONS, *MULTIPART, "space"]} == {"ok"}
    commit = finding_of(found, "conditional commit")
    assert (commit.status, "hard link creates" in commit.message) == ("ok" if linked else "warn", linked)
    assert list(tmp_path.iterdir()) == []


def test_removes_a_local_folder_that_was_not_there(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = program("doctor", "checkpoints/run", "--size", "0")
    assert done.code == 0
    assert "\nok   get " in done.out
    assert f"the folder {tmp_path}/checkpoints/run" in done.out
    for size in ("1K", "2 MiB"):
        assert program("doctor", "checkpoints/run", "--size", size).code == 0
    last = program("doctor", str(tmp_path), "--role", "reader").out.splitlines()[-1]
    assert last == f"{tmp_path} is fit for a reader: 0 warnings, 0 failures"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("denied", "check", "status"),
    [
        ("s3:PutObject", "put", "fail"),
        ("s3:GetObject", "get", "fail"),
        ("s3:ListBucket", "list", "warn"),
        ("s3:DeleteObject", "delete", "warn"),
        ("s3:ListMultipartUploadParts", None, "ok"),
        ("s3:AbortMultipartUpload", "multipart abort", "fail"),
        ("s3:GetLifecycleConfiguration", "lifecycle", "warn"),
        ("s3:GetBucketVersioning", "versioning", "warn"),
    ],
)
def test_names_each_right_that_is_missing(minio: S3Server, denied: str, check: str | None, status: str) -> None:
    bucket = minio.make_bucket()
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    options = minio.limited_options(everything, {"Effect": "Deny", "Action": denied, "Resource": "arn:aws:s3:::*"})
    found = examine(S3Store(bucket, S3Options.from_storage_options(options)), "runs", probe_bytes=0)
    if check is None:
        assert found.ok
        return
    assert by_check(found)[check] == status
    assert denied in (finding_of(found, check).remedy or "")
    assert minio.keys(bucket) == (["runs/_bucketpoint/doctor/access"] if denied == "s3:DeleteObject" else [])


def credentials(monkeypatch: pytest.MonkeyPatch, server: S3Server, *statements: dict[str, Any]) -> None:
    """Let the program find credentials that may do only what the statements allow."""
    limited = server.limited_options(*statements)
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token"}
    enter(monkeypatch, server.env | {name: limited[option] for name, option in names.items()})


@pytest.mark.parametrize(
    ("policy", "role", "failing"),
    [
        ("trainer", None, set()),
        ("trainer", "trainer", set()),
        ("reader", "reader", set()),
        ("pruner", "pruner", set()),
        ("reader", None, {"put"}),
        ("reader", "pruner", {"put"}),
        ("pruner", "trainer", {"put"}),
        ("trainer", "pruner", {"delete"}),
    ],
)
def test_tries_what_a_role_may_do_and_leaves_the_bucket_as_before(
    minio: S3Server,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    role: str | None,
    failing: set[str],
) -> None:
    bucket = minio.make_bucket()
    minio.client().put_object(Bucket=bucket, Key="teams/a/run-1/step-1/.metadata", Body=b"somebody's")
    text = (Path(__file__).parents[2] / "policies" / "minio" / f"{policy}.json").read_text()
    text = text.replace("BUCKET", bucket).replace("PREFIX", "teams/a")
    credentials(monkeypatch, minio, *json.loads(text)["Statement"])
    said = [] if role is None else ["--role", role]
    done = program("doctor", f"s3://{bucket}/teams/a/run-1", "--size", "1MiB", "--json", *said)
    status = {one["check"]: one["status"] for one in done.json["findings"]}
    assert {check for check, state in status.items() if state == "fail"} == failing
    assert done.code == (1 if failing else 0)
    assert done.json["left"] == []
    assert minio.keys(bucket) == ["teams/a/run-1/step-1/.metadata"]
    assert minio.open_uploads(bucket) == []
    kept = minio.client().get_object(Bucket=bucket, Key="teams/a/run-1/step-1/.metadata")
    assert kept["Body"].read() == b"somebody's"
    if policy == role:
        wanted = {"trainer": ["put data", "throughput up"], "reader": ["pinned read"], "pruner": ["delete notes"]}
        assert {status[check] for check in ["list", "get", *wanted[policy]]} == {"ok"}
        assert "warn" not in status.values(), "the recommended policy is no fault"


@pytest.mark.parametrize("role", ["trainer", "reader", "pruner"])
def test_prints_the_policy_of_a_role_for_a_url(program: Program, role: str) -> None:
    for service, options in (("aws", []), ("minio", ["--endpoint-url", "http://127.0.0.1:9"])):
        text = (Path(__file__).parents[2] / "policies" / service / f"{role}.json").read_text()
        printed = program("doctor", "s3://b/teams/a", "--role", role, "--iam", *options)
        assert json.loads(printed.out) == json.loads(text.replace("BUCKET", "b").replace("PREFIX", "teams/a"))


POINT = "arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/n"


@pytest.mark.parametrize(
    ("url", "region", "resources"),
    [
        ("s3://b", "us-gov-west-1", {"arn:aws-us-gov:s3:::b/*", "arn:aws-us-gov:s3:::b"}),
        (f"s3://{POINT}/p", "cn-north-1", {f"{POINT}/object/p/*", POINT}),
        ("s3://b--usw2-az1--x-s3/p", "us-west-2", {"arn:aws:s3express:*:*:bucket/b--usw2-az1--x-s3"}),
    ],
)
def test_prints_a_policy_with_the_arns_of_its_place(
    program: Program, url: str, region: str, resources: set[str]
) -> None:
    asked = ["--role", "reader", "--iam", "--json", "--storage-option", f"region={region}"]
    found = program("doctor", url, *asked).json["policy"]["Statement"]
    assert {resource for statement in found for resource in statement["Resource"]} == resources
    assert ("ReadOnly" in json.dumps(found)) == ("s3express:CreateSession" in json.dumps(found))


def test_names_the_small_object_that_stays_where_nothing_can_be_deleted(
    minio: S3Server, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = minio.make_bucket()
    everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}
    credentials(monkeypatch, minio, everything, {"Effect": "Deny", "Action": "s3:DeleteObject", "Resource": "*"})
    done = program("doctor", f"s3://{bucket}/runs", "--json")
    assert done.code == 0
    status = {one["check"]: one["status"] for one in done.json["findings"]}
    assert (status["put data"], status["throughput"], status["clean-up"]) == ("ok", "skip", "warn")
    assert done.json["left"] == ["runs/_bucketpoint/doctor/access"]
    # Nor does anything come to it the next time.
    done = program("doctor", f"s3://{bucket}/runs")
    assert "1 object stays: runs/_bucketpoint/doctor/access" in done.out
    assert f"`bucketpoint gc s3://{bucket}/runs` removes objects of doctor" in done.out
    assert minio.keys(bucket) == ["runs/_bucketpoint/doctor/access"]
    assert minio.client().head_object(Bucket=bucket, Key=minio.keys(bucket)[0])["ContentLength"] < 20
    assert minio.open_uploads(bucket) == []


def test_sweeps_what_examinations_left_and_nothing_else(tmp_path: Path, program: Program) -> None:
    left = [
        "_bucketpoint/doctor/access",
        "_bucketpoint/doctor/0123456789ab/speed-12",
        # As 0.1.0 called them.
        "bucketpoint-doctor-0123456789ab/access",
        "bucketpoint-doctor-0123456789ab/speed-0",
    ]
    foreign = [
        "_bucketpoint/doctor/mine",
        "_bucketpoint/doctor/0123456789ab/model.pt",
        "bucketpoint-doctor-0123456789ab/model.pt",
        "bucketpoint-doctor-notes/access",
    ]
    for number, name in enumerate([*left, *foreign, "_bucketpoint/doctor/ba9876543210/access"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        if number < len(left) + len(foreign):
            os.utime(path, (1_700_000_000, 1_700_000_000))
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert program("gc", str(tmp_path), "--dry-run", "--json").json["objects"] == sorted(left)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == before
    done = program("gc", str(tmp_path), "--json")
    assert (done.json["objects"], done.json["bytes"], done.code) == (sorted(left), len(left), 0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == before - {*left}


def test_reports_what_cannot_be_reached_as_one_failure(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    for store in (
        store_of(minio, bucket + "-not"),
        store_of(minio, bucket, secret="wrong"),
        store_of(minio, bucket, client_kwargs={"endpoint_url": "http://127.0.0.1:1"}, **minio.attempts(1)),
    ):
        found = examine(store, "runs")
        assert [(one.check, one.status) for one in found.findings] == [("connect", "fail")]
        assert found.findings[0].remedy


class Without:
    """A store that does not honour what it is asked for."""

    def __init__(self, inner: Any, ignored: str) -> None:
        self._inner = inner
        self._ignored = ignored

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: value(*args, **{k: v for k, v in kwargs.items() if k != self._ignored})


@pytest.mark.parametrize(
    ("ignored", "said"),
    [("if_none_match", {"create-only put": "fail"}), ("if_match", {"put if match": "fail", "pinned read": "warn"})],
)
def test_finds_conditions_that_a_store_ignores(tmp_path: Path, ignored: str, said: dict[str, str]) -> None:
    found = examine(Without(LocalStore(str(tmp_path)), ignored), "", probe_bytes=0)  # type: ignore[arg-type]
    assert said.items() <= by_check(found).items()
    assert list(tmp_path.iterdir()) == []


def test_finds_a_race_that_two_writers_win(tmp_path: Path) -> None:
    class Racy(LocalStore):
        """Looks, waits, and writes: what a condition must not be."""

        def put(self, key: str, body: Any, *, if_none_match: bool = False, **kwargs: Any) -> Any:
            if if_none_match and any(True for info in self.list(key) if info.key == key):
                return super().put(key, body, if_none_match=True)
            if if_none_match and key.endswith("race"):
                time.sleep(0.2)
            return super().put(key, body, **kwargs)

    found = examine(Racy(str(tmp_path)), "", probe_bytes=0)
    finding = finding_of(found, "create-only put")
    assert (finding.status, "concurrent writers" in finding.message) == ("fail", True)


def test_finds_checksums_that_a_store_does_not_verify(tmp_path: Path) -> None:
    class Claims(LocalStore):
        @property
        def capabilities(self) -> Any:
            return dataclasses.replace(super().capabilities, checksums=True)

    found = examine(Claims(str(tmp_path)), "", probe_bytes=0)
    assert by_check(found)["checksum"] == "warn"


@pytest.mark.parametrize(
    ("call", "first", "check"),
    [
        ("create_multipart", 1, "multipart create"),
        ("put_part", 1, "multipart upload"),
        ("complete_multipart", 1, "multipart complete"),
        ("list_multipart", 1, "multipart list"),
        ("read_into", 5, "throughput"),
    ],
)
def test_names_the_request_that_fails_and_leaves_nothing(tmp_path: Path, call: str, first: int, check: str) -> None:
    inner = LocalStore(str(tmp_path))
    store = FailingStore(inner, lambda name, number: name == call and number >= first, lambda: AccessDeniedError("no"))
    found = examine(store, "", probe_bytes=1 << 20)
    assert by_check(found)[check] in ("fail", "warn")
    assert list(inner.list_multipart("")) == list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ahead", "status"), [(0, "ok"), (20, "ok"), (-60, "warn"), (100, "warn"), (1000, "fail"), (-1000, "fail")]
)
def test_compares_the_clocks(minio: S3Server, monkeypatch: pytest.MonkeyPatch, ahead: int, status: str) -> None:
    store = store_of(minio, minio.make_bucket())
    monkeypatch.setattr(s3_bucket, "time", SimpleNamespace(time=lambda: time.time() + ahead))
    assert clock_finding(store).status == status


def versioned(server: S3Server, bucket: str) -> None:
    server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


def suspended(server: S3Server, bucket: str) -> None:
    versioned(server, bucket)
    server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})


def that_drops_old_versions(state: Callable[[S3Server, str], None]) -> Callable[[S3Server, str], None]:
    def prepare(server: S3Server, bucket: str) -> None:
        state(server, bucket)
        with_rules(below("") | {"NoncurrentVersionExpiration": {"NoncurrentDays": 2}})(server, bucket)

    return prepare


def with_rules(*rules: dict[str, Any]) -> Callable[[S3Server, str], None]:
    entries = [{"ID": f"rule-{number}", "Status": "Enabled", **rule} for number, rule in enumerate(rules)]

    def put(server: S3Server, bucket: str) -> None:
        server.client().put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": entries})

    return put


def below(prefix: str) -> dict[str, Any]:
    return {"Filter": {"Prefix": prefix}}


TAGGED = {"Filter": {"Tag": {"Key": "a", "Value": "b"}}}
EXPIRES = {"Expiration": {"Days": 30}}
ARCHIVES = {"Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}
ABORTS = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}}


@pytest.mark.parametrize(
    ("prepare", "check", "status"),
    [
        (versioned, "versioning", "warn"),
        (suspended, "versioning", "warn"),
        (that_drops_old_versions(versioned), "versioning", "ok"),
        (that_drops_old_versions(suspended), "versioning", "ok"),
        (with_rules(below("") | EXPIRES), "lifecycle expiry", "fail"),
        (with_rules(below("runs/a") | EXPIRES), "lifecycle expiry", "fail"),
        (with_rules(below("logs/") | EXPIRES), "lifecycle expiry", "ok"),
        (with_rules(TAGGED | EXPIRES), "lifecycle expiry", "warn"),
        (with_rules(below("") | ARCHIVES), "lifecycle expiry", "warn"),
        (with_rules({"Status": "Disabled"} | below("") | EXPIRES), "lifecycle expiry", "ok"),
        (with_rules(below("") | ABORTS), "lifecycle multipart", "ok"),
        (with_rules(below("runs/a") | ABORTS), "lifecycle multipart", "warn"),
        (with_rules(TAGGED | ABORTS), "lifecycle multipart", "warn"),
    ],
)
def test_tells_what_the_buckets_own_rules_would_do(
    moto: S3Server, prepare: Callable[[S3Server, str], None], check: str, status: str
) -> None:
    bucket = moto.make_bucket()
    prepare(moto, bucket)
    found = {one.check: one.status for one in bucket_findings(store_of(moto, bucket), "runs")}
    assert found[check] == status


def test_reports_a_bucket_that_locks_new_objects(minio: S3Server) -> None:
    bucket = f"{minio.make_bucket()}-lock"
    minio.client().create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    configuration = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    minio.client().put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=configuration)
    found = examine(store_of(minio, bucket), "runs", probe_bytes=0)
    assert by_check(found)["object lock"] == "warn"
    # A delete marker hides even a locked object.
    minio.client().put_object(Bucket=bucket, Key="x", Body=b"x")
    assert store_of(minio, bucket).delete(["x"]) == []


def test_moves_about_as_many_bytes_in_the_probe_as_it_was_told_to(tmp_path: Path) -> None:
    store = CountingStore(LocalStore(str(tmp_path)))
    used: list[str] = []
    speed = probe(store, "x/", 16 << 20, used=used.append)  # type: ignore[arg-type]
    assert store.received == speed.moved_bytes
    assert 15 << 20 <= speed.moved_bytes <= 18 << 20
    assert store.keys == set(used)


def test_derives_the_advice_from_latency_and_bandwidth() -> None:
    levels = (Level(1, 80e6, 90e6), Level(8, 640e6, 700e6), Level(24, 660e6, 720e6))
    far = Speed(0.2, levels, 8 << 20, 0).advice()
    near = Speed(0.001, levels, 8 << 20, 0).advice()
    assert (near.part_bytes, near.connections) == (32 << 20, 8)
    assert far.part_bytes == 128 << 20
    scaling = Speed(0.01, (*levels[:2], Level(24, 1900e6, 720e6)), 8 << 20, 0)
    assert scaling.advice().connections == 24
