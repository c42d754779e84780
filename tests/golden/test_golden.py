"""Checkpoints that released versions wrote are read by today's readers, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bucketpoint
from bucketpoint import BucketReader, CheckpointDeletedError, CheckpointManager, RetentionPolicy
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.format.index import ref as index_ref
from bucketpoint.format.index.view import Entries
from bucketpoint.retention import Keep, Prune
from format.test_independent_reader import read_here
from golden.states import flat
from kit.servers import S3Server

pytestmark = pytest.mark.contract

HERE = Path(__file__).resolve().parent
EXPECTED = {
    (path.parent.name, form): content
    for path in sorted(HERE.glob("*/expected.json"))
    for form, content in json.loads(path.read_text(encoding="utf-8")).items()
}
VERSIONS = sorted({version for version, _ in EXPECTED})
WHOLE = [place for place in EXPECTED if not place[1].startswith("no-collectives/")]


def test_checks_that_each_form_is_there() -> None:
    forms = {form.partition("/")[0] for version, form in EXPECTED if version == "0.1"}
    assert forms == {"plain", "zstd", "index", "ranks", "ranks-index", "no-collectives", "run"}


@pytest.mark.parametrize(("version", "form"), WHOLE)
def test_loads_what_was_saved_and_verifies_every_byte(version: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(HERE / version / form)
    report = verify(open_checkpoint(url))
    assert report.ok, report.damage
    # The tables of digests of the three objects of a run, which have no checksum.
    assert report.read_bytes - report.checked_bytes == (3 * 48 if form.startswith("run/") else 0)

    # A first request that is smaller than `.metadata`: otherwise nothing is left that an index would save.
    monkeypatch.setattr(index_ref, "HEAD_BYTES", 600)

    assert flat(bucketpoint.load(url)) == EXPECTED[version, form]

    entries = BucketReader(url).read_metadata().state_dict_metadata
    assert isinstance(entries, Entries) == form.endswith("index")


def test_restores_integer_keys_and_state_of_ranks_as_they_were() -> None:
    state = bucketpoint.load(str(HERE / "0.1" / "plain"))
    assert list(state["optim"]["state"]) == [0, 1]
    assert type(state["ordered"]["a"]) is int
    ranks = bucketpoint.load(str(HERE / "0.1" / "ranks"))
    assert ranks["loader"] == {f"rank-{rank}": {"position": 100 + rank} for rank in range(4)}


@pytest.mark.parametrize(("version", "form"), EXPECTED)
def test_loads_what_was_saved_by_the_independent_reader(version: str, form: str) -> None:
    folder, _, rank = form.partition("/__")
    place = str(HERE / version / folder), *([f"__{rank}.metadata"] if rank else [])
    if form == "zstd":
        with pytest.raises(NotImplementedError, match=r"model\.w was saved through \['stream\.zstd/1'\]"):
            read_here(*place)
    else:
        assert read_here(*place) == EXPECTED[version, form]


def test_refuses_other_ranks_for_a_checkpoint_without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(HERE / "0.1" / "no-collectives")
    with pytest.raises(bucketpoint.MismatchError, match="saved by 4 ranks"):
        BucketReader(url).read_metadata(rank=2)
    monkeypatch.setattr("bucketpoint.dcp.reader.world_size", lambda: 4)
    assert list(BucketReader(url).read_metadata(rank=2).state_dict_metadata) == ["own", "rank"]


@pytest.mark.parametrize("version", VERSIONS)
def test_takes_no_deletion_marker_for_a_checkpoint(version: str) -> None:
    url = HERE / version / "deleted"
    with pytest.raises(CheckpointDeletedError, match="a policy"):
        bucketpoint.load(str(url))
    with pytest.raises(FileNotFoundError):
        read_here(str(url))


@pytest.mark.parametrize("version", VERSIONS)
def test_continues_a_run_from_its_catalog(version: str, moto: S3Server) -> None:
    bucket, folder = moto.make_bucket(), HERE / version / "run"
    for path in folder.rglob("*"):
        if path.is_file():
            moto.client().put_object(
                Bucket=bucket, Key=f"run/{path.relative_to(folder).as_posix()}", Body=path.read_bytes()
            )
    policy = RetentionPolicy(Keep(latest=1), prune=Prune(when="manual"))
    with CheckpointManager(moto.url(bucket, "run"), policy=policy, storage_options=moto.options) as manager:
        snapshot = manager.catalog.snapshot()
        assert [(one.step, one.kind, sum(one.groups.values())) for one in snapshot.checkpoints] == [
            (1, "full", 6393),
            (2, "full", 6393),
        ]
        assert not snapshot.superseded
        assert [pin.step for pin in snapshot.notes.pins] == [1]
        state = {"model": {"frozen": torch.zeros(600)}, "step": 0}
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, state["step"]) == (2, 2)
        assert torch.equal(state["model"]["frozen"], torch.arange(600.0))
