"""Tools on checkpoints with copied objects, which hold bytes that no item uses: they neither miss nor invent any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.summary import summarise
from bucketpoint.dcp.copy import copy_checkpoint, plan_copy
from bucketpoint.errors import TransientStoreError
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.thinning import Outline
from dcp.ranks import Ranks
from dcp.saving.copied_saves import Refusing, Run, Watch, lora, nbytes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two checkpoints, of which the second has copied objects, without the first."""
    run = Run(str(tmp_path / "run"))
    writer = run.writer()
    run.save(lora(1), 1, writer)
    watch = Watch(writer)
    run.save(lora(2), 2, writer)
    assert watch.calls["copy"] == 1
    run.delete(1)
    return run


def test_loads_a_copy_of_it_elsewhere_and_copies_from_it_again(run: Run, tmp_path: Path) -> None:
    other = Run(str(tmp_path / "other"))
    copy_checkpoint(plan_copy(open_checkpoint(run.url(2)), other.url(2)))
    other.assert_holds(2, lora(2))
    assert other.verified(2).damage == []
    writer = other.writer()
    watch = Watch(writer)
    other.save(lora(3), 3, writer)
    other.assert_holds(3, lora(3))
    assert watch.sent < 0.03 * nbytes(lora(3))


def test_deletes_nothing_of_it_by_gc(run: Run) -> None:
    before = sorted(Path(run.url(2)).rglob("*"))
    assert not sweep(open_catalog(run.root), older_than=3600, deep=True).failures
    assert sorted(Path(run.url(2)).rglob("*")) == before
    run.assert_holds(2, lora(2))


def test_deletes_what_a_copy_without_an_answer_left_by_gc(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "run"))
    writer = run.writer()
    Watch(writer, lambda store: Refusing(store, lambda: TransientStoreError("no answer"), acts=True))
    for step in (1, 2):
        run.save(lora(step), step, writer)
    data = sorted(Path(run.url(2)).rglob("*-model-*.distcp"), key=lambda path: path.stat().st_mtime_ns)
    assert len(data) == 3
    (left,) = (path for path in data if path.name.endswith("-model-0.distcp"))
    os.utime(left, (0, 0))
    assert [key.rpartition("/")[2] for key in sweep(open_catalog(run.root), deep=True).objects] == [left.name]
    run.assert_holds(2, lora(2))
    assert run.verified(2).damage == []


def test_counts_the_items_and_not_the_dead_bytes_in_its_summary(run: Run, tmp_path: Path) -> None:
    plain = Run(str(tmp_path / "plain"))
    plain.save(lora(2), 2, plain.writer(unchanged="send"))
    ours, theirs = (summarise(open_checkpoint(each.url(2))) for each in (run, plain))
    assert ours.entries == theirs.entries


def test_keeps_what_was_copied_when_it_is_thinned_to_its_weights(run: Run) -> None:
    path = Path(run.url(2), ".metadata")
    data = Outline(path.read_bytes()).thinned()
    gone = {info.relative_path for index, info in decode_metadata(path.read_bytes()).storage_data.items()} - {
        info.relative_path for info in decode_metadata(data).storage_data.values()
    }
    for each in gone:
        Path(run.url(2), each).unlink()
    path.write_bytes(data)
    weights = {"model": lora(2)["model"], "step": 2, "note": lora(2)["note"]}
    run.assert_holds(2, weights)
    # What is left of it can be copied, and the rest is sent.
    writer = run.writer()
    watch = Watch(writer)
    run.save(lora(3), 3, writer)
    assert watch.calls["copy"] == 1
    run.assert_holds(3, lora(3))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def test_copies_what_the_store_names_in_a_checkpoint_process(run: Run, one_rank: Ranks) -> None:
    one_rank.run(_save_by_process, run)
    run.assert_holds(3, lora(3))
    # Dead bytes of the first save tell that it is a copy.
    assert _largest(run, 3) == _largest(run, 2)


def _save_by_process(rank: int, world: int, run: Run) -> None:
    kind = AsyncCheckpointerType.PROCESS
    saving = dcp.async_save(
        lora(3), checkpoint_id=run.url(3), storage_writer=run.writer(), async_checkpointer_type=kind
    )
    saving.result()  # type: ignore[union-attr]


def _largest(run: Run, step: int) -> bytes:
    return max((path.read_bytes() for path in Path(run.url(step)).rglob("*.distcp")), key=len)
