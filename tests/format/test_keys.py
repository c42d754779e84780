"""Keys of objects and of the catalog, and groups of items: what keys say is read back, and no foreign name is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import InvalidURLError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import (
    DEFAULT_RULES,
    MAX_NAME_BYTES,
    AttemptKey,
    CommitKey,
    GroupRule,
    NoteKey,
    StepTemplate,
    UploadKey,
    decode,
    encode,
    group_of,
)

groups = st.text("abcxyzABC019_.", min_size=1, max_size=12)
numbers = st.integers(0, 1 << 40)


@given(rank=numbers, group=groups, n=numbers)
def test_tells_by_a_data_path_what_it_was_made_of_and_keeps_its_folder(rank: int, group: str, n: int) -> None:
    token = keys.new_token()
    path, later = keys.data_path(token, rank, group, n), keys.data_path(keys.new_token(), rank, group, n)
    assert keys.parse_data_path(path) == (token, rank, group, n)
    assert keys.join("run/step-5", path) == f"run/step-5/{path}"
    assert later != path
    assert later.split("/")[:2] == path.split("/")[:2]


def test_spreads_the_objects_of_one_save_over_many_folders() -> None:
    token = keys.new_token()
    assert len({keys.data_path(token, rank, "model", 0)[:7] for rank in range(512)}) > 100


def test_repeats_no_token_when_a_training_run_seeds_its_random_numbers() -> None:
    import random

    tokens = set()
    for _ in range(50):
        random.seed(0)
        tokens.add(keys.new_token())
    assert len(tokens) == 50
    assert all(len(token) == 12 and set(token) <= set("0123456789abcdef") for token in tokens)


@pytest.mark.parametrize(
    "path",
    [
        "__0_0.distcp",
        "data/00/0123456789ab-0-model-0.distcp",  # the folder does not follow from the rest
        "data/af/0123456789ab-00-model-0.distcp",
        "data/af/0123456789ab-0-model-0.distcp\n",
        "data/af/0123456789ab-" + "9" * 5000 + "-model-0.distcp",
        "",
    ],
)
def test_treats_other_paths_as_nobodys_data_path(path: str) -> None:
    assert keys.parse_data_path(path) is None


@pytest.mark.parametrize("group", ["", "a/b", "..//", "a-b", "ä"])
def test_refuses_a_group_that_would_break_the_path(group: str) -> None:
    with pytest.raises(ValueError):
        keys.data_path(keys.new_token(), 0, group, 0)


@pytest.mark.parametrize(
    "relative",
    [
        "",
        "/etc/passwd",
        "..",
        "data/../../x",
        "data/..",
        "a\\b",
        "a\0b",
        "a\nb",
        "s3://other/x",
        "C:x",
        "a\ud800",
    ],
)
def test_refuses_a_path_that_leaves_the_checkpoint(relative: str) -> None:
    with pytest.raises(UnsafeDataError):
        keys.join("run/step", relative)
    with pytest.raises(UnsafeDataError):
        keys.join("", relative)


@pytest.mark.parametrize(
    "path",
    [
        *(".metadata", "./.metadata", "step-2/.metadata", ".METADATA", ".metadata/", "__3.metadata"),
        *(".bucketpoint.json", "a/.Bucketpoint.json", "_bucketpoint/run.json", "x/_bucketpoint/steps/y"),
    ],
)
def test_refuses_to_delete_as_data_what_is_none(path: str) -> None:
    assert not keys.may_be_data(path)
    assert keys.may_be_data(f"data/00/{path.replace('/', '-')}.distcp")


@pytest.mark.parametrize("relative", ["__0_0.distcp", "a b/ü#%+.distcp", "a..b/c", "shard//x", "...", "1/x:y"])
def test_leaves_a_path_within_the_checkpoint_as_it_is(relative: str) -> None:
    assert keys.join("run [1]/*", relative) == f"run [1]/*/{relative}"
    assert keys.join("", relative) == relative


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
    ["{step}-{step}", "{epoch}", "/{step}", "../{step}", "{step!r}", "{step:x}", "{", "a{step}/b", "\udcf3{step}"],
)
def test_refuses_a_template_that_names_no_folders(template: str) -> None:
    with pytest.raises(InvalidURLError):
        StepTemplate(template)


def test_fits_the_longest_key_into_a_file_name_and_pads_folders_as_told() -> None:
    template = StepTemplate("a" * 40 + "{step}")
    groups = {"model": 10**15, "optim": 10**15, "other": 10**15}
    key = CommitKey(10**16 - 1, 9e9, "f" * 12, "emergency", "f" * 8, template.folder(10**16 - 1), groups)
    assert len(key.name()) <= MAX_NAME_BYTES
    assert StepTemplate("step-{step:08d}").folder(12) == "step-00000012"


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


@pytest.mark.parametrize(
    ("fqn", "group"),
    [
        # The recipe of PyTorch's tutorials: {"app": AppState} with {"model", "optim"}.
        ("app.model.layers.0.weight", "model"),
        ("app.optim.state.layers.0.weight.exp_avg", "optim"),
        ("app.optim.param_groups.model.layers.0.weight.lr", "optim"),
        ("app.optim.state.model.embed.weights.exp_avg_sq", "optim"),
        # torchtitan: weights at the top level, optimizer keys flattened below "optimizer".
        ("layers.0.attention.wq.weight", "model"),
        ("tok_embeddings.weight", "model"),
        ("optimizer.state.layers.0.attention.wq.weight.exp_avg", "optim"),
        ("optimizer.param_groups.layers.0.attention.wq.weight.lr", "optim"),
        ("lr_scheduler", "optim"),
        # Others' habits.
        ("model.model.layers.3.mlp.down_proj.weight", "model"),
        ("state.optimizer_0.state.0.exp_avg", "optim"),
        ("optimizer_states.0.exp_avg", "optim"),
        ("module.optimizer_gate.weight", "model"),
        ("optimizer_gate.bias", "model"),
    ],
)
def test_separates_weights_and_optimizer_state_by_the_first_known_segment(fqn: str, group: str) -> None:
    assert group_of(fqn, DEFAULT_RULES) == group


@pytest.mark.parametrize("fqn", ["dataloader.0", "rng_state", "dataloader_rank_3.state", "remodel.optimum.weight"])
def test_calls_bytes_that_no_rule_knows_other(fqn: str) -> None:
    assert group_of(fqn, tensor=False) == "other"


def test_lets_the_user_choose_rules_of_which_the_earlier_wins() -> None:
    rules = (GroupRule("ema", ["ema"]), GroupRule("rest", {"ema", "teacher"}))
    assert group_of("state.ema.layers.0.weight", rules) == "ema"
    assert group_of("state.teacher.ema.weight", rules) == "rest"
    assert group_of("optim.state.weight", rules) == "model"
