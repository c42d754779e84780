"""torchtitan's override hook: its trainer saves, loads and prunes through us, with one flag and no code of the user's.

Only torchtitan imports this module. When to save, and what is in a state, stays torchtitan's; here is where it goes,
what is there, and what is kept. `docs/torchtitan.md` says how it is used.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from bucketpoint.catalog.policy_file import read_policy
from bucketpoint.catalog.pruning import worker_of
from bucketpoint.catalog.run import open_run
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.dcp import BucketWriter, SavePlanner, async_save
from bucketpoint.dcp.async_save import as_ours
from bucketpoint.errors import BucketpointError
from bucketpoint.manager.loading import Outcome, attempt
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.restoring import Wanted, restored
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.retention.row import FULL, WEIGHTS
from bucketpoint.staging import Stager, StagingOptions

logger = logging.getLogger(__name__)

POLICY_VARIABLE = "BUCKETPOINT_POLICY"
"""The environment variable that names the policy's file, where the flag does not."""

SEED_STEP = 0
"""The step of torchtitan's seed checkpoint, of which it only ever loads the model."""

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other's uploads at least, torch's default."""


class BucketpointManager(CheckpointManager):
    """torchtitan's manager of DCP checkpoints, with our writer, reader, staging and retention in it.

    The hooks below are those that its base class calls; its public methods stay as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and two of ours.

        Attributes:
            policy: file of the retention policy, read by rank 0; by default what BUCKETPOINT_POLICY names. Without
                either `keep_latest_k` is the policy.
            fresh: begin from scratch although there are traces of checkpoints and none can be loaded.
        """

        policy: str | None = None
        fresh: bool = False

    # What the base class sets, which carries no types here.
    enable: bool
    folder: str
    save_future: Any

    def __init__(self, config: Any, **parts: Any) -> None:
        # Without a number to keep torchtitan's own purge has no thread: it counts folders, dead saves among them.
        super().__init__(replace(config, keep_latest_k=0), **parts)
        if not self.enable:
            return
        ranks = Ranks(timeout=_COLLECTIVE_TIMEOUT)
        policy = ranks.told(lambda: _policy_of(config))
        self._ranks, self._policy, self._fresh = ranks, policy, config.fresh
        self._exports = self.folder
        # What was typed beside the command wins over what a file says.
        self.folder = self.folder if filesystem.is_remote(self.folder) else policy.root or self.folder
        self._catalog = open_run(policy, self.folder)
        self._planner = SavePlanner()
        if self.async_mode != AsyncMode.DISABLED:
            # The base class makes torch's own only where there is none, and closes whichever there is.
            beside = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = Stager(StagingOptions(use_async_staging=beside))
        self._pruner = worker_of(self._catalog, policy)
        self._triggers = Triggers(policy.save, ranks)
        logger.info("checkpoints are saved to and loaded from %s by bucketpoint", self._catalog.url)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """torchtitan's `interval`, or the policy's `save:`. All ranks, at every step."""
        asked = self._triggers.due(curr_step, last=last_step) is not None
        return bool(super()._should_save(curr_step, last_step)) or (asked and not self.load_only)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return filesystem.join(folder, f"step-{step}") if folder else self._catalog.url_of(step)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save one state: at once, or beside training and answer with what torchtitan waits for."""
        _, step = self._catalog.folder_of(checkpoint_id)
        if to_hf:
            # Another format, which torchtitan writes to local folders only.
            local = filesystem.join(self._exports, f"step-{step}")
            return super().dcp_save(state_dict, local, async_mode, enable_garbage_collection, to_hf)
        # A model alone is no checkpoint to resume from. Of the seed torchtitan wants nothing else.
        kind = FULL if OPTIMIZER in state_dict or step == SEED_STEP else WEIGHTS
        saving: dict[str, Any] = {
            "checkpoint_id": checkpoint_id,
            # A run that went back to an earlier step saves steps again, which torchtitan overwrites without asking.
            "storage_writer": BucketWriter(checkpoint_id, log=self._log(kind)),
            "planner": self._planner,
            "process_group": self._ranks.group,
        }
        self._triggers.saved()
        if async_mode == AsyncMode.DISABLED:
            try:
                dcp.save(state_dict, **saving)
            except CheckpointException as raised:
                # torchtitan ends a run by `except Exception`, and this is none.
                raise as_ours(raised, checkpoint_id) from raised
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        handle: Any = async_save(state_dict, async_stager=self.stager, **saving)
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            return AsyncSaveResponse(staging_completion=handle.staged, upload_completion=handle)
        return handle

    def _log(self, kind: str) -> SaveLog:
        """Records the commit, and prunes after it and never because a save has begun."""
        return SaveLog(self._catalog, kind, pruner=self._pruner)

    def _wait_for_saving(self) -> None:
        # Forgotten first: a failure is told once, and `close` goes on.
        saving, self.save_future = self.save_future, None
        saving.result()

    # -- loading ------------------------------------------------------------------------------------------------------

    @structured_logger.log_trace_span("checkpoint_load")
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Go on from the newest whole checkpoint, or the step that is named; or begin as torchtitan was told to."""
        return self._resume(step) or self._begin()

    def _resume(self, step: int) -> bool:
        wanted = Wanted("latest" if step == -1 else step, None, self._fresh, '{"fresh": true} in the override')
        found = restored(self._catalog, self._policy, self._ranks, wanted, self._try, self._pruner)
        if found is None:
            return False
        self._triggers.resumed(found.step)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _try(self, step: int, url: str) -> Outcome:
        begun = time.monotonic()
        logger.info("loading %s", url)
        outcome = self._attempt(self._states_to_load(step == SEED_STEP), url)
        if outcome.loaded:
            logger.info("loaded %s in %.2f s", url, time.monotonic() - begun)
        return outcome

    def _attempt(self, states: dict[str, Any], url: str) -> Outcome:
        outcome = attempt(states, url, self._ranks)
        if outcome.loaded:
            # Its states are flattened, so that DCP cannot hand them to the model by itself.
            self.states[MODEL].load_state_dict(states)
        return outcome

    def _begin(self) -> bool:
        """What torchtitan's `initial_load_*` say, for a run that has no checkpoint yet."""
        path, from_hf = self.initial_load_path, self.initial_load_in_hf
        if path is None and from_hf:
            path = self.sd_adapter.hf_assets_path if self.sd_adapter is not None else None
            if path is None:
                raise BucketpointError("Nothing says where the safetensors are", remedy="Set --hf_assets_path")
        if path is None:
            logger.info("there is no checkpoint: this is a fresh start")
            return False
        logger.info("beginning with %s", path)
        states = self._states_to_load(self.initial_load_model_only)
        self.dcp_load(states, path, from_hf=from_hf, from_quantized=self.initial_load_in_hf_quantized)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load from anywhere: a bucket or a folder, ours or torch's; safetensors as torchtitan does."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        outcome = self._attempt(state_dict, checkpoint_id)
        if outcome.error is not None:
            raise outcome.error

    # -- ending -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Wait for the save under way and for pruning. torchtitan closes twice, the second time as it is collected."""
        self.enable = False
        if getattr(self, "_triggers", None) is None:
            return
        try:
            if self.save_future is not None:
                self._wait_for_saving()
            self._pruner.drain()
        finally:
            self._triggers.close()
            super()._close()
            self._ranks.close()


def _policy_of(config: Any) -> RetentionPolicy:
    """The policy's file, or what torchtitan's own option says.

    Raises:
        PolicyError: the file cannot be read, or is no policy.
    """
    path = config.policy or os.environ.get(POLICY_VARIABLE)
    if path:
        return read_policy(path)
    if config.keep_latest_k == 0:
        return RetentionPolicy(keep=Keep(latest=1), prune=Prune(when="manual"))
    # As torchtitan means it: what is not kept goes now, and the bucket does not hold a day's checkpoints beside them.
    return RetentionPolicy(keep=Keep(latest=config.keep_latest_k), prune=Prune(grace=timedelta(0)))


@override(target=CheckpointManager.Config, exact=True, description="checkpoints in object stores, by bucketpoint")
def use(config: CheckpointManager.Config, *, policy: str | None = None, fresh: bool = False) -> Any:
    """What `--override.imports bucketpoint.integrations.torchtitan.use` names."""
    return derive(config, BucketpointManager.Config, policy=policy, fresh=fresh)
