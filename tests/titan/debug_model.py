"""torchtitan's debug model with an attention that has a backward pass on CPUs; its own has none."""

from __future__ import annotations

from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import default_adamw, llama3_debugmodel
from torchtitan.trainer import Trainer


def on_cpu() -> Trainer.Config:
    """What `--module titan.debug_model --config on_cpu` names."""
    config = llama3_debugmodel()
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.seq_len = 64
    config.training.local_batch_size = 2
    config.validator.enable = False
    return config


def untrained() -> Trainer.Config:
    """The same with a learning rate of 0: each step keeps the values that the model began with."""
    config = on_cpu()
    config.optimizer = default_adamw(lr=0.0)
    return config
