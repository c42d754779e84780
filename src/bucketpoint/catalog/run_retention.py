"""Retention for a writer without a manager: finds the run of each save, and prunes it by a policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.worker import PruneWorker, worker_of
from bucketpoint.catalog.policy_file import policy_of
from bucketpoint.catalog.run import open_run
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.forks import ProcessLock
from bucketpoint.location import Location, parent_and_name
from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)


class RunRetention:
    """Factory of the `SaveLog` for a save's URL. The log records the commit and starts a prune.

    The root of the run is the policy's `root`, or by default the parent of the checkpoint's folder. The step is parsed
    from the folder's name by the policy's `layout`.

    Raises:
        PolicyError: the policy's file has faults; the error lists all of them.
        InvalidURLError: the policy's root or layout is invalid.
    """

    def __init__(
        self,
        policy: RetentionPolicy | str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
    ) -> None:
        self.policy = policy_of(policy)
        self._storage_options, self._fs = storage_options, fs
        self._root = self._open(self.policy.root) if self.policy.root is not None else None
        self._logs: dict[str, SaveLog] = {}
        self._warned = False
        self._lock = ProcessLock()
        self.pruning: PruneWorker | None = None
        """The worker of the run of this process's last save."""

    def log_of(self, url: str) -> SaveLog | None:
        """Return the log for a save to `url`. If `url` is no step of a run, log one warning and return None."""
        split = parent_and_name(url)
        with self._lock:
            log = self._log(*split) if split is not None else None
            if log is not None:
                self.pruning = log.pruner
            elif not self._warned:
                self._warned = True
                of = f"the run at {self.policy.root}" if self._root is not None else "a run"
                logger.warning(
                    "%s is saved, but gets no record and is not pruned, because it is not a step of %s, whose "
                    "folders are named %s",
                    url,
                    of,
                    self.policy.layout.step_dir,
                )
            return log

    def _open(self, root: str) -> Catalog:
        return open_run(self.policy, Location.of(root, self._storage_options, self._fs))

    def _log(self, root: str, folder: str) -> SaveLog | None:
        if root not in self._logs:
            catalog = self._open(root)
            if self._root is not None:
                # Several URLs may denote one place.
                if (catalog.store.identity, catalog.prefix) != (self._root.store.identity, self._root.prefix):
                    return None
                catalog = replace(self._root, url=root)
            self._logs[root] = SaveLog(catalog, pruner=worker_of(catalog, self.policy))
        log = self._logs[root]
        return log if log.catalog.template.step_of(folder) is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes its own worker: see `worker_of`.
        return {**self.__dict__, "_lock": None, "_logs": {}, "pruning": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ProcessLock()
