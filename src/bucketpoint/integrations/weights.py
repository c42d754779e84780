"""The weights of a checkpoint as promised tensors, under the names that an inference engine expects."""

from __future__ import annotations

import difflib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from bucketpoint.catalog.policy_file import POLICY_VARIABLE, read_policy
from bucketpoint.catalog.restore_candidates import restore_candidates
from bucketpoint.catalog.run import checkpoint_at_or_below, open_run
from bucketpoint.dcp.error_boundary import as_failure
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError, MismatchError, first_of
from bucketpoint.format.item_names import renaming
from bucketpoint.integrations.boxes import BoxReader, SavedBox
from bucketpoint.integrations.promised import Promised, Promises, with_real
from bucketpoint.location import Location
from bucketpoint.retention import Keep, RetentionPolicy
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.options import NodeCopy

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Segments that torch.compile, FSDP and activation checkpointing add to names. DDP adds `module` as the first."""


@dataclass(frozen=True)
class WeightsOptions:
    """Location and names of the weights that an inference engine loads.

    Attributes:
        url: URL of a checkpoint, or of a run.
        prefix: start of the saved names of the weights, such as `model.`, which is removed from the names.
        step: checkpoint of a run: `latest`, `best` by the policy file in BUCKETPOINT_POLICY, or a step.
        names: JSON file that maps saved names to the engine's names. `{}` stands for any number, null leaves a tensor
            out, and names that the file lacks stay the same. Or `package.module:name` of a function that takes the
            saved tensors by name, and returns tensors by the engine's names.
        storage_options, cooperative: as for `BucketReader`.
        node_copy: folder on the node for a copy that its servers share, with a size limit: `/local_nvme/ckpt:200GB`.
    """

    url: str
    prefix: str = ""
    step: str | int = "latest"
    names: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    cooperative: str = "node"
    node_copy: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> WeightsOptions:
        """Make options from a configuration. Raises BucketpointError for unknown keys, and without `url`."""
        known = [option.name for option in fields(cls)]
        for name in config:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise BucketpointError(
                    f"{name!r} is not a key of the loader's configuration",
                    remedy=f"Did you mean {near[0]!r}?" if near else f"The keys are {', '.join(known)}",
                )
        if not isinstance(config.get("url"), str):
            raise BucketpointError(
                "The loader's configuration names no checkpoint", remedy='Add {"url": "s3://bucket/run/step-500"}'
            )
        return cls(**config)


class Weights:
    """The weights of a checkpoint, which each load chooses anew. The ranks of `process_group` load together."""

    def __init__(self, options: WeightsOptions, process_group: Any = None) -> None:
        self.options = options
        self._promises: Promises | None = None
        self._group = process_group if process_group is not None and dist.get_world_size(process_group) > 1 else None

    @contextmanager
    def loading(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the promised tensors by the engine's names. Copies of them are made at the end of the block.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            MismatchError: no tensor has the prefix, or two tensors get one name.
            CorruptDataError: bytes differ from those that were saved; or the checkpoint was replaced meanwhile.
        """
        options, group = self.options, self._group
        transfer = None if options.node_copy is None else TransferOptions(node_copy=NodeCopy.parse(options.node_copy))
        url = self._on_first_rank(lambda: _url_of(options))
        alone = group is None
        reader = BoxReader(
            url,
            storage_options=options.storage_options,
            transfer=transfer,
            cooperative="off" if alone else options.cooperative,
            process_group=group,
            # Engines have kernels for quantized weights.
            dequantize=False,
        )
        try:
            metadata = reader.read_metadata()
        except Exception as error:
            if not alone:
                # The other ranks may have read the metadata, and wait in the last load.
                with suppress(Exception):
                    reader.load([], Metadata({}), process_group=group, failure=error)
            raise

        def load(boxes: Sequence[SavedBox], *, last: bool = False, failure: BaseException | None = None) -> None:
            # Only the last load is a collective: the number of the other loads differs between ranks.
            if failure is None or not alone:
                reader.load(boxes, metadata, process_group=group, alone=alone or not last, failure=failure)

        self._promises = promises = Promises(load)
        with promises.noting():
            yield self._named(promises, metadata, url)

    def has_gaps(self, parameter: torch.Tensor) -> bool:
        """Return True if `loading` wrote only a part of a parameter."""
        return self._promises is not None and 0 < self._promises.written(parameter) < parameter.nbytes

    def refused(self, error: BaseException) -> bool:
        """Return True if `error` is torch's refusal of a view or a copy of a saved tensor, because of its shape."""
        return self._promises is not None and self._promises.refusal is error

    def _named(self, promises: Promises, metadata: Metadata, url: str) -> dict[str, torch.Tensor]:
        saved: dict[str, torch.Tensor] = {}
        prefix = self.options.prefix
        entries = metadata.state_dict_metadata
        mapping, function = _names(self.options.names)
        for key, entry in entries.items():
            if not key.startswith(prefix) or not isinstance(entry, TensorStorageMetadata):
                continue
            if entry.properties.layout is not torch.strided:
                continue
            name = mapping(without_wrappers(key[len(prefix) :]))
            if name in saved:
                raise MismatchError(f"Two tensors of the checkpoint get the name {name}", url=url, key=key)
            if name is not None:
                saved[name] = promises.promise(key, entry.size, entry.properties.dtype)
        if not saved:
            raise MismatchError(
                f"The checkpoint has no tensor below {prefix!r}, but {first_of(list(entries), 5)}",
                url=url,
                remedy="Pass as `prefix` what the names of the model's tensors begin with",
            )
        given = saved if function is None else dict(function(saved))
        own = {
            name: without_wrappers(tensor.saved.key[len(prefix) :])
            for name, tensor in given.items()
            if isinstance(tensor, Promised)
        }
        for name in own:
            ring = [name]
            while (saved_as := own[ring[-1]]) in own and saved_as not in ring:
                ring.append(saved_as)
            if saved_as == name and len(ring) > 1:
                raise MismatchError(
                    "The mapping gives " + ", ".join(f"{other} the values of {own[other]}" for other in ring),
                    url=url,
                    remedy="Remove these names from the mapping",
                )
        return given

    def _on_first_rank(self, find: Callable[[], str]) -> str:
        """Call `find` on the first rank of the group. Return its result, or raise its error, on all ranks."""
        if self._group is None:
            return find()
        answer: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                answer = [find()]
            except Exception as error:  # noqa: BLE001 (raised on all ranks)
                answer = [as_failure(error, this_rank(), self.options.url)]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return str(answer[0])


