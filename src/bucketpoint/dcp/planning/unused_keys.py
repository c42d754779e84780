"""One log line on the keys of a checkpoint that a load does not use, and on the keys that the checkpoint lacks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from bucketpoint.errors import first_of
from bucketpoint.format.groups import OPTIM, deciding

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5


def in_words(unused: Sequence[str]) -> str:
    return f"{len(unused)} keys that the state lacks: {first_of(unused, _NAMED_AT_MOST)}"


def log_difference(
    metadata: Metadata, used: Collection[str], unused: Sequence[str], lacking: Sequence[str], url: str | None
) -> None:
    """Log one line if keys differ; as a warning if an optimizer would continue without its saved tensors.

    Args:
        used: keys that ranks ask for.
        unused: keys of the checkpoint that no rank asks for.
        lacking: keys that ranks ask for and that the checkpoint lacks.
    """
    parts = []
    if unused:
        parts.append(f"the checkpoint has {in_words(unused)}")
    if lacking:
        named = first_of(lacking, _NAMED_AT_MOST)
        parts.append(f"the checkpoint lacks {len(lacking)} keys, whose values in the state stay unchanged: {named}")
    forgotten = _forgotten_optimizer(metadata, used) if unused else None
    if forgotten is not None:
        parts.append(forgotten)
    if parts:
        logger.log(logging.INFO if forgotten is None else logging.WARNING, "loading %s: %s", url, "; ".join(parts))


def warn_of_forgotten_optimizer(metadata: Metadata, used: Collection[str], url: str | None) -> None:
    """Log a warning if an optimizer would continue without its saved tensors, as `log_difference` does."""
    forgotten = _forgotten_optimizer(metadata, used)
    if forgotten is not None:
        logger.warning("loading %s: %s", url, forgotten)


def _forgotten_optimizer(metadata: Metadata, used: Collection[str]) -> str | None:
    """Say in words that the state has an optimizer and asks for none of its tensors; None if there is no such one."""
    asked = {name for fqn in used for group, name in (deciding(fqn),) if group == OPTIM}
    if not asked:
        return None
    counts: Counter[str] = Counter()
    for fqn, entry in metadata.state_dict_metadata.items():
        group, name = deciding(fqn)
        if group == OPTIM and isinstance(entry, TensorStorageMetadata):
            if fqn in used:
                asked.discard(name)
            else:
                counts[name] += 1
    for name, count in counts.items():
        if name in asked:
            return (
                f"none of the {count} tensors of {name} is loaded, because an optimizer that has made no step has no "
                "tensors to load into; call torch's get_optimizer_state_dict, which makes them"
            )
    return None
