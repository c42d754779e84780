"""A staged copy looks the same, shares nothing with the state, and keeps what is one object, or one memory, one."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorBase, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from typing_extensions import Self

from bucketpoint.errors import StagingError
from bucketpoint.staging import Stager, StagingOptions
from staging.helpers import both_kinds, finished, staged_copy, sync_and_async

pytestmark = pytest.mark.contract


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_keeps_the_class_and_attributes_of_a_dict_that_is_pickled_with_its_value() -> None:
    labelled = OrderedDict(a=1)
    labelled._metadata = {"version": 2}  # type: ignore[attr-defined]
    numbers, counts = defaultdict(list, {1: [2]}), Counter("aab")
    copied = staged_copy({"value": (numbers, counts, labelled, OrderedDict(b=torch.ones(2)))})["value"]
    assert [type(each) for each in copied] == [defaultdict, Counter, OrderedDict, OrderedDict]
    assert copied[:2] == (numbers, counts)
    assert copied[0].default_factory is list
    assert copied[2]._metadata == {"version": 2}
    numbers[1].append(3)
    assert copied[0] == {1: [2]}


# -- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keeps_the_bits_of_every_dtype(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    source = bits.clone().view(dtype)
    copied = staged_copy({"w": source, "column": source.view(2, 3)[:, 1], "none": source[:0]})
    source.view(torch.uint8).zero_()
    assert copied["w"].dtype is dtype
    assert torch.equal(copied["w"].view(torch.uint8), bits)
    assert copied["none"].shape == (0,)
    assert (copied["column"].shape, copied["column"].stride()) == ((2,), (3,))
    assert copied["column"].data_ptr() - copied["w"].data_ptr() == dtype.itemsize
    bits = bits.view(2, -1)
    alone = staged_copy({"column": bits.view(dtype)[:, 1:2]})["column"]
    assert alone.dtype is dtype
    assert torch.equal(alone.view(torch.uint8), bits[:, dtype.itemsize : 2 * dtype.itemsize])


# -- shapes and strides -----------------------------------------------------------------------------------------------


def test_copies_no_column_twice_and_none_of_a_tensor_that_is_saved_too() -> None:
    large = torch.randn(256, 256)
    state = {"whole": large, "column": large[:, 3:7], "every other": large[::2]}
    stager = Stager()
    copied = finished(stager.stage(state))
    assert stager.staged_bytes <= large.nbytes + 64
    copied["whole"].zero_()
    assert not copied["column"].any()
    assert not copied["every other"].any()
    state = {"a": large[:, 3:7], "b": large[:, 3:7]}
    stager = Stager()
    copied = finished(stager.stage(state))
    assert stager.staged_bytes <= 256 * 4 * 4 + 64
    copied["a"].zero_()
    assert not copied["b"].any()


# -- memory that is shared --------------------------------------------------------------------------------------------


def test_overlaps_parts_of_one_numpy_array_in_the_copy_too() -> None:
    array = np.arange(100.0)
    state = {"a": torch.from_numpy(array[:60]), "b": torch.from_numpy(array[40:80]), "c": torch.from_numpy(array[75:])}
    copied = staged_copy(state)
    array[:] = -1
    assert copied["a"].tolist() == list(range(60))
    assert copied["b"].tolist() == list(range(40, 80))
    assert copied["c"].tolist() == list(range(75, 100))
    copied["b"].fill_(-2)
    assert copied["a"][40:].tolist() == [-2] * 20
    assert copied["c"][:5].tolist() == [-2] * 5


def test_copies_memory_that_is_not_aligned_to_its_elements() -> None:
    raw = bytearray(range(65))
    source = torch.frombuffer(raw, dtype=torch.float64, offset=1, count=8)
    assert source.data_ptr() % 8
    expected = source.clone()
    as_bytes = torch.frombuffer(raw, dtype=torch.uint8)
    copied = staged_copy({"w": source, "rows": source.view(2, 4)[:, 1], "bytes": as_bytes})
    raw[:] = bytes(65)
    assert copied["bytes"].tolist() == list(range(65))
    assert copied["w"].data_ptr() % 8 == 0
    assert torch.equal(copied["w"], expected)
    assert torch.equal(copied["rows"], expected.view(2, 4)[:, 1])


@pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
def test_copies_the_values_of_memory_that_is_seen_otherwise_at_the_next_save(tied: bool) -> None:
    """Lazily conjugated or negated: address, shape, strides and dtype may be the same each time."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    stager = Stager()
    for seen in (z, z.conj(), z, torch._neg_view(z), z.conj(), z.conj().imag, z.conj().t(), z):
        expected, own = seen.clone().resolve_conj().resolve_neg(), z.clone()
        copied = finished(stager.stage({"a": seen, "b": z} if tied else {"a": seen}))
        z.mul_(2)
        assert torch.equal(copied["a"].resolve_conj().resolve_neg(), expected)
        assert not tied or torch.equal(copied["b"], own)
        del copied


