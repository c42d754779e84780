"""Reading of a policy's file, with the file's name in errors. `bucketpoint.retention` parses the content."""

from __future__ import annotations

import os
from typing import Any

from bucketpoint.catalog.restore_candidates import metric_and_mode, usual_mode
from bucketpoint.errors import BucketpointError, InvalidURLError, PolicyError, PolicyFault
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.retention import Best, Keep, RetentionPolicy, Save, SaveEvery, from_yaml
from bucketpoint.retention.yaml_text import MAX_BYTES

POLICY_VARIABLE = "BUCKETPOINT_POLICY"
"""Environment variable with the path of a policy's file, for programs that pass no policy."""


def policy_of(
    policy: RetentionPolicy | str | os.PathLike[str] | Any,
    keep: int | None = None,
    best: str | None = None,
    every: int | None = None,
) -> RetentionPolicy:
    """Return `policy`, read it if it is a path, or make a policy of the keywords `keep`, `best` and `every`.

    Raises the errors of `read_policy`, and BucketpointError if `policy` has another type, or if both `policy` and
    keywords are given, or neither.
    """
    if policy is not None and (keep, best, every) == (None, None, None):
        if isinstance(policy, str | os.PathLike):
            return read_policy(policy)
        if not isinstance(policy, RetentionPolicy):
            wanted = "a RetentionPolicy or the path of its YAML file"
            raise BucketpointError(f"The argument policy must be {wanted}, not {type(policy).__name__}")
        return policy
    if policy is not None or keep is None:
        raise BucketpointError(
            "There are both policy= and keywords that make a policy" if policy is not None else "There is no policy",
            remedy="Pass keep=3, with best= and every= if wanted; or policy=, which contains `keep:` and `save:`",
        )
    rules: tuple[Best, ...] = ()
    if best is not None:
        metric, mode = metric_and_mode(str(best))
        if not mode and usual_mode(metric) == "max":
            raise BucketpointError(
                f"best={best!r} would keep the lowest value, but high values of such a metric are better",
                remedy=f'Pass best="{best}:max", or "{best}:min" if low values are better',
            )
        rules = (Best(metric, "max" if mode == "max" else "min"),)
    save = Save() if every is None else Save(every=[SaveEvery(every)], on=["last_step", "sigterm"])
    return RetentionPolicy(Keep(latest=keep, best=rules), save=save)


def read_policy(path: str | os.PathLike[str]) -> RetentionPolicy:
    """Read the policy in the local YAML file `path`. `${VAR}` is replaced by its value in this process's environment.

    Raises:
        PolicyError: the file cannot be read, or has faults: the error lists all of them, with line and column.
    """
    try:
        # One byte more than the limit, so that `from_yaml` can refuse a longer text.
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8", "strict" if len(raw) <= MAX_BYTES else "replace")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"The policy file cannot be read: {error}", file=os.fspath(path)) from None
    policy = from_yaml(text, environ=os.environ, file=os.fspath(path))
    try:
        StepTemplate(policy.layout.step_dir)
    except InvalidURLError as error:
        # The keys of the catalog limit the length of a folder's name. The policy's classes do not check that limit.
        fault = PolicyFault(error.message, error.remedy, ("layout", "step_dir"))
        raise PolicyError.of(fault, file=os.fspath(path)) from None
    return policy
