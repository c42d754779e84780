"""Loads of quantized weights from folders of safetensors, beside torch's own reader of such folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import bucketpoint
from bucketpoint import BucketReader
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.checkpoint.summary import summarise
from bucketpoint.checkpoint.verify import verify
from bucketpoint.convert import plan_conversion, run_conversion
from bucketpoint.errors import MetadataError, MismatchError
from bucketpoint.transfer import TransferOptions
from checkpoint.test_safetensors_folder import load_box
from dcp.conftest import two_ranks  # noqa: F401
from dcp.ranks import Ranks
from dcp.states import assert_same

safetensors = pytest.importorskip("safetensors.torch")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8_NAME, MXFP4_NAME = "model.layers.0.q_proj.weight", "model.layers.0.experts.down_proj_blocks"


def fp8_state(rows: int = 300, columns: int = 257) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        FP8_NAME: torch.randn(rows, columns, generator=generator).mul(100).to(torch.float8_e4m3fn),
        f"{FP8_NAME}_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128), generator=generator),
        "model.norm.weight": torch.randn(columns, generator=generator).bfloat16(),
    }


def mxfp4_state(experts: int = 5, rows: int = 7, groups: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        MXFP4_NAME: torch.randint(256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8),
        MXFP4_NAME.replace("_blocks", "_scales"): torch.randint(
            100, 140, (experts, rows, groups), generator=generator, dtype=torch.uint8
        ),
        "model.norm.weight": torch.randn(rows, generator=generator).bfloat16(),
    }


def folder(path: Path, state: dict[str, torch.Tensor], config: Any) -> str:
    """Write a folder in two files, of which the second has the scales."""
    path.mkdir(parents=True)
    files = {name: f"model-{1 + ('scale' in name)}.safetensors" for name in state}
    for file in set(files.values()):
        safetensors.save_file({name: state[name] for name in state if files[name] == file}, path / file)
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return str(path)


LAYOUTS = pytest.mark.parametrize(
    ("state", "config", "name"),
    [(fp8_state(), FP8, FP8_NAME), (mxfp4_state(), MXFP4, MXFP4_NAME)],
    ids=["fp8", "mxfp4"],
)


class TorchReader(QuantizedHuggingFaceStorageReader):
    """torch's reader, with the dequantized shape also for the chunk of a tensor.

    With the stored one (torch 2.15) it reads only as many columns of `mxfp4` as a row has groups.
    """

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            (index,) = [index for index in metadata.storage_data if index.fqn == name]
            origin = torch.Size([0] * len(entry.size))
            metadata.storage_data[replace(index, offset=origin)] = metadata.storage_data.pop(index)
            entry.chunks = [ChunkStorageMetadata(origin, entry.size)]
        return metadata


def of_torch(url: str, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Load a tensor by torch's reader."""
    reader = TorchReader(url, target_dtype=dtype)
    loaded = torch.zeros(reader.read_metadata().state_dict_metadata[name].size, dtype=dtype)
    dcp.load({name: loaded}, storage_reader=reader, no_dist=True)
    return loaded


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantizes_as_torch_does(tmp_path: Path, state: Any, config: Any, name: str, dtype: torch.dtype) -> None:
    url = folder(tmp_path / "hf", state, config)
    expected = of_torch(url, name, dtype)
    target = {name: torch.zeros_like(expected), "model.norm.weight": torch.zeros_like(state["model.norm.weight"])}
    small = TransferOptions(max_inflight_bytes=1 << 12, connections=4)
    for reader in (BucketReader(), BucketReader(transfer=small)):
        dcp.load(target, checkpoint_id=url, storage_reader=reader, no_dist=True)
        assert_same(target, {name: expected, "model.norm.weight": state["model.norm.weight"]})
    transposed = torch.zeros(expected.shape[::-1], dtype=dtype).permute(*reversed(range(expected.dim())))
    dcp.load({name: transposed}, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert torch.equal(transposed, expected)


@LAYOUTS
def test_load_by_url_returns_bfloat16(tmp_path: Path, state: Any, config: Any, name: str) -> None:
    url = folder(tmp_path / "hf", state, config)
    expected = {name: of_torch(url, name, torch.bfloat16), "model.norm.weight": state["model.norm.weight"]}
    assert_same(bucketpoint.load(url), expected)
    assert_same(bucketpoint.load(url, keys=name), {name: expected[name]})
    # In one file, without an index.
    (Path(url) / INDEX_NAME).unlink()
    safetensors.save_file(state, Path(url) / "model.safetensors")
    assert_same(bucketpoint.load(url), expected)


@LAYOUTS
def test_shows_verifies_and_converts_what_is_stored(tmp_path: Path, state: Any, config: Any, name: str) -> None:
    url = folder(tmp_path / "hf", state, config)
    entries = summarise(open_checkpoint(url, plain=True)).entries
    assert {key: entry.shape for key, entry in entries.items()} == {
        key: tuple(saved.shape) for key, saved in state.items()
    }
    report = verify(open_checkpoint(url))
    assert report.ok
    assert sum(report.unchecked.values()) == sum(tensor.nbytes for tensor in state.values())
    run_conversion(plan_conversion(url, str(tmp_path / "ours")))
    assert_same(bucketpoint.load(str(tmp_path / "ours")), state)
    target = {key: torch.zeros_like(saved) for key, saved in state.items()}
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(dequantize=False), no_dist=True)
    assert_same(target, state)
    (Path(url) / "config.json").unlink()
    assert_same(bucketpoint.load(url), state)


