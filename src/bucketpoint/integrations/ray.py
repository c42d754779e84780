"""Ray Train: checkpoints that all workers save into the storage of the run, and that Ray registers and deletes."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bucketpoint.catalog.catalog import latest_checkpoint
from bucketpoint.dcp.api import load
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.planning.rank_state import rank_state
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, MismatchError
from bucketpoint.integrations.training_state import Saves, TrainingState, job_ranks, with_parts

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
"""URL schemes by pyarrow's names of filesystems."""

_ONE_MODEL = (
    "Give report() and restore() the optimizer together with its model: {'model': model, 'optimizer': optimizer}"
)

_EMPTY_DICTS = "bucketpoint_empty_dicts"
"""Key of the checkpoint's list of empty dicts, because DCP saves nothing of an empty dict."""

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
    """Report metrics to Ray Train, and save a state in the background as their checkpoint. All workers.

    Each worker saves its part into one folder of the run's storage. Ray receives the checkpoint once it is committed,
    and uploads nothing. Ray takes reports in the order of the calls, so metrics reported during a save wait for its
    end, in the background. If a save fails, Ray raises the error in the training function.

    Args:
        metrics: numbers and texts, as for `ray.train.report`.
        state: models, optimizers, objects with a `state_dict`, and plain values to save, with the same keys on each
            worker. None reports metrics alone.
        step: training step; the folder's name ends with this number.
        storage_writer: writer to save with. One writer for all saves plans only once, and compares successive states.
        storage_options: options of the store, such as `endpoint_url`, if there is no writer. pyarrow's filesystem does
            not expose its own options.
        options: as for `bucketpoint.async_save`.

    Returns:
        the handle of the save, once the state is copied and training may change it; None without a state.

    Raises:
        BucketpointError: a state without a step; a writer together with storage options; an optimizer without its
            model; models in a list or dict; or a filesystem of the run without a URL.
        StagingError: the state cannot be copied.
    """
    if state is None:
        # A SYNC report blocks training until Ray takes it; Ray takes one every two seconds. If all were ASYNC, reports
        # of quick steps would queue up, and Ray would receive checkpoints too late.
        mode = CheckpointUploadMode.ASYNC if _saves.under_way else CheckpointUploadMode.SYNC
        ray.train.report(dict(metrics), checkpoint_upload_mode=mode)
        return None

    def checked() -> tuple[dict[str, Any], BucketWriter]:
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
                    f"{key!r} of the state holds models or other objects in a list or dict: no load would find their "
                    "state",
                    remedy="Give each its own key: {'generator': model, 'critic': other}",
                )
        writer = storage_writer or BucketWriter(storage_options=storage_options)
        return {**with_parts(state, _ONE_MODEL), **_noted_empty_dicts(state)}, writer

    # Checked before Ray's broadcast, in which the other workers would wait for a worker that failed.
    call = f"report(step={step})"
    saved, writer = job_ranks(call).together(call, checked)
    context = ray.train.get_context()
    storage = context.get_storage()
    # If a worker dies after a commit and before Ray's report, Ray resumes from an older checkpoint and reaches the same
    # step again. The time in the name distinguishes the two saves.
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


def restore(state: dict[str, Any], *, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Load the newest whole checkpoint of the run into a state. All workers, in any number.

    This is the checkpoint of `ray.train.get_checkpoint()`, or one of a higher step whose report did not reach Ray
    because a worker died.

    Args:
        state: a state with the keys of the reported one. Models, optimizers, tensors and objects with a `state_dict`
            are loaded in place; plain values, and lists and dicts of plain values, are replaced.
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
    # Plain values may have other keys in the checkpoint: load them apart. `keys=` takes wildcards as patterns.
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
    """Return the URL of Ray's checkpoint, or its path if it is local.

    Args:
        checkpoint: the checkpoint, such as `result.checkpoint`.

    Raises:
        BucketpointError: the checkpoint's filesystem has no URL, such as a filesystem written in Python.
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
    """Yield the leaves of a value. A dict of `rank_state` is one leaf."""
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
    """Return the item that lists the empty dicts of a state; an empty dict if there are none."""
    paths = [path for name, value in state.items() for path in _empty_dicts(value, name)]
    return {_EMPTY_DICTS: paths} if paths else {}


def _empty_dicts(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict) and not value.keys() & rank_state(None).keys():
        if not value:
            yield path
        for key, each in value.items():
            # A load might refuse the pickle of a key of another type.
            if type(key) in (str, int):
                yield from _empty_dicts(each, *path, key)


def _load_plain(wanted: Mapping[str, Any], url: str, storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
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
        # DCP saves no entries for empty dicts.
        return value


def _is_hollow(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_hollow, value.values()))


def _began_again(newest: str, known: str) -> bool:
    """Return True if Ray's checkpoint is later than that of the highest step, as after a restart of the step count."""
    (time, _, step), (later, _, lower) = (each.rpartition("/")[2].rpartition("_step-") for each in (newest, known))
    return later > time and lower.isdigit() and step.isdigit() and int(lower) < int(step)


def _check_seen(checkpoint: Checkpoint, url: str) -> None:
    """Check that Ray's filesystem, whose endpoint may differ from the writer's, finds a committed checkpoint.

    Otherwise Ray would delete older checkpoints in favour of one that no later run finds.
    """
    seen = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/.metadata")
    if seen.type == arrow.FileType.NotFound:
        raise CheckpointNotFoundError(
            "The checkpoint is committed, but Ray's filesystem does not find it, because it reads from another store",
            url=url,
            remedy=_SAME_STORE,
        )
