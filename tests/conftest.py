"""Fixtures for every test: the S3 servers, a bucket per test, and an environment that holds nothing of the host's."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

import fsspec_backends
import gcs_server
import get_fake_gcs
import get_minio
import get_versitygw
from azurite import AzureServer
from background import LEAST_BYTES, choose_uploads
from bucketpoint.stores.s3 import store as s3_store
from bucketpoint.stores.s3.options import S3Service
from gcs_server import GCSServer
from gcs_xml import with_multipart
from kit import FaultProxy, servers
from kit.plugin import MakeProxy
from kit.servers import REGION, S3Server
from services import Service, proxy_before
from tiers import mark_broad, servers_later

_FRAMEWORKS = {
    "accelerator": ("accelerate",),
    "hf_trainer": ("accelerate", "transformers"),
    "lit": ("lightning",),
    "megatron_core": ("megatron",),
    "ray_train": ("ray",),
    "serving": ("vllm",),
    "titan": ("torchtitan",),
    "torch_ckpt": ("torch_checkpointing",),
    "trackers": ("mlflow", "tensorboard", "wandb"),
    "xla": ("torch_xla",),
}
"""What the tests of a folder need: without it, as in most environments of the Makefile, they are not collected."""

collect_ignore_glob = [
    f"{folder}/test_*.py" for folder, needed in _FRAMEWORKS.items() if not all(map(importlib.util.find_spec, needed))
]

pytest_plugins = ["kit.plugin"]

NO_MINIO = "there is no MinIO server here: run `make minio`, put `minio` on the PATH, or set $MINIO"
NO_FAKE_GCS = "there is no fake-gcs-server here: run `make fake-gcs`, put it on the PATH, or set $FAKE_GCS"
NO_VERSITYGW = "there is no versitygw here: run `make versitygw`, put it on the PATH, or set $VERSITYGW"

OBTAIN = "BUCKETPOINT_OBTAIN_SERVERS"
"""Set by `make test`, which downloads or builds the servers beside the tests that need none."""

# No deadline: a slow machine is not a failed test. The blob reproduces a failure that CI found.
hypothesis.settings.register_profile(
    "bucketpoint", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("bucketpoint")


def pytest_configure(config: pytest.Config) -> None:
    choose_uploads()
    # Here and not in the fixture: in CI one clear line must end the run, not a failure per test.
    try:
        missing = _missing(config)
    except SystemExit as refusal:
        raise pytest.UsageError(str(refusal)) from refusal
    if missing and os.environ.get("CI") and not os.environ.get(OBTAIN):
        raise pytest.UsageError(f"CI is set, and {'; '.join(missing)}")


def _missing(config: pytest.Config) -> list[str]:
    wanted = {NO_MINIO: get_minio.find(), NO_FAKE_GCS: get_fake_gcs.find()}
    # Only broad tests need it: `make test` does not build it.
    if "not broad" not in config.option.markexpr:
        wanted[NO_VERSITYGW] = get_versitygw.find()
    return [remedy for remedy, binary in wanted.items() if binary is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first: at the end one worker would run them alone while the other one has nothing left to do.
    items.sort(key=lambda item: "faults" not in item.path.parts)
    if os.environ.get(OBTAIN):
        items[:] = servers_later(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    mark_broad(items)


def pytest_collection_finish() -> None:
    # torch and the tests are a million objects that stay: each full collection would look through them again.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if missing := _missing(config):
        terminalreporter.section("INCOMPLETE: tests on real servers were skipped", yellow=True)
        for remedy in missing:
            terminalreporter.line(remedy)


@pytest.fixture(scope="session", autouse=True)
def _host_aws_env() -> Iterator[None]:
    """Session fixtures build clients too, so the host's settings go before the first of them."""
    with pytest.MonkeyPatch.context() as patch:
        _isolate(patch)
        yield


@pytest.fixture(autouse=True)
def clean_aws_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """No AWS setting of the host, or of another test, reaches a test. Tests set what they need with `monkeypatch`."""
    _isolate(monkeypatch)


@pytest.fixture
def threads_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that change how this process writes to a store: no other process uploads for it."""
    monkeypatch.setattr("bucketpoint.dcp.saving.uploads.LEAST_BYTES", LEAST_BYTES["thread"])


_tried: dict[str, S3Service] = {}


@pytest.fixture(autouse=True)
def _deletions_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of what a service's deletions may take lasts three seconds, and each test has a bucket of its own."""

    original = s3_store.S3Store._tried

    def tried(store: s3_store.S3Store, prefix: str) -> S3Service:
        endpoint = store.identity.removesuffix(store.bucket)
        if endpoint not in _tried:
            _tried[endpoint] = original(store, prefix)
        return _tried[endpoint]

    monkeypatch.setattr(s3_store.S3Store, "_tried", tried)