@pytest.mark.parametrize(
    ("name", "offsets", "lengths"),
    [
        (FP8_NAME, (127, 0), (2, 257)),
        (FP8_NAME, (1, 130), (298, 127)),
        (FP8_NAME, (299, 256), (1, 1)),
        (FP8_NAME, (130, 3), (0, 5)),
        (MXFP4_NAME, (1, 2, 0), (3, 5, 96)),
        (MXFP4_NAME, (0, 0, 31), (5, 7, 3)),
        (MXFP4_NAME, (4, 6, 33), (1, 1, 30)),
        (MXFP4_NAME, (2, 0, 95), (2, 7, 1)),
        (MXFP4_NAME, (0, 1, 64), (5, 5, 32)),
    ],
)
@pytest.mark.parametrize("leased", [64 << 20, 1 << 10, 16])
def test_dequantizes_a_box_at_any_offset(tmp_path: Path, name: str, offsets: Any, lengths: Any, leased: int) -> None:
    fp8 = name == FP8_NAME
    url = folder(tmp_path / "hf", fp8_state() if fp8 else mxfp4_state(), FP8 if fp8 else MXFP4)
    whole = of_torch(url, name, torch.bfloat16)
    transfer = TransferOptions(max_inflight_bytes=leased, connections=2, free_gap_bytes=8, coalesce_gap_bytes=16)
    loaded = load_box(BucketReader(url, transfer=transfer), name, offsets, lengths, torch.bfloat16)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))
    assert torch.equal(loaded, whole[box])


@pytest.mark.parametrize("part", [0, 3])
def test_reads_only_the_bytes_of_the_wanted_rows(tmp_path: Path, part: int) -> None:
    for name, state, config, nbytes in (
        (FP8_NAME, fp8_state(2048, 1536), FP8, 512 * 1536 + 4 * 12 * 4),
        (MXFP4_NAME, mxfp4_state(64, 32, 90), MXFP4, 16 * 32 * 90 * 17),
    ):
        url = folder(tmp_path / name, state, config)
        reader = BucketReader(url)
        size = reader.read_metadata().state_dict_metadata[name].size
        rows = size[0] // 4
        offsets = (part * rows, *[0] * (len(size) - 1))
        loaded = load_box(reader, name, offsets, (rows, *size[1:]), torch.bfloat16)
        assert torch.equal(loaded, of_torch(url, name, torch.bfloat16)[part * rows : (part + 1) * rows])
        assert reader.stats is not None
        assert nbytes <= reader.stats.read_bytes <= 1.05 * nbytes


def load_sharded(rank: int, world: int, url: str, name: str, expected: torch.Tensor, norm: torch.Tensor) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    for placement in (Shard(0), Shard(expected.dim() - 1), Replicate()):
        target = {
            name: distribute_tensor(torch.zeros_like(expected), mesh, [placement]),
            "model.norm.weight": torch.zeros_like(norm),
        }
        reader = BucketReader(cooperative="group")
        dcp.load(target, checkpoint_id=url, storage_reader=reader)
        assert torch.equal(target[name].full_tensor(), expected), placement
        assert torch.equal(target["model.norm.weight"], norm)
    return reader.explain()


