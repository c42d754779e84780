"""torchtitan's override hook: one flag makes its trainer save, load and prune through bucketpoint, without user code.

Only torchtitan imports this module. torchtitan decides when to save and what a state contains; this module decides
where checkpoints are stored, which of them exist, and which are kept. `docs/torchtitan.md` describes its use.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.worker import worker_of
from bucketpoint.catalog.policy_file import POLICY_VARIABLE, read_policy
from bucketpoint.catalog.run import open_run
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.convert import CONVERT_OPTIONS, export_safetensors
from bucketpoint.convert.target import TargetPlace, copy_beside
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.saving.earlier_saves import EarlierSaves
from bucketpoint.dcp.saving.uploads import Uploads
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.location import Location
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.restoring import LoadOutcome, attempt, restored, with_states
from bucketpoint.manager.saving import begin_together, may_be_warned
from bucketpoint.manager.triggers import Triggers
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.retention.rows import FULL, WEIGHTS
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.transfer import TransferOptions

logger = logging.getLogger(__name__)

SEED_STEP = 0
"""Step of torchtitan's seed checkpoint, from which torchtitan loads the model only."""


class BucketpointManager(CheckpointManager):
    """torchtitan's manager of DCP checkpoints, with bucketpoint's writer, reader, staging and retention.

    The methods below are hooks that the base class calls; the public methods of the base class are unchanged.

    Args:
        config: torchtitan's options with those of bucketpoint, as `use` makes them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and five of bucketpoint's.

        Attributes:
            policy: file of the retention policy, which rank 0 reads; by default the one that BUCKETPOINT_POLICY names.
                Without either, `keep_latest_k` is the policy.
            fresh: start from scratch even if there are traces of checkpoints, none of which can be loaded.
            on_commit: `package.module:name` of a function that is called on rank 0, with a `CommitInfo`, once an
                asynchronous save is committed.
            hf_source: URL of safetensors from which a run without a checkpoint begins, in place of `initial_load_path`.
            hf_target: URL below which the last step's model is written as safetensors, in a folder `step-N`.
        """

        policy: str | None = None
        fresh: bool = False
        on_commit: str | None = None
        hf_source: str | None = None
        hf_target: str | None = None

    # Attributes that the base class sets, declared here because torchtitan is imported without types.
    enable: bool
    folder: str
    last_save_in_hf: bool
    save_future: Any

    def __init__(self, config: Any, **parts: Any) -> None:
        # With `keep_latest_k=0` torchtitan starts no purge thread, which would count folders of dead saves, too.
        super().__init__(replace(config, keep_latest_k=0), **parts)
        if not self.enable:
            return
        if config.hf_source is not None:
            self.initial_load_path, self.initial_load_in_hf = config.hf_source, True
        self._hf_target = config.hf_target
        self.last_save_in_hf = self.last_save_in_hf or self._hf_target is not None
        ranks = self._ranks = Ranks("CheckpointManager()")
        policy = self._policy = ranks.on_coordinator(lambda: _policy_of(config), "CheckpointManager()")
        ranks.limit(policy.save.in_flight.timeout)
        self._fresh = config.fresh
        self._exports = self.folder
        # A remote folder from the command line wins over the root in the policy file.
        self.folder = self.folder if filesystem.is_remote(self.folder) else policy.root or self.folder

        def prepared() -> tuple[Catalog, Any]:
            catalog = open_run(policy, self.folder)
            _refuse_unfit(config, self.sd_adapter, catalog)
            return catalog, _named(config.on_commit)

        self._catalog, self._on_commit = ranks.together("CheckpointManager()", prepared)
        self._planner = SavePlanner()
        if self.async_mode != AsyncMode.DISABLED:
            # The base class makes torch's stager only if there is no stager yet, and closes either of them.
            beside = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = Stager(StagingOptions(use_async_staging=beside))
        self._pruner = worker_of(self._catalog, policy)
        self._uploads = Uploads(TransferOptions())
        self._earlier_saves = EarlierSaves()
        self._triggers = Triggers(policy.save, ranks)
        self._committed = False
        logger.info("checkpoints are saved to and loaded from %s by bucketpoint", self._catalog.url)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Return True if torchtitan's `interval` or the policy's `save:` asks for a save. All ranks, at every step."""
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
        """Save a state at once, or start a background save and return the future that torchtitan waits for."""
        _, step = self._catalog.folder_of(checkpoint_id)
        if to_hf and self._hf_target is None:
            # torchtitan writes the safetensors, to local folders only.
            local = filesystem.join(self._exports, f"step-{step}")
            return super().dcp_save(state_dict, local, async_mode, enable_garbage_collection, to_hf)
        call = f"the save of {checkpoint_id}"
        exported = to_hf and step != SEED_STEP
        if exported:
            state_dict = self._ranks.together(call, partial(self.sd_adapter.to_hf, state_dict))
        # A run cannot resume from a model alone. The seed counts as full, because torchtitan loads only its model.
        kind = FULL if OPTIMIZER in state_dict or step == SEED_STEP else WEIGHTS
        log = SaveLog(self._catalog, kind, pruner=self._pruner)
        writer = BucketWriter.of_run(checkpoint_id, log, self._uploads, self._earlier_saves)
        saving: dict[str, Any] = {
            # The writer overwrites by default, as torchtitan does: a run that went back to an earlier step saves steps
            # again.
            "storage_writer": writer,
            "planner": self._planner,
        }
        self._triggers.saved()
        if async_mode == AsyncMode.DISABLED:
            made = self._ranks.together(call, lambda: with_states(state_dict))
            # torchtitan cleans up in `except Exception`, which does not catch DCP's CheckpointException.
            with self._ranks.calling_dcp(call, checkpoint_id):
                dcp.save(made, checkpoint_id=checkpoint_id, process_group=self._ranks.group, **saving)
            if exported:
                self._export(checkpoint_id, filesystem.join(self._hf_target, f"step-{step}"))
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        saving.update(async_stager=self.stager, on_commit=self._on_commit)
        handle: Any = begin_together(self._ranks, call, state_dict, checkpoint_id, **saving)
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            return AsyncSaveResponse(staging_completion=handle.staged, upload_completion=handle)
        return handle

    def _export(self, url: str, target: str) -> None:
        """Write a saved model as safetensors. The step's checkpoint has the same names of tensors."""
        assets = self.sd_adapter.hf_assets_path
        if assets:
            store, folder = Location.of(assets).opened
            place = TargetPlace(*Location.of(target).opened, target)
            self._ranks.on_coordinator(lambda: copy_beside(store, folder, place, CONVERT_OPTIONS), "the export")
        # `overwrite`: a repeated run replaces its export.
        export_safetensors(url, target, overwrite=True)
        logger.info("the model of %s was written to %s as safetensors", url, target)

    def _wait_for_saving(self) -> None:
        # Cleared first, so that a failure is raised once and `close` continues.
        saving, self.save_future = self.save_future, None
        if self._policy.save.on_failure == "warn" and isinstance(saving, SaveHandle):
            saving.wait()
            error = saving.failure()
            if error is not None and may_be_warned(error, committed=self._committed):
                logger.error("%s was not saved, and training continues (on_failure: warn): %s", saving.url, error)
                return
        saving.result()
        self._committed = True

    # -- loading ------------------------------------------------------------------------------------------------------

    @structured_logger.log_trace_span("checkpoint_load")
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load the newest whole checkpoint, or the named step; without one, start as torchtitan is configured."""
        checkpoint = restored(
            self._catalog,
            self._policy,
            self._ranks,
            self._try,
            self._pruner,
            "latest" if step == -1 else step,
            fresh=self._fresh,
            fresh_by='{"fresh": true} in the override',
        )
        if checkpoint is None:
            return self._begin()
        self._triggers.resumed(checkpoint.step)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _try(self, step: int, url: str) -> LoadOutcome:
        begun = time.monotonic()
        logger.info("loading %s", url)
        states = self._ranks.together("the load of a checkpoint", lambda: self._states_to_load(step == SEED_STEP))
        outcome = self._attempt(states, url)
        if outcome.error is None:
            logger.info("loaded %s in %.2f s", url, time.monotonic() - begun)
        return outcome

    def _attempt(self, states: dict[str, Any], url: str, *, from_hf: bool = False) -> LoadOutcome:
        call = "the load of a model"
        if from_hf:
            states = self._ranks.together(call, partial(self.sd_adapter.to_hf, states))
        outcome = attempt(states, url, self._ranks)
        if outcome.error is None:

            def load() -> None:
                # torchtitan flattens the states of a model, so DCP cannot load them into the model.
                self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(states) if from_hf else states)

            self._ranks.together(call, load)
        return outcome

    def _begin(self) -> bool:
        """Load what `initial_load_*` names, in a run without a checkpoint. Return True if anything was loaded."""
        path, from_hf = self.initial_load_path, self.initial_load_in_hf
        if path is None and from_hf:
            path = self.sd_adapter.hf_assets_path if self.sd_adapter is not None else None
            if path is None:
                raise BucketpointError("The folder of the safetensors is not configured", remedy="Set --hf_assets_path")
        if path is None:
            logger.info("there is no checkpoint: this is a fresh start")
            return False
        logger.info("beginning with %s", path)
        states = self._states_to_load(self.initial_load_model_only)
        self.dcp_load(states, path, from_hf=from_hf, from_quantized=self.initial_load_in_hf_quantized)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load from a bucket or a folder. torchtitan itself loads safetensors in local folders."""
        if from_hf and not filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        outcome = self._attempt(state_dict, checkpoint_id, from_hf=from_hf)
        if outcome.error is not None:
            raise outcome.error

    # -- ending -------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Wait for the save under way and for pruning. Called twice: the second time at garbage collection."""
        self.enable = False
        if getattr(self, "_triggers", None) is None:
            return
        try:
            if self.save_future is not None:
                self._wait_for_saving()
            self._pruner.drain()
        finally:
            self._triggers.close()
            self._uploads.close()
            super()._close()
            self._ranks.close()


