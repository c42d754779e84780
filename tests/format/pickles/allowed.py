"""Every name that a pickle may use, in groups with the reason: the vocabulary must have these and no others.

A name gets in if real training states or DCP itself put it into pickles, and if the interpreter can check every call
and every state of it. So there is no `getattr` in items, no `functools.partial`, no `operator.*`, nothing
that loads (`torch.load`, `torch.storage._load_from_bytes`, `numpy.load`) and nothing that imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES, STORAGE_TYPE_NAMES


def _names(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names.split())


ITEM_REASONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "tensors: they are laid over the storages of the item once their bounds were checked": (
        *_names(
            "torch._utils",
            "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
            "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
            "_rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
        ),
        "torch._tensor._rebuild_from_type_v2",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        *_names("torch.storage", "UntypedStorage TypedStorage"),
        *(f"torch.{name}" for name in STORAGE_TYPE_NAMES),
    ),
    "torch values: constants and value types": (
        *(f"torch.{name}" for name in DTYPE_NAMES),
        *_names("torch", "Size device per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"),
        "torch.per_channel_affine_float_qparams",
        "torch.serialization._get_layout",
        "torch._C.Generator",
    ),
    "DTensor: what torch.distributed.tensor itself registers as safe": (
        "torch.distributed.device_mesh.DeviceMesh",
        *_names("torch.distributed._mesh_layout", "_FlatLayout _MeshLayout"),
        "torch.distributed.tensor.DTensor",
        *_names("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry"),
        *_names("torch.distributed.tensor.placement_types", "Partial Replicate Shard _StridedShard"),
    ),
    "numpy arrays and scalars, under the module names of numpy 1 and 2": (
        *_names("numpy", "dtype ndarray"),
        *_names("numpy.core.multiarray", "_reconstruct scalar"),
        *_names("numpy._core.multiarray", "_reconstruct scalar"),
        "numpy.core.numeric._frombuffer",
        "numpy._core.numeric._frombuffer",
    ),
    "Python containers and values": (
        *_names("builtins", "bool bytearray bytes complex dict float frozenset int list range set slice str tuple"),
        "builtins.Ellipsis",
        *_names("collections", "Counter OrderedDict defaultdict deque"),
        "_codecs.encode",  # protocol 2, torch.save's default, encodes bytes with it
        *("_io.BytesIO", "io.BytesIO"),
        "types.SimpleNamespace",
        "argparse.Namespace",
    ),
    "times and paths": (
        *_names("datetime", "date datetime time timedelta timezone"),
        *_names("pathlib", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"),
        *_names("pathlib._local", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"),
    ),
})  # fmt: skip
"""Names for items saved as bytes (torch.save output, mostly), by the reason for allowing them."""

_CHECKPOINT = "torch.distributed.checkpoint"

METADATA_REASONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "DCP's own dataclasses": (
        *_names(
            f"{_CHECKPOINT}.metadata",
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
            "_MEM_FORMAT_ENCODING StorageMeta",
        ),
        *_names(f"{_CHECKPOINT}.filesystem", "_StorageInfo _StoragePrefix"),
        # The names from before torch 2.2.
        *_names("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties MEM_FORMAT_ENCODING"),
    ),
    "torch values in tensor properties": (
        *(f"torch.{name}" for name in DTYPE_NAMES),
        "torch.Size",
        "torch.serialization._get_layout",
    ),
    "Python 3.11.0 to 3.11.3 pickle an enum member as a getattr; only that of _MEM_FORMAT_ENCODING is ever made": (
        "builtins.getattr",
        "__builtin__.getattr",
    ),
    "a flatten mapping may be ordered": ("collections.OrderedDict",),
    "a checkpoint_id may be a path": (
        *_names("pathlib", "PosixPath PurePosixPath PureWindowsPath WindowsPath"),
        *_names("pathlib._local", "PosixPath PurePosixPath PureWindowsPath WindowsPath"),
        "multistorageclient.pathlib.MultiStoragePath",
    ),
})  # fmt: skip
"""Names for the `.metadata` pickle, by the reason for allowing them."""


def _pairs(reasons: Mapping[str, tuple[str, ...]]) -> frozenset[tuple[str, str]]:
    return frozenset((name.rpartition(".")[0], name.rpartition(".")[2]) for names in reasons.values() for name in names)


ITEM_GLOBALS = _pairs(ITEM_REASONS)
METADATA_GLOBALS = _pairs(METADATA_REASONS)