def _isolate(patch: pytest.MonkeyPatch) -> None:
    # requests and botocore read the CA variables too; a host's corporate bundle must not decide a TLS test.
    gcs = ["STORAGE_EMULATOR_HOST", "API_ENDPOINT_OVERRIDE"]
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_"))] + gcs:
        patch.delenv(name, raising=False)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        patch.delenv(name, raising=False)
    # google-auth looks for a metadata server otherwise, for seconds where there is none.
    patch.setenv("NO_GCE_CHECK", "true")
    patch.setenv("CLOUDSDK_CONFIG", os.devnull)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    patch.setenv("no_proxy", "127.0.0.1,localhost")


@pytest.fixture(scope="session")
def moto(bucketpoint_moto: S3Server) -> S3Server:
    return bucketpoint_moto


@pytest.fixture(scope="session")
def bucketpoint_minio_binary() -> Path:
    """The one that `make minio` found or built."""
    return _binary(get_minio, NO_MINIO)


def _binary(server: ModuleType, remedy: str) -> Path:
    binary: Path | None = server.obtain() if os.environ.get(OBTAIN) else server.find()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail(remedy)
        pytest.skip(remedy)
    return binary


@pytest.fixture(scope="session")
def minio(bucketpoint_minio: S3Server) -> S3Server:
    return bucketpoint_minio


@pytest.fixture(scope="session")
def minio_tls(bucketpoint_minio_binary: Path) -> Iterator[S3Server]:
    with servers.minio(bucketpoint_minio_binary, tls=True) as server:
        yield server


@pytest.fixture(scope="session")
def versitygw() -> Iterator[S3Server]:
    """A server on a temporary folder. It keeps what it knows of objects beside them, as few filesystems keep xattrs."""
    binary, key, secret = _binary(get_versitygw, NO_VERSITYGW), "bucketpoint", os.urandom(16).hex()

    def command(scratch: Path, port: int) -> list[str]:
        for name in ("data", "sidecar"):
            (scratch / name).mkdir()
        address = f"127.0.0.1:{port}"
        return [
            *(str(binary), "--access", key, "--secret", secret, "--region", REGION, "--port", address, "--quiet"),
            *("posix", "--sidecar", str(scratch / "sidecar"), str(scratch / "data")),
        ]

    with servers._running(command, {}) as (_, port, pid):
        yield S3Server("versitygw", f"http://127.0.0.1:{port}", key, secret, pid=pid)


@pytest.fixture(scope="session")
def gcs() -> Iterator[GCSServer]:
    """fake-gcs-server, which takes whole objects only."""
    pytest.importorskip("google.cloud.storage")
    with gcs_server.fake_gcs(_binary(get_fake_gcs, NO_FAKE_GCS)) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_xml(gcs: GCSServer) -> Iterator[GCSServer]:
    """The same with the XML API's multipart uploads before it."""
    with with_multipart(gcs) as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[AzureServer]:
    """Azurite, where adlfs is."""
    with fsspec_backends.azure_server() as server:
        yield server


@pytest.fixture(scope="session", params=["moto", "minio"])
def s3(request: pytest.FixtureRequest) -> S3Server:
    """Each test that uses it runs twice: against moto and against MinIO."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # moto is slow, and says of S3 what MinIO does; but it is all that the contract tests have on each older torch.
    if "service" in metafunc.fixturenames and not _parametrizes(metafunc.definition, "service"):
        contract = metafunc.definition.get_closest_marker("contract")
        metafunc.parametrize("service", ["moto", "minio", "gcs"] if contract else ["minio", "gcs"], indirect=True)


def _parametrizes(test: pytest.Item, name: str) -> bool:
    given = [mark.args[0] for mark in test.iter_markers("parametrize")]
    return any(name in (names.replace(",", " ").split() if isinstance(names, str) else names) for names in given)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Service:
    """A new, empty bucket, on each kind of server in turn."""
    return Service.on(request.getfixturevalue(request.param))


@pytest.fixture
def proxy(service: Service, fault_proxy: MakeProxy) -> FaultProxy:
    """The fault proxy, before `service`."""
    return proxy_before(service.server, fault_proxy)


@pytest.fixture(scope="session")
def s3_tls(minio_tls: S3Server) -> S3Server:
    """MinIO over HTTPS; `.ca` is the authority's file."""
    return minio_tls


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A new, empty bucket on `s3`. The servers end with the session, and the buckets with them."""
    return s3.make_bucket()


@pytest.fixture
def bucket_tls(s3_tls: S3Server) -> str:
    return s3_tls.make_bucket()
