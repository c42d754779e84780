"""A staged copy shares nothing with the state, looks the same, and keeps what is one object one object."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bucketpoint.errors import BucketpointError
from bucketpoint.staging import Stager


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_change_to_the_original_does_not_reach_the_copy() -> None:
    state = {"w": torch.zeros(3), "nested": {"list": [torch.zeros(2), 5]}, "tuple": (torch.zeros(1),)}
    copied = copy_to_host(state)
    state["w"].fill_(1)
    state["nested"]["list"][0].fill_(1)
    state["nested"]["list"].append("more")
    state["tuple"][0].fill_(1)
    assert copied["w"].tolist() == [0, 0, 0]
    assert [copied["nested"]["list"][0].tolist(), copied["nested"]["list"][1:]] == [[0, 0], [5]]
    assert copied["tuple"][0].tolist() == [0]


def test_tied_weights_are_copied_once_and_stay_tied() -> None:
    tied = torch.ones(4)
    copied = copy_to_host({"a": tied, "b": {"c": tied}})
    assert copied["a"] is copied["b"]["c"]
    assert copied["a"] is not tied


def test_a_distributed_tensor_keeps_its_mesh_and_placements(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    copied = copy_to_host({"w": tensor})["w"]
    assert isinstance(copied, DTensor)
    assert copied.placements == tensor.placements
    assert copied.device_mesh == mesh
    tensor.to_local().fill_(-1)
    assert torch.equal(copied.to_local(), torch.arange(6.0).reshape(2, 3))


def test_strides_and_dtypes_are_kept_and_nothing_requires_grad() -> None:
    channels = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    half = torch.ones(3, dtype=torch.bfloat16)
    copied = copy_to_host({"c": channels, "h": half})
    assert copied["c"].stride() == channels.stride()
    assert not copied["c"].requires_grad
    assert copied["h"].dtype == torch.bfloat16


def test_an_ordered_dict_keeps_its_order() -> None:
    copied = copy_to_host(OrderedDict(b=1, a=2))
    assert list(copied) == ["b", "a"]


def test_an_object_that_cannot_be_copied_is_named_by_its_key() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("never")

    with pytest.raises(BucketpointError, match="never") as caught:
        copy_to_host({"app": {"thing": Stubborn()}})
    assert caught.value.key == "app.thing"
