"""An engine gets a checkpoint of torchtitan's under the names of the Hub, by torchtitan's own mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import model_registry

from bucketpoint import BucketWriter
from bucketpoint.integrations.promised import Promised
from bucketpoint.integrations.weights import Weights, WeightsOptions


def names_of_hub(tensors: dict[str, Any]) -> dict[str, Any]:
    """What `"names": "titan.test_serving:names_of_hub"` names."""
    spec = model_registry("debugmodel", attn_backend="flex")
    return spec.state_dict_adapter(spec.model, None).to_hf(tensors)


def test_maps_names_by_an_adapter_and_turns_only_queries_and_keys_by_reading_them(tmp_path: Path) -> None:
    spec = model_registry("debugmodel", attn_backend="flex")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in spec.model.build().state_dict().items()}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    dcp.save({"model": state}, checkpoint_id=f"file://{tmp_path}", storage_writer=BucketWriter(), no_dist=True)
    expected = names_of_hub(state)
    config = {"url": f"file://{tmp_path}", "prefix": "model.", "names": f"{__name__}:names_of_hub"}
    with Weights(WeightsOptions.of(config)).loading() as tensors:
        read = {name for name, tensor in tensors.items() if not isinstance(tensor, Promised)}
        targets = {name: torch.empty(tensor.shape) for name, tensor in tensors.items()}
        for name, target in targets.items():
            target.copy_(tensors[name])
    assert {name.rpartition("self_attn.")[2] for name in read} == {"q_proj.weight", "k_proj.weight"}
    assert targets.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], targets[name])] == []
