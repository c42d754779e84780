"""`exclude=`: keys that a conversion leaves out, so that one of them does not refuse all the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint.convert.journal as notes
import bucketpoint.convert.pipeline as run
from bucketpoint import BucketWriter
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.records import adopt
from bucketpoint.convert import ConvertOptions, ConvertPlan, plan_conversion, run_conversion
from bucketpoint.convert.detect import open_source
from bucketpoint.convert.source import FORMATS, TARGETS
from bucketpoint.errors import MismatchError, StoreError, UnsafeDataError
from bucketpoint.location import Location
from convert.conftest import SMALL, behind, converted, killed, load
from dcp.states import assert_same, filled

safetensors = pytest.importorskip("safetensors.torch")

WEIGHTS = {f"model.w{n}": filled((40, 30), torch.float32, seed=n) for n in range(2)}
ROPE = {f"model.rope.{name}": filled((5,), torch.complex64) for name in ("cos", "sin")}


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, tensor in flat.items():
        *above, last = name.split(".")
        place = state
        for part in above:
            place = place.setdefault(part, {})
        place[last] = tensor
    return state


def written(path: Path, kind: str, flat: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these tensors in each format."""
    if kind == "safetensors":
        path = path.with_suffix(".safetensors")
        safetensors.save_file(flat, path)
    elif kind == "torch":
        torch.save(nested(flat), path)
    else:
        writer: Any = BucketWriter(str(path)) if kind == "bucketpoint" else FileSystemWriter(str(path))
        dcp.save(nested(flat), storage_writer=writer, no_dist=True)
    return path


def keys_at(path: Path) -> set[str]:
    return set(open_source(Location.of(path), transfer=SMALL).metadata.state_dict_metadata)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("to", TARGETS)
def test_leaves_excluded_keys_out_of_the_target_and_no_others(tmp_path: Path, kind: str, to: str) -> None:
    source = written(tmp_path / "a", kind, WEIGHTS | ROPE)
    done = converted(source, tmp_path / "b", to, exclude=["model.rope", "*.w1"])
    assert keys_at(tmp_path / "b") == {"model.w0"}
    assert done.nbytes < 3 * WEIGHTS["model.w0"].nbytes
    converted(tmp_path / "b", tmp_path / "back", "bucketpoint")
    # A file of safetensors has names without levels, and DCP's metadata keeps them so.
    left = {"model.w0": WEIGHTS["model.w0"]}
    assert_same(load(tmp_path / "back", left), left)


def test_names_a_key_by_one_string_as_the_source_does(tmp_path: Path) -> None:
    source = written(tmp_path / "a", "bucketpoint", WEIGHTS | ROPE)
    converted(source, tmp_path / "hf", "safetensors", prefix="model.", exclude="model.rope")
    assert safetensors.load_file(tmp_path / "hf" / "model.safetensors").keys() == {"w0", "w1"}
    converted(tmp_path / "hf", tmp_path / "back", prefix="model.", exclude="w1")
    assert keys_at(tmp_path / "back") == {"model.w0"}


def test_names_at_once_what_safetensors_lacks_with_the_way_round_it(tmp_path: Path) -> None:
    wide = {f"wide[{n}]": torch.zeros(2, dtype=torch.complex128) for n in range(2)}
    source = written(tmp_path / "a", "bucketpoint", WEIGHTS | wide)
    with pytest.raises(MismatchError, match=r"wide\[0\] \(torch.complex128\), wide\[1\]") as raised:
        converted(source, tmp_path / "hf", "safetensors")
    assert "--exclude 'wide[[]0]'" in (raised.value.remedy or "")
    assert not (tmp_path / "hf").exists()
    converted(source, tmp_path / "hf", "safetensors", exclude=["wide[[]0]", "wide[[]1]"])
    assert keys_at(tmp_path / "hf") == set(WEIGHTS)


