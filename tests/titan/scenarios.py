"""What tests have looked at where torchtitan is imported, which is not in the process of the tests."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from bucketpoint import CommitInfo


def policies(configs: list[dict[str, Any]], variable: str | None = None) -> list[dict[str, Any]]:
    """The policies that options of torchtitan's stand for."""
    from bucketpoint.catalog.policy_file import POLICY_VARIABLE
    from bucketpoint.integrations.torchtitan import _policy_of
    from titan.cpu import BucketpointManager

    os.environ.pop(POLICY_VARIABLE, None)
    if variable is not None:
        os.environ[POLICY_VARIABLE] = variable
    return [asdict(_policy_of(BucketpointManager.Config(enable=True, **config))) for config in configs]


def refusal(config: dict[str, Any]) -> str:
    """What is wrong with options of torchtitan's, by the error that they are refused with."""
    from titan.cpu import BucketpointManager

    try:
        BucketpointManager.Config(enable=True, **config)
    except ValueError as error:
        return str(error)
    return ""


def to_hugging_face(file: str) -> None:
    """Rename the tensors of a debug model in a file of torch.save, as torchtitan's own adapter does."""
    import torch

    from titan.cpu import llama3_debugmodel

    spec = llama3_debugmodel().model_spec
    torch.save(spec.state_dict_adapter(spec.model, None).to_hf(torch.load(file)), file)


def refusals_of_safetensors(root: str, configs: list[dict[str, Any]], adapter: object) -> list[str]:
    """The errors that options of a load or a save of safetensors are refused with, by a run whose model has an adapter.

    Empty for those that are not refused.
    """
    from bucketpoint.catalog.catalog import open_catalog
    from bucketpoint.errors import BucketpointError
    from bucketpoint.integrations.torchtitan import _refuse_unfit
    from titan.cpu import BucketpointManager

    def refused(config: dict[str, Any]) -> str:
        try:
            _refuse_unfit(BucketpointManager.Config(enable=True, **config), adapter, open_catalog(root))
        except BucketpointError as error:
            return str(error)
        return ""

    return list(map(refused, configs))


def note(info: CommitInfo) -> None:
    """A program's function that is told of commits."""
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{info.step} {info.url}\n")
