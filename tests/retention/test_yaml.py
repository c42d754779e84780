"""Policies as YAML: strict, every fault with its place, equal to the Python objects, and the JSON Schema beside it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
import yaml
from hypothesis import given

from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.policy_file import read_policy
from bucketpoint.errors import PolicyError
from bucketpoint.retention import (
    Await,
    Best,
    EveryHours,
    EverySteps,
    InFlight,
    Keep,
    Layout,
    MaxDelete,
    Prune,
    RetentionPolicy,
    Save,
    SaveEvery,
    SaveEveryMinutes,
    from_yaml,
    to_yaml,
)
from bucketpoint.retention.policy import LEAST_DEBRIS_AGE
from bucketpoint.retention.setting_types import LONGEST
from bucketpoint.retention.yaml_text import MAX_BYTES
from make_policy_schema import SCHEMA_FILE, schema_text
from retention.cases import policies

ROOT = Path(__file__).resolve().parents[2]

EXAMPLE = RetentionPolicy(
    Keep(
        latest=3,
        best=[Best("eval/loss", "min", 2, wait=Await(timedelta(hours=12), 4))],
        every=[EverySteps(1000, until=10000), EverySteps(10000), EveryHours(24, last=14, thin="weights")],
        within=timedelta(hours=6),
        steps=[143000],
    ),
    root="s3://acme-ckpt/llama8b/run-042",
    layout=Layout("step-{step}"),
    save=Save(
        every=[SaveEvery(500), SaveEveryMinutes(30)],
        on=["first_step", "last_step", "sigterm"],
        in_flight=InFlight(when_busy="wait", timeout=timedelta(minutes=20)),
    ),
    prune=Prune(
        when="after_commit",
        grace=timedelta(hours=24),
        debris_after=timedelta(hours=48),
        max_delete=MaxDelete(20, 0.5),
    ),
)


def read(text: str, **environ: str) -> RetentionPolicy:
    return from_yaml(text, environ=environ, file="policy.yaml")


def faults(text: str, **environ: str) -> list[tuple[int | None, int | None, str]]:
    """Line, column, and path with message, of each fault."""
    with pytest.raises(PolicyError) as caught:
        read(text, **environ)
    assert caught.value.file == "policy.yaml"
    assert all(fault.remedy for fault in caught.value.faults)
    return [(fault.line, fault.column, str(fault).split(". ")[0]) for fault in caught.value.faults]


def keep(*lines: str) -> str:
    return "\n".join(["version: 1", "keep:", "  latest: 1", *(f"  {line}" for line in lines)]) + "\n"


def test_reads_the_example_as_the_same_policy_as_the_python_objects() -> None:
    assert read((ROOT / "examples/retention.yaml").read_text()) == EXAMPLE


def test_gives_the_smallest_policy_the_documented_defaults() -> None:
    policy = read("version: 1\nkeep: {latest: 3}\n")
    assert policy == RetentionPolicy(Keep(3))
    assert policy.prune == Prune("after_commit", timedelta(hours=24), timedelta(hours=48), MaxDelete(20, 0.5))
    assert policy.save == Save((), (), InFlight(1, "wait", timedelta(minutes=20)))
    assert policy.layout == Layout("step-{step}")


@given(policies)
def test_reads_any_policy_back_from_its_own_yaml(policy: RetentionPolicy) -> None:
    assert from_yaml(to_yaml(policy), environ={}) == policy


words = st.text("abe137_.:#'\"{}[]()*&!%@`?|>,<=~^+-\\é世", min_size=1, max_size=8)
odd_words = st.sampled_from(
    ["1e3", "on", "no", "null", "~", "0x10", "1:30", "2001-01-01", "1_000", ".inf", "a: b", "*a", "<<"]
)


@given(words | odd_words, words, st.integers(0, int(LONGEST.total_seconds())))
def test_reads_names_back_that_yaml_takes_for_something_else(metric: str, root: str, seconds: int) -> None:
    policy = RetentionPolicy(
        Keep(1, best=[Best(metric, "max")]), root=f"s3://{root}/$x", prune=Prune(grace=timedelta(seconds=seconds))
    )
    assert from_yaml(to_yaml(policy), environ={}) == policy


@pytest.mark.parametrize("setting", [setting.name for setting in dataclasses.fields(RetentionPolicy)])
def test_writes_every_setting(setting: str) -> None:
    policy = dataclasses.replace(EXAMPLE, run="gpt-7b", layout=Layout("at-{step}"), prune=Prune(grace=timedelta(1.5)))
    assert getattr(policy, setting) != getattr(RetentionPolicy(Keep(1)), setting)
    assert getattr(from_yaml(to_yaml(policy), environ={}), setting) == getattr(policy, setting)


def test_writes_nothing_that_stands_at_its_default() -> None:
    assert to_yaml(RetentionPolicy(Keep(3))) == "version: 1\nkeep: {latest: 3}\n"


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("90s", timedelta(seconds=90)),
        ("20m", timedelta(minutes=20)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(days=14)),
    ],
)
def test_reads_durations_with_units(text: str, span: timedelta) -> None:
    assert read(keep(f"within: {text}")).keep.within == span


BROKEN = """\
version: 1
rot: s3://x
root: s3://${NOPE}/x
keep:
  latest: 0
  best: {metric: a}
  every:
    - {step: 1000}
    - {steps: 1000}
    - {steps: 2000}
    - {steps: 1000}
    - {foo: 1}
  within: 6 hours
  lates: 3
  latest: 4
  steps: []