@LAYOUTS
def test_loads_plain_tensors_and_dequantizes_shards_that_ranks_read_together(
    tmp_path: Path,
    two_ranks: Ranks,  # noqa: F811
    state: Any,
    config: Any,
    name: str,
) -> None:
    url = folder(tmp_path / "hf", state, config)
    told = two_ranks.run(load_sharded, url, name, of_torch(url, name, torch.bfloat16), state["model.norm.weight"])
    assert all(text.startswith("Cooperative") for text in told), told


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "config", "change", "text"),
    [
        (fp8_state(), FP8, {f"{FP8_NAME}_scale_inv": None}, f"files lack the scales {FP8_NAME}_scale_inv"),
        (fp8_state(), FP8, {f"{FP8_NAME}_scale_inv": torch.ones(3, 2)}, r"shape \[3, 2\] instead of \[3, 3\]"),
        (fp8_state(), FP8, {f"{FP8_NAME}_scale_inv": torch.ones(3, 3).int()}, "int32 instead of torch.float32"),
        (fp8_state(), FP8, {FP8_NAME: torch.ones(300, 257).bfloat16()}, "tensor with scales is torch.bfloat16"),
        (fp8_state(), FP8, {FP8_NAME: torch.ones(300).to(torch.float8_e4m3fn)}, r"has the shape \[300\]"),
        (fp8_state(), FP8 | {"weight_block_size": [0, 128]}, {}, "weight_block_size"),
        (fp8_state(), FP8 | {"weight_block_size": "128"}, {}, "weight_block_size"),
        (mxfp4_state(), MXFP4, {"model.layers.0.experts.down_proj_scales": None}, "lack the scales .*down_proj_scales"),
        (
            mxfp4_state(),
            MXFP4,
            {"model.layers.0.experts.down_proj_scales": torch.ones(5, 7, 4, dtype=torch.uint8)},
            r"shape \[5, 7, 4\] instead of \[5, 7, 3\]",
        ),
        (mxfp4_state(), MXFP4, {MXFP4_NAME: torch.ones(5, 7, 3, 8, dtype=torch.uint8)}, r"shape \[5, 7, 3, 8\]"),
    ],
)  # fmt: skip
def test_refuses_a_layout_that_lies(tmp_path: Path, state: Any, config: Any, change: Any, text: str) -> None:
    kept = {name: saved for name, saved in {**state, **change}.items() if saved is not None}
    url = folder(tmp_path / "hf", kept, config)
    with pytest.raises(MetadataError, match=text) as refused:
        bucketpoint.load(url)
    assert refused.value.remedy
    assert refused.value.key
    (Path(url) / "config.json").unlink()
    assert_same(bucketpoint.load(url), kept)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "fp9"},
        {"block": []},
        {"block": [0, 128]},
        {"block": [128] * 3},
        {"scales": {FP8_NAME: 1}},
        {"scales": {FP8_NAME: "no tensor"}},
        {"scales": {FP8_NAME: "model.norm.weight"}},
        {"scales": {"model.norm.weight": f"{FP8_NAME}_scale_inv"}},
        {"more": 1},
    ],
)
def test_refuses_metadata_that_lies_about_quantization(tmp_path: Path, change: Any) -> None:
    url = folder(tmp_path / "hf", fp8_state(), FP8)
    reader = BucketReader(url)
    metadata = reader.read_metadata()
    fact = vars(metadata)["bucketpoint"]["quantization"]
    vars(metadata)["bucketpoint"]["quantization"] = {**fact, **change}
    planner = dcp.DefaultLoadPlanner()
    target = {name: torch.zeros(entry.size) for name, entry in metadata.state_dict_metadata.items()}
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with pytest.raises(MetadataError):
        reader.read_data(planner.create_local_plan(), planner)


@LAYOUTS
def test_refuses_targets_that_cannot_hold_the_values(tmp_path: Path, state: Any, config: Any, name: str) -> None:
    url = folder(tmp_path / "hf", state, config)
    shape = BucketReader(url).read_metadata().state_dict_metadata[name].size
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int32):
        with pytest.raises(CheckpointException, match=r"do not fit into .*dequantize=False"):
            target = {name: torch.zeros(shape, dtype=dtype)}
            dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    tied = torch.zeros(shape)
    both = folder(tmp_path / "tied", {**state, "tied.weight": torch.zeros(shape)}, config)
    with pytest.raises(MismatchError, match="one tensor under two names"):
        bucketpoint.load({name: tied, "tied.weight": tied}, both)
