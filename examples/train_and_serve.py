"""Trains a tiny Llama on a few sentences under FSDP2, saves to a bucket in the background, and writes the configuration
and the tokenizer that vLLM needs to serve the checkpoints.

    torchrun --nproc-per-node 2 examples/train_and_serve.py s3://bucket/run CONFIG_DIR
    vllm serve CONFIG_DIR --load-format bucketpoint \\
        --model-loader-extra-config '{"url": "s3://bucket/run", "prefix": "model."}'

Needs transformers besides bucketpoint, which vLLM brings along. Trains on CPUs in some seconds, with any number of
ranks. A path in place of the URL works, too.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import bucketpoint

SENTENCES = [
    "A checkpoint is saved completely or not at all.",
    "The optimizer stays in the bucket when a model is served.",
    "Every byte is verified before it reaches a parameter.",
    "Servers of one host read each weight once.",
]
SEED = 7


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: token for token, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the configuration of the model. vLLM finds its own Llama by `architectures`."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    if rank == 0:
        config.save_pretrained(args.config_dir)
        tokenizer.save_pretrained(args.config_dir)

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    texts = [f"{sentence}</s>" for sentence in SENTENCES][rank % len(SENTENCES) :: world]  # the texts of this rank
    batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)  # which the loss leaves out

    def state() -> dict[str, Any]:
        weights, optim = get_state_dict(model, optimizer)
        return {"model": weights, "optim": optim}

    with bucketpoint.CheckpointManager(args.root, keep=2, every=args.steps // 2) as manager:
        for step in range(1, args.steps + 1):
            loss = model(**batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if manager.should_save(step, last=step == args.steps):
                manager.save(step, state)
                if rank == 0:
                    print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("root", metavar="URL", help="where the checkpoints of the run are, or a folder")
    parser.add_argument("config_dir", metavar="CONFIG_DIR", help="for config.json and the tokenizer")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


if __name__ == "__main__":
    main()
