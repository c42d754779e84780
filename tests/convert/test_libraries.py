"""What other libraries make of our exports, and we of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from convert.conftest import converted, load, names, state
from dcp.states import assert_same
from kit.servers import S3Server


def test_exports_what_transformers_loads_and_reads_what_it_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("safetensors", reason="pip install safetensors")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    value = {"model": model.state_dict(), "step": 3}
    dcp.save(value, storage_writer=BucketWriter(str(tmp_path / "ours")), no_dist=True)
    done = converted(tmp_path / "ours", tmp_path / "hf", "safetensors", prefix="model.", shard_bytes=8_000)
    assert done.objects > 2
    config.save_pretrained(tmp_path / "hf")
    found, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(dict(found.state_dict()), dict(model.state_dict()))
    tokens = torch.arange(8).reshape(1, 8)
    model.eval()
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    converted(tmp_path / "theirs", tmp_path / "back", prefix="model.")
    back = {"model": dict(model.state_dict())}
    assert_same(load(tmp_path / "back", back), back)


def test_converts_what_multi_storage_client_wrote(
    minio_root: str, monkeypatch: pytest.MonkeyPatch, minio: S3Server, tmp_path: Path
) -> None:
    pytest.importorskip("multistorageclient", reason="pip install 'multi-storage-client[boto3]'")
    writer = pytest.importorskip("multistorageclient.contrib.torch")
    bucket = minio_root.removeprefix("s3://").split("/")[0]
    options = {"base_path": bucket, "region_name": minio.region, "endpoint_url": minio.endpoint}
    profiles = {"there": {"storage_provider": {"type": "s3", "options": options}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    value = state()
    made = writer.MultiStorageFileSystemWriter("msc://there/there/theirs")
    dcp.save(value, storage_writer=made, no_dist=True)
    assert ".metadata" in names(f"{minio_root}/theirs")
    converted(f"{minio_root}/theirs", f"{minio_root}/ours")
    assert_same(load(f"{minio_root}/ours", value), value)
    # And by its own URLs, which fsspec then knows.
    converted("msc://there/there/theirs", f"{minio_root}/again")
    assert_same(load(f"{minio_root}/again", value), value)
