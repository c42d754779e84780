"""`bucketpoint.load(url)` gives the state that was saved; loads into a state say what they leave out."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import bucketpoint as bp
from bucketpoint.dcp.planning import unused_keys
from bucketpoint.dcp.planning.nested_state import INT_KEYS, nested, noted_int_keys
from bucketpoint.errors import MismatchError
from dcp.ranks import Ranks
from dcp.states import same


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def a_state() -> dict[Any, Any]:
    model, optimizer = trained()
    return {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "step": 7,
        "names": ["a", "b"],
        "sizes": {0: 1, 10: [torch.ones(2), {"3": 4, -5: "x"}], 2**64: 2, -(10**19): 3},
    }


@pytest.mark.parametrize("saved_by", ["save", "async_save", "dcp.save with SavePlanner"])
def test_returns_the_state_as_it_was_saved(tmp_path: Path, saved_by: str) -> None:
    state, url = a_state(), f"{tmp_path}/a"
    if saved_by == "save":
        bp.save(state, url)
    elif saved_by == "async_save":
        bp.async_save(state, url, no_dist=True).result(60)
    else:
        dcp.save(state, checkpoint_id=url, storage_writer=bp.BucketWriter(), planner=bp.SavePlanner(), no_dist=True)
    loaded = bp.load(url)
    assert same(loaded, state)
    # What an optimizer makes of it.
    model, optimizer = trained()
    optimizer.load_state_dict(loaded["optim"])
    model.load_state_dict(loaded["model"])


def test_restores_integer_keys_through_an_index_and_a_kept_plan(tmp_path: Path) -> None:
    planner, writer = bp.SavePlanner(), bp.BucketWriter()
    for number in range(3):
        # The same flat names, and at last keys that are text.
        keys = list(range(800)) if number < 2 else list(map(str, range(800)))
        state = {"a": {key: torch.full((1,), float(number)) for key in keys}}
        dcp.save(state, checkpoint_id=f"{tmp_path}/{number}", storage_writer=writer, planner=planner, no_dist=True)
        assert same(bp.load(f"{tmp_path}/{number}"), state)
        assert same(bp.load(f"{tmp_path}/{number}", trusted=True), state), "without the index"


def test_returns_checkpoints_of_others_nested(tmp_path: Path) -> None:
    dcp.save({"a": {"b": [torch.ones(2), {"c": 1}]}, "n": {0: 5}}, checkpoint_id=tmp_path, no_dist=True)
    assert same(bp.load(tmp_path), {"a": {"b": [torch.ones(2), {"c": 1}]}, "n": {"0": 5}})


def test_loads_only_the_keys_that_are_asked_for(tmp_path: Path) -> None:
    state, url = a_state(), f"{tmp_path}/a"
    bp.save(state, url)
    weights = {name: state["model"][name] for name in ("0.weight", "1.weight")}
    assert same(bp.load(url, keys="model.*.weight"), {"model": weights})
    assert same(bp.load(url, keys=["model", "step"]), {"model": state["model"], "step": 7})
    momenta = bp.load(url, keys="*.exp_avg")
    assert set(momenta) == {"optim"}
    assert same(momenta["optim"]["state"][0], {"exp_avg": state["optim"]["state"][0]["exp_avg"]})
    # Places of lists are kept.
    assert same(bp.load(url, keys=["sizes.10.1.*"]), {"sizes": {10: [None, {"3": 4, -5: "x"}]}})
    with pytest.raises(bp.MismatchError, match=r"no key that matches 'modle\.\*'.*begin with: model, "):
        bp.load(url, keys=["step", "modle.*"])


def test_reads_only_the_bytes_of_what_is_asked_for(tmp_path: Path) -> None:
    bp.save({"model": {"small": torch.ones(1000), "large": torch.ones(1_000_000)}}, f"{tmp_path}/a")
    events: list[bp.Progress] = []
    bp.load(f"{tmp_path}/a", keys="model.small", progress=events.append)
    assert 4000 <= events[-1].done_bytes < 10_000


def test_needs_trust_for_values_that_are_no_plain_data(tmp_path: Path) -> None:
    bp.save({"w": torch.ones(2), "f": threading.Thread.start}, f"{tmp_path}/a")
    with pytest.raises(bp.UnsafeDataError):
        bp.load(f"{tmp_path}/a")
    assert same(bp.load(f"{tmp_path}/a", keys="w"), {"w": torch.ones(2)})
    assert bp.load(f"{tmp_path}/a", trusted=True)["f"] is threading.Thread.start


def test_loads_without_a_gpu_what_was_saved_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tuple is pickled whole, with the device of its tensors.
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        bp.save({"w": torch.ones(2), "pair": (torch.ones(3), 1)}, f"{tmp_path}/a")
    found = bp.load(f"{tmp_path}/a", device="cpu")
    assert found["pair"][0].device.type == "cpu"
    assert torch.equal(found["pair"][0], torch.ones(3))


@pytest.mark.parametrize("device", ["cpuu", "cuda:999", None])
def test_refuses_a_device_that_is_not_there_and_names_another(tmp_path: Path, device: Any) -> None:
    bp.save({"w": torch.ones(2)}, f"{tmp_path}/a")
    with pytest.raises(bp.BucketpointError, match=r'cannot be used: .* Pass device="cpu"') as caught:
        bp.load(f"{tmp_path}/a", device=device)
    assert "keys=" not in str(caught.value)


def test_returns_sparse_tensors_sparse(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    bp.save({"s": sparse}, f"{tmp_path}/a")
    found = bp.load(f"{tmp_path}/a")["s"]
    assert found.layout is torch.sparse_coo
    assert torch.equal(found.to_dense(), torch.eye(3))


def test_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    for wrong in (
        lambda: bp.load(f"{tmp_path}/a", f"{tmp_path}/b"),  # type: ignore[call-overload]
        lambda: bp.load({}, f"{tmp_path}/b", keys="x"),  # type: ignore[call-overload]
        lambda: bp.load({}),  # type: ignore[call-overload]
        lambda: bp.load(f"{tmp_path}/a", strict=True),  # type: ignore[call-overload]
        lambda: bp.load({}, f"{tmp_path}/a", strict=True, planner=bp.LoadPlanner()),
    ):
        with pytest.raises(bp.BucketpointError, match=r"load\(|LoadPlanner\("):
            wrong()


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("a",), "b": ("a", "b")},
        {"a": ("a", "b"), "b": ("a",)},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ("x",), "b": ("x",)},
        {"a": ("x", 1 << 40), "b": ("b",)},
        {"a": ("x", -1), "b": ("b",)},
        {"a": (0,), "b": ("b",)},
        {"a": (), "b": ("b",)},
        {"a": ("x",) * 5000, "b": ("b",)},
        {"a": "ab", "b": ("b",)},
        {"a": ("a", ["x"]), "b": ("b",)},
    ],
)
def test_refuses_paths_that_make_no_state(paths: dict[str, Any]) -> None:
    metadata = Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()}, planner_data=paths)
    with pytest.raises(bp.MetadataError):
        nested({"a": 1, "b": 2}, metadata)


@pytest.mark.parametrize("listed", [[[["x"], ["9" * 10_000]]], [[["x"], [["9"]]]], [[["x"], None, 3]]])
def test_refuses_integer_keys_that_are_none(listed: Any) -> None:
    name = f"x.{'9' * 10_000}"
    metadata = Metadata({name: BytesStorageMetadata()}, planner_data={name: tuple(name.split("."))})
    metadata.bucketpoint = {"format": 1, INT_KEYS: listed}  # type: ignore[attr-defined]
    with pytest.raises(bp.MetadataError, match="integer key"):
        nested({name: 1}, metadata, noted_int_keys(metadata))


def save_shards(rank: int, world: int, url: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    bp.save(
        {"w": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "n": {rank: rank, 9: 9, 10**rank * 2**64: 1}}, url
    )


def test_loads_alone_in_a_process_of_a_job_without_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bp.save({"w": torch.ones(2)}, f"{tmp_path}/a")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert same(bp.load(f"{tmp_path}/a"), {"w": torch.ones(2)})


def load_alone_beside_a_save(rank: int, world: int, url: str) -> Any:
    """Rank 0 loads, and waits neither for the others, who never come, nor for the save, which cannot end before it."""
    loaded = threading.Event()

    class Waiting(bp.BucketWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            assert loaded.wait(120)
            return super().write_data(plan, planner)

    handle = bp.async_save({"w": torch.zeros(2)}, checkpoint_id=f"{url}/b", storage_writer=Waiting())
    found = bp.load(f"{url}/a")["w"].tolist() if rank == 0 else None
    loaded.set()
    handle.result(120)
    return found


def test_loads_on_any_rank_alone_what_many_saved_and_beside_a_save(two_ranks: Ranks, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    two_ranks.run(save_shards, f"{url}/a")
    assert two_ranks.run(load_alone_beside_a_save, url) == [[0.0, 1.0, 2.0, 3.0, 4.0], None]
    assert same(bp.load(f"{url}/a"), {"w": torch.arange(5.0), "n": {0: 0, 1: 1, 9: 9, 2**64: 1, 10 * 2**64: 1}})


# Into a state


def test_loads_integer_keys_of_a_state_in_place(tmp_path: Path) -> None:
    saved = {"a": {0: 101, 1: [102, {2**64: 103}], None: "t", "3": 4}}
    bp.save(saved, f"{tmp_path}/a")
    state: dict[Any, Any] = {"a": {0: 1, 1: [2, {2**64: 3}], None: "", "3": 0}}
    bp.load(state, f"{tmp_path}/a")
    assert same(state, saved)
    # At the top too, and what any planner saved.
    dcp.save({7: "top"}, checkpoint_id=f"{tmp_path}/b", storage_writer=bp.BucketWriter(), no_dist=True)
    state = {7: ""}
    bp.load(state, f"{tmp_path}/b")
    assert state == {7: "top"}


def test_counts_unused_and_missing_keys_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bp.save({"model": {f"w{n}": torch.ones(1) for n in range(8)}, "step": 1}, f"{tmp_path}/a")
    with caplog.at_level(logging.INFO, logger="bucketpoint"):
        bp.load({"step": 0, "model": {"w0": torch.zeros(1)}}, f"{tmp_path}/a")
        bp.load({"step": 0, "more": {"v": torch.zeros(1)}}, f"{tmp_path}/a", strict=False)
    first, second = [record for record in caplog.records if record.name == unused_keys.__name__]
    assert first.levelno == logging.INFO
    assert "the checkpoint has 7 keys that the state lacks: model.w1" in first.getMessage()
    assert "and 2 more" in first.getMessage()
    assert "the checkpoint lacks 1 keys, whose values in the state stay unchanged: more.v" in second.getMessage()


def test_follows_torch_in_strict(tmp_path: Path) -> None:
    bp.save({f"w{n}": torch.ones(1) for n in range(8)}, f"{tmp_path}/a")
    every = {f"w{n}": torch.zeros(1) for n in range(8)}
    bp.load(every, f"{tmp_path}/a", strict=True)
    with pytest.raises(bp.MismatchError, match=r"has 7 keys that the state lacks: w1, .* and 2 more"):
        bp.load({"w0": torch.zeros(1)}, f"{tmp_path}/a", strict=True)
    for strict in (None, True):
        with pytest.raises(bp.MismatchError, match="v is not in the checkpoint"):
            bp.load({"v": torch.zeros(1)}, f"{tmp_path}/a", strict=strict)
    kept = {"v": torch.zeros(1), "w0": torch.zeros(1)}
    bp.load(kept, f"{tmp_path}/a", strict=False)
    assert (kept["v"].item(), kept["w0"].item()) == (0, 1)


def load_parts(rank: int, world: int, url: str) -> Any:
    """Together the ranks ask for all keys, and each for some alone."""
    stream = io.StringIO()
    logger = logging.getLogger(unused_keys.__name__)
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        bp.load({f"w{rank}": torch.zeros(1)}, url, strict=True)
        try:
            # A word of one rank for all of them.
            bp.load({"w0": torch.zeros(1)}, url, strict=True if rank else None)
        except bp.MismatchError as error:
            refused = str(error)
        bp.load({f"v{rank}": torch.zeros(1), f"w{rank}": torch.zeros(1)}, url, strict=False)
    finally:
        logger.removeHandler(handler)
    return refused, stream.getvalue()


def test_compares_keys_with_those_of_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a"
    bp.save({"w0": torch.ones(1), "w1": torch.ones(1)}, url)
    (refused, line), (refused_too, nothing) = two_ranks.run(load_parts, url)
    assert "The checkpoint has 1 keys that the state lacks: w1" in refused
    assert "The checkpoint has 1 keys that the state lacks: w1" in refused_too
    assert "the checkpoint lacks 2 keys, whose values in the state stay unchanged: v0, v1" in line
    assert nothing == ""


@pytest.mark.filterwarnings("ignore")
def test_loads_quantised_tensors_with_their_quantiser(tmp_path: Path) -> None:
    values = torch.arange(16.0).view(4, 4)
    by_tensor = torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)
    by_row = torch.quantize_per_channel(
        values, torch.arange(1.0, 5.0), torch.zeros(4, dtype=torch.int64), 0, torch.quint8
    )
    state = {"tensor": by_tensor, "rows": by_row}
    bp.save(state, tmp_path.as_uri())
    loaded = bp.load(tmp_path.as_uri())

    def other(number: int) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.zeros(number, 4), 0.5, 7, torch.quint8)

    into = {"tensor": other(4), "rows": other(4)}
    own = into["tensor"]
    bp.load(into, tmp_path.as_uri())
    # torch compares the quantisers too.
    assert all(torch.equal(each[name], state[name]) for each in (loaded, into) for name in state)
    assert into["tensor"] is own
    with pytest.raises(MismatchError, match="another quantiser"):
        bp.load({"tensor": other(8)[:4]}, tmp_path.as_uri())


def test_refuses_to_load_two_values_into_one_tensor(tmp_path: Path) -> None:
    tied, apart = f"{tmp_path.as_uri()}/tied", f"{tmp_path.as_uri()}/apart"
    bp.save({"embedding": torch.ones(9), "head": torch.ones(9)}, tied)
    bp.save({"embedding": torch.ones(9), "head": torch.zeros(9)}, apart)
    one = torch.zeros(9)
    bp.load({"embedding": one, "head": one}, tied)
    assert one.tolist() == [1.0] * 9
    with pytest.raises(MismatchError, match="one tensor as embedding and as head"):
        bp.load({"embedding": one, "head": one}, apart)


def test_finds_no_damage_where_tensors_go_into_one_memory(tmp_path: Path) -> None:
    rows = 1 << 20
    bp.save({"all": torch.ones(4 * rows), "first": torch.zeros(3 * rows), "last": torch.ones(rows)}, tmp_path.as_uri())
    for _ in range(8):
        memory = torch.full((4 * rows,), 5.0)
        bp.load({"all": memory, "first": memory[: 3 * rows], "last": memory[3 * rows :]}, tmp_path.as_uri())
        assert set(memory.unique().tolist()) <= {0.0, 1.0}
