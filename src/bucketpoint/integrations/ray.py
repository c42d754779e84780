"""Ray Train: checkpoints that all workers save into the storage of the run, and that Ray registers and deletes."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bucketpoint.catalog.catalog import latest_checkpoint
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.deadline.api import load
from bucketpoint.dcp.planning.rank_state import rank_state
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, MismatchError
from bucketpoint.integrations.saves import Saves, job_ranks
from bucketpoint.integrations.training_state import TrainingState, with_parts

try:
    import ray.train
    from pyarrow import fs as arrow
    from ray.train import Checkpoint, CheckpointUploadMode
    from ray.train.collective import broadcast_from_rank_zero
except ImportError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.ray needs Ray Train v2: pip install 'ray[train]>=2.53'", name="ray"
    ) from error

_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}
"""Schemes of URLs by pyarrow's names of filesystems."""

_ONE_MODEL = (
    "Give report() and restore() the optimizer together with its model: {'model': model, 'optimizer': optimizer}"
)

_EMPTY_DICTS = "bucketpoint_empty_dicts"
"""Key of a checkpoint for the paths of empty dicts, of which DCP saves nothing."""

_saves = Saves()
"""The saves of this process, which has one training function at a time."""

_SAME_STORE = (
    "Give report() and restore() the endpoint of RunConfig(storage_filesystem=...), as "
    "storage_options={'endpoint_url': ...}, or set AWS_ENDPOINT_URL, which both read"
)


def report(
    metrics: Mapping[str, Any],
    state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    storage_writer: BucketWriter | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> SaveHandle | None:
    """Report metrics to Ray Train, and save a state beside training as the checkpoint that they belong to. All workers.

    The workers save into a folder of the run's storage, each its own part. Ray receives the checkpoint once it is
    committed, and uploads nothing itself. Ray takes reports in the order of the calls; while a save is under way the
    metrics after it wait in the background. Ray raises the error of a save that fails in the training function.

    Args:
        metrics: numbers and texts, as for `ray.train.report`.
        state: models, optimizers, objects with a `state_dict`, and plain values to save, with the same keys on each
            worker. None reports metrics alone.
        step: number of the training step. The name of the folder ends with it.
        storage_writer: writer to save with. A writer reused for all saves plans once, and compares states.
        storage_options: options of the store, such as `endpoint_url`, when there is no writer. The options of pyarrow's
            filesystem cannot be read from it.
        options: as for `bucketpoint.async_save`.

    Returns:
        the handle of the save, once the state is copied and training may change it; None without a state.

    Raises:
        BucketpointError: there is a state and no step; there are a writer and options of a store; an optimizer comes
            without its model; models are in a list or dict; or the filesystem of the run has no URL.
        StagingError: the state cannot be copied.
    """
    if state is None:
        # Ray accepts one report every two seconds, and otherwise blocks training. Otherwise the reports of quick steps
        # would queue up, and Ray would receive checkpoints too late.
        mode = CheckpointUploadMode.ASYNC if _saves.under_way else CheckpointUploadMode.SYNC
        ray.train.report(dict(metrics), checkpoint_upload_mode=mode)
        return None

    def checked() -> tuple[dict[str, Any], BucketWriter]:
        _check_report(state, step, storage_writer, storage_options)
        writer = storage_writer or BucketWriter(storage_options=storage_options)
        return {**with_parts(state, _ONE_MODEL), **_noted_empty_dicts(state)}, writer

    # Checked before Ray's own collective, in which other workers would wait for one that failed.
    call = f"report(step={step})"
    saved, writer = job_ranks(call).together(call, checked)
    context = ray.train.get_context()
    storage = context.get_storage()
    # The time keeps a save apart from one of the same step that was committed just before a worker died: Ray does not
    # know that one, and starts from an older checkpoint.
    name = broadcast_from_rank_zero(f"{storage.make_default_checkpoint_dir_name()}_step-{step}")
    checkpoint = Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
    url = checkpoint_url(checkpoint)
    handle = TrainingState(lambda: saved).save(_saves, url, storage_writer=writer, **options)
    assert handle is not None

    def committed(reported: Checkpoint, _name: str) -> Checkpoint:
        handle.result()
        if context.get_world_rank() == 0:
            _check_seen(reported, url)
        return reported

    ray.train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=committed,
        # Otherwise Ray deletes the folder in the bucket as if it were a local copy.
        delete_local_checkpoint_after_upload=False,
    )
    return handle


def _check_report(
    state: Mapping[str, Any],
    step: int | None,
    storage_writer: BucketWriter | None,
    storage_options: Mapping[str, Any] | None,
) -> None:
    if step is None:
        raise BucketpointError(
            "A state was reported without a step", remedy="Give report(..., step=) its training step"
        )
    if storage_writer is not None and storage_options is not None:
        raise BucketpointError(
            "report() got both a writer and options of a store",
            remedy="Give the options to the writer: S3Writer(storage_options=...)",
        )
    for key, value in state.items():
        if _in_container(value) and any(hasattr(leaf, "state_dict") for leaf in _leaves(value)):
            raise BucketpointError(
                f"{key!r} of the state holds models or other objects in a list or dict: no load would find their state",
                remedy="Give each a key of its own: {'generator': model, 'critic': other}",
            )


