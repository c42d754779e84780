"""What is told of a prune and a sweep while they run: counts of what was really listed and deleted."""

from __future__ import annotations

from pathlib import Path

from bucketpoint.catalog.deletion.throttle import PAGE
from bucketpoint.cli.progress_line import WatchedStore
from bucketpoint.stores import DeleteFailure, LocalStore
from cli.conftest import Program
from cli.test_retention import save_run, write


def test_every_batch_is_told_of_and_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    keys = [f"k/{number:05}" for number in range(2 * PAGE + 1)]
    (tmp_path / "k").mkdir()
    for key in keys:
        (tmp_path / key).touch()

    class Refusing(LocalStore):
        def delete(self, keys: object) -> list[DeleteFailure]:
            assert isinstance(keys, list)
            return [DeleteFailure(keys[0], "AccessDenied", "no"), *super().delete(keys[1:])]

    seen: list[tuple[int, int]] = []
    store = WatchedStore(Refusing(str(tmp_path)), lambda listed, deleted: seen.append((listed, deleted)))
    assert [info.key for info in store.list("k/")] == keys
    assert seen == [(number, 0) for number in range(1, len(keys) + 1)]
    assert [failure.key for failure in store.delete(keys)] == [keys[0], keys[PAGE], keys[2 * PAGE]]
    assert seen[len(keys) :] == [(len(keys), done) for done in (PAGE - 1, 2 * PAGE - 2, 2 * PAGE - 2)]
    assert store.url == LocalStore(str(tmp_path)).url


def test_a_prune_and_a_sweep_that_are_watched_do_what_they_do_unwatched(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 10, 20, 30)
    pruned = program("prune", str(write(tmp_path, root)), "--progress", "--json")
    assert (pruned.code, [one["step"] for one in pruned.json["deleted"]]) == (0, [10])
    assert program("gc", root, "--deep", "--progress", "--json").json["objects"] == []
