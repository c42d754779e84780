"""Which group an item belongs to, for the states that training code really has."""

from __future__ import annotations

import pytest

from bucketpoint.format.groups import DEFAULT_RULES, GroupRule, group_of


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
    ],
)
def test_separates_weights_and_optimizer_state_by_the_first_known_segment(fqn: str, group: str) -> None:
    assert group_of(fqn, DEFAULT_RULES) == group


@pytest.mark.parametrize("fqn", ["dataloader.0", "train_state", "rng_state", "dataloader_rank_3.state", "whatever"])
def test_calls_bytes_that_no_rule_knows_other(fqn: str) -> None:
    assert group_of(fqn, tensor=False) == "other"


def test_lets_the_user_choose_rules_of_which_the_earlier_wins() -> None:
    rules = (GroupRule("ema", ["ema"]), GroupRule("rest", {"ema", "teacher"}))
    assert group_of("state.ema.layers.0.weight", rules) == "ema"
    assert group_of("state.teacher.ema.weight", rules) == "rest"
    assert group_of("optim.state.weight", rules) == "model"


def test_matches_a_segment_whole() -> None:
    assert group_of("remodel.optimum.weight", tensor=False) == "other"
    assert group_of("optimizer_gate.bias") == "model"