# -- kinds of tensor --------------------------------------------------------------------------------------------------


class Loaded(torch.nn.Parameter):
    pass


def test_keeps_parameters_and_the_gradient_flag_without_the_graph() -> None:
    tied, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    source = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    own, own_frozen = Loaded(torch.ones(2)), Loaded(torch.ones(2), requires_grad=False)
    parameters = {"p": tied, "again": tied, "frozen": frozen, "own": own, "own frozen": own_frozen}
    copied = staged_copy({**parameters, "computed": tied * 2, "c": source, "view": source[0]})
    assert copied["p"] is copied["again"]
    kinds = [torch.nn.Parameter] * 3 + [Loaded] * 2 + [torch.Tensor] * 3
    assert [type(tensor) for tensor in copied.values()] == kinds
    assert [name for name in copied if not copied[name].requires_grad] == ["frozen", "own frozen"]
    assert copied["c"].stride() == source.stride()
    assert all(tensor.is_leaf for tensor in copied.values())


class Labelled(torch.Tensor):
    """No `__tensor_flatten__`: an ordinary tensor under another name."""

    label: Any


def test_keeps_class_attributes_and_memory_of_a_subclass() -> None:
    source = torch.arange(6.0).reshape(2, 3).as_subclass(Labelled)
    source.label = ["a"]
    copied = staged_copy({"w": source, "view": source.as_subclass(torch.Tensor)[1]})
    source.label.append("b")
    source.fill_(-1)
    assert type(copied["w"]) is Labelled
    assert copied["w"].label == ["a"]
    assert copied["w"].as_subclass(torch.Tensor).tolist() == [[0, 1, 2], [3, 4, 5]]
    copied["view"].fill_(7)
    assert copied["w"].as_subclass(torch.Tensor)[1].tolist() == [7, 7, 7]


