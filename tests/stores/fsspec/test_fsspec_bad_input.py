"""What is wrong around fsspec's filesystems: each is one named error that says what to do, and comes to an end."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from azurite import ACCOUNT, KEY, AzureServer
from bucketpoint import BucketReader, BucketWriter
from bucketpoint.doctor.examine import examine
from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BucketpointError,
    CheckpointNotFoundError,
    CredentialsError,
    EndpointError,
    InvalidURLError,
)
from bucketpoint.stores import open_store
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.fsspec.drivers import driver_of
from fsspec_backends import SERVED, Backend, backend
from kit.failures import failure_of
from kit.servers import free_port

on_azure = pytest.mark.skipif("adlfs" not in SERVED, reason="adlfs is not here")


def failure(action: Callable[[str, Any], None], url: str, through: Any) -> BucketpointError:
    """The one error that a save or a load ends with."""
    error = failure_of(lambda: action(url, through))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


def save(url: str, writer: Any) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=writer, no_dist=True)


def load(url: str, reader: Any) -> None:
    dcp.load({"w": torch.zeros(3)}, checkpoint_id=url, storage_reader=reader, no_dist=True)


@pytest.mark.parametrize(
    ("scheme", "module", "remedy"),
    [
        *((scheme, "adlfs", r"pip install 'adlfs>=.*its extra azure") for scheme in ("az", "abfs", "abfss")),
        *((scheme, "gcsfs", r"pip install 'google-cloud-storage>=.*its extra gcs") for scheme in ("gs", "gcs")),
        # fsspec says what to install for what it serves itself.
        ("sftp", "paramiko", "paramiko"),
    ],
)
def test_names_a_library_that_is_missing_with_what_installs_it(
    scheme: str, module: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    # An import of it fails now as where it was never installed, and fsspec has to try it.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    for known in ("az", "abfs", "abfss", "gs", "gcs", "sftp"):
        monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, known, raising=False)
    for use in (open_store, BucketWriter, BucketReader):
        with pytest.raises(InvalidURLError, match=f"{scheme}:// URLs is not installed") as caught:
            use(f"{scheme}://bucket/x")
        assert re.search(remedy, str(caught.value))
        assert "gcsfs" not in str(caught.value)


class Azure(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A filesystem of adlfs, as far as opening one goes: the policy of its client is where Azure's library has it."""

    __module__ = "adlfs.spec"
    protocol = "az"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.policy = SimpleNamespace(connect_retries=3, total_retries=3)
        self.service_client = SimpleNamespace(_config=SimpleNamespace(retry_policy=self.policy))


def test_tries_a_connection_to_azure_once_more_and_leaves_the_callers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "az", Azure)
    store, _ = open_store("az://container/run")
    assert isinstance(store, FsspecStore)
    assert vars(store.fs.policy) == {"connect_retries": 1, "total_retries": 3}
    own = Azure()
    open_store("az://container/run", fs=own)
    assert vars(own.policy) == {"connect_retries": 3, "total_retries": 3}
    never = Azure()
    never.policy.connect_retries = 0
    driver_of(never).bound_retries(never)
    assert never.policy.connect_retries == 0
    never.service_client = SimpleNamespace()
    driver_of(never).bound_retries(never)


@on_azure
def test_asks_twice_for_an_account_that_is_not_there() -> None:
    nobody = AzureServer(f"http://127.0.0.1:{free_port()}")
    store, _ = open_store("az://container/run", storage_options=nobody.options)
    assert isinstance(store, FsspecStore)
    policy = store.fs.service_client._config.retry_policy
    policy.initial_backoff = policy.increment_base = policy.random_jitter_range = 0
    attempts, increment = [], policy.increment
    policy.increment = lambda *args, **more: attempts.append(1) or increment(*args, **more)
    with pytest.raises(EndpointError):
        store.get("k")
    assert len(attempts) == 2


# A filesystem of the caller's own keeps the retries of its library: Google's and Azure's take half a minute and more.
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one == "s3fs" else pytest.mark.slow) for one in SERVED])
def test_ends_a_save_with_one_error_if_a_server_is_not_there(name: str) -> None:
    library = importlib.import_module(name)
    nobody = f"http://127.0.0.1:{free_port()}"
    if name == "s3fs":
        settings = {"endpoint_url": nobody, "config_kwargs": {"retries": {"max_attempts": 0}}}
        fs = library.S3FileSystem(key="k", secret="s", **settings)
        fs.retries = 1
    elif name == "gcsfs":
        fs = library.core.GCSFileSystem(token="anon", project="test", endpoint_url=nobody)
    else:
        fs = library.AzureBlobFileSystem(**AzureServer(nobody).options)
    error = failure(save, "bucket/run/step-1", BucketWriter(fs=fs))
    assert isinstance(error, EndpointError)
    assert "storage_options" in str(error)
    assert KEY not in str(error)


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with backend(request.param, request, tmp_path) as one:
        yield one