@pytest.mark.parametrize("to", ["bucketpoint", "torch", "safetensors"])
def test_leaves_a_sparse_tensor_out(tmp_path: Path, to: str) -> None:
    torch.save({"w": torch.ones(3), "eye": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    dcp.save({"w": torch.ones(3), "eye": torch.eye(3).to_sparse()}, storage_writer=BucketWriter(f"{tmp_path}/a"))
    for source in ("a.pt",) if to == "bucketpoint" else ("a.pt", "a"):
        with pytest.raises(MismatchError, match="--exclude eye"):
            converted(tmp_path / source, tmp_path / f"{source} left", to)
        converted(tmp_path / source, tmp_path / f"{source} left", to, exclude=["eye"])
        assert keys_at(tmp_path / f"{source} left") == {"w"}


def test_leaves_an_item_out_that_is_refused_without_trust(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "evil": pytest.raises}, storage_writer=FileSystemWriter(str(tmp_path / "a")))
    with pytest.raises(UnsafeDataError, match="--exclude evil"):
        converted(tmp_path / "a", tmp_path / "b")
    converted(tmp_path / "a", tmp_path / "b", exclude=["evil"])
    assert keys_at(tmp_path / "b") == {"w"}


def test_moves_nothing_up_in_a_list(tmp_path: Path) -> None:
    torch.save({"list": [torch.zeros(2), torch.ones(2), 3]}, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt", "torch", exclude=["list.0"])
    assert_same(torch.load(tmp_path / "b.pt"), {"list": [None, torch.ones(2), 3]})


@pytest.mark.parametrize("kind", FORMATS)
def test_refuses_a_pattern_without_a_key_and_leaving_out_everything(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path / "a", kind, WEIGHTS)
    for patterns, reason in [
        (["*.w1", "modle.*"], r"no key that matches 'modle\.\*'.*begin with: model"),
        (["model.w"], "no key that matches 'model.w'"),
        (["*.w0", "model.w1"], "--exclude leaves out every key"),
    ]:
        with pytest.raises(MismatchError, match=reason):
            converted(source, tmp_path / "b", "bucketpoint", exclude=patterns)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["bucketpoint", "safetensors"])
def test_begins_again_after_an_interruption_if_the_exclusions_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = written(tmp_path / "a", "dcp", WEIGHTS | {"model.x": torch.ones(1), "optim.x": torch.ones(1)})
    monkeypatch.setattr(run, "_BATCH_BYTES", 1)
    monkeypatch.setattr(notes, "NOTE_BYTES", 1)

    def planned(*exclude: str) -> ConvertPlan:
        options = ConvertOptions(object_bytes=1, shard_bytes=1, exclude=exclude)
        return plan_conversion(source, tmp_path / "b", to_format=to, options=options, transfer=SMALL)

    with behind(monkeypatch, killed(lambda name, n: name == "put" and n > 5)), pytest.raises(StoreError):
        run_conversion(planned("optim.x"))
    assert len(planned("optim.x").there) == 2
    # Other words for the same keys are the same conversion.
    assert len(planned("optim", "*m.x").there) == 2
    assert planned().there == {}
    plan = planned("model.x")
    assert plan.there == {}
    run_conversion(plan)
    assert keys_at(tmp_path / "b") == {*WEIGHTS, "optim.x"}


def test_makes_a_run_checkpoint_without_its_optimizer_not_resumable(tmp_path: Path) -> None:
    state = WEIGHTS | {"optim.exp_avg": torch.ones(3), "optim.step": torch.ones(1)}
    root = tmp_path / "run"
    source = written(root / "step-5", "bucketpoint", state)
    adopt(open_catalog(str(root)))
    for step, patterns in [(7, ["*.w1", "optim.step"]), (9, ["optim"])]:
        converted(source, root / f"step-{step}", "bucketpoint", exclude=patterns)
    rows = open_catalog(str(root)).snapshot().rows()
    assert [(row.step, row.kind) for row in rows] == [(5, "full"), (7, "full"), (9, "weights")]
    # The catalog has the record, and none lies beside the metadata.
    assert not (root / "step-7/.bucketpoint.json").exists()