def read_kept(model: torch.nn.Module) -> None:
    """Replace the promised tensors that a model's loader kept, instead of copies, by tensors that are read."""
    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            for name, value in values.items():
                if isinstance(value, Promised):
                    real = with_real(value)
                    is_parameter = isinstance(value, torch.nn.Parameter)
                    values[name] = torch.nn.Parameter(real, value.requires_grad) if is_parameter else real


def without_wrappers(name: str) -> str:
    """Return the name of a model's tensor without the segments that wrappers of torch add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _url_of(options: WeightsOptions) -> str:
    place = Location.of(options.url, options.storage_options)
    if options.step == "latest":
        # The URL may be that of a folder of safetensors. If it is not, the reader's error names what is there.
        return checkpoint_at_or_below(place) or options.url
    file = os.environ.get(POLICY_VARIABLE)
    policy = read_policy(file) if file else RetentionPolicy(keep=Keep(latest=1))
    catalog = open_run(policy, place)
    which = int(options.step) if str(options.step).isdecimal() else str(options.step)
    candidates = restore_candidates(catalog, policy, which, None)
    return catalog.url_of_folder(candidates[0].folder)


def _names(text: str | None) -> tuple[Callable[[str], str | None], Any]:
    """Return the mapping of single names, and the function over all tensors, that `names` defines."""
    if text is None:
        return renaming(None), None
    if not text.endswith(".json"):
        try:
            return renaming(None), pkgutil.resolve_name(text)
        except (ImportError, AttributeError, ValueError) as error:
            raise BucketpointError(
                f"names is neither a JSON file nor a function: {text!r}: {error}",
                remedy='Pass "names.json", or "package.module:function" of a package on PYTHONPATH',
            ) from error
    return renaming(text), None
