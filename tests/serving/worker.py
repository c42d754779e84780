"""Program of one worker: loads a model with vLLM's loader and writes its parameters, or generates tokens.

Arguments: a JSON object with `model`, `out`, and arguments of vLLM's `EngineArgs`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bucketpoint.stores.local import LocalStore

read_bytes = 0


def count_reads() -> None:
    lock, read_into = threading.Lock(), LocalStore.read_into

    def counting(self: Any, key: str, offset: int, buffers: Any, **kwargs: Any) -> None:
        global read_bytes
        with lock:
            read_bytes += sum(len(view) for view in buffers)
        read_into(self, key, offset, buffers, **kwargs)

    LocalStore.read_into = counting  # type: ignore[method-assign]


def outputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what each linear layer makes of ones, and the other weights. On a CPU it multiplies by a packed copy."""
    from vllm.model_executor.layers.linear import LinearBase

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}
    sizes = {name: getattr(layer, "input_size_per_partition", layer.input_size) for name, layer in layers.items()}
    linear = {name: layer(torch.ones(1, sizes[name]))[0].clone() for name, layer in layers.items()}
    rest = model.named_parameters()
    return linear | {name: p.detach().clone() for name, p in rest if name.rpartition(".")[0] not in layers}


def errors(config: Any, configs: list[dict[str, Any]]) -> list[str]:
    """Return the error of a load with each configuration of the loader."""
    from vllm.model_executor.model_loader import get_model_loader

    results = []
    for extra in configs:
        load_config = dataclasses.replace(config.load_config, model_loader_extra_config=extra)
        with torch.device("cpu"):
            try:
                get_model_loader(load_config).load_model(config, config.model_config)
            except Exception as error:  # noqa: BLE001 (is the result)
                results.append(f"{type(error).__name__}: {error}")
            else:
                results.append("")
        config.compilation_config.static_forward_context.clear()
    return results


def arrive(arrivals: Iterator[tuple[str, str]], rank: int) -> None:
    """Move the next checkpoint to its place."""
    torch.distributed.barrier()
    if rank == 0:
        os.rename(*next(arrivals))
    torch.distributed.barrier()


def parameters(arguments: dict[str, Any], place: str, reload: dict[str, str], refused: Any) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.utils.torch_utils import set_default_torch_dtype

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = EngineArgs(**arguments, tensor_parallel_size=world, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"file://{place}", local_rank=rank, backend="gloo")
        initialize_model_parallel(world)
        if refused:
            return {"errors": errors(config, refused)}
        if reload:
            with torch.device("cpu"):
                model = get_model_loader(config.load_config).load_model(config, config.model_config)
            first = outputs(model)
            for parameter in model.parameters():
                # As sleep of level 2, which vLLM has on GPUs only.
                parameter.data.fill_(torch.nan)
            arrivals, error = iter(reload.items()), ""
            arrive(arrivals, rank)
            reload_weights(config, model, None, None, is_checkpoint_format=True)
            again = outputs(model)
            arrive(arrivals, rank)
            try:
                reload_weights(config, model, None, None, is_checkpoint_format=True)
            except Exception as caught:  # noqa: BLE001 (is the result)
                error = f"{type(caught).__name__}: {caught}"
            return {"first": first, "again": again, "error": error}
        # Without the last step of `load_model`, in which layers of a CPU replace their parameters by packed ones. Those
        # that are quantized during the load are not packed.
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            if config.model_config.quantization is not None:
                model = loader.load_model(config, config.model_config)
            else:
                model = loader.create_model(config, config.model_config)
        if config.model_config.quantization is None:
            loader.load_weights(model, config.model_config)
    return {name: _comparable(tensor.detach()).clone() for name, tensor in model.state_dict().items()}


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its bytes if torch cannot compare its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def tokens(arguments: dict[str, Any], world: int, arrives: dict[str, str]) -> list[list[int]]:
    """Return the tokens that the model generates, and those after each checkpoint of `arrives` came to its place."""
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments, tensor_parallel_size=world, enforce_eager=True, max_model_len=64, max_num_seqs=1)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    results = []
    for came in (None, *arrives.items()):
        if came is not None:
            os.rename(*came)
            engine.collective_rpc("reload_weights")
        (result,) = engine.generate([{"prompt_token_ids": [3, 14, 15, 92]}], sampling)
        results.append(list(result.outputs[0].token_ids))
    return results


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    out = Path(arguments.pop("out"))
    if arguments.pop("generate", False):
        arrives = arguments.pop("arrives", {})
        out.write_text(json.dumps(tokens(arguments, int(os.environ["WORLD_SIZE"]), arrives)))
    else:
        count_reads()
        place = arguments.pop("place")
        result = parameters(arguments, place, arguments.pop("reload", {}), arguments.pop("refused", []))
        torch.save({"parameters": result, "read": read_bytes}, out)
