"""A trainer of a small GPT of megatron-core on CPUs: it saves every 3 steps, and goes on where it stopped.

Arguments: folder of the run, file for what rank 0 saw, number of ranks, size of the tensor-parallel groups, `sync` or
`async`, and the step at which rank 0 is killed: by then all data of its checkpoint are uploaded, and the commit is
next; 0 for none.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

import bucketpoint
from bucketpoint.integrations.megatron import BucketSaveStrategy, load, save

LAST, SAVE_EVERY, BATCH, LENGTH, VOCABULARY = 9, 3, 4, 8, 64

# All that insists on a GPU, for tensors that are on the CPU.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda *_: None
CudaRNGStatesTracker.fork = lambda *_: nullcontext()


class Writer(bucketpoint.BucketWriter):
    """Writer that kills its rank where it would commit."""

    dies = False

    def finish(self, metadata: Any, results: Any) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().finish(metadata, results)


class Trainer:
    def __init__(self, tensor_parallel: int) -> None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        self.data_rank, self.data_size = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            ffn_hidden_size=32,
            gated_linear_unit=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor_parallel,
        )
        self.model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.done = 0
        self.losses: list[float] = []

    def step(self) -> None:
        torch.manual_seed(self.done)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).chunk(self.data_size)[self.data_rank]
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        loss = self.model(tokens[:, :-1], torch.arange(LENGTH)[None], mask, labels=tokens[:, 1:]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        group = parallel_state.get_data_parallel_group()
        for each in (*(parameter.grad for parameter in self.model.parameters()), loss.detach()):
            dist.all_reduce(each, group=group)
            each /= self.data_size
        self.optimizer.step()
        self.done += 1
        self.losses.append(loss.item())

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return the state in the manner of Megatron's `generate_state_dict`."""
        if loading and not self.optimizer.state:
            for each in self.model.parameters():
                each.grad = torch.zeros_like(each)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self.optimizer.step()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        # The dicts are the optimizer's own.
        optimizer["state"] = {number: dict(of) for number, of in optimizer["state"].items()}
        steps = [of.pop("step") for of in optimizer["state"].values()]
        parameters = get_param_id_to_sharded_param_map(model, self.model.parameters())
        optim_state_to_sharding_state(optimizer, parameters)
        generator = ShardedObject(
            "rng_state", [torch.get_rng_state()], (self.data_size,), (self.data_rank,), replica_id=self.tensor_rank
        )
        return {
            "args": Namespace(hidden_size=16, saved_by="trainer"),
            "iteration": self.done,
            "steps": steps[0].item(),
            "model": model,
            "optimizer": optimizer,
            "rng_state": generator,
        }

    @property
    def tensor_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def resume(self, url: str) -> dict[str, Any]:
        loaded: dict[str, Any] = load(self.state(loading=True), url)
        self.model.load_state_dict(loaded["model"])
        for of in loaded["optimizer"]["state"].values():
            of["step"] = torch.tensor(loaded["steps"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.done = loaded["iteration"]
        return loaded

    def digest(self, state: dict[str, Any] | None = None) -> str:
        """Return a digest of all tensors of all ranks, put together, whatever their number. All ranks."""
        sharded, _ = save_preprocess(state or self.state(), False)
        mine = [each for each in nested_values(sharded) if isinstance(each, ShardedTensor)]
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            held, [(each.key, each.global_shape, each.global_slice(), each.data.detach()) for each in mine]
        )
        whole: dict[str, torch.Tensor] = {}
        for key, shape, where, data in (shard for rank in held for shard in rank):
            whole.setdefault(key, torch.full(shape, torch.nan))[where] = data
        digest = hashlib.sha256()
        for key in sorted(whole):
            assert not whole[key].isnan().any(), key
            digest.update(key.encode() + whole[key].numpy().tobytes())
        return digest.hexdigest()


def main(rank: int, root: str, report: str, world: int, tensor_parallel: int, kind: str, kill_at: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    trainer = Trainer(tensor_parallel)
    told: dict[str, Any] = {"from": 0, "digests": {}}
    newest = [bucketpoint.latest_checkpoint(root) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if newest[0] is not None:
        loaded = trainer.resume(newest[0])
        told.update({"from": trainer.done, "common": [vars(loaded["args"]), loaded["steps"]]})
        told["loaded"] = trainer.digest()
    writer = Writer()
    strategy: Any = BucketSaveStrategy(storage_writer=writer)
    if kind == "async":
        # As --ckpt-fully-parallel-save does: the replicas share the work.
        strategy = FullyParallelSaveStrategyWrapper(strategy, parallel_state.get_data_parallel_group())
    queue = AsyncCallsQueue()
    while trainer.done < LAST:
        trainer.step()
        queue.maybe_finalize_async_calls()
        if trainer.done % SAVE_EVERY:
            continue
        queue.maybe_finalize_async_calls(blocking=True)
        told["digests"][trainer.done] = trainer.digest()
        writer.dies = trainer.done == kill_at
        url = f"{root}/iter_{trainer.done:07d}"
        if kind == "async":
            options = {"async_sharded_save": True, "async_strategy": "mcore"}
            queue.schedule_async_request(save(trainer.state(), url, sharded_strategy=strategy, **options))
        else:
            save(trainer.state(), url, sharded_strategy=strategy)
    queue.close()
    told["losses"] = trainer.losses
    if dist.get_rank() == 0:
        Path(report).write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[3])
    arguments = (sys.argv[1], sys.argv[2], ranks, int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    # Forked, as each rank would import megatron for many seconds.
    torch.multiprocessing.start_processes(main, arguments, ranks, start_method="fork")
