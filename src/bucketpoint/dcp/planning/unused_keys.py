"""One log line on the keys of a checkpoint that a load does not use, and on the keys that the checkpoint lacks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from bucketpoint.errors import first_of
from bucketpoint.format.groups import OPTIM, deciding

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Comparison:
    """Comparison of the keys that all ranks of a load ask for with the keys of the checkpoint.

    Attributes:
        used: keys that ranks ask for.
        lacking: keys that ranks ask for and that the checkpoint lacks.
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
        return f"{len(self.unused)} keys that the state lacks: {first_of(self.unused, _NAMED_AT_MOST)}"

    @cached_property
    def forgotten_optimizer(self) -> tuple[str, int] | None:
        """Name and number of tensors of an optimizer that the state has, but none of whose tensors it asks for.

        None if there is no such optimizer.
        """
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
        """Log one line if keys differ; as a warning if an optimizer would continue without its saved tensors."""
        said = []
        if self.unused:
            said.append(f"the checkpoint has {self.not_asked_for}")
        if self.lacking:
            named = first_of(self.lacking, _NAMED_AT_MOST)
            said.append(
                f"the checkpoint lacks {len(self.lacking)} keys, whose values in the state stay unchanged: {named}"
            )
        forgotten = self.forgotten_optimizer if self.unused else None
        if forgotten is not None:
            name, count = forgotten
            said.append(
                f"none of the {count} tensors of {name} is loaded, because an optimizer that has made no step has no "
                "tensors to load into; call torch's get_optimizer_state_dict, which makes them"
            )
        if said:
            logger.log(logging.INFO if forgotten is None else logging.WARNING, "loading %s: %s", url, "; ".join(said))
