"""Keys of the catalog: what they say is read back, they sort by step, and no foreign name is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import InvalidURLError
from bucketpoint.format.catalog_keys import (
    MAX_NAME_BYTES,
    AttemptKey,
    CommitKey,
    NoteKey,
    StepTemplate,
    UploadKey,
    decode,
    encode,
)

texts = st.text("ab_/.-%~ 0F\x00\n\N{FIRE}\N{LATIN SMALL LETTER A WITH DIAERESIS}", max_size=20)
tokens = st.text("0123456789abcdef", min_size=12, max_size=12)
steps = st.integers(0, 10**16 - 1)
folders = st.sampled_from(["step-5", "step-00000005", "runs/a/5", "epoch=1-step=5", "\N{FIRE}5"])


@given(st.lists(texts, min_size=1, max_size=6))
def test_takes_a_name_apart_into_what_it_was_made_of(parts: list[str]) -> None:
    name = encode(parts)
    assert decode(name) == parts or len(name) > 1024
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_")


@given(steps, st.integers(0, 10**13 - 1), tokens, st.sampled_from(["full", "weights"]), folders, st.integers(0, 10**18))
def test_says_in_a_commits_key_all_that_a_plan_needs(
    step: int, created: int, token: str, kind: str, folder: str, size: int
) -> None:
    key = CommitKey(step, created / 1000, token, kind, "0123abcd", folder, {"model": size, "ema": 3, "other": 4})
    found = CommitKey.parse(key.name())
    assert (found.step, found.token, found.kind, found.folder) == (step, token, kind, folder)
    assert found.created == pytest.approx(created / 1000, abs=0.0011)
    assert found.groups == {**({"model": size} if size else {}), "other": 7}


@given(steps, steps)
def test_sorts_keys_by_step(one: int, other: int) -> None:
    names = [CommitKey(step, 0, "0" * 12, "full", "0" * 8, "f").name() for step in (one, other)]
    assert (names[0] < names[1]) == (one < other)


@pytest.mark.parametrize(
    ("template", "folder", "step"),
    [
        ("step-{step}", "step-100", 100),
        ("step-{step}", "step-00000100", 100),
        ("step-{step:08d}", "step-7", 7),
        ("step-{step}", "my-step-900-pinned", None),
        ("step-{step}", "backup-of-step-5", None),
        ("step-{step}", "step-5-old", None),
        ("step-{step}", "step-5.bak", None),
        ("step-{step}", "step-", None),
        ("step-{step}", "step-x", None),
        ("step-{step}", "step--5", None),
        ("step-{step}", "step-\u0661", None),
        ("step-{step}", "step-" + "9" * 5000, None),
        ("runs/a/{step}", "runs/a/3", 3),
        ("epoch=1-step={step}", "epoch=1-step=9", 9),
    ],
)
def test_gives_a_folder_to_a_run_only_if_all_of_its_name_fits(template: str, folder: str, step: int | None) -> None:
    assert StepTemplate(template).step_of(folder) == step


@pytest.mark.parametrize(
    "template",
    ["", "step", "{step}-{step}", "{epoch}", "/{step}", "../{step}", "{step!r}", "{step:x}", "{", "a{step}/b"],
)
def test_refuses_a_template_that_names_no_folders(template: str) -> None:
    with pytest.raises(InvalidURLError):
        StepTemplate(template)


def test_makes_padded_folders_as_the_template_says() -> None:
    assert StepTemplate("step-{step:08d}").folder(12) == "step-00000012"


def test_fits_the_longest_key_into_a_file_name() -> None:
    template = StepTemplate("a" * 40 + "{step}")
    groups = {"model": 10**15, "optim": 10**15, "other": 10**15}
    key = CommitKey(10**16 - 1, 9e9, "f" * 12, "emergency", "f" * 8, template.folder(10**16 - 1), groups)
    assert len(key.name()) <= MAX_NAME_BYTES


@pytest.mark.parametrize(
    "name",
    [
        "",
        "__",
        "0000000000000100",
        "0000000000000100__open__0123456789ab",
        "0000000000000100__0000000000000__0123456789ab__full__00000000",
        "0000000000000100__0000000000000__0123456789ab__full__00000000__what.5__step-100",
        "100__0000000000000__0123456789ab__full__00000000__step-100",
        "0000000000000100__0000000000000__0123456789AB__full__00000000__step-100",
        "x" * 5000,
        "_C3",
    ],
)
def test_ignores_what_is_no_record_and_no_intent(name: str) -> None:
    assert CommitKey.parse(name) is None
    assert AttemptKey.parse(name) is None


def test_reads_intents_uploads_and_notes_back() -> None:
    attempt = AttemptKey(5, "0123456789ab", "runs/a/step-5")
    assert AttemptKey.parse(attempt.name()) == attempt
    upload = UploadKey(5, "0123456789ab", 1023, "step-5")
    assert UploadKey.parse(upload.name()) == upload
    note = NoteKey(5, "metrics", ("1", "eval/loss", "-inf", ""))
    assert NoteKey.parse(note.name()) == note
