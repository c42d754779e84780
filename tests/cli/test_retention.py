"""`ls`, `prune`, `pin`, `undo`, `report`, `rollback`, `gc` and `overview` on runs that a manager saved."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.worker import PAGE, counted
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import DeleteFailure, LocalStore
from cli.conftest import Program

STEPS = (10, 20, 30, 40, 50)


def save_run(root: str, *steps: int) -> None:
    policy = RetentionPolicy(Keep(100), prune=Prune(when="manual", grace=timedelta(0)))
    with CheckpointManager(root, policy=policy) as manager:
        for step in steps:
            manager.save(step, {"model": {"w": torch.ones(1000)}, "optim": {"m": torch.ones(2000)}, "step": step})


def write(folder: Path, root: str, *, grace: str = "0s", count: int = 20) -> Path:
    file = folder / "policy.yaml"
    file.write_text(
        f"version: 1\nroot: {root}\nkeep:\n  latest: 2\n  best:\n    - {{metric: eval/loss, mode: min}}\n"
        f"prune: {{grace: {grace}, max_delete: {{count: {count}, fraction: 1.0}}}}\n"
    )
    return file


def steps_in(program: Program, root: str) -> list[int]:
    return [one["step"] for one in program("ls", root, "--json").json["checkpoints"]]


def test_plans_costs_and_carries_out_a_policy(program: Program, root: str, tmp_path: Path) -> None:
    save_run(root, *STEPS)
    policy = str(write(tmp_path, root))
    assert program("report", root, "20", "eval/loss=0.5").code == 0
    assert program("pin", root, "10", "--reason", "a release").code == 0
    planned = program("prune", policy, "--dry-run", "--json")
    assert planned.code == 0
    found = {one["step"]: one["action"] for one in planned.json["checkpoints"]}
    assert found == {10: "keep", 20: "keep", 30: "delete", 40: "keep", 50: "keep"}
    assert "3rd" in planned.json["checkpoints"][2]["miss"]["why"]
    assert {name: planned.json[name] for name in planned.json["summary"]} == planned.json["summary"]
    assert "step 30" in program("prune", policy, "--dry-run").out
    cost = program("overview", root, "--policy", policy, "--json").json
    assert (cost["now"]["checkpoints"], cost["what_if"]["checkpoints"]) == (5, 4)

    assert steps_in(program, root) == [*STEPS]
    done = program("prune", policy, "--progress", "--json")
    assert (done.code, [one["step"] for one in done.json["deleted"]]) == (0, [30])
    assert steps_in(program, root) == [10, 20, 40, 50]
    assert program("pin", root, "10", "--remove").code == 0
    assert program("pin", root, "10", "--remove").code == 1
    assert "step 10 deleted" in program("prune", policy).out
    assert "nothing to do" in program("prune", policy).out
    assert program("verify", f"{root}/step-20").code == 0
    assert program("show", f"{root}/step-10").code == 3


def test_names_withdraws_and_gives_back_the_tombstones_of_a_run(program: Program, root: str, tmp_path: Path) -> None:
    save_run(root, *STEPS)
    file = write(tmp_path, root, grace="1h")
    plan = ("prune", "--dry-run", str(file))
    assert " freed, 1h after they get a tombstone" in program(*plan).out
    done = program("prune", str(file), "--json").json
    assert ([one["step"] for one in done["tombstones"]], done["deleted"]) == ([10, 20, 30], [])
    assert program("ls", root).out.count("to be deleted after 2") == 3
    said = program(*plan).out
    assert said.count("has a tombstone, is due after 2") == 3
    assert "2 kept, 0 thinned, 3 deleted" in said
    assert "freed; all of them have a tombstone already" in said
    assert "checkpoints are due" not in said
    waiting = program(*plan, "--json").json["waiting"]
    assert [(one["step"], one["action"], one["is_due"]) for one in waiting] == [(n, "delete", False) for n in STEPS[:3]]
    file.write_text(file.read_text().replace("latest: 2", "latest: 4"))
    said = program(*plan).out
    assert said.count("(3rd latest); a prune withdraws its tombstone") == 1
    assert said.count("has a tombstone, is due after 2") == 1
    assert "4 kept, 0 thinned, 1 deleted" in said
    assert "freed; it has a tombstone already" in said
    told = program(*plan, "--json").json
    assert [one["step"] for one in told["withdrawn"]] == [20, 30]
    assert [one["step"] for one in told["waiting"]] == [10]
    assert "step 30 lost its tombstone, because the policy keeps it" in program("prune", str(file)).out
    listed = program("ls", root, "--json").json["checkpoints"]
    assert [one["step"] for one in listed if one["tombstone"]] == [10]
    assert [program("undo", root, "10").code for _ in range(2)] == [0, 1]
    assert program("pin", root, "30").code == 0
    listed = program("ls", root, "--json").json["checkpoints"]
    assert [one["held"] for one in listed] == [[], [], ["pinned"], [], []]
    assert not any(one["tombstone"] for one in listed)


def test_names_in_a_plan_the_tombstones_that_are_due(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    file = str(write(tmp_path, root, grace="1s"))
    program("prune", file)
    time.sleep(1.1)
    said = program("prune", "--dry-run", file).out
    assert said.count("has a tombstone, is due at the next prune") == 3
    assert "the tombstones of 3 checkpoints are due" in said
    waiting = program("prune", "--dry-run", file, "--json").json["waiting"]
    assert [one["is_due"] for one in waiting] == [True] * 3


def test_names_a_rule_for_a_metric_that_nobody_reports(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    file = str(write(tmp_path, root, grace="1h"))
    commands = (("prune", file, "--dry-run"), ("prune", file))
    assert program("report", root, "20", "evl/loss=0.5").code == 0
    line = "no checkpoint has a value of eval/loss (rule best); the metrics reported are evl/loss"
    for command in commands:
        said = program(*command)
        assert (said.code, line in said.out) == (0, True)
        assert program(*command, "--json").json["unreported"] == {"eval/loss": line}
    assert program("report", root, "30", "eval/loss=0.5").code == 0
    for command in commands:
        assert "no checkpoint has a value" not in program(*command).out


def test_takes_the_policy_file_for_a_manager_too(tmp_path: Path) -> None:
    with CheckpointManager(policy=write(tmp_path, f"{tmp_path}/run")) as manager:
        assert (manager.policy.keep.latest, manager.catalog.url) == (2, f"{tmp_path}/run")


def test_deletes_a_few_of_too_many_until_somebody_says_yes(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, *STEPS)
    careful = str(write(tmp_path, root, count=1))
    for arguments in (("prune", careful, "--dry-run"), ("prune", careful)):
        refused = program(*arguments)
        assert refused.code == 1
        assert "REFUSED" in refused.out
        assert "max_delete allows 1" in refused.out
        assert "prune --yes" in refused.out
    assert "step 10 deleted" in refused.out
    assert steps_in(program, root) == [20, 30, 40, 50]
    assert program("prune", careful, "--yes").code == 0
    assert steps_in(program, root) == [40, 50]


def test_adopts_checkpoints_of_others_and_removes_debris(program: Program, root: str) -> None:
    for step in (100, 200):
        writer = BucketWriter(f"{root}/step-{step}")
        dcp.save({"w": torch.ones(10)}, storage_writer=writer, no_dist=True)
    for options in (["--dry-run"], []):
        adopted = program("gc", root, "--adopt", *options, "--json").json["adopted"]
        assert [url.rsplit("/", 1)[1] for url in adopted] == ["step-100", "step-200"]
    assert program("gc", root, "--adopt", "--json").json["adopted"] == []
    assert steps_in(program, root) == [100, 200]
    assert program("gc", root, "--deep", "--older-than", "1h", "--progress", "--json").json["objects"] == []
    too_early = program("gc", root, "--deep", "--older-than", "59m")
    assert too_early.code == 2
    assert "--older-than 1h" in too_early.err
    assert program("verify", f"{root}/step-100").code == 0


def test_names_the_place_of_a_fault_in_a_policy_or_its_key(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nroot: file:///tmp/nowhere\nkeep:\n  latest: 0\n  newest: 3\n")
    failed = program("prune", "--dry-run", str(file))
    assert (failed.code, "line 4" in failed.err, "line 5" in failed.err) == (2, True, True)
    file.write_text("version: 1\nkeep: {latest: 1}\n")
    assert "pass --root" in program("prune", str(file)).err
    # The function of `match` is imported for a plan, which knows the policy and not its text.
    root = f"{tmp_path}/run"
    save_run(root, 100)
    for match in ("no_such_module:keep", "os:nothing", "os:name", "os:getcwdb"):
        file.write_text(f"version: 1\nroot: {root}\nkeep: {{latest: 1, match: '{match}'}}\n")
        failed = program("prune", "--dry-run", str(file))
        assert (failed.code, f"  keep.match: {match} " in failed.err, "None" in failed.err) == (2, True, False)


def test_takes_a_step_in_every_form_in_every_command(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 1, 2, 3)
    for number in (1, 2, 3):
        assert program("report", f"{root}/step-{number}", f"loss={4 - number}").code == 0
    # Without a policy, the name of the only metric says that low values are better.
    for words in (["2"], ["latest"], ["best"], ["best:loss:max"], ["best:loss:min"]):
        step = {"2": 2, "best:loss:max": 1}.get(words[0], 3)
        for command in ("show", "verify", "rm --dry-run --force"):
            assert program(*command.split(), root, *words, "--json").json["url"] == f"{root}/step-{step}"
        assert program("pin", root, *words, "--json").json["step"] == step
    assert program("diff", root, "1", "latest", "--json").json["b"]["url"] == f"{root}/step-3"
    assert program("rollback", f"{root}/step-1", "--dry-run", "--json").json["step"] == 1
    assert program("undo", root, "1", "2").out == "step 1 has no tombstone\nstep 2 has no tombstone\n"
    assert program("undo", root, "4").out == "step 4 has no checkpoint: a deletion cannot be undone\n"
    assert program("report", root, "latest", "accuracy=1").code == 0
    refused = program("show", root, "best")
    assert (refused.code, "the run has accuracy, loss\n" in refused.err) == (2, True), refused.err
    for words, code, why in (
        (["newest"], 2, "'newest' is not a step, latest or best"),
        (["best:f"], 2, "the run has accuracy, loss\n"),
        (["best:los:min"], 3, "the run has accuracy, loss\n"),
    ):
        refused = program("show", root, *words)
        assert (refused.code, why in refused.err) == (code, True), refused.err


@pytest.mark.parametrize(("command", "option"), [("pin", "--expires"), ("rollback", "--grace")])
def test_refuses_a_duration_beyond_all_times_before_it_writes_anything(
    program: Program, tmp_path: Path, command: str, option: str
) -> None:
    root = str(tmp_path)
    save_run(root, 10, 20)
    refused = program(command, root, "10", option, "9999999d")
    assert refused.code == 2
    assert "is too long" in refused.err
    notes = open_catalog(root).snapshot().notes
    assert (notes.pins, notes.tombstones) == ((), ())


def test_gives_a_run_a_name_that_the_policy_must_say(program: Program, root: str, tmp_path: Path) -> None:
    save_run(root, 10, 20, 30)
    file = write(tmp_path, root)
    assert program("gc", root, "--name", "a b").code == 2
    assert "would belong to run llama" in program("gc", root, "--name", "llama", "--dry-run").out
    assert program("ls", root, "--json").json["run"] is None
    named = program("gc", root, "--name", "llama")
    assert named.code == 0
    assert "add `run: llama` to the policy of its jobs" in named.out
    assert program("ls", root, "--json").json["run"] == "llama"
    refused = program("prune", str(file), "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (5, "OtherRunError")
    assert "set run: llama in the policy" in refused.err
    file.write_text(file.read_text() + "run: llama\n")
    done = program("prune", str(file), "--json")
    assert [one["step"] for one in done.json["deleted"]] == [10]
    for options in (["--dry-run"], []):
        taken = program("gc", root, "--name", "other", *options, "--json")
        assert (taken.code, taken.json["run"]) == (1, "llama")
    for options, owner in (["--dry-run"], "llama"), ([], None):
        assert " no name any more: it was llama\n" in program("gc", root, "--name", "", *options).out
        assert program("ls", root, "--json").json["run"] == owner


def test_deletes_nothing_behind_a_link_that_stands_where_a_checkpoint_was(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 10, 20, 30)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run/step-10").rename(elsewhere)
    (tmp_path / "run/step-10").symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.rglob("*"))
    done = program("prune", str(write(tmp_path, root)))
    assert sorted(path.name for path in elsewhere.rglob("*")) == before
    assert done.code != 0
    assert "step-10 is a symbolic link" in done.err
    # The link itself is what a person may name.
    assert program("show", f"{root}/step-10").code == 0


def test_gives_what_is_newer_than_a_rollback_a_tombstone_and_restores_its_step(
    program: Program, root: str, tmp_path: Path
) -> None:
    save_run(root, *STEPS)
    would = program("rollback", root, "20", "--dry-run", "--json").json
    assert (would["tombstones"], would["dry_run"]) == ([30, 40, 50], True)
    assert program("ls", root).out.count("to be deleted") == 0
    done = program("rollback", root, "20")
    assert done.code == 0
    assert done.out.count("will be deleted after 2") == 3
    assert "the next restore loads step 20" in done.out
    planned = program("prune", "--dry-run", str(write(tmp_path, root, grace="1h"))).out
    assert planned.count(", regardless of the policy") == 3
    assert "2 kept, 0 thinned, 3 deleted" in planned
    with CheckpointManager(root, policy=RetentionPolicy(Keep(100))) as manager:
        state = {"model": {"w": torch.zeros(1000)}, "optim": {"m": torch.zeros(2000)}, "step": 0}
        assert manager.restore(state).step == 20  # type: ignore[union-attr]
        manager.save(30, state)
    assert program("undo", root, "50").code == 0
    listed = program("ls", root, "--json").json["checkpoints"]
    assert [one["step"] for one in listed if not one["tombstone"]] == [10, 20, 30, 50]
    # Further, or back again: the step that is named is what is restored.
    assert program("rollback", root, "10", "--grace", "1h").code == 0
    assert program("rollback", root, "20", "--json").json["tombstones"] == []
    with CheckpointManager(root, policy=RetentionPolicy(Keep(100))) as manager:
        assert manager.restore(state).step == 20  # type: ignore[union-attr]


def test_leaves_what_is_held_in_a_rollback_and_gives_nothing_up_for_damage(program: Program, tmp_path: Path) -> None:
    root = str(tmp_path)
    save_run(root, *STEPS)
    assert program("pin", root, "40").code == 0
    run = open_catalog(root)
    run.store.delete([next(info.key for path, info in run.objects_of("step-10").items() if path.startswith("data/"))])
    refused = program("rollback", root, "10")
    assert refused.code == 1
    assert "Step 10 is not whole" in refused.err
    assert program("rollback", root, "25").code == 3
    assert "tombstone" not in program("ls", root).out
    held = program("rollback", root, "20", "--json")
    assert held.code == 1
    assert held.json["tombstones"] == [30, 50]
    assert held.json["held"] == [{"step": 40, "why": "pinned"}]
    assert "step 40 stays, because it is pinned" in program("rollback", root, "20").out


def test_tells_of_every_batch_and_does_not_count_what_is_refused(tmp_path: Path) -> None:
    keys = [f"k/{number:05}" for number in range(2 * PAGE + 1)]
    (tmp_path / "k").mkdir()
    for key in keys:
        (tmp_path / key).touch()

    class Refusing(LocalStore):
        def delete(self, keys: object) -> list[DeleteFailure]:
            assert isinstance(keys, list)
            return [DeleteFailure(keys[0], "AccessDenied", "no"), *super().delete(keys[1:])]

    seen: list[tuple[int, int]] = []
    store = counted(Refusing(str(tmp_path)), lambda *numbers: seen.append(numbers))
    assert [info.key for info in store.list("k/")] == keys
    assert seen == [(PAGE, 0), (PAGE, 0), (1, 0)]
    assert [failure.key for failure in store.delete(keys)] == [keys[0], keys[PAGE], keys[2 * PAGE]]
    assert seen[3:] == [(0, PAGE - 1), (0, PAGE - 1), (0, 0)]
    assert store.url == LocalStore(str(tmp_path)).url
