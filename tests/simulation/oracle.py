"""What must hold, judged by what was acknowledged alone: after each change of the bucket, and again at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.simulation.bucket import Bucket, Held
from tests.simulation.facts import Commit, Op, Pinned, ViolationError, ordered_by, tombstone_of

from bucketpoint.catalog.listing import read_notes, read_steps
from bucketpoint.convert.journal import NAME as JOURNAL
from bucketpoint.errors import BucketpointError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.index.ref import ref_of
from bucketpoint.format.item_info import read_item
from bucketpoint.format.keys import RECORD
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.retention import plan
from bucketpoint.stores import ObjectInfo

OPTIM_ADDS = 0.5
"""What an optimizer's values have more than the model's of the same save."""

SAVES = frozenset({"save", "cp", "convert"})


@dataclass
class Oracle:
    """The judge of one run."""

    bucket: Bucket
    seq: int = 0
    live: dict[str, Commit] = field(default_factory=dict)
    named: dict[str, set[str]] = field(default_factory=dict)
    """By data key: the `.metadata` that name it."""
    planted: set[str] = field(default_factory=set)
    damaged: dict[str, int] = field(default_factory=dict)
    """Data keys that a person has deleted, and the number of that change."""
    deleted_by: dict[str, Op] = field(default_factory=dict)
    when: dict[tuple[str, str], int] = field(default_factory=dict)
    """By prefix and id: when it was committed."""
    committed: dict[str, float] = field(default_factory=dict)
    """By id: the value that was committed under it."""
    pins: dict[str, Pinned] = field(default_factory=dict)
    removed: dict[tuple[str, int | None, str], tuple[frozenset[str], float]] = field(default_factory=dict)
    """By root, step and id: the objects that a pruner has freed by removing or thinning a checkpoint, and when."""
    discarded: set[str] = field(default_factory=set)
    """Keys of tombstones that a save wrote because its user discards the step: no policy need say so."""
    withdrawn: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By root, folder and id: when the tombstone of a checkpoint was taken away."""
    rows_changed: dict[str, list[tuple[int, Op]]] = field(default_factory=dict)
    """By root: who has changed what plans are made from, and when."""
    ordered: dict[str, float] = field(default_factory=dict)
    """By key of a tombstone that a prune wrote: the true time before which it may not be carried out."""
    gone: dict[tuple[str, str], int] = field(default_factory=dict)
    """By root and id: when a person removed the commit, or a save replaced it."""
    measured: dict[str, str | None] = field(default_factory=dict)
    """By key of a note with metrics: the id of the commit that was measured; None if there was none."""
    unsure: set[str] = field(default_factory=set)
    """Roots where a step was replaced while it was measured."""

    # -- changes -------------------------------------------------------------------------------------------------------

    def changed(self, op: Any, key: str, before: Held | None, after: Held | None) -> None:
        self.seq += 1
        if op is not None and op.began is None:
            op.began, op.at = self.seq, self.bucket.clock()
        if key in self.planted and op.kind != "plant":
            raise ViolationError("foreign", f"{op} touched {key}, which is nobody's")
        if key.endswith(".metadata"):
            self._metadata(op, key, before, after)
        elif after is None:
            self._gone(op, key)
        elif key in self.named and before is not None and before.data != after.data:
            raise ViolationError("torn", f"{op} replaced {key}, which {self._of(key)} names")
        if "/steps/" in key:
            if before is None and after is not None:
                self._noted(op, key, after)
            elif after is None:
                self._withdrawn(key)
            elif before is not None and b"waiting" in before.data and b"begun" in after.data:
                self._claimed(op, key)
        if "/notes/" in key and "__metrics__" in key and before is None:
            self._measured(op, key)
        if "/steps/" in key or "/notes/" in key:
            root = key[: key.index(f"/{catalog_keys.CATALOG}/")]
            self.rows_changed.setdefault(root, []).append((self.seq, op))

    def listed(self, op: Any, prefix: str, page: list[ObjectInfo], first: bool) -> None:
        """A page of a listing was received."""
        if op is not None and op.kind == "prune" and prefix.endswith(("/steps/", "/notes/")):
            if first:
                op.seen[prefix] = {}
            op.seen[prefix] |= {info.key: info for info in page}

    def _of(self, key: str) -> str:
        return " and ".join(sorted(self.named[key]))

    def _gone(self, op: Op, key: str) -> None:
        self.deleted_by[key] = op
        if self.named.get(key):
            if op.kind == "person":
                self.damaged[key] = self.seq
                return
            if key in self.damaged:
                return
            raise ViolationError("torn", f"{op} deleted {key}, which {self._of(key)} names and which can be loaded")

    def _metadata(self, op: Op, key: str, before: Held | None, after: Held | None) -> None:
        was = self.live.pop(key, None)
        if was is not None:
            for name in was.names:
                self.named[name].discard(key)
        now = self._read(key, after) if after is not None else None
        if was is not None and (now is None or now.id != was.id):
            self._removed(op, was, now)
        if was is not None and now is not None and now.id == was.id and now.kind != was.kind:
            self._thinned(op, was, now)
        if now is None:
            return
        if op.kind in ("prune", "sweep", "adopt", "pin", "undo") and (was is None or now.id != was.id):
            raise ViolationError("undead", f"{op} made {key} loadable")
        if was is not None and now.id == was.id:
            # Thinned: whoever saw it whole saw this one.
            now = replace(now, seq=was.seq)
        if op.kind == "save" and (was is None or now.id != was.id):
            missing = {f"model.w{rank}" for rank in range(op.parts)} - {fqn for fqn, *_ in now.values}
            if missing:
                raise ViolationError("part", f"{op} committed {key} without {sorted(missing)}")
        self.live[key] = now
        self.when[now.prefix, now.id] = now.seq
        for name in now.names:
            self.named.setdefault(name, set()).add(key)
        self.committed[now.id] = self._whole(op, now)

    def _read(self, key: str, held: Held) -> Commit | None:
        try:
            metadata = decode_metadata(held.data)
        except BucketpointError:
            return None
        prefix = key.rpartition("/")[0]
        facts = extra(metadata)
        names, values = set(), []
        for index, stored in (metadata.storage_data or {}).items():
            info = read_item(stored)
            names.add(f"{prefix}/{info.path}")
            if info.payload_offset is not None:
                start = info.offset + info.payload_offset
                values.append((index.fqn, f"{prefix}/{info.path}", start, start + (info.payload_nbytes or 0)))
        ref = ref_of(metadata)
        if ref is not None:
            names.add(f"{prefix}/{ref.path}")
        token = facts.get("token") or hashlib.sha256(held.data).hexdigest()[:12]
        folder = prefix.rpartition("/")[2]
        step = catalog_keys.StepTemplate().step_of(folder)
        return Commit(
            key,
            prefix,
            token,
            facts.get("kind") or "full",
            frozenset(names),
            tuple(values),
            held.etag,
            self.seq,
            step,
        )

    def _whole(self, op: Op, commit: Commit) -> float:
        """The value of a checkpoint that is whole and of one save."""
        found: dict[str, float] = {}
        for name in sorted(commit.names):
            if name not in self.bucket.objects and name not in self.damaged:
                by = self.deleted_by.get(name)
                raise ViolationError("torn", f"{op} committed {commit.key} without {name}, deleted by {by}")
        for fqn, key, start, stop in commit.values:
            if key in self.damaged:
                continue
            data = self.bucket.objects[key].data[start:stop]
            numbers = np.frombuffer(data, dtype=np.float32)
            if len(data) != stop - start or not len(numbers) or (numbers != numbers[0]).any():
                raise ViolationError("torn", f"{op} committed {commit.key}, whose {fqn} is {numbers}")
            found[fqn] = float(numbers[0]) - (OPTIM_ADDS if fqn.startswith("optim") else 0.0)
        if len(set(found.values())) > 1:
            raise ViolationError("mixed", f"{op} committed {commit.key} of several saves: {found}")
        return next(iter(found.values()), -1.0)

    # -- who may remove what -------------------------------------------------------------------------------------------

    def _removed(self, op: Op, was: Commit, now: Commit | None) -> None:
        if op.kind == "person" or op.kind in SAVES:
            self.gone[was.prefix.rpartition("/")[0], was.id] = self.seq
        if op.kind == "person":
            return
        if op.kind in SAVES and now is not None:
            began = op.began if op.began is not None else self.seq
            if not op.overwrite and not self._given_up(op, was):
                raise ViolationError("replaced", f"{op} replaced {was.key} and was not to overwrite")
            if was.seq > began:
                raise ViolationError("replaced", f"{op} replaced {was.key}, committed after it had begun")
            return
        if op.kind != "prune":
            raise ViolationError("removed", f"{op} removed {was.key}")
        self._may_go(op, was, was.names, catalog_action="delete")

    def _thinned(self, op: Op, was: Commit, now: Commit) -> None:
        if op.kind == "prune":
            self._may_go(op, was, was.names - now.names, catalog_action="thin")
        elif op.kind not in SAVES:
            raise ViolationError("thinned", f"{op} thinned {was.key}")

    def _may_go(self, op: Op, was: Commit, freed: frozenset[str], *, catalog_action: str) -> None:
        root, _, folder = was.prefix.rpartition("/")
        self.removed[root, was.step, was.id] = freed, self.bucket.clock()
        if not self._buried(root, folder, was.id, catalog_action):
            raise ViolationError("not buried", f"{op} removed {was.key} of {was.id}, which has no tombstone")
        now = self.bucket.clock()
        orders = [
            self.ordered.get(key)
            for key in self._steps_of(root)
            if tombstone_of(key) == (was.id, catalog_action, folder)
        ]
        if all(due is not None and due > now + 1.0 for due in orders):
            raise ViolationError("grace", f"{op} removed {was.key} before its grace was over")
        for name, pin in self.pins.items():
            if (pin.root, pin.step) == (root, was.step) and now < pin.until:
                raise ViolationError(pin.what, f"{op} removed {was.key}, which {name} holds")
        if catalog_action == "delete" and was.kind == "full":
            others = [one for one in self._of_root(root) if one.key != was.key and one.kind == "full"]
            # What a person deletes after the pruner has looked, nobody can know of.
            began = op.began if op.began is not None else self.seq
            taken = any(where == root and seq > began for (where, _), seq in self.gone.items())
            if self._is_whole(was) and not taken and not any(self._is_whole(one, since=began) for one in others):
                raise ViolationError("last", f"{op} removed {was.key}, the last that was whole")

    def _buried(self, root: str, folder: str, token: str, wanted: str) -> bool:
        return any(tombstone_of(key) == (token, wanted, folder) for key in self._steps_of(root))

    def _given_up(self, op: Op, was: Commit) -> bool:
        """What a manager's save may replace unasked: what goes, is damaged, or is not older than a rollback."""
        root, _, folder = was.prefix.rpartition("/")
        back = op.rolled_back_to is not None and was.step is not None and was.step >= op.rolled_back_to
        # One whose tombstone is taken away while the save is under way stays given up for it.
        was_buried = self.withdrawn.get((root, folder, was.id), -1) > op.asked
        return back or not self._is_whole(was) or was_buried or self._buried(root, folder, was.id, "delete")

    def _of_root(self, root: str) -> list[Commit]:
        return [one for one in self.live.values() if one.prefix.rpartition("/")[0] == root and one.step is not None]

    def _is_whole(self, commit: Commit, since: float = float("inf")) -> bool:
        """Whether all objects of a checkpoint are there, but for those that a person has deleted after `since`."""
        return all(name in self.bucket.objects or self.damaged.get(name, 0) > since for name in commit.names)

    def _steps_of(self, root: str) -> Iterable[str]:
        above = f"{root}/{catalog_keys.CATALOG}/"
        return [key for key in self.bucket.objects if key.startswith(above) and "/steps/" in key]

    def _noted(self, op: Op, key: str, held: Held) -> None:
        """A tombstone: the policy must say so of the records and notes that its prune has seen."""
        tombstone = tombstone_of(key)
        if tombstone is None or not held.data or op.policy is None:
            return
        if op.kind == "save" and op.discards:
            self.discarded.add(key)
        if b"waiting" not in held.data or key in self.discarded:
            return
        token, action, folder = tombstone
        if op.kind != "prune":
            return
        self.ordered[key] = (op.at or 0.0) + op.policy.prune.grace.total_seconds()
        root = key[: key.index(f"/{catalog_keys.CATALOG}/")]
        if root in self.unsure:
            return
        seen = [info for listed in op.seen.values() for info in listed.values()]
        planned = plan(op.policy, self.rows(root, seen, op.began if op.began is not None else self.seq))
        for entry in planned.entries:
            # A copy within a run has the token of its commit in another step.
            if entry.row.id == token and f"{entry.row.step:016}__" in key:
                held = entry.row.pinned or entry.row.leased or entry.row.restored_from
                # Somebody else has thinned it meanwhile.
                thinned = action == "thin" and entry.row.kind != "full"
                if entry.action == "keep" and not held and not thinned:
                    reasons = "; ".join(map(str, entry.reasons))
                    raise ViolationError("plan", f"{op} buries step {entry.row.step} ({folder}), to be kept: {reasons}")
                return

    def _claimed(self, op: Op, key: str) -> None:
        """A pruner begins with what an earlier one has ordered: its own policy must not keep the checkpoint."""
        stone = ordered_by(key)
        if stone is None or op.kind != "prune" or op.policy is None or op.began is None:
            return
        token, action, folder, by_policy = stone
        root = key[: key.index(f"/{catalog_keys.CATALOG}/")]
        others = any(seq > op.began and by is not op for seq, by in self.rows_changed.get(root, []))
        given_up = any(
            tombstone_of(other) == (token, "delete", folder)
            and (ordered_by(other) != (token, "delete", folder, True) or b"begun" in self.bucket.objects[other].data)
            for other in self._steps_of(root)
            if other != key
        )
        alive = any((one.prefix, one.id) == (f"{root}/{folder}", token) for one in self.live.values())
        # What others changed since the plan, or replaced without the catalog, the plan does not know. What was given
        # up, or is being deleted, goes whatever the policy says.
        if not by_policy or others or given_up or not alive or root in self.unsure:
            return
        # Of a subset of these rows, such as the pruner may have decided on, a policy keeps at least as much.
        objects = self.bucket.objects
        there = [ObjectInfo(key, len(held.data), held.etag, held.modified) for key, held in objects.items()]
        for entry in plan(op.policy, self.rows(root, there, op.began)).entries:
            held = entry.row.pinned or entry.row.leased or entry.row.restored_from
            same = entry.row.id == token and f"{entry.row.step:016}__" in key
            if same and not held and entry.action not in ("delete", action):
                reasons = "; ".join(map(str, entry.reasons))
                raise ViolationError(
                    "kept", f"{op} goes on to {action} step {entry.row.step} ({folder}), to be kept: {reasons}"
                )

    def _withdrawn(self, key: str) -> None:
        tombstone = tombstone_of(key)
        if tombstone is not None and tombstone[1] == "delete":
            token, _, folder = tombstone
            self.withdrawn[key[: key.index(f"/{catalog_keys.CATALOG}/")], folder, token] = self.seq

    def _measured(self, op: Op, key: str) -> None:
        """A step is measured: what is committed there now, or was when the report began."""
        root, step = key[: key.index(f"/{catalog_keys.CATALOG}/")], int(key.rpartition("/")[2].split("__")[0])
        there = [one for one in self._of_root(root) if one.step == step]
        self.measured[key] = there[0].id if there else None
        if (any(one.seq > op.asked for one in there) and op.kind == "report") or len(there) > 1:
            self.unsure.add(root)

    def rows(self, root: str, listed: Iterable[ObjectInfo], since: int) -> list[Any]:
        """The rows that a listing shows: of commits, and of those that a person or a save took away after `since`.

        Of several records of a folder that of the last commit counts, whatever they say.
        """
        above = f"{root}/{catalog_keys.CATALOG}/step-N/"
        infos = {info.key[len(above) :]: info for info in listed if info.key.startswith(above)}
        steps = [(name[6:], info) for name, info in sorted(infos.items()) if name.startswith("steps/")]
        notes = [(name[6:], info) for name, info in sorted(infos.items()) if name.startswith("notes/")]
        live = {one.id for one in self._of_root(root)}
        counted: dict[str, set[tuple[int, str]]] = {}
        for name, _ in steps:
            commit = catalog_keys.CommitKey.parse(name)
            if commit and (commit.token in live or self.gone.get((root, commit.token), self.seq) > since):
                when = self.when.get((f"{root}/{commit.folder}", commit.token), 0)
                counted.setdefault(commit.folder, set()).add((when, commit.token))
        current = {(folder, max(commits)[1]) for folder, commits in counted.items()}

        def counts(name: str) -> bool:
            commit = catalog_keys.CommitKey.parse(name)
            # Whoever has a tombstone counts as well: what this one was ordered for is in no snapshot without it.
            return (commit.folder, commit.token) in current if commit else "__tombstone__" not in name

        steps = [(name, info) for name, info in steps if counts(name)]
        snapshot = read_steps(steps, StepTemplate(), taken=self.bucket.clock()).with_notes(read_notes(notes))
        rows = []
        for row in snapshot.rows():
            reports = sorted(snapshot.notes.reports, key=lambda report: (report.time, report.key))
            of_it = [one for one in reports if one.step == row.step and self.measured.get(one.key) in (None, row.id)]
            rows.append(replace(row, metrics={one.name: one.value for one in of_it}))
        return rows

    # -- acknowledgements ----------------------------------------------------------------------------------------------

    def saved(self, op: Op, tokens: Iterable[str]) -> None:
        """An actor was told that its save is committed."""
        for token in tokens:
            if token not in self.committed:
                raise ViolationError("not committed", f"{op} reported success, and {token} was never committed")
            if op.value is not None and self.committed[token] not in (op.value, -1.0):
                raise ViolationError("values", f"{op} committed {self.committed[token]} and not {op.value}")

    def pruned(self, op: Op, root: str, deleted: Iterable[tuple[int, str]], thinned: Iterable[tuple[int, str]]) -> None:
        """A pruner was told what it has deleted and thinned."""
        for step, token in [*deleted, *thinned]:
            freed, at = self.removed.get((root, step, token), (frozenset(), 0.0))
            there = {name: self.bucket.objects[name] for name in freed if name in self.bucket.objects}
            left = [name for name, held in there.items() if held.modified < at and not self.named.get(name)]
            if left:
                raise ViolationError("not freed", f"{op} says that step {step} is gone, and leaves {sorted(left)}")

    def loaded(self, op: Op, values: Iterable[float]) -> None:
        found = set(values)
        if len(found) > 1:
            raise ViolationError("mixed load", f"{op} loaded {sorted(found)}")

    def restored(self, op: Op, root: str, step: int) -> None:
        """A job goes on from `step`: no newer checkpoint that is whole, and was all the while, may be passed over."""
        for one in self._of_root(root):
            there = one.kind == "full" and one.seq <= op.asked and self._is_whole(one) and not self._given_up(op, one)
            if there and one.step is not None and one.step > step:
                raise ViolationError("passed over", f"{op} passes over step {one.step}, which is whole")

    def not_loaded(self, op: Op, prefix: str, before: Commit | None, error: BaseException) -> None:
        """An actor could not load the checkpoint that was there `before`, before it looked."""
        commit = self.live.get(f"{prefix}/.metadata")
        if commit is None or before is None or commit.etag != before.etag:
            return
        if not any(name in self.damaged for name in commit.names):
            raise ViolationError("not loaded", f"{op}: {commit.key} is whole, and a load says: {error}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """After the last prune and sweep: nothing is left that nothing names."""
        for commit in self.live.values():
            self._whole(Op("end", "the end"), commit)
        loadable = {one.prefix for one in self.live.values()}
        left = []
        for key in sorted(self.bucket.objects):
            if key in self.planted or key in self.live or self.named.get(key):
                continue
            parts = key.split("/")
            if catalog_keys.CATALOG in parts:
                left += self._note_left(key, loadable)
                continue
            above, _, name = key.rpartition("/")
            # A record lies beside its commit, and may outlive it where another one has replaced that.
            if name == RECORD and above in loadable:
                continue
            if name == JOURNAL:
                # What a conversion that was killed takes up again when it is run again, and nobody else removes.
                continue
            left.append(key)
        if self.bucket.lists_uploads:
            left += [f"upload {one.key}" for one in self.bucket.uploads.values()]
        if left:
            raise ViolationError("left", ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else ""))

    def _note_left(self, key: str, loadable: set[str]) -> list[str]:
        root = key[: key.index(f"/{catalog_keys.CATALOG}/")]
        name = key.rpartition("/")[2]
        if "/fences/" in key:
            return [key]
        if "/steps/" not in key and "/uploads/" not in key:
            return []
        commit = catalog_keys.CommitKey.parse(name)
        if commit is not None:
            return [] if f"{root}/{commit.folder}" in loadable else [key]
        if "/uploads/" in key or catalog_keys.AttemptKey.parse(name) is not None:
            return [key]
        return []
