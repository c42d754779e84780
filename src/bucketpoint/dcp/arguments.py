"""Checks of arguments, whose errors name the wrong argument."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any

from bucketpoint.errors import BucketpointError
from bucketpoint.format.catalog_keys import MAX_STEP
from bucketpoint.transfer import TransferOptions

MOST_SECONDS = 100_000_000
"""The longest wait, about 3 years. Python and gloo count nanoseconds, and overflow at 292 years."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "state": ((Mapping,), 'a dict, such as {"model": model.state_dict()}'),
    "url": ((str, os.PathLike), "a URL or a path"),
    "transfer": ((TransferOptions, NoneType), "a TransferOptions"),
}


def check_types(**given: Any) -> None:
    """Check the types of arguments by name.

    Raises:
        BucketpointError: an argument has a wrong type.
    """
    for name, value in given.items():
        types, wanted = _TYPES[name]
        if not isinstance(value, types):
            raise BucketpointError(f"The argument {name} must be {wanted}, not {type(value).__name__}")


def checked_seconds(name: str, value: Any) -> float:
    """Return an argument in seconds.

    Raises:
        BucketpointError: the value is not a number above 0 and up to `MOST_SECONDS`.
    """
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= MOST_SECONDS:
        raise BucketpointError(f"{name} must be a number of seconds above 0 and up to {MOST_SECONDS}, not {value!r}")
    return float(value)


def whole_step(step: Any) -> int:
    """Return a step as Python's int: integers of numpy and of torch are steps too.

    Raises:
        BucketpointError: the step is not an integer, or is out of range.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise BucketpointError(f"A step must be an integer from 0 to {MAX_STEP}, not {step!r}")
    return number
