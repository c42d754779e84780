"""Saves of one training program, one after another."""

from __future__ import annotations

from typing import Any

from bucketpoint.dcp import BucketWriter, SaveHandle, async_save


class Saves:
    """Saves in the background with one writer, which keeps its plans and its staging memory.

    Args:
        writer: writer of the saves that name no other.
    """

    def __init__(self, writer: BucketWriter) -> None:
        self._writer = writer
        self._last: SaveHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A program may pickle what holds the saves, such as an Accelerator. The save under way is this process's own.
        return {"_writer": self._writer, "_last": None}

    def save(
        self, url: str, state: dict[str, Any], *, storage_writer: BucketWriter | None = None, **options: Any
    ) -> SaveHandle:
        """Wait for the save before, and begin the next. Return once training may change the state.

        Args:
            options: as for `async_save`.

        Raises:
            BucketpointError: the save before this one failed.
            StagingError: the state cannot be copied.
        """
        self.wait()
        handle = async_save(state, checkpoint_id=url, storage_writer=storage_writer or self._writer, **options)
        handle.staged.result()
        self._last = handle
        return handle

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            BucketpointError: it failed.
        """
        last = self._last
        if last is None:
            return
        try:
            last.result()
        finally:
            # Ctrl-C ends the wait, and not the save: the next wait must still learn how that ends.
            if last.done():
                self._last = None
