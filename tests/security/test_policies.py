"""The policies in `policies/minio`, enforced by MinIO: each role can do all of its work, and is refused the rest."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketpoint
import make_policies
from bucketpoint import S3Reader, S3Writer, TransferOptions, async_save
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.prune import prune_by
from bucketpoint.catalog.deletion.remove import plan_removal, remove
from bucketpoint.catalog.deletion.state import undo
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.notes import pin, unpin
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.errors import AccessDeniedError
from bucketpoint.format.keys import data_path
from bucketpoint.location import Location
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import EverySteps, Keep, Prune, RetentionPolicy
from bucketpoint.stores import ObjectInfo, Store, open_store
from kit import checkpoints
from kit.servers import S3Server

POLICIES = Path(__file__).parents[2] / "policies" / "minio"
ROLES = ("trainer", "reader", "pruner")
PREFIX = "teams/a"
# A prefix is for all runs of a team, and may be that of one run.
RUN = f"{PREFIX}/run-1"
MIB = 1 << 20
Place = tuple[str, dict[str, dict[str, Any]]]
SMALL_PARTS = TransferOptions(part_bytes=5 * MIB, single_put_bytes=5 * MIB, connections=4)


def statements(role: str, bucket: str, below: str = f"{PREFIX}/") -> list[dict[str, Any]]:
    text = (POLICIES / f"{role}.json").read_text().replace("BUCKET", bucket).replace("PREFIX/", below)
    found: list[dict[str, Any]] = json.loads(text)["Statement"]
    return found


@pytest.fixture(scope="module")
def place(minio: S3Server) -> Place:
    """A bucket, and `storage_options` of each role on it."""
    bucket = minio.make_bucket()
    return bucket, {role: minio.limited_options(*statements(role, bucket)) for role in ROLES}


def save(url: str, value: float, options: dict[str, Any]) -> None:
    checkpoints.save(url, value, S3Writer(storage_options=options, transfer=SMALL_PARTS), elements=3 * MIB)


def loaded(url: str, options: dict[str, Any]) -> float:
    return checkpoints.load(url, S3Reader(storage_options=options), elements=3 * MIB)


def manual(**keep: Any) -> RetentionPolicy:
    return RetentionPolicy(Keep(**keep), prune=Prune(when="manual", grace=timedelta(0)))


def trained(step: int) -> dict[str, Any]:
    # A state that stands still is reported.
    return {"model": {"w": torch.full((100,), float(step))}, "optim": {"m": torch.full((100,), float(step))}}


def managed(root: str, options: dict[str, Any], *steps: int) -> None:
    with CheckpointManager(root, policy=manual(latest=9), storage_options=options) as manager:
        for step in steps:
            manager.save(step, trained(step))


def test_names_no_star_but_below_the_prefix_in_the_files() -> None:
    for role in ROLES:
        for statement in statements(role, "b"):
            assert statement["Effect"] == "Allow"
            assert all(action.startswith("s3:") and "*" not in action for action in statement["Action"])
            for resource in statement["Resource"]:
                assert resource == "arn:aws:s3:::b" or resource.startswith(f"arn:aws:s3:::b/{PREFIX}/")
            # What a whole bucket may be asked for is bound to the prefix where the service can do that.
            assert ("Condition" in statement) == (statement["Action"] == ["s3:ListBucket"])
    assert sorted(path.name for path in POLICIES.glob("*.json")) == sorted(f"{role}.json" for role in ROLES)


def test_makes_the_files_of_the_one_source() -> None:
    texts = make_policies.files()
    assert {path for path in POLICIES.parent.rglob("*") if path.is_file()} == set(texts)
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run tools/make_policies.py"


def test_allows_requests_without_a_prefix_in_amazons_policies_unlike_minios() -> None:
    # S3 evaluates the right to list, with its condition, to choose between 404 and 403 for a GET of a missing key.
    for role in ROLES:
        amazons = (POLICIES.parent / "aws" / f"{role}.json").read_text()
        conditions = [each["Condition"] for each in json.loads(amazons)["Statement"] if "Condition" in each]
        assert conditions == [{"StringLikeIfExists": {"s3:prefix": ["PREFIX/*"]}}]
        assert amazons.replace("StringLikeIfExists", "StringLike") == (POLICIES / f"{role}.json").read_text()


def test_lets_a_trainer_save_overwrite_restore_and_keep_notes_and_a_reader_verify(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, roles = place
    url, options = f"s3://{bucket}/{RUN}/plain/step-1", roles["trainer"]
    save(url, 1.0, options)
    save(url, 2.0, options)
    assert "was not deleted" in caplog.text or "were not deleted" in caplog.text
    caplog.clear()
    writer = S3Writer(storage_options=options)
    state = checkpoints.state_of(3.0, 3 * MIB)
    async_save(state, checkpoint_id=f"{url}-async", storage_writer=writer, no_dist=True).result()
    assert (loaded(url, options), loaded(f"{url}-async", options)) == (2.0, 3.0)

    root = f"s3://{bucket}/{RUN}"
    managed(root, options, 10, 20)
    with CheckpointManager(root, policy=manual(latest=9), storage_options=options) as manager:
        manager.report(20, {"eval/loss": 0.5})
        target = trained(0)
        restored = manager.restore(target)
    assert restored is not None
    assert restored.step == 20
    assert target["model"]["w"][0] == 20
    refused = [one.message for one in caplog.records if one.levelno >= logging.WARNING and "bucketpoint" in one.name]
    assert refused == [], "nothing of a trainer's daily work is refused"
    assert {10, 20} <= {one.step for one in open_catalog(Location.of(root, roles["reader"])).snapshot().checkpoints}
    assert verify(open_checkpoint(Location.of(f"{root}/step-20", roles["reader"]))).ok


def test_lets_no_trainer_that_prunes_or_removes_end_a_checkpoint(
    place: Place, minio: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, roles = place
    root, options = f"s3://{bucket}/{PREFIX}/run-2", roles["trainer"]
    managed(root, minio.options, 10, 20, 30)
    catalog = open_catalog(Location.of(root, options))
    with pytest.raises(AccessDeniedError, match=r"s3:DeleteObject.*role pruner"):
        remove(plan_removal(Location.of(f"{root}/step-10", options)), holder="test")
    with pytest.raises(AccessDeniedError, match=r"s3:DeleteObject.*role pruner"):
        prune_by(catalog, manual(latest=1), holder="test", force=True)
    policy = RetentionPolicy(Keep(latest=1), prune=Prune(grace=timedelta(0)))
    with CheckpointManager(root, policy=policy, storage_options=options) as manager:
        manager.save(40, trained(40))
    assert "pruning failed" in caplog.text
    assert "role pruner" in caplog.text
    for step in (10, 20, 30):
        assert bucketpoint.load(f"{root}/step-{step}", storage_options=options)["model"]["w"][0] == step


def test_lets_a_pruner_plan_prune_thin_undo_and_sweep(place: Place, minio: S3Server) -> None:
    bucket, roles = place
    root = f"s3://{bucket}/{RUN}"
    managed(root, minio.options, 100, 110, 120, 130)
    catalog = open_catalog(Location.of(root, roles["pruner"]))
    thinning = RetentionPolicy(
        Keep(latest=1, every=[EverySteps(steps=20, thin="weights")]), prune=Prune(when="manual", grace=timedelta(0))
    )
    done = prune_by(catalog, thinning, holder="test", force=True).done
    assert done.failures == []
    assert {step for step, _ in done.deleted} >= {110}
    assert {step for step, _ in done.thinned} >= {100, 120}
    pin(catalog, 100)
    assert len(catalog.snapshot().notes.pins) == 1
    patient = RetentionPolicy(Keep(latest=1), prune=Prune(when="manual", grace=timedelta(hours=1)))
    done = prune_by(catalog, patient, holder="test", force=True).done
    assert done.failures == []
    assert 120 in {step for step, _ in done.buried}
    assert undo(catalog, 120) == 1
    unpin(catalog, 100)

    debris = f"{RUN}/step-140/{data_path('0123456789ab', 0, 'model', 0)}"
    client = minio.client()
    client.put_object(Bucket=bucket, Key=debris, Body=b"x")
    store = catalog.store
    upload = open_store(f"{root}/x", storage_options=minio.options)[0].create_multipart(debris)
    assert [one.upload_id for one in store.list_multipart(debris)] == [upload]
    later = replace(catalog, now=time.time() + 2 * MIN_SWEEP_AGE_S)
    swept = sweep(later, older_than=MIN_SWEEP_AGE_S, deep=True)
    assert swept.failures == []
    assert debris in swept.objects
    store.abort_multipart(debris, upload)
    assert list(store.list_multipart(debris)) == []


def test_covers_the_whole_bucket_by_policies_without_the_prefix(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    roles = {role: minio.limited_options(*statements(role, bucket, below="")) for role in ROLES}
    for root in (f"s3://{bucket}", f"s3://{bucket}/run"):
        managed(root, roles["trainer"], 10, 20)
        seen = open_catalog(Location.of(root, roles["reader"])).snapshot().checkpoints
        assert {one.step for one in seen} == {10, 20}
        done = prune_by(
            open_catalog(Location.of(root, roles["pruner"])), manual(latest=1), holder="test", force=True
        ).done
        assert done.failures == []
        assert {step for step, _ in done.deleted} == {10}


def _requests(store: Store, key: str, upload: str) -> dict[str, Any]:
    body = [memoryview(b"hostile")]
    return {
        "get": lambda: store.get(key),
        "head": lambda: store.head(key),
        "put": lambda: store.put(key, body),
        "create": lambda: store.create_multipart(key),
        "part": lambda: store.put_part(key, upload, 1, body),
        "abort": lambda: store.abort_multipart(key, upload),
        "list": lambda: list(store.list(key.rpartition("/")[0] + "/")),
        "uploads": lambda: list(store.list_multipart(key)),
        "delete": lambda: _raise_failures(store.delete([key])),
        "copy": lambda: store.copy(ObjectInfo(key, 7), f"{key}-copy"),
    }


def _raise_failures(failures: list[Any]) -> None:
    if failures:
        raise AccessDeniedError(failures[0].code)


DATA, METADATA, NOTE = "step-9/data/00/x.distcp", "step-9/.metadata", "_bucketpoint/notes/x"
READ, WRITE, DELETE = {"get", "head"}, {"put", "create", "part", "copy"}, {"delete"}
ALLOWED = {
    ("trainer", DATA): READ | WRITE | {"abort", "list"},
    ("trainer", METADATA): READ | WRITE | {"abort", "list"},
    ("trainer", NOTE): READ | WRITE | {"abort", "list"} | DELETE,
    ("reader", DATA): READ | {"list"},
    ("reader", METADATA): READ | {"list"},
    ("reader", NOTE): READ | {"list"},
    ("pruner", DATA): READ | {"abort", "list", "uploads"} | DELETE,
    ("pruner", METADATA): READ | WRITE - {"copy"} | {"abort", "list", "uploads"} | DELETE,
    ("pruner", NOTE): READ | WRITE | {"abort", "list", "uploads"} | DELETE,
}

# No service binds this to a prefix. It tells keys.
ELSEWHERE = {"pruner": {"uploads"}}


@pytest.mark.parametrize("role", ROLES)
def test_refuses_each_role_all_that_is_not_its_work(role: str, place: Place, minio: S3Server) -> None:
    """Every request that a store makes, on each kind of object, in the run and in another one beside it."""
    bucket, roles = place
    client = minio.client()
    store, _ = open_store(f"s3://{bucket}/x", storage_options={**roles[role], **minio.attempts(1)})
    for prefix in (RUN, PREFIX, f"{PREFIX}-other", "teams"):
        for path in (DATA, METADATA, NOTE):
            key = f"{prefix}/{path}"
            allowed = ALLOWED[role, path] if prefix in (RUN, PREFIX) else ELSEWHERE.get(role, set())
            for name in _requests(store, key, ""):
                client.put_object(Bucket=bucket, Key=key, Body=b"x")
                upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
                refused = False
                try:
                    _requests(store, key, upload)[name]()
                except AccessDeniedError:
                    refused = True
                assert refused == (name not in allowed), f"{role}: {name} {key}"
                if refused:
                    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"x"