prune:
  grace: 1y
  when:
save: {on: [sigkill], every: [{steps: 100}, {steps: 50}]}
"""


def test_names_every_fault_of_a_file_with_its_place() -> None:
    assert faults(BROKEN) == [
        (2, 1, "rot: The key `rot` is not known"),
        (3, 12, "root: NOPE is not set"),
        (5, 11, "keep.latest: 0 is out of bounds"),
        (6, 9, "keep.best: A mapping is not a list"),
        (8, 8, "keep.every[0].step: The key `step` is not known"),
        (11, 7, "keep.every[3]: {'steps': 1000} is listed twice"),
        (12, 7, "keep.every[4]: Neither `steps` nor `hours` is given"),
        (13, 11, "keep.within: '6 hours' is not a duration"),
        (14, 3, "keep.lates: The key `lates` is not known"),
        (15, 3, "keep.latest: The key `latest` is given twice, first in line 5"),
        (16, 10, "keep.steps: The list is empty"),
        (18, 10, "prune.grace: '1y' is not a duration"),
        (19, 8, "prune.when: The value is missing"),
        (20, 13, "save.on[0]: 'sigkill' is not a valid value"),
    ]


def test_shows_all_faults_in_the_error_that_survives_pickling() -> None:
    with pytest.raises(PolicyError) as caught:
        read(BROKEN)
    error = caught.value
    assert str(error).splitlines()[0] == "policy.yaml has 14 faults:"
    assert "  policy.yaml:2:1: rot: The key `rot` is not known. Did you mean `root`?" in str(error)
    assert (error.faults[0].line, error.faults[0].column) == (2, 1)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.faults == error.faults


SEEN_BY_EDITORS = [
    ("keep: {latest: 1}\n", (1, 1), "`version` is missing"),
    ("version: 2\nkeep: {latest: 1}\n", (1, 10), "version: Version 2 is not supported"),
    ("version: 1\nkeep: {}\n", (2, 7), "keep: `latest` is missing"),
    (keep("within: 6"), (4, 11), "keep.within: 6 is not a duration"),
    (keep("within: 0.0h"), (4, 11), "keep.within: 0s is too short"),
    (keep("match: os.system"), (4, 10), "keep.match: 'os.system' is not an import path such as my_pkg"),
    (keep("steps: [1, 2, 1]"), (4, 17), "keep.steps[2]: 1 is listed twice"),
    (keep("every: [{steps: 10, hours: 1}]"), (4, 23), "keep.every[0].hours: The key `hours` is not known"),
    (
        "version: 1\nlayout: {step_dir: step}\nkeep: {latest: 1}\n",
        (2, 20),
        "layout.step_dir: 'step' is not a folder",
    ),
    (
        "version: 1\nkeep: {latest: 1}\nprune: {max_delete: {fraction: 2}}\n",
        (3, 32),
        "prune.max_delete.fraction: 2 is",
    ),
]
"""Faults that the JSON Schema names too."""


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        *SEEN_BY_EDITORS,
        ("", (1, 1), "The policy is empty"),
        ("# nothing\n", (1, 1), "The policy is empty"),
        ("version: 1\n", (1, 1), "`keep` is missing"),
        ("version: 1\nkeep:\n", (2, 6), "keep: The value is missing"),
        ("version: 1\nkeep: 3\n", (2, 7), "keep: 3 is not a mapping"),
        ("- 1\n", (1, 1), "A list is not a mapping"),
        ("version: 1\nkeep: {latest: '3'}\n", (2, 16), "keep.latest: '3' is not a whole number"),
        ("version: 1\nkeep: {latest: 3.0}\n", (2, 16), "keep.latest: 3.0 is not a whole number"),
        ("version: 1\nkeep: {latest: true}\n", (2, 16), "keep.latest: True is not a whole number"),
        ("version: 1\nkeep: {latest: 1_000}\n", (2, 16), "keep.latest: '1_000' is not a whole number"),
        ("version: 1\nkeep: {latest: [3]}\n", (2, 16), "keep.latest: A list is not a whole number"),
        (keep("within: 9999999999999w"), (4, 11), "keep.within: '9999999999999w' is too long"),
        (keep("within: 36501d"), (4, 11), "keep.within: '36501d' is too long"),
        (keep("steps: [-1]"), (4, 11), "keep.steps[0]: -1 is out of bounds"),
        (keep("best: [{metric: a, mode: less}]"), (4, 28), "keep.best[0].mode: 'less' is not a valid value"),
        (keep("best: [{metric: a, mode: min, await: {for: 1h}}]"), (4, 40), "keep.best[0].await: `max` is missing"),
        (keep("best: [{metric: 7, mode: min}]"), (4, 19), "keep.best[0].metric: 7 is not text"),
        (keep("every: [{steps: 10, until: 9}]"), (4, 11), "keep.every[0]: Only step 0 is ever kept: the grid begins"),
        (keep("every: [{hours: 1, thin: optimizer}]"), (4, 28), "keep.every[0].thin: 'optimizer' is not a valid value"),
        ("version: 1\nkeep: &a {latest: 1}\n", (2, 7), "The anchor or alias `a` is not allowed in a policy"),
        ("version: 1\nkeep: *a\n", (2, 7), "The anchor or alias `a` is not allowed in a policy"),
        (
            "version: 1\nkeep: {latest: !!int 1}\n",
            (2, 16),
            "The tag `tag:yaml.org,2002:int` is not allowed in a policy",
        ),
        ("version: 1\nkeep: {latest: 1\n", (3, 1), "The text is not YAML"),
        ("version: 1\n\tkeep: 1\n", (2, 1), "The text is not YAML"),
        ("version: 1\n---\nversion: 1\n", (2, 1), "The text is not YAML"),
        ("version: 1\nkeep: \x00\n", (2, 7), "The character #x0000 is not allowed in YAML"),
        ("version: 1\nroot: 'a${X}'\nkeep: {latest: 1}\n", (2, 9), "root: X is not set"),
        ("version: 1\nroot: a$b\nkeep: {latest: 1}\n", (2, 8), "root: A `$` is not followed by a name"),
        ("version: 1\nin_flight: {}\nkeep: {latest: 1}\n", (2, 1), "in_flight: The key `in_flight` is not known"),
    ],
)
def test_names_a_fault_where_it_stands(text: str, place: tuple[int, int], message: str) -> None:
    found = faults(text)
    assert len(found) == 1
    assert found[0][:2] == place
    assert found[0][2].startswith(message)


def test_reports_deep_nesting_as_a_fault_without_a_crash() -> None:
    assert faults("version: 1\nkeep: " + "[" * 5000)[0][2] == "The policy is nested too deeply"


def test_refuses_a_policy_of_more_than_64_kib_unread(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    rules = "".join(f"  - {{metric: m{number}, mode: min}}\n" for number in range(101))
    assert "The list has 101 values" in faults(f"version: 1\nkeep:\n  latest: 1\n  best:\n{rules}")[0][2]
    for text in ("#" * (MAX_BYTES + 1), "# " + "é" * (MAX_BYTES // 2)):
        assert faults(text)[0][2].startswith("The text is longer than 65536 bytes")
        file.write_text(text, encoding="utf-8")
        with pytest.raises(PolicyError, match="longer than 65536 bytes"):
            read_policy(file)


def test_lists_the_first_100_faults_of_a_policy_and_counts_the_others() -> None:
    with pytest.raises(PolicyError, match="has 5000 faults, of which the first 100 are listed") as error:
        from_yaml("version: 1\n" + "".join(f"a{number}: 1\n" for number in range(4999)), environ={})
    assert len(error.value.faults) == 100
    assert len(str(error.value)) < 20_000


def test_takes_variables_in_the_root_from_the_environment() -> None:
    text = "version: 1\nroot: s3://${BUCKET}/${RUN:-run-1}/$${x}\nkeep: {latest: 1}\n"
    assert read(text, BUCKET="b").root == "s3://b/run-1/${x}"
    assert read(text, BUCKET="b", RUN="r").root == "s3://b/r/${x}"
    assert read(text, BUCKET="b", RUN="").root == "s3://b/run-1/${x}"
    assert faults(text, BUCKET="") == [(2, 12, "root: BUCKET is empty")]
    # No variable is read as YAML, or as another variable.
    assert read(text, BUCKET="x: ${RUN}").root == "s3://x: ${RUN}/run-1/${x}"


def test_checks_python_objects_like_yaml() -> None:
    with pytest.raises(PolicyError, match=r"keep\.latest|latest: 0 is out of bounds"):
        Keep(0)
    with pytest.raises(PolicyError, match="not a whole number"):
        EverySteps(1.5)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="not a duration"):
        Keep(1, within=6)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"keep: 3 is not a mapping\. Write keys with values; in Python, a Keep"):
        RetentionPolicy(3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="The key `5` is not known"):
        RetentionPolicy({"latest": 1, 5: 1})  # type: ignore[arg-type]
    with pytest.raises(PolicyError) as caught:
        Best("", "less", 0)  # type: ignore[arg-type]
    assert [fault.path for fault in caught.value.faults] == [("metric",), ("mode",), ("count",)]


def test_makes_the_schema_file_of_the_classes() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run tools/make_policy_schema.py"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))
    VALIDATOR.validate(as_editors_see_it((ROOT / "examples/retention.yaml").read_text()))


VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema_text()))


def as_editors_see_it(text: str) -> Any:
    """Editors read YAML 1.2, in which `on` is a word."""
    return yaml.safe_load(re.sub(r"\bon:", '"on":', text))


@given(policies)
def test_accepts_in_the_schema_what_the_reader_takes(policy: RetentionPolicy) -> None:
    VALIDATOR.validate(yaml.safe_load(to_yaml(policy)))


@pytest.mark.parametrize(
    "text",
    [
        *(text for text, _, _ in SEEN_BY_EDITORS),
        keep("lates: 3"),
        keep("within: 6 hours"),
        keep("steps: []"),
        keep("best: [{metric: a}]"),
        keep("best: [{metric: a, mode: min, count: 0}]"),
        keep("every: [{foo: 1}]"),
        "version: 1\nkeep: {latest: 1}\nsave: {in_flight: {max: 2}}\n",
    ],
)
def test_refuses_in_the_schema_what_the_reader_refuses(text: str) -> None:
    assert faults(text)
    assert not VALIDATOR.is_valid(as_editors_see_it(text))


def test_sweeps_no_debris_before_the_least_age_of_a_sweep() -> None:
    assert LEAST_DEBRIS_AGE[0].total_seconds() == MIN_SWEEP_AGE_S
    ((_, _, said),) = faults("version: 1\nkeep: {latest: 1}\nprune: {debris_after: 59m}\n")
    assert "59m is too short: a sweep could delete the data of a running save" in said