class Scaled(torch.Tensor):
    """A tensor made of two, as quantisation libraries make them."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, note: str) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, note: str) -> None:
        self.values_, self.scale, self.note = values, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values_", "scale"], self.note

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], note: str, size: Any, stride: Any) -> Scaled:
        return cls(inner["values_"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not for this class")


class Opaque(Scaled):
    """The same, but it does not say what it is made of."""

    __tensor_flatten__ = None  # type: ignore[assignment]


def test_takes_a_subclass_made_of_tensors_apart_and_makes_it_again() -> None:
    scale = torch.tensor([0.5])
    source = Scaled(torch.arange(4, dtype=torch.int8), scale, "per tensor")
    copied = staged_copy({"w": source, "scale": scale})
    source.values_.zero_()
    assert type(copied["w"]) is Scaled
    assert copied["w"].note == "per tensor"
    assert copied["w"].values_.tolist() == [0, 1, 2, 3]
    # Two objects, of which one is pickled with its own bytes only, over the same memory.
    assert copied["w"].scale.data_ptr() == copied["scale"].data_ptr()


def test_keeps_a_tensor_a_shard_that_describes_itself_as_one() -> None:
    source = torch.arange(4.0)
    described = {
        "global_shape": (8,),
        "global_offsets": ((4,),),
        "local_offsets": ((0,),),
        "local_sizes": ((4,),),
    }
    for name, value in described.items():
        setattr(source, name, value)
    tied = {"a": source, "b": torch.nn.Parameter(source)}
    tied["b"].__dict__.update(described)
    tied["b"].main_grad = torch.ones(4)
    copied = staged_copy(tied)
    assert all(copied[key].__dict__ == described for key in tied)
    assert type(copied["b"]) is torch.nn.Parameter


def test_keeps_scale_and_zero_point_of_quantised_tensors() -> None:
    per_tensor = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)
    per_channel = torch.quantize_per_channel(
        torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.zeros(2), 0, torch.qint8
    )
    copied = staged_copy({"t": per_tensor, "c": per_channel})
    assert torch.equal(copied["t"].dequantize(), per_tensor.dequantize())
    assert (copied["t"].q_scale(), copied["t"].q_zero_point()) == (per_tensor.q_scale(), 3)
    assert torch.equal(copied["c"].dequantize(), per_channel.dequantize())
    assert copied["t"].int_repr().data_ptr() != per_tensor.int_repr().data_ptr()


def test_copies_sparse_tensors_as_snapshots_too() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    coo, csr = dense.to_sparse().coalesce(), dense.to_sparse_csr()
    copied = staged_copy({"coo": coo, "csr": csr})
    coo.values().zero_()
    csr.values().zero_()
    assert copied["coo"].layout is torch.sparse_coo
    assert copied["csr"].layout is torch.sparse_csr
    assert torch.equal(copied["coo"].to_dense(), dense)
    assert torch.equal(copied["csr"].to_dense(), dense)


def test_keeps_the_rows_of_a_jagged_tensor() -> None:
    source = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    copied = staged_copy({"n": source})["n"]
    assert copied.values().data_ptr() != source.values().data_ptr()
    assert [row.tolist() for row in copied.unbind()] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_keeps_mesh_and_placements_of_a_distributed_tensor(one_rank: None, placement: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    values = torch.arange(6.0).reshape(2, 3)
    tensor = DTensor.from_local(values.clone(), mesh, [placement], run_check=False)
    parameter = torch.nn.Parameter(DTensor.from_local(values.clone(), mesh, [placement], run_check=False))
    copied = staged_copy({"w": tensor, "local": tensor.to_local(), "p": parameter, "tied": parameter})
    tensor.to_local().fill_(-1)
    assert isinstance(copied["w"], DTensor)
    assert copied["w"].placements == tensor.placements
    assert copied["w"].device_mesh == mesh
    assert copied["w"].shape == tensor.shape
    assert torch.equal(copied["w"].to_local(), values)
    copied["local"].fill_(7)
    assert bool((copied["w"].to_local() == 7).all())
    assert isinstance(copied["p"], DTensor)
    assert copied["p"] is copied["tied"]
    assert copied["p"].requires_grad


def _sharded(values: torch.Tensor) -> ShardedTensor:
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(values, [0, 0], 0)], *values.shape)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "cuda"])
def test_copies_a_sharded_tensors_local_shards_off_their_device(one_rank: None, elsewhere: bool) -> None:
    """ShardedTensor's own constructor compares the placement that it is told with what it finds."""
    values = torch.arange(6.0).reshape(2, 3)
    source = _sharded(values.clone())
    whole, shards = source.metadata(), source.local_shards()
    if elsewhere:
        # Here the source is pinned and the copy is not; on a CUDA device it is the other way round.
        whole.tensor_properties.pin_memory = True
        for metadata in (whole.shards_metadata[0], shards[0].metadata):
            metadata.placement = _remote_device("rank:0/cuda:0")
        rebuilt: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, whole)
        rebuilt._prepare_init()
        source = rebuilt
    copied = staged_copy({"s": source})["s"]
    shards[0].tensor.fill_(-1)
    assert isinstance(copied, ShardedTensor)
    assert torch.equal(copied.local_shards()[0].tensor, values)
    assert copied.metadata().size == source.metadata().size
    assert copied._process_group is source._process_group
    assert str(copied.local_shards()[0].metadata.placement) == "rank:0/cpu"
    assert elsewhere or copied.local_shards()[0].metadata == shards[0].metadata
    assert elsewhere or copied.metadata() == whole


# -- containers and objects -------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (both kinds are in use)


class Typed(NamedTuple):
    weight: torch.Tensor
    step: int


def test_keeps_kinds_and_order_of_containers() -> None:
    pair = (torch.ones(1), torch.zeros(1))
    state = OrderedDict(
        z=[1, (2, torch.ones(1)), [torch.zeros(1)]],
        a={"pair": Pair(torch.ones(1), "r"), "typed": Typed(torch.ones(2), 3)},
        size=torch.Size([1, 2]),
        model=OrderedDict(b=torch.ones(1), a=torch.ones(1)),
        tuples={"a": pair, "b": pair},
    )
    copied = staged_copy(state)
    assert list(copied) == ["z", "a", "size", "model", "tuples"]
    assert type(copied["model"]) is OrderedDict
    assert list(copied["model"]) == ["b", "a"]
    assert copied["z"][0] == 1
    assert type(copied["z"][1]) is tuple
    assert copied["z"][1][1].tolist() == [1]
    assert copied["z"][2][0].tolist() == [0]
    assert type(copied["a"]["pair"]) is Pair
    assert type(copied["a"]["typed"]) is Typed
    assert copied["a"]["typed"].step == 3
    assert copied["a"]["pair"].left.data_ptr() != state["a"]["pair"].left.data_ptr()
    assert copied["size"] == (1, 2)
    assert type(copied["size"]) is torch.Size
    assert copied["tuples"]["a"] is copied["tuples"]["b"]