def test_names_a_bucket_that_is_not_there_and_makes_none(served: Backend) -> None:
    root = "bucketpoint-no-such-bucket-here/run"
    for url in (f"{root}/step-1", f"{root}/step-2"):
        error = failure(save, url, BucketWriter(fs=served.fs))
        assert isinstance(error, BucketNotFoundError)
        assert "create the bucket first" in str(error)
        # Not every library says in an answer to a read which of the two is missing.
        missing = (BucketNotFoundError, CheckpointNotFoundError)
        assert isinstance(failure(load, url, BucketReader(fs=served.fs)), missing)
    seen = examine(FsspecStore(served.fs, root), "", probe_bytes=0)
    assert [(one.check, one.status) for one in seen.findings] == [("connect", "fail")]


def limited(azure: AzureServer, container: str, permissions: str) -> dict[str, Any]:
    """`storage_options` with a shared access signature for these rights."""
    blob: Any = importlib.import_module("azure.storage.blob")
    until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    rights = blob.ContainerSasPermissions.from_string(permissions)
    signature = blob.generate_container_sas(ACCOUNT, container, account_key=KEY, permission=rights, expiry=until)
    return {"connection_string": f"BlobEndpoint={azure.endpoint}/{ACCOUNT};SharedAccessSignature={signature}"}


@on_azure
def test_needs_the_rights_on_azure_that_the_page_has(azure: AzureServer) -> None:
    container = azure.make_container()
    url = f"az://{container}/run/step-1"
    save(url, BucketWriter(storage_options=azure.options))
    reader, trainer, blind = (limited(azure, container, rights) for rights in ("r", "rw", "w"))
    load(url, BucketReader(storage_options=reader))
    error = failure(save, url, BucketWriter(storage_options=reader))
    assert isinstance(error, AccessDeniedError)
    assert "lack the right to write" in str(error)
    assert "sig=" not in str(error)
    save(f"az://{container}/run/step-2", BucketWriter(storage_options=trainer))
    load(f"az://{container}/run/step-2", BucketReader(storage_options=trainer))
    error = failure(load, url, BucketReader(storage_options=blind))
    assert isinstance(error, AccessDeniedError)
    assert "lack the right to read" in str(error)
    with pytest.raises(AccessDeniedError, match="lack the right to list"):
        list(open_store(f"az://{container}/run", storage_options=trainer)[0].list(""))


@pytest.mark.skipif(importlib.util.find_spec("adlfs") is None, reason="adlfs is not here")
def test_signs_in_with_the_identity_that_azure_finds_for_an_account_without_a_secret() -> None:
    from adlfs import AzureBlobFileSystem

    filesystem = AzureBlobFileSystem(account_name="account", skip_instance_cache=True)
    assert filesystem.anon is False


@on_azure
def test_raises_one_error_without_the_secret_for_credentials_refused_by_azure(azure: AzureServer) -> None:
    container = azure.make_container()
    wrong = "A" * 86 + "=="
    said = azure.options["connection_string"].replace(KEY, wrong)
    error = failure(save, f"az://{container}/x", BucketWriter(storage_options={"connection_string": said}))
    assert isinstance(error, AccessDeniedError | CredentialsError)
    assert wrong not in str(error)


@on_azure
@pytest.mark.parametrize("options", [{}, {"connection_string": "nonsense"}, {"no_such_option": 1}])
def test_says_of_the_options_that_credentials_are_missing_or_malformed(options: dict[str, Any]) -> None:
    # A filesystem that another test made from variables of the environment has no options either.
    importlib.import_module("adlfs").AzureBlobFileSystem.clear_instance_cache()
    with pytest.raises(BucketpointError, match="does not accept these storage_options"):
        open_store("az://container/x", storage_options=options)


@on_azure
@pytest.mark.parametrize("form", ["az://{c}/run", "abfs://{c}/run", "abfss://{c}@{a}.dfs.core.windows.net/run"])
def test_takes_the_forms_of_azures_urls_for_one_place(azure: AzureServer, form: str) -> None:
    container = azure.make_container()
    root = form.format(c=container, a=ACCOUNT)
    save(f"{root}/step-1", BucketWriter(storage_options=azure.options))
    load(f"az://{container}/run/step-1", BucketReader(storage_options=azure.options))
