"""What a load does not use of a checkpoint, and what the checkpoint lacks, in one line."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from bucketpoint.format.groups import OPTIM, deciding

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Comparison:
    """What all ranks of a load ask for, beside what is there.

    Attributes:
        used: keys that ranks ask for.
        lacking: keys that they ask for and that the checkpoint lacks.
    """

    metadata: Metadata
    used: Collection[str]
    lacking: Sequence[str]

    @cached_property
    def unused(self) -> list[str]:
        """Keys of the checkpoint that no rank asks for."""
        return [fqn for fqn in self.metadata.state_dict_metadata if fqn not in self.used]

    @property
    def not_asked_for(self) -> str:
        """The unused keys in words."""
        return f"{len(self.unused)} keys that the state does not ask for: {_named(self.unused)}"

    @cached_property
    def forgotten_optimizer(self) -> tuple[str, int] | None:
        """An optimizer that the state asks for, but for all of its tensors; and their number."""
        asked = {name for fqn in self.used for group, name in (deciding(fqn),) if group == OPTIM}
        if not asked:
            return None
        counts: dict[str, int] = {}
        entries = self.metadata.state_dict_metadata
        for fqn in entries:
            group, name = deciding(fqn)
            if group != OPTIM or not isinstance(entries[fqn], TensorStorageMetadata):
                continue
            if fqn in self.used:
                asked.discard(name)
            else:
                counts[name] = counts.get(name, 0) + 1
        return next(((name, count) for name, count in counts.items() if name in asked), None)

    def log(self, url: str | None) -> None:
        """One line if there is anything to say: a warning where an optimizer goes on without what it had."""
        said = []
        if self.unused:
            said.append(f"the checkpoint has {self.not_asked_for}")
        if self.lacking:
            said.append(f"it lacks {len(self.lacking)} keys, whose values stay as they were: {_named(self.lacking)}")
        forgotten = self.forgotten_optimizer if self.unused else None
        if forgotten is not None:
            name, count = forgotten
            said.append(
                f"none of the {count} tensors of {name} is loaded, as an optimizer that has made no step has none to "
                "load into: torch's get_optimizer_state_dict makes them first"
            )
        if said:
            logger.log(logging.INFO if forgotten is None else logging.WARNING, "loading %s: %s", url, "; ".join(said))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more
