"""What goes wrong outside of us: each is a named error with the URL, the rank and what to do, through plain DCP."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

import bucketpoint as bp
from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer, errors
from bucketpoint.dcp.planning.rank_state import compared_digests
from kit import checkpoints
from kit.failures import failure_of
from kit.servers import S3Server, free_port
from services import Service


def failing_save(url: str, options: dict[str, Any]) -> bp.BucketpointError:
    writer = BucketWriter(storage_options=options)
    return checked(lambda: dcp.save({"w": torch.ones(2)}, checkpoint_id=url, storage_writer=writer, no_dist=True))


def failing_load(url: str, options: dict[str, Any]) -> bp.BucketpointError:
    reader = BucketReader(storage_options=options)
    return checked(lambda: dcp.load({"w": torch.zeros(2)}, checkpoint_id=url, storage_reader=reader, no_dist=True))


def checked(action: Callable[[], object]) -> bp.BucketpointError:
    error = failure_of(action)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.fields() == error.fields()
    assert error.url is not None
    return error


@pytest.mark.parametrize("fails", [failing_save, failing_load])
def test_names_a_bucket_or_an_endpoint_that_is_not_there(service: Service, fails: Any) -> None:
    no_bucket = replace(service, bucket="no-such-bucket-here").url("a")
    assert isinstance(fails(no_bucket, service.options), errors.BucketNotFoundError)
    options = {**service.at(f"http://127.0.0.1:{free_port()}").options, **service.server.attempts(1)}
    assert isinstance(fails(service.url("a"), options), errors.EndpointError)


def test_names_wrong_credentials_without_the_secret_and_access_denied_to_anybody(minio: S3Server) -> None:
    url = f"s3://{minio.make_bucket()}/a"
    options = {**minio.options, "secret": "not-the-secret-at-all"}
    for error in (failing_save(url, options), failing_load(url, options)):
        assert isinstance(error, (bp.CredentialsError, bp.AccessDeniedError))
        assert "not-the-secret-at-all" not in str(error) + repr(error)
    anonymous = {"anon": True, "client_kwargs": minio.options["client_kwargs"]}
    for error in (failing_save(url, anonymous), failing_load(url, anonymous)):
        assert isinstance(error, bp.AccessDeniedError)
    assert "PutObject" in str(failing_save(url, anonymous))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("the payload ran",)


@pytest.mark.parametrize(
    ("key", "content", "kind"),
    [
        ("nothing/here", b"", bp.CheckpointNotFoundError),
        ("run/data/00/x.distcp", b"half", errors.IncompleteCheckpointError),
        ("run/.metadata", b"", bp.MetadataError),
        ("run/.metadata", b"no pickle", bp.MetadataError),
        ("run/.metadata", pickle.dumps({"a": 1}), bp.MetadataError),
        ("run/.metadata", b"\x80\x04" + b"x" * 100, bp.MetadataError),
        ("run/.metadata", pickle.dumps(Evil()), bp.UnsafeDataError),
    ],
)
def test_names_what_is_no_checkpoint_and_runs_no_code_of_it(
    service: Service, capsys: pytest.CaptureFixture[str], key: str, content: bytes, kind: type[Exception]
) -> None:
    service.write(key, content)
    error = failing_load(service.url("run"), service.options)
    assert type(error) is kind
    assert "the payload ran" not in capsys.readouterr().out
    if kind is bp.CheckpointNotFoundError:
        assert "latest_checkpoint" in str(error)
        with pytest.raises(kind):
            service.reader(service.url("run")).read_metadata()


def test_names_a_data_object_that_is_missing(service: Service) -> None:
    checkpoints.save(service.url("run"), 1.0, service.writer(), elements=2)
    gone = next(key for key in service.listed() if key.endswith(".distcp"))
    service.delete(gone)
    reader = service.reader(service.url("run"))
    error = checked(lambda: dcp.load(checkpoints.state_of(0, 2), storage_reader=reader, no_dist=True))
    assert isinstance(error, bp.CorruptDataError)
    assert "missing" in str(error)
    # In a folder's store the key is the path below the checkpoint's folder.
    assert gone.endswith(error.key)
    assert error.key.endswith(".distcp")


def test_needs_no_rights_beyond_put_get_and_abort_in_a_trainer_and_get_in_a_reader(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    url, elements = f"s3://{bucket}/run/step-1", 6_000_000
    trainer, only_read = (
        minio.limited_options({"Effect": "Allow", "Action": actions, "Resource": [f"arn:aws:s3:::{bucket}/run/*"]})
        for actions in (["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"], ["s3:GetObject"])
    )
    for value in (1.0, 2.0):
        checkpoints.save(url, value, S3Writer(storage_options=trainer), elements=elements)
    error = failing_save(url, only_read)
    assert isinstance(error, bp.AccessDeniedError)
    assert "PutObject" in str(error)
    for options in (trainer, only_read):
        assert checkpoints.load(url, S3Reader(storage_options=options), elements=elements) == 2.0


def digests(state: dict[str, Any], url: str) -> None:
    compared_digests(create_default_local_save_plan(state, is_coordinator=True).items, state)


@pytest.mark.parametrize("nbytes", [0, 4096])
@pytest.mark.parametrize("view", [torch.detach, torch.t, lambda whole: whole[1:]], ids=["whole", "columns", "rows"])
@pytest.mark.parametrize("use", [bp.save, lambda *args: bp.async_save(*args).result(), bp.load, digests])
def test_refuses_a_tensor_whose_storage_was_freed_or_shrunk(use: Any, view: Any, nbytes: int, tmp_path: Path) -> None:
    state, url = {"empty": torch.ones(2, 0), "model": {"w": view(torch.ones(512, 64))}}, str(tmp_path)
    bp.save(state, url)
    state["model"]["w"].untyped_storage().resize_(nbytes)
    with pytest.raises(bp.BucketpointError, match=r"shape \(\d+, \d+\) has no memory") as caught:
        use({"model.w": state["model"]["w"]} if use is digests else state, url)
    assert caught.value.key == "model.w"
