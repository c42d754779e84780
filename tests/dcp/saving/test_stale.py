"""The stale-state alarm: when it is given, when not, and what it says."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable

import pytest

from bucketpoint.dcp.saving.stale import StalePart, StaleWatch, advanced, tell
from bucketpoint.format.changes import Changes, PartChanges

KINDS = {
    "model": "model",
    "teacher.model": "model",
    "generator": "model",
    "critic": "model",
    "optim moments": "moments",
    "optim": "optim",
    "rng": "random",
    "dataloader": "data",
    "other": "other",
}
TRAINING = ("model", "optim moments", "optim", "rng", "dataloader", "other")


def url(step: int) -> str:
    return f"s3://b/run/step-{step}"


def changes(changed: Iterable[str], parts: Iterable[str] = TRAINING, *, since: str | None = "s3://b/run/x") -> Changes:
    changed = set(changed)
    return Changes(
        since, {part: PartChanges(KINDS[part], 10, 100, *((2, 20) if part in changed else (0, 0))) for part in parts}
    )


class Run:
    """Saves of one run, each with the parts that changed since the one before."""

    def __init__(self, parts: Iterable[str] = TRAINING) -> None:
        self.watch, self.parts, self.step = StaleWatch(), tuple(parts), 0
        assert self.watch.look(changes(parts, parts, since=None), url(0), advanced=True) == []

    def save(
        self, changed: Iterable[str], *, advanced: bool = True, idle_lr: bool = False
    ) -> list[tuple[str, str | None]]:
        self.step += 1
        found = self.watch.look(changes(changed, self.parts), url(self.step), advanced=advanced, idle_lr=idle_lr)
        assert all(each.url == url(self.step) for each in found)
        return [(each.part, each.last_changed) for each in found]

    def without(self, *parts: str) -> list[tuple[str, str | None]]:
        return self.save(set(self.parts) - set(parts))


def test_ordinary_training_is_silent() -> None:
    # As in LoRA: some tensors of the model and all moments change, most tensors of the model do not.
    run = Run()
    assert [run.without() for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize("part", ["model", "optim moments", "dataloader"])
def test_a_part_that_stops_is_told_once_until_it_moves_again(part: str) -> None:
    run = Run()
    assert run.without() == run.without() == []
    assert run.without(part) == [(part, url(2))]
    assert run.without(part) == run.without(part) == []
    assert run.without() == []
    # It paused for three saves before: a pause as long is no news.
    assert [run.without(part) for _ in range(5)] == [[], [], [], [(part, url(6))], []]


@pytest.mark.parametrize("part", ["optim", "other", "rng"])
def test_steps_and_settings_may_stand_still(part: str) -> None:
    run = Run()
    assert run.without() == run.without(part) == []


def test_an_optimizer_disconnected_midway_is_told() -> None:
    run = Run()
    assert run.without() == []
    assert run.without("model", "optim moments") == [("model", url(1)), ("optim moments", url(1))]


def test_an_optimizer_disconnected_from_the_start_is_told_once() -> None:
    run = Run()
    assert run.without("model", "optim moments") == [("model", None), ("optim moments", None)]
    assert run.without("model", "optim moments") == []


def test_a_dataloader_that_never_moved_is_told_and_a_random_generator_is_not() -> None:
    run = Run()
    assert run.without("rng", "dataloader") == [("dataloader", None)]
    assert run.without("rng", "dataloader") == []


def test_a_warm_up_at_zero_learning_rate_is_silent_for_the_model_alone() -> None:
    run = Run()
    still = set(TRAINING) - {"model"}
    assert run.save(still, idle_lr=True) == run.save(still, idle_lr=True) == []
    assert run.save(still - {"optim moments"}, idle_lr=True) == [("optim moments", url(2))]
    # The warm-up is over and the model moves; then it stops again, at a learning rate that is not 0.
    assert run.without() == []
    assert run.save(still, idle_lr=True) == []
    assert run.save(still) == [("model", url(4))]


def test_a_model_that_does_not_move_after_the_warm_up_is_told() -> None:
    run = Run()
    assert run.save(set(TRAINING) - {"model"}, idle_lr=True) == []
    assert run.without("model") == [("model", None)]


def test_models_trained_in_turns_are_told_at_the_first_turn_only() -> None:
    run = Run(("generator", "critic", "optim moments"))
    assert run.without() == []
    assert run.without("critic") == [("critic", url(1))]
    assert run.without("generator") == [("generator", url(2))]
    for _ in range(4):
        assert run.without("critic") == []
        assert run.without("generator") == []
    # The turn of the generator is over for a second save, longer than any turn before.
    assert run.without("generator") == [("generator", url(10))]


def test_a_part_that_the_save_before_did_not_hold_has_neither_moved_nor_stopped() -> None:
    # The first save held the model alone; the teacher, which is frozen, came with the next.
    run = Run((*TRAINING, "teacher.model"))
    added = changes(TRAINING, run.parts)
    new = PartChanges("model", 10, 100, 10, 100, 10)
    added = Changes(added.since, {**added.parts, "teacher.model": new})
    assert run.watch.look(added, url(1), advanced=True) == []
    assert [run.without("teacher.model") for _ in range(3)] == [[], [], []]


def test_a_frozen_teacher_is_logged_once_and_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketpoint")
    run = Run((*TRAINING, "teacher.model"))
    for _ in range(4):
        assert run.without("teacher.model") == []
    assert [record.getMessage() for record in caplog.records] == [
        "'teacher.model' (model) has not changed since the first save: it counts as frozen"
    ]


def test_without_a_step_nothing_is_stale() -> None:
    run = Run()
    assert run.without() == []
    for _ in range(3):
        assert run.save((), advanced=False) == []
    # Saves between which training stood still are no pause of a part, and the alarm is still to come.
    assert run.without("model") == [("model", url(1))]


def test_a_checkpoint_saved_to_one_url_again_and_again_is_watched() -> None:
    watch, last = StaleWatch(), "s3://b/run/last"
    assert watch.look(changes(TRAINING, since=None), last, advanced=True) == []
    assert watch.look(changes(TRAINING, since=last), last, advanced=True) == []
    (stale,) = watch.look(changes(set(TRAINING) - {"model"}, since=last), last, advanced=True)
    assert stale == StalePart("model", "model", last, last)


@pytest.mark.parametrize(
    ("since", "now", "expected"),
    [
        ("s3://b/step-400", "s3://b/step-500", True),
        ("s3://b/step-400/", "s3://b/step-500/", True),
        ("s3://b/step-500", "s3://b/step-400", False),
        ("s3://b/step-0500", "s3://b/step-500", False),
        ("s3://b/step-99", "s3://b/step-100", True),
        ("s3://b/9", "s3://b/10", True),
        ("s3://b/step-" + "9" * 5000, "s3://b/step-1" + "0" * 5000, True),
        # These tell nothing: then anything that changed does.
        ("s3://b/step-400", "s3://b/step-400", None),
        ("s3://b/step-400", "s3://b/step-400/", None),
        ("s3://b/step-400", "s3://b/final", None),
        ("s3://b/epoch-9", "s3://b/step-1", None),
        ("s3://b/last", "s3://b/best", None),
    ],
)
def test_numbers_of_the_folders_tell_whether_training_went_on(since: str, now: str, expected: bool | None) -> None:
    assert advanced(since, now, changes(["rng"])) is (True if expected is None else expected)
    assert advanced(since, now, changes([])) is bool(expected)


STALE = StalePart("optim moments", "moments", url(3), url(5))


def test_the_message_says_what_stopped_when_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    tell([STALE, StalePart("model", "model", None, url(5))])
    first, second = caplog.messages
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for said in ("'optim moments'", url(3), url(5), "stale copy", "Check that the optimizer"):
        assert said in first
    for said in ("'model'", "first save of this process", "learning rate is 0", "param_groups"):
        assert said in second


def test_the_watch_can_be_pickled() -> None:
    run = Run()
    run.without()
    run.watch = pickle.loads(pickle.dumps(run.watch))
    assert run.without("model") == [("model", url(1))]