class Lazy(dict[str, Any]):
    """Makes its tensors as it is read, and keeps none of them."""

    def items(self) -> Any:
        return ((key, make()) for key, make in super().items())


def test_separates_values_that_live_only_while_they_are_read() -> None:
    values = [torch.tensor([float(number)]) for number in range(100)]
    place = torch.zeros((1, 1), dtype=torch.long)
    dense = {str(number): value.clone for number, value in enumerate(values)}
    sparse = {
        str(number): functools.partial(torch.sparse_coo_tensor, place, value, (1,), check_invariants=False)
        for number, value in enumerate(values)
    }
    waited = {str(number): functools.partial(AsyncCollectiveTensor, value) for number, value in enumerate(values)}
    copied = staged_copy({"dense": Lazy(dense), "sparse": Lazy(sparse), "waited": Lazy(waited)})
    assert [copied["waited"][key].item() for key in waited] == list(range(100))
    assert {type(tensor) for tensor in copied["waited"].values()} == {torch.Tensor}
    assert [copied["dense"][key].item() for key in dense] == list(range(100))
    assert [copied["sparse"][key].to_dense().item() for key in sparse] == list(range(100))


@dataclass
class Progress:
    step: int
    history: list[int] = field(default_factory=list)
    weight: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


def test_copies_objects_deeply() -> None:
    state = {"progress": Progress(1, [1, 2]), "names": {"a"}, "raw": bytearray(b"ab"), "array": np.zeros(2)}
    copied = staged_copy(state)
    state["progress"].history.append(3)
    state["progress"].weight.fill_(9)
    state["names"].add("b")
    state["raw"][0] = 0
    state["array"][:] = 5
    assert copied["progress"].history == [1, 2]
    assert copied["progress"].weight.tolist() == [0, 0]
    assert copied["names"] == {"a"}
    assert copied["raw"] == b"ab"
    assert copied["array"].tolist() == [0, 0]


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("never")


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Stubborn, "never"),
        (threading.Lock, "lock"),
        (lambda: torch.empty(2, device="meta"), "meta device has no data"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided), ""),
        (lambda: Opaque(torch.ones(2), torch.ones(1), ""), ""),
        (freed, r"shape \(3,\) has no memory"),
    ],
    ids=["object", "lock", "meta", "nested", "a wrapper that does not say what it wraps", "freed"],
)
@sync_and_async
def test_refuses_at_once_what_cannot_be_copied(make: Any, said: str, beside: bool) -> None:
    stager = Stager(StagingOptions(use_async_staging=beside))
    with pytest.raises(StagingError, match=said) as caught:
        stager.stage({"fine": torch.ones(1), "app": {"things": [1, make()]}})
    assert caught.value.key == "app.things.1"
    assert stager.staged_bytes == 0
    finished(stager.stage({"w": torch.ones(1)}))


def test_refuses_a_state_that_contains_itself() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(StagingError, match="contains itself"):
        staged_copy(state)


# -- the caller's modes -----------------------------------------------------------------------------------------------


@sync_and_async
@both_kinds
def test_uses_memory_made_in_inference_mode_outside_of_it(shared: bool, beside: bool) -> None:
    stager = Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside))
    with torch.inference_mode():
        source = torch.ones(3) + 1
        stager.prefault({"w": source, "s": source.to_sparse()})
        copied = finished(stager.stage({"w": source, "s": source.to_sparse()}))
    copied["w"].add_(1)
    assert not copied["w"].is_inference()
    assert copied["w"].tolist() == [3, 3, 3]
    assert copied["s"].to_dense().tolist() == [2, 2, 2]
    state = {"w": torch.ones(3), "s": torch.ones(3).to_sparse()}
    del copied
    stager.prefault(state)
    assert finished(stager.stage(state))["w"].tolist() == [1, 1, 1]


@both_kinds
@pytest.mark.parametrize("mode", [functools.partial(torch.device, "meta"), torch.enable_grad], ids=["device", "grad"])
def test_ignores_the_callers_default_device_and_grad_mode(shared: bool, mode: Any) -> None:
    source = torch.arange(20.0).reshape(4, 5).requires_grad_()
    state = {"w": source, "column": source[:, 1:3], "head": source.view(-1)[:7], "tail": source.view(-1)[5:9]}
    with mode():
        copied = staged_copy(state, use_shared_memory=shared)
    assert {key: value.device.type for key, value in copied.items()} == dict.fromkeys(state, "cpu")
    assert all(torch.equal(copied[key], source_value) for key, source_value in state.items())
    assert copied["column"].grad_fn is None
