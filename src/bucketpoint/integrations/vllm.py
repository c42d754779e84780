"""vLLM's load format `bucketpoint`: the weights of a DCP checkpoint, read from the bucket into vLLM's parameters.

    vllm serve CONFIG_DIR --load-format bucketpoint \\
        --model-loader-extra-config '{"url": "s3://bucket/run/step-500", "prefix": "model."}'

CONFIG_DIR is a folder, or a model of the Hub, with the configuration and the tokenizer. The keys of the extra
configuration are the attributes of `WeightsOptions`. vLLM's own loaders slice and copy tensors before their bytes are
read: each worker then reads only its part, and the workers of a host together read each byte once. vLLM imports this
module through an entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from bucketpoint.dcp.planning.unused_keys import nearest
from bucketpoint.errors import BucketpointError, MismatchError, first_of
from bucketpoint.integrations.weights import Weights, WeightsOptions, read_kept

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMED_AT_MOST = 5
_LOADED = "_bucketpoint_loaded"
"""Attribute of a loaded model: the names of the tensors that it was loaded from."""


class BucketpointLoader(BaseModelLoader):
    """vLLM's loader of weights from a DCP checkpoint."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = WeightsOptions.of(load_config.model_loader_extra_config or {})

    def download_model(self, model_config: Any) -> None:
        """Do nothing: workers read from the bucket."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights of the checkpoint into the model, on all workers.

        Raises MismatchError if the checkpoint lacks names that the model's loader expects, or has others.
        """
        weights, passed, parameters = self._weights(), [""], [name for name, _ in model.named_parameters()]
        names: list[str] = []
        lacking: list[str] = []
        try:
            with weights.loading() as promised:
                tensors = _with_tied(promised, model_config)
                names = list(tensors)
                loaded = model.load_weights(_noting_names(tensors.items(), passed))
                if loaded is not None and model_config.quantization is None:
                    # vLLM's own check leaves out layers that are processed after the load: all linear layers.
                    lacking = [
                        name
                        for name, value in model.named_parameters()
                        if value.numel() and (name not in loaded or weights.has_gaps(value))
                    ]
                if lacking:
                    raise KeyError(lacking[0])
                read_kept(model)
        except BucketpointError:
            raise
        except Exception as error:
            if not isinstance(error, (KeyError, ValueError, AssertionError)) and not weights.refused(error):
                if sys.version_info >= (3, 11):
                    error.add_note(f"bucketpoint: the model's loader failed at {passed[0]} of {self._options.url}")
                raise
            raise _misfit(error, passed[0], lacking, names, parameters, self._options.url) from error
        setattr(model, _LOADED, frozenset(names))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the checkpoint by name, for a reload of the model by vLLM.

        Raises MismatchError if tensors of the first load are missing: vLLM would keep their old values.
        """
        with self._weights().loading() as promised:
            tensors = _with_tied(promised, model_config)
            if lacking := sorted(getattr(model, _LOADED, frozenset()) - tensors.keys()):
                raise _misfit(KeyError(lacking[0]), "", lacking, list(tensors), [], self._options.url)
            yield from tensors.items()
            read_kept(model)

    def _weights(self) -> Weights:
        group = get_world_group().cpu_group if torch.distributed.is_initialized() else None
        return Weights(self._options, group)


def _with_tied(tensors: dict[str, torch.Tensor], model_config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors, with a tied embedding also under its own name if the checkpoint has only the head."""
    tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
    if tied and _HEAD in tensors and _EMBEDDING not in tensors:
        return {_EMBEDDING: tensors[_HEAD], **tensors}
    return tensors


def _noting_names(tensors: Iterable[tuple[str, torch.Tensor]], passed: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and keep the name of the last one in `passed`."""
    for name, tensor in tensors:
        passed[0] = name
        yield name, tensor


def _misfit(
    error: Exception, passed: str, lacking: list[str], names: list[str], parameters: list[str], url: str
) -> MismatchError:
    """Return the error for names that do not fit, with the nearest names of both sides."""
    if lacking:
        text = f"The checkpoint lacks {first_of(lacking, _NAMED_AT_MOST)} of the model, or parts of them"
        near = f"the nearest names of the checkpoint are {first_of(nearest(lacking, names), _NAMED_AT_MOST)}"
    else:
        text = f"The model's loader refuses the tensors of the checkpoint, at {passed}: {type(error).__name__}: {error}"
        near = f"the nearest names of the model are {first_of(nearest([passed], parameters), _NAMED_AT_MOST)}"
    return MismatchError(
        f"{text}; {near}",
        url=url,
        remedy="Pass as `prefix` what the saved names begin with, or as `names` a mapping of them to vLLM's",
    )


def register() -> None:
    """Register the load format. vLLM calls this function in each of its processes, through the entry point."""
    register_model_loader("bucketpoint")(BucketpointLoader)
