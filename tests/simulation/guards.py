"""The guards of the product, by name, and how each is switched off: then the simulation has to find a violation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.simulation.bucket import View

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion import delete as deletion
from bucketpoint.catalog.deletion import fence, prune, sweep
from bucketpoint.catalog.snapshot import Attempt, Snapshot
from bucketpoint.dcp import process_groups, reader
from bucketpoint.dcp.saving import commit, commit_put
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.format import catalog_keys, keys
from bucketpoint.stores.retry import Budget
from bucketpoint.stores.s3 import errors


@dataclass(frozen=True)
class Guard:
    """A guard: how it is switched off, and the scenarios in which that shows soonest."""

    off: Callable[[], AbstractContextManager[object]]
    family: str


def _replaced(where: Any, name: str, what: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(where, name, what)


@contextlib.contextmanager
def _unconditional_deletion() -> Iterator[None]:
    """The pruner takes `.metadata` away whatever it is by then."""
    at_it = threading.local()
    uncommit, write, delete_if = deletion._uncommit, Catalog.write, View.delete_if

    def careless(*given: Any, **named: Any) -> Any:
        at_it.now = True
        try:
            return uncommit(*given, **named)
        finally:
            at_it.now = False

    def written(self: Catalog, key: str, data: bytes = b"", *, if_match: str | None = None) -> Any:
        return write(self, key, data, if_match=None if getattr(at_it, "now", False) else if_match)

    def deleted(self: View, key: str, etag: str) -> None:
        if getattr(at_it, "now", False):
            self.delete([key])
        else:
            delete_if(self, key, etag)

    with (
        mock.patch.object(deletion, "_uncommit", careless),
        mock.patch.object(Catalog, "write", written),
        mock.patch.object(View, "delete_if", deleted),
    ):
        yield


def _all_that_is_there(listed: dict[str, Any], tokens: Any, paths: Any) -> list[str]:
    return [info.key for path, info in listed.items() if path != keys.METADATA]


def _may_withdraw(real: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *given, **named: real(*given, **{**named, "taken_over": False})


def _under_way(snapshot: Snapshot) -> list[Attempt]:
    return [one for one in snapshot.attempts if one.is_live(snapshot.taken)]


def _as_a_condition(*given: Any) -> Exception:
    return PreconditionFailedError("refused")


def _by_its_own_clock(self: Catalog, written: Any) -> Catalog:
    return replace(self, now=self.clock())


GUARDS: dict[str, Guard] = {
    "deletion is conditional": Guard(_unconditional_deletion, "asleep"),
    "deletion by token": Guard(_replaced(deletion, "_data", _all_that_is_there), "plain_over_due"),
    "newest is whole": Guard(_replaced(prune, "damage", lambda catalog, inspected: None), "newest_gone"),
    "save takes its fence": Guard(_replaced(fence.AttemptFence, "ensure", lambda self: None), "long_save"),
    "sweep takes the fence": Guard(_replaced(sweep, "condemn", lambda *given: True), "long_save"),
    "age floor": Guard(_replaced(sweep, "MIN_SWEEP_AGE_S", 0.0), "long_save"),
    "metadata of ranks": Guard(_replaced(keys, "is_rank_metadata", lambda path: False), "alone"),
    "only what was seen": Guard(_replaced(commit_put, "_refuse_others", lambda *given, **named: None), "copies"),
    "intent of a save that may commit again": Guard(_replaced(prune, "_running", _under_way), "unheard"),
    "fence of a save that may commit again": Guard(_replaced(deletion, "_fenced", lambda *given: False), "unheard"),
    "intent after a second request": Guard(_replaced(commit, "process_budget", Budget), "unheard"),
    "a policy that keeps takes back": Guard(_replaced(Snapshot, "spared", lambda self, fates: []), "changed_mind"),
    "the store's time": Guard(_replaced(Catalog, "dated", _by_its_own_clock), "wrong_clocks"),
    "commit that a record names": Guard(_replaced(prune, "absent", lambda *given, **named: ([], False)), "removed"),
    "metrics of a commit": Guard(_replaced(catalog_keys, "token_named", lambda metric: None), "measured_again"),
    "claims are not withdrawn": Guard(_replaced(prune, "still_goes", _may_withdraw(prune.still_goes)), "held"),
    "one commit on all ranks": Guard(_replaced(reader, "agree_on_commit", lambda plans, url: plans), "loads"),
    "ranks that staged the state": Guard(_replaced(process_groups, "refuse_other_ranks", lambda *given: None), "ended"),
    "a refusal is no damage": Guard(_replaced(errors, "translate", _as_a_condition), "refused"),
}


@contextlib.contextmanager
def switched_off(name: str) -> Iterator[None]:
    """Without the guard of that name, if it is not empty."""
    if not name:
        yield
        return
    with GUARDS[name].off():
        yield
