"""What changed since the last save, counted by part of the state."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import MetadataError
from bucketpoint.format.changes import MOST_PARTS, Changes, ItemChange, PartChanges, amount, merge, tally
from bucketpoint.format.groups import DEFAULT_RULES, GroupRule

Entry = tuple[str, bool, int, int, ItemChange, int]


def tensor(fqn: str, *, changed: bool = True, elements: int = 100) -> Entry:
    return fqn, True, elements, 4 * elements, "changed" if changed else "same", 0


def value(fqn: str, *, changed: bool = True) -> Entry:
    return fqn, False, 0, 10, "changed" if changed else "same", 0


def parts(*entries: Entry, **rules: Any) -> dict[str, str]:
    return {name: part.kind for name, part in merge([tally(entries, **rules)], "s3://b/a").parts.items()}


@pytest.mark.parametrize(
    ("entry", "name", "kind"),
    [
        (tensor("model.layers.0.w"), "model", "model"),
        (tensor("student.model.w"), "student.model", "model"),
        (tensor("teacher.module.w"), "teacher.module", "model"),
        (tensor("layers.3.module.w"), "layers", "model"),
        (tensor("3.module.w"), "model", "model"),
        (tensor("layers.0.attention.wq.weight"), "model", "model"),
        (tensor("optimizer.state.0.exp_avg"), "optimizer moments", "moments"),
        (tensor("optimizer.state.0.step", elements=1), "optimizer", "optim"),
        (value("optimizer.param_groups.0.lr"), "optimizer", "optim"),
        (tensor("optimizer_1.state.0.exp_avg"), "optimizer_1 moments", "moments"),
        (tensor("optim_g.state.0.exp_avg"), "optim_g moments", "moments"),
        (value("lr_scheduler.last_epoch"), "lr_scheduler", "optim"),
        (tensor("lr_scheduler.base"), "lr_scheduler", "optim"),
        (tensor("rng_states.cuda"), "rng_states", "random"),
        (tensor("torch_rng_state"), "torch_rng_state", "random"),
        (value("rng_state_17.python"), "rng_state", "random"),
        (value("dataloader.dp_rank_3"), "dataloader", "data"),
        (value("train_loader.position"), "train_loader", "data"),
        (value("dataset"), "dataset", "data"),
        (value("trainer.epoch"), "trainer", "other"),
        (value("step"), "other", "other"),
        (tensor("step", elements=1), "other", "other"),
    ],
)
def test_the_name_of_an_item_decides_its_part_and_kind(entry: Entry, name: str, kind: str) -> None:
    assert parts(entry) == {name: kind}


def test_weights_without_a_known_name_are_apart_from_a_model_that_has_one() -> None:
    assert parts(tensor("model.w"), tensor("ema.w")) == {"model": "model", "other tensors": "model"}


def test_a_rule_of_the_users_own_makes_a_part() -> None:
    rules = [GroupRule("teacher", ["teacher"]), *DEFAULT_RULES]
    assert parts(tensor("teacher.w"), tensor("w"), rules=rules) == {"teacher": "other", "model": "model"}
    rules = [GroupRule("model", ["generator", "critic"]), *DEFAULT_RULES]
    assert parts(tensor("generator.w"), tensor("critic.w"), rules=rules) == {"critic": "model", "generator": "model"}


def test_ranks_add_up_and_the_largest_part_comes_first() -> None:
    first = tally([tensor("model.a"), tensor("model.b", changed=False), value("step")])
    second = pickle.loads(pickle.dumps(tally([tensor("model.c", changed=False), value("step", changed=False)])))
    changes = merge([first, second, {}], "s3://b/a")
    assert changes.parts == {
        "model": PartChanges("model", 3, 1200, 1, 400),
        "other": PartChanges("other", 2, 20, 1, 10),
    }
    assert list(changes.parts) == ["model", "other"]
    assert (changes.items, changes.nbytes, changes.changed_items, changes.changed_nbytes) == (5, 1220, 2, 410)


@given(
    st.lists(st.tuples(st.sampled_from(["model.a", "optim.b", "c"]), st.booleans(), st.booleans()), max_size=30),
    st.data(),
)
def test_the_sums_do_not_depend_on_the_ranks(items: list[tuple[str, bool, bool]], data: st.DataObject) -> None:
    entries = [
        tensor(fqn, changed=changed) if is_tensor else value(fqn, changed=changed) for fqn, is_tensor, changed in items
    ]
    cut = data.draw(st.integers(0, len(entries)))
    assert merge([tally(entries[:cut]), tally(entries[cut:])], None) == merge([tally(entries)], None)


def test_many_parts_become_one_for_each_kind() -> None:
    models = [tensor(f"m{number}.model.w") for number in range(MOST_PARTS)]
    assert len(merge([tally(models)], None).parts) == MOST_PARTS
    one_rank = [*models, tensor("one.model.w"), value("step")]
    assert len(tally(one_rank)) == 2
    assert parts(*one_rank) == {"model": "model", "other": "other"}
    ranks = [tally([entry]) for entry in one_rank]
    assert merge(ranks, None) == merge([tally(one_rank)], None)


def test_a_tally_is_as_small_for_many_items() -> None:
    few, many = (tally(tensor(f"model.layers.{n}.w") for n in range(count)) for count in (10, 10_000))
    assert len(pickle.dumps(many)) <= len(pickle.dumps(few)) + 16


def test_the_log_line_names_the_parts() -> None:
    changes = Changes(
        "s3://b/a",
        {
            "model": PartChanges("model", 300, 10**9, 12, 10**7),
            "optim moments": PartChanges("moments", 24, 2 * 10**7, 24, 2 * 10**7),
            "optim": PartChanges("optim", 5, 50),
        },
    )
    assert str(changes) == (
        "model 10.0 MB of 1.0 GB in 12 of 300 items; optim moments 20.0 MB, all changed; optim unchanged"
    )
    assert str(Changes(None, changes.parts)) == "no earlier save to compare with"


def test_the_log_line_stays_one_line_for_any_name() -> None:
    changes = Changes("s3://b/a", {"model\nERROR all is lost\x1b[2J": PartChanges("model", 1, 4)})
    assert str(changes).isprintable()


def test_new_items_are_counted_apart_from_those_that_changed() -> None:
    entries: list[Entry] = [("model.a", True, 1, 4, "new", 0), ("model.b", True, 1, 4, "changed", 0), tensor("model.c")]
    (part,) = merge([tally(entries[:1]), tally(entries[1:])], "s3://b/a").parts.values()
    assert (part.changed_items, part.new_items) == (3, 1)


def test_long_names_are_cut_so_that_the_record_stays_readable() -> None:
    changes = merge([tally([tensor("a" * 5000 + ".model.w"), tensor("a" * 5000 + "b.model.w")])], "s3://b/a")
    assert Changes.from_plain(changes.to_plain()) == changes
    assert changes.items == 2


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_amounts(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text


counts = st.integers(0, (1 << 61) - 1)
part_changes = st.builds(
    lambda kind, a, b, c, d: PartChanges(kind, a + b, c + d, b, d, b // 2),
    st.text(max_size=9),
    counts,
    counts,
    counts,
    counts,
)


@given(st.none() | st.text(max_size=99), st.dictionaries(st.text(max_size=99), part_changes, max_size=9))
def test_changes_read_back_as_they_were_written(since: str | None, parts: dict[str, PartChanges]) -> None:
    changes = Changes(since, parts)
    assert Changes.from_plain(json.loads(json.dumps(changes.to_plain()))) == changes


COUNTED = {"items": 2, "nbytes": 8, "changed_items": 1, "changed_nbytes": 4, "new_items": 0, "nonfinite": 0}
SOUND = {"kind": "model", **COUNTED}


def test_fields_of_a_later_version_are_dropped() -> None:
    plain = {
        "since": None,
        "parts": {"model": {**SOUND, "later": 3}},
        "more": [],
        "checked_finite": False,
        "copied_nbytes": 0,
    }
    assert Changes.from_plain(plain) == Changes(None, {"model": PartChanges("model", 2, 8, 1, 4)})


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        "model",
        {},
        {"parts": []},
        {"parts": {}, "since": 5},
        {"parts": {}, "since": "x" * 10_000},
        {"parts": {"m": None}},
        {"parts": {"m": []}},
        {"parts": {"m": {}}},
        {"parts": {"m" * 1000: SOUND}},
        {"parts": {str(n): SOUND for n in range(1000)}},
        {"parts": {5: SOUND}},
        *(
            {"parts": {"m": {name: content for name, content in SOUND.items() if name != left_out}}}
            for left_out in SOUND
        ),
        *({"parts": {"m": {**SOUND, "items": wrong}}} for wrong in (-1, 1.0, True, "2", None, 1 << 70, float("nan"))),
        {"parts": {"m": {**SOUND, "changed_items": 3}}},
        {"parts": {"m": {**SOUND, "changed_nbytes": 9}}},
        {"parts": {"m": {**SOUND, "new_items": 2}}},
        {"parts": {"m": {**SOUND, "nonfinite": -1}}},
        {"parts": {"m": SOUND}, "checked_finite": None},
        {"parts": {"m": SOUND}, "checked_finite": "yes"},
        {"parts": {"m": SOUND}, "copied_nbytes": -1},
        {"parts": {"m": {**SOUND, "kind": []}}},
        {"parts": {"m": {**SOUND, "kind": "k" * 1000}}},
    ],
    ids=lambda plain: str(plain)[:60],
)
def test_malformed_changes_are_refused(plain: Any) -> None:
    if isinstance(plain, dict):
        plain = {"checked_finite": False, "copied_nbytes": 0, **plain}
    with pytest.raises(MetadataError):
        Changes.from_plain(plain)
