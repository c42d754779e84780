"""Stand-in that DCP is given in place of metadata that could not be read."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint import Metadata


class Unread(Metadata):
    """Stand-in for metadata that could not be read: raises the reason once DCP looks into it."""

    def __init__(self, reason: Exception) -> None:
        self.__dict__["_reason"] = reason

    def fail(self) -> NoReturn:
        raise self.__dict__["_reason"]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
            raise object.__getattribute__(self, "__dict__")["_reason"]
        return object.__getattribute__(self, name)
