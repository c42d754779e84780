"""Trial saves and loads on a user's store, with faults injected by a seeded script, below a scratch prefix.

Existing objects are not touched, and the trial's objects are deleted afterwards. Errors that make the trial impossible
are raised; failures during the trial are counted and reported.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp import BucketReader, BucketWriter
from bucketpoint.doctor.scratch import CHAOS_FOLDER
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, InvalidURLError
from bucketpoint.stores import GCSStore, S3Store, Store, open_store
from bucketpoint.stores.gcs import client as gcs_client
from bucketpoint.stores.s3 import client as s3_client
from bucketpoint.testing.faults import TRANSIENT, FlipReply, FlipRequest, Rule, Script
from bucketpoint.testing.proxy import FaultProxy
from bucketpoint.transfer import TransferOptions

OPTIONS = TransferOptions(part_bytes=5 << 20, single_put_bytes=1 << 20)
"""Small sizes, so that each save has parts, a Complete and single PUTs. 5 MiB is the smallest part that S3 accepts."""

_LARGE = (5 << 20) + 4096


@dataclass
class ChaosReport:
    """The result of a trial.

    Attributes:
        committed: number of saves that succeeded.
        refused: number of saves that raised a `BucketpointError`, by class.
        loaded: number of loads through the faults that succeeded. Each checkpoint is also loaded without faults.
        failed_loads: number of loads through the faults that raised a `BucketpointError`, by class.
        losses: one sentence for each failure that must never happen: lost, damaged or wrong data.
        left: keys that could not be deleted.
    """

    seed: int
    committed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    loaded: int = 0
    failed_loads: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.losses


def chaos(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    saves: int = 10,
    probability: float = 0.1,
    told: Callable[[str], None] = lambda line: None,
) -> ChaosReport:
    """Save and load below `url` through a proxy that injects a fault into each request with this probability.

    Every second save replaces the checkpoint before it. Each save uploads about 5 MiB, and twice that is downloaded.

    Args:
        seed: seed of the script: the n-th request meets the same fault in every run.
        told: called with a line of text for each notable event, as it happens.

    Raises:
        InvalidURLError: the URL is neither `s3://` nor `gs://`: the proxy works only for these.
        StoreError: the store cannot be reached at all.
    """
    store, prefix = open_store(url.rstrip("/") or url, storage_options=storage_options)
    if not isinstance(store, S3Store | GCSStore):
        raise InvalidURLError(
            "--chaos can inject faults only for S3 and GCS", url=url, remedy="Pass an s3:// or gs:// URL"
        )
    folder = f"{prefix}/" if prefix else ""
    folder += f"{CHAOS_FOLDER}{os.urandom(6).hex()}"
    report = ChaosReport(seed)
    faults = (*TRANSIENT, FlipRequest(), FlipReply())
    script = Script((Rule(faults, probability=probability),), seed)
    with warnings.catch_warnings(), _before(store) as proxy:
        # DCP warns that this process is the only rank.
        warnings.simplefilter("ignore")
        proxy.play(script)
        trial = _Trial(dict(storage_options or {}), _through(store, proxy), report, told)
        try:
            trial.run(f"{store.url}/{folder}", saves)
        finally:
            proxy.play(Script())
            _clean_up(store, folder, proxy, report)
            report.requests = proxy.board.total.requests.total()
            report.faults = proxy.board.total.faults
    return report


@dataclass
class _Trial:
    """A trial with two sets of `storage_options`: `calm` for requests without faults, `faulty` for those with them."""

    calm: Mapping[str, Any]
    faulty: Mapping[str, Any]
    report: ChaosReport
    told: Callable[[str], None]

    def run(self, root: str, saves: int) -> None:
        standing: dict[str, int | None] = {}
        for value in range(1, saves + 1):
            url = f"{root}/step-{(value + 1) // 2}"
            expected: set[int | None] = {value}
            if not self._save(url, value):
                expected.add(standing.get(url))
            standing[url] = self._look(url, expected)
            if standing[url] is not None:
                self._load(url, standing[url])

    def _save(self, url: str, value: int) -> bool:
        """Save `value` at `url`. Returns True if the save reports that it is committed."""
        try:
            writer = BucketWriter(url, storage_options=self.faulty, transfer=OPTIONS)
            dcp.save(_state(value), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as failure:
            self._answered(self.report.refused, f"save {value} was refused", failure)
            return False
        self.report.committed += 1
        return True

    def _load(self, url: str, value: int | None) -> None:
        try:
            values = _loaded(url, self.faulty)
        except dcp.CheckpointException as failure:
            self._answered(self.report.failed_loads, f"a load of {url} failed", failure)
            return
        self.report.loaded += 1
        if values != {value}:
            self._lost(f"{url} holds {value}, and a load returned {sorted(values)} without an error")

    def _answered(self, counter: Counter[str], what: str, failure: dcp.CheckpointException) -> None:
        """Count a failure that is a `BucketpointError`. Any other error is a bug of bucketpoint and is raised again."""
        error = failure.failures[0][0]
        if not isinstance(error, BucketpointError):
            raise failure
        counter[type(error).__name__] += 1
        self.told(f"{what}: {type(error).__name__}: {error.message}")

    def _look(self, url: str, expected: set[int | None]) -> int | None:
        """Load the checkpoint at `url` without faults, and verify each byte.

        Returns:
            The value in the checkpoint, or None if it cannot be loaded.
        """
        try:
            values = _loaded(url, self.calm)
            damage = verify(open_checkpoint(url, storage_options=self.calm)).damage
        except dcp.CheckpointException as failure:
            error = failure.failures[0][0]
            if None not in expected or not isinstance(error, CheckpointNotFoundError):
                self._lost(f"{url} cannot be loaded: {error}")
            return None
        if damage:
            self._lost(f"{url} is damaged: {damage[0].message}")
        if len(values) != 1 or not values <= expected:
            self._lost(f"{url} holds {sorted(values)} and not one of {sorted(map(str, expected))}")
        return values.pop()

    def _lost(self, sentence: str) -> None:
        self.report.losses.append(sentence)
        self.told(f"LOST: {sentence}")


def _state(value: int) -> dict[str, Any]:
    large, small = torch.full((_LARGE,), value % 256, dtype=torch.uint8), torch.full((9,), float(value))
    moment = torch.full((1000,), float(value))
    return {"model": {"large": large, "small": small}, "optim": {"moment": moment}, "step": value}


def _loaded(url: str, options: Mapping[str, Any]) -> set[int]:
    """Return the values found in a checkpoint: exactly one if the checkpoint is consistent."""
    state = _state(0)
    dcp.load(state, storage_reader=BucketReader(url, storage_options=options, transfer=OPTIONS), no_dist=True)
    tensors = (state["model"]["small"], state["optim"]["moment"])
    values = {int(value) for tensor in tensors for value in tensor.unique().tolist()} | {state["step"]}
    low = {value % 256: value for value in values}
    return values | {low.get(value, -1) for value in state["model"]["large"].unique().tolist()}


def _before(store: S3Store | GCSStore) -> FaultProxy:
    """Make a proxy for the store, which trusts the CA bundle of the options, the environment or the profile."""
    if isinstance(store, GCSStore):
        endpoint = gcs_client.client_for(store.options).endpoint
        ca = store.options.ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")
        # Requests to GCS are not signed, so the proxy can replace the Host header by the store's own host.
        return FaultProxy(endpoint, ca=ca, host_header=urlsplit(endpoint).netloc.rpartition("@")[2])
    ca = store.options.ca_bundle or store.options.client_kwargs.get("verify")
    if not isinstance(ca, str):
        # In botocore's order: AWS_CA_BUNDLE or the profile's bundle, then REQUESTS_CA_BUNDLE.
        session = botocore.session.Session(profile=store.options.profile)
        ca = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return FaultProxy(str(s3_client.client_for(store.options, store.pin).api.meta.endpoint_url), ca=ca)


def _through(store: S3Store | GCSStore, proxy: FaultProxy) -> dict[str, Any]:
    """Return the store's options with the proxy as the endpoint."""
    options = {field.name: getattr(store.options, field.name) for field in fields(store.options)}
    if isinstance(store, GCSStore):
        # The defaults of these two options depend on the endpoint, which is now the proxy.
        token = "anon" if store.options.anonymous else store.options.token
        uploads = "xml" if store.options.multipart else "compose"
        return {**options, "endpoint_url": proxy.url, "token": token, "uploads": uploads}
    # The client signs for the store's real host, so its requests must go on naming that host.
    config = {**store.options.config_kwargs, **proxy.options["config_kwargs"]}
    return {**options, "endpoint_url": proxy.options["endpoint_url"], "config_kwargs": config}


def _clean_up(store: Store, folder: str, proxy: FaultProxy, report: ChaosReport) -> None:
    begun = {exchange.request.key for exchange in proxy.exchanges if exchange.request.kind == "CreateMultipartUpload"}
    for key in [f"{folder}/"] if store.capabilities.lists_uploads else sorted(begun):
        for upload in list(store.list_multipart(key)):
            store.abort_multipart(upload.key, upload.upload_id)
    report.left += [failure.key for failure in store.delete([info.key for info in store.list(f"{folder}/")])]
