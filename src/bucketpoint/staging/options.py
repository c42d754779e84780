"""Options of staging, and their translation from torch's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from bucketpoint.errors import BucketpointError

WhenBusy = Literal["wait", "double_buffer", "error"]

TORCH_FIELDS = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")


@dataclass(frozen=True)
class StagingOptions:
    """Options of staging, independent of each other. Options for accelerators have no effect without one.

    The first four have the names, the meaning and the order of `torch.distributed.checkpoint.staging.StagingOptions`.

    Attributes:
        use_pinned_memory: register the memory with the driver, once, so that device copies run at full speed.
        use_shared_memory: stage into memory that a checkpoint process reads without a second copy.
        use_async_staging: `stage()` returns a future, and the copy runs during training, which must not change the
            state until the future is done. False by default, unlike in torch, so that `async_save` returns a plain
            future.
        use_non_blocking_copy: issue all device copies before waiting for any.
        when_busy: reaction of a new save to an earlier save that still reads its memory: `"wait"` waits for its end,
            `"double_buffer"` copies at once into separate memory (twice the bytes), `"error"` raises
            `StagingOverlapError`.
        max_bytes: limit on the host memory held for staging, in bytes; None for as much as the state needs.
        unread_timeout_s: seconds after which a staged state that no save has begun to read stops blocking others. Its
            memory is never overwritten: the next save gets other memory.

    Raises:
        BucketpointError: `when_busy` is unknown, or a limit is not above 0.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = False
    use_non_blocking_copy: bool = True
    when_busy: WhenBusy = "wait"
    max_bytes: int | None = None
    unread_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.when_busy not in get_args(WhenBusy):
            raise BucketpointError(
                f"when_busy={self.when_busy!r} is invalid", remedy=f"Choose one of {', '.join(get_args(WhenBusy))}"
            )
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise BucketpointError(f"max_bytes={self.max_bytes} leaves no memory for staging")
        if not self.unread_timeout_s > 0:
            raise BucketpointError(f"unread_timeout_s={self.unread_timeout_s} must be above 0")


def as_staging_options(config: Any) -> StagingOptions:
    """Return `config` as `StagingOptions`: torch's options are translated, and None becomes the defaults.

    Raises:
        BucketpointError: `config` is of another type.
    """
    if config is None:
        return StagingOptions()
    if isinstance(config, StagingOptions):
        return config
    if all(hasattr(config, name) for name in TORCH_FIELDS):
        pinned, shared, beside, non_blocking = (bool(getattr(config, name)) for name in TORCH_FIELDS)
        return StagingOptions(pinned, shared, beside, non_blocking)
    raise BucketpointError(
        f"{type(config).__qualname__} does not describe staging options",
        remedy="Pass bucketpoint.StagingOptions, or torch.distributed.checkpoint.staging.StagingOptions",
    )