def restore(state: dict[str, Any], *, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Load the newest whole checkpoint of the run into a state. All workers, of any number.

    This is the checkpoint of `ray.train.get_checkpoint()`, or one of a higher step: a worker that dies before Ray
    receives its report leaves a checkpoint that Ray does not know.

    Args:
        state: the state as it is reported. Models, optimizers, tensors and objects with a `state_dict` are loaded into;
            plain values, lists and dicts of them included, are replaced.
        storage_options: options of the store.

    Returns:
        the URL of the checkpoint, or None if there is none: the run begins from scratch.

    Raises:
        MismatchError: the checkpoint lacks keys of the state, or has other shapes.
        CheckpointNotFoundError: Ray has a checkpoint that the store does not have.
    """
    storage = ray.train.get_context().get_storage()
    run = checkpoint_url(Checkpoint(storage.experiment_fs_path, storage.storage_filesystem))
    known = ray.train.get_checkpoint()
    # Values whose keys may differ in the checkpoint. Names that are not plain would be patterns for `keys=`.
    plain = {
        name: value
        for name, value in state.items()
        if name == glob.escape(name)
        and (value is None or (_in_container(value) and all(map(_is_plain, _leaves(value)))))
    }

    def find() -> tuple[str | None, dict[str, Any]]:
        newest = latest_checkpoint(run, storage_options=storage_options)
        if newest is not None and known is not None and _began_again(newest, known.path):
            newest = checkpoint_url(known)
        if newest is None:
            return None, plain
        return newest, _load_plain(plain, newest, storage_options)

    call = "restore()"
    ranks = job_ranks(call)
    newest, plain = ranks.on_coordinator(find, call)
    if newest is None and known is not None:
        raise CheckpointNotFoundError(
            "Ray resumes from a checkpoint that the store does not have, or that bucketpoint did not save",
            url=checkpoint_url(known),
            remedy=_SAME_STORE,
        )
    if newest is None:
        return None
    wanted = {name: value for name, value in state.items() if name not in plain}
    loaded = TrainingState(lambda: with_parts(wanted, _ONE_MODEL)).load(newest, storage_options=storage_options)
    in_place = (torch.nn.Module, torch.optim.Optimizer)
    state.update({name: loaded[name] for name, value in wanted.items() if not isinstance(value, in_place)}, **plain)
    return newest


def checkpoint_url(checkpoint: Checkpoint) -> str:
    """Return the URL of a checkpoint of Ray; a path if it is local.

    Args:
        checkpoint: Ray's checkpoint, such as `result.checkpoint`.

    Raises:
        BucketpointError: its filesystem has no URL, such as one written in Python.
    """
    filesystem, path = checkpoint.filesystem, checkpoint.path
    if isinstance(filesystem, arrow.LocalFileSystem):
        return str(path)
    if isinstance(filesystem, arrow.PyFileSystem) and isinstance(filesystem.handler, arrow.FSSpecHandler):
        return str(filesystem.handler.fs.unstrip_protocol(path))
    if filesystem.type_name not in _SCHEMES:
        raise BucketpointError(
            f"pyarrow's filesystem {filesystem.type_name!r} has no URL",
            remedy="Give RunConfig a storage_path of s3://, gs:// or a local folder, or an fsspec filesystem",
        )
    return f"{_SCHEMES[filesystem.type_name]}://{path}"


def _in_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def _leaves(value: Any) -> Iterator[Any]:
    """Return the parts of a value. An object with a state for each rank is one leaf."""
    if isinstance(value, dict) and not value.keys() & rank_state(None).keys():
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, (torch.Tensor, dict)) and not hasattr(leaf, "state_dict")


def _noted_empty_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item to save with a state that has empty dicts; nothing if it has none."""
    paths = [path for name, value in state.items() for path in _empty_dicts(value, name)]
    return {_EMPTY_DICTS: paths} if paths else {}


def _empty_dicts(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict) and not value.keys() & rank_state(None).keys():
        if not value:
            yield path
        for key, each in value.items():
            # The pickle of another key might be refused at the load.
            if type(key) in (str, int):
                yield from _empty_dicts(each, *path, key)


def _load_plain(wanted: Mapping[str, Any], url: str, storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return plain values as they were saved."""
    found: dict[str, Any] = {}
    empty = _loaded(_EMPTY_DICTS, {}, url, storage_options) if wanted else {}
    for name, value in wanted.items():
        paths = [path for path in empty if path[0] == name]
        found[name] = _loaded(name, {} if paths else value, url, storage_options)
        for path in paths:
            inner = found
            for key in path:
                inner = inner.setdefault(key, {})
    return found


def _loaded(name: str, value: Any, url: str, storage_options: Mapping[str, Any] | None) -> Any:
    try:
        return load(url, keys=name, storage_options=storage_options)[name]
    except MismatchError:
        if not _is_hollow(value):
            raise
        # A checkpoint has no entries for empty dicts.
        return value


def _is_hollow(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_hollow, value.values()))


def _began_again(newest: str, known: str) -> bool:
    """Return True if Ray's checkpoint is later than the one with the highest step: a run restarted its count."""
    (time, _, step), (later, _, lower) = (each.rpartition("/")[2].rpartition("_step-") for each in (newest, known))
    return later > time and lower.isdigit() and step.isdigit() and int(lower) < int(step)


def _check_seen(checkpoint: Checkpoint, url: str) -> None:
    """Look for a committed checkpoint with Ray's filesystem, which may have another endpoint than the writer.

    Otherwise Ray would count checkpoints, and delete older ones, that no later run finds.
    """
    seen = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/.metadata")
    if seen.type == arrow.FileType.NotFound:
        raise CheckpointNotFoundError(
            "The checkpoint is committed, but Ray's filesystem does not find it: it reads from another store",
            url=url,
            remedy=_SAME_STORE,
        )
