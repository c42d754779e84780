"""What goes wrong outside of us: each is a named error with the URL, the rank and what to do, through plain DCP."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer, errors
from bucketpoint.dcp.s3_and_gcs import GCSReader, GCSWriter
from kit.servers import S3Server, free_port
from services import Service


def failing_save(url: str, options: dict[str, Any], **more: Any) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        writer = BucketWriter(storage_options=options, **more)
        dcp.save({"w": torch.ones(2)}, checkpoint_id=url, storage_writer=writer, no_dist=True)
    return checked(caught.value.failures[0][0])


def failing_load(url: str, options: dict[str, Any], state: dict[str, Any] | None = None) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        reader = BucketReader(storage_options=options)
        dcp.load(state or {"w": torch.zeros(2)}, checkpoint_id=url, storage_reader=reader, no_dist=True)
    return checked(caught.value.failures[0][0])


def checked(error: BaseException) -> BaseException:
    assert isinstance(error, bp.BucketpointError), error
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.fields() == error.fields()
    assert error.url is not None
    return error


@pytest.fixture
def whole(service: Service) -> str:
    url = service.url("run/step-1")
    state = {"w": torch.ones(2), "v": torch.ones(50_000)}
    dcp.save(state, checkpoint_id=url, storage_writer=service.writer(), no_dist=True)
    return url


def data_key(service: Service) -> str:
    return next(key for key in service.listed() if key.endswith(".distcp"))


@pytest.mark.parametrize("fails", [failing_save, failing_load])
def test_names_a_bucket_or_an_endpoint_that_is_not_there(service: Service, fails: Any) -> None:
    no_bucket = replace(service, bucket="no-such-bucket-here").url("a")
    assert isinstance(fails(no_bucket, service.options), errors.BucketNotFoundError)
    options = {**service.at(f"http://127.0.0.1:{free_port()}").options, **service.server.attempts(1)}
    assert isinstance(fails(service.url("a"), options), errors.EndpointError)


def test_names_wrong_credentials_without_the_secret(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    options = {**minio.options, "secret": "not-the-secret-at-all"}
    for error in (failing_save(f"s3://{bucket}/a", options), failing_load(f"s3://{bucket}/a", options)):
        assert isinstance(error, (bp.CredentialsError, bp.AccessDeniedError))
        assert "not-the-secret-at-all" not in str(error) + repr(error)


def test_tells_an_anonymous_user_of_denied_access(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    options = {"anon": True, "client_kwargs": minio.options["client_kwargs"]}
    error = failing_save(f"s3://{bucket}/a", options)
    assert isinstance(error, bp.AccessDeniedError)
    assert "PutObject" in str(error)
    assert isinstance(failing_load(f"s3://{bucket}/a", options), bp.AccessDeniedError)


@pytest.mark.parametrize(
    ("key", "content", "kind"),
    [
        ("nothing/here", b"", bp.CheckpointNotFoundError),
        ("run/data/00/x.distcp", b"half", errors.IncompleteCheckpointError),
        ("run/.metadata", b"", bp.MetadataError),
        ("run/.metadata", b"no pickle", bp.MetadataError),
        ("run/.metadata", pickle.dumps({"a": 1}), bp.MetadataError),
        ("run/.metadata", b"\x80\x04" + b"x" * 100, bp.MetadataError),
    ],
)
def test_names_what_is_no_checkpoint(service: Service, key: str, content: bytes, kind: type[Exception]) -> None:
    service.write(key, content)
    error = failing_load(service.url("run"), service.options)
    assert type(error) is kind
    if kind is bp.CheckpointNotFoundError:
        assert "latest_checkpoint" in str(error)
        with pytest.raises(kind):
            service.reader(service.url("run")).read_metadata()


def test_refuses_metadata_that_would_run_code_before_anything_runs(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("the payload ran",)

    service.write("run/.metadata", pickle.dumps(Evil()))
    assert isinstance(failing_load(service.url("run"), service.options), bp.UnsafeDataError)
    assert "the payload ran" not in capsys.readouterr().out


def test_names_a_data_object_that_is_missing(service: Service, whole: str) -> None:
    gone = data_key(service)
    service.delete(gone)
    error = failing_load(whole, service.options)
    assert isinstance(error, bp.CorruptDataError)
    assert "missing" in str(error)
    # In a folder's store the key is the path below the checkpoint's folder.
    assert gone.endswith(error.key)
    assert error.key.endswith(".distcp")


def test_names_a_data_object_that_is_truncated(service: Service, whole: str) -> None:
    cut = data_key(service)
    for key in service.listed():
        body = service.read(key)
        service.write(key.replace("step-1", "copy"), body[:100_000] if key == cut else body)
    state = {"w": torch.zeros(2), "v": torch.zeros(50_000)}
    assert isinstance(failing_load(whole.replace("step-1", "copy"), service.options, state), bp.CorruptDataError)


@pytest.mark.parametrize(
    ("makes", "own", "other"), [((S3Writer, S3Reader), "s3", "gs"), ((GCSWriter, GCSReader), "gs", "s3")]
)
def test_refuses_a_path_without_the_classes_scheme_at_once(makes: Any, own: str, other: str) -> None:
    for make in makes:
        for path in ("bucket/run", f"{other}://bucket/run"):
            with pytest.raises(errors.InvalidURLError, match=f"{own}://"):
                make(path)


def test_refuses_a_role_that_may_only_read_by_name_and_harms_nothing(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    url = f"s3://{bucket}/run/step-1"
    writer = S3Writer(storage_options=minio.options)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=url, storage_writer=writer, no_dist=True)
    only_read = minio.limited_options(
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [f"arn:aws:s3:::{bucket}/*"]}
    )
    error = failing_save(url, only_read)
    assert isinstance(error, bp.AccessDeniedError)
    assert "PutObject" in str(error)
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=url, storage_reader=S3Reader(storage_options=only_read), no_dist=True)
    assert target["w"].tolist() == [1.0, 1.0]


def test_needs_only_the_rights_to_put_get_and_abort_in_a_trainer(minio: S3Server) -> None:
    bucket = minio.make_bucket()
    url = f"s3://{bucket}/run/step-1"
    trainer = minio.limited_options(
        {
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"],
            "Resource": [f"arn:aws:s3:::{bucket}/run/*"],
        }
    )
    for value in (1.0, 2.0):
        writer = S3Writer(storage_options=trainer)
        state = {"w": torch.full((6_000_000,), value)}
        dcp.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(6_000_000)}
    dcp.load(target, checkpoint_id=url, storage_reader=S3Reader(storage_options=trainer), no_dist=True)
    assert target["w"].unique().tolist() == [2.0]
