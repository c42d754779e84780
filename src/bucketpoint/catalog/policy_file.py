"""A policy's file: read, and named in its errors. What it means is `retention`'s."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bucketpoint.errors import Fault, InvalidURLError, PolicyError
from bucketpoint.format.catalogue import StepTemplate
from bucketpoint.retention import RetentionPolicy, from_yaml


def read_policy(path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None) -> RetentionPolicy:
    """The policy in a local YAML file.

    Args:
        environ: where `${VAR}` is taken from; this process's environment by default.

    Raises:
        PolicyError: with all that is wrong, each with its line and column; or the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"The policy cannot be read: {error}", file=os.fspath(path)) from None
    policy = from_yaml(text, environ=os.environ if environ is None else environ, file=os.fspath(path))
    try:
        StepTemplate(policy.layout.step_dir)
    except InvalidURLError as error:
        # How long a folder's name may be is a matter of the catalogue's keys, which a policy knows nothing of.
        fault = Fault(error.message, error.remedy, ("layout", "step_dir"))
        raise PolicyError.of(fault, file=os.fspath(path)) from None
    return policy