def _named(name: str | None) -> Any:
    """Import a function by its name. Raises BucketpointError if there is none."""
    if name is None:
        return None
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BucketpointError(
            f"on_commit names no function: {name!r}: {error}",
            remedy='Give it as {"on_commit": "package.module:name"}, and put the package on PYTHONPATH',
        ) from error


def _refuse_unfit(config: Any, adapter: Any, catalog: Catalog) -> None:
    """Raise BucketpointError if options do not fit a load or a save of safetensors at a URL."""
    source, target = config.hf_source, config.hf_target
    if (source or target) and adapter is None:
        raise BucketpointError(
            "The model has no adapter between torchtitan's names and Hugging Face's",
            remedy="Leave initial_load_in_hf and last_save_in_hf out",
        )
    if (source and not config.initial_load_model_only) or (target and not config.last_save_model_only):
        raise BucketpointError(
            "Safetensors hold a model only",
            remedy="Pass --checkpoint.initial_load_model_only and --checkpoint.last_save_model_only",
        )
    if target:
        store, prefix = Location.of(target).opened
        if (store.identity, prefix) == (catalog.store.identity, catalog.prefix):
            raise BucketpointError(
                "last_save_in_hf names the folder of the run", url=target, remedy="Name one outside the run"
            )


def _policy_of(config: Any) -> RetentionPolicy:
    """Read the policy's file, or make a policy from torchtitan's own option. Raises PolicyError for a faulty file."""
    path = config.policy or os.environ.get(POLICY_VARIABLE)
    if path:
        return read_policy(path)
    if config.keep_latest_k == 0:
        return RetentionPolicy(keep=Keep(latest=1), prune=Prune(when="manual"))
    # As in torchtitan, checkpoints that are not kept are deleted at once, without the default grace period of a day.
    return RetentionPolicy(keep=Keep(latest=config.keep_latest_k), prune=Prune(grace=timedelta(0)))


@override(target=CheckpointManager.Config, exact=True, description="checkpoints in object stores, by bucketpoint")
def use(
    config: CheckpointManager.Config,
    *,
    policy: str | None = None,
    fresh: bool = False,
    on_commit: str | None = None,
    initial_load_in_hf: str | None = None,
    last_save_in_hf: str | None = None,
) -> Any:
    """Replace torchtitan's options by bucketpoint's.

    `--override.imports bucketpoint.integrations.torchtitan.use` names this function.

    Args:
        config: torchtitan's options.
        policy, fresh, on_commit: as the attributes of `BucketpointManager.Config`.
        initial_load_in_hf, last_save_in_hf: `hf_source` and `hf_target` there. torchtitan's own options refuse URLs.
    """
    hf: dict[str, Any] = {"hf_source": initial_load_in_hf, "hf_target": last_save_in_hf}
    return derive(config, BucketpointManager.Config, policy=policy, fresh=fresh, on_commit=on_commit, **hf)
