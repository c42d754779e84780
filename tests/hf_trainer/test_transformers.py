"""transformers' Trainer on URLs: killed in a save and resumed on other ranks, it sees each sample once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_trainer.trainer import dataset, small_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import bucketpoint
from bucketpoint.integrations.transformers import BucketTrainerMixin
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, RetentionPolicy, Save, SaveEvery
from kit.servers import S3Server
from kit.trainers import assert_same_steps, block, chunks, killed_in_an_upload, launched, plain

PROGRAM = Path(__file__).with_name("trainer.py")

LAST = 27


def train(root: str, report: Path, world: int, server: S3Server, **env: str) -> Any:
    """Run the trainer on so many ranks. Return what rank 0 saw."""
    launched(PROGRAM, [root, str(report), str(world)], world, server, **env)
    return json.loads(report.read_text())


@pytest.mark.parametrize(
    ("worlds", "env"),
    [((4, 2), {}), ((2, 2), {"DROPOUT": "0.5"}), ((4, 2), {"FSDP": "2"})],
    ids=["ddp", "dropout", "fsdp2"],
)
def test_resumes_after_a_kill_in_a_save_as_if_nothing_had_happened(
    worlds: tuple[int, int], env: dict[str, str], minio: S3Server, tmp_path: Path
) -> None:
    bucket = minio.make_bucket()
    first, then = worlds
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", first, minio, **env)
    assert [step for step, _, _ in whole["seen"]] == list(range(1, LAST + 1))
    root = f"s3://{bucket}/run"
    arguments = [root, str(tmp_path / "none"), str(first)]
    third = f"{root}/step-18"
    killed_in_an_upload(PROGRAM, arguments, first, minio, third, tmp_path / "ranks", **env)
    if "FSDP" in env:
        assert chunks(f"{root}/step-12", "model.model.embed_tokens.weight", minio) == first
    # Nine steps are an epoch, so that the checkpoint lies in the middle of the second one.
    assert bucketpoint.latest_checkpoint(root, storage_options=minio.options) == f"{root}/step-12"
    resumed = train(root, tmp_path / "resumed", then, minio, **env)
    assert_same_steps(resumed["seen"], whole["seen"][12:])
    assert (resumed["rate"], resumed["epoch"]) == (whole["rate"], whole["epoch"])


class OnBucket(BucketTrainerMixin, Trainer):
    """A trainer with checkpoints at a URL, that notes the step at which it begins."""

    begun: int

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = -1
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = self.state.global_step if self.begun < 0 else self.begun
        return super().training_step(*args, **kwargs)


def trainer(folder: Path, *, model: Any = None, made: Any = OnBucket, **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("policy", "manager_options", "callbacks") if name in options}
    defaults = {
        "output_dir": str(folder / "logs"),
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "save_steps": 2,
        "max_steps": 6,
        "report_to": "none",
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    data = dataset()
    if issubclass(made, BucketTrainerMixin):
        given["checkpoint_url"] = folder / "run"
    arguments = TrainingArguments(**{**defaults, **options})
    return made(model or small_model(), arguments, train_dataset=data, eval_dataset=data[:8], **given)


def test_makes_a_policy_of_limit_and_best_model_and_exports_them(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    made = trainer(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        learning_rate=0.5,
        manager_options={"on_commit": told.append},
    )
    made.train()
    assert [info.step for info in told] == [2, 4, 6]
    assert all("eval_loss" in info.metrics for info in told)
    best = min(told, key=lambda info: info.metrics["eval_loss"])
    assert made.state.best_model_checkpoint == best.url
    assert made.evaluate()["eval_loss"] == pytest.approx(best.metrics["eval_loss"], rel=1e-5)
    policy = made._manager.policy
    assert (policy.keep.latest, [(rule.metric, rule.mode) for rule in policy.keep.best]) == (1, [("eval_loss", "min")])
    assert {path.name for path in (tmp_path / "run").glob("step-*")} == {"step-6", Path(best.url).name}
    # Nothing but logs is local.
    assert not list((tmp_path / "logs").glob("checkpoint-*"))
    # An export replaces another one, whatever its files are.
    made.export_pretrained(tmp_path / "hub", checkpoint=f"{tmp_path}/run/step-6")
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / "hub" / name).write_text("{}")
    made.export_pretrained(tmp_path / "hub")
    assert {path.name for path in (tmp_path / "hub").glob("model*")} == {"model.safetensors"}
    again = LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    expected = dict(made.model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in again.named_parameters())


def test_takes_the_checkpoint_to_resume_from_a_url(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    with CheckpointManager(tmp_path / "run", policy=RetentionPolicy(Keep(latest=9))) as manager:
        assert manager.steps() == [2, 4, 6]
    longer = trainer(tmp_path, num_train_epochs=1)
    longer.args.max_steps = 8
    longer.train(resume_from_checkpoint=f"{tmp_path}/run/step-6")
    assert longer.state.global_step == 8
    assert [each["step"] for each in longer.state.log_history if "train_runtime" in each][-1] == 8


def test_begins_from_scratch_in_a_run_without_checkpoints(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6


def test_resumes_from_a_folder_of_the_trainers_own_and_leaves_it(tmp_path: Path) -> None:
    trainer(tmp_path, made=Trainer).train()
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    made = trainer(tmp_path, max_steps=8, **best)
    made.train(resume_from_checkpoint=str(tmp_path / "logs" / "checkpoint-6"))
    assert (made.begun, made._manager.steps()) == (6, [8])
    # At its end the trainer deletes checkpoints of its output folder, which it thinks it has made.
    assert sorted(path.name for path in (tmp_path / "logs").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (2, 4, 6)
    ]


class Stops(TrainerCallback):
    """Raises once, after a step."""

    step = 5

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.step = 0
            raise KeyboardInterrupt


def test_resumes_from_the_last_save_after_an_interrupt(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[Stops()])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.train(resume_from_checkpoint=True)
    assert (made.begun, made.state.global_step) == (4, 6)


def test_refuses_a_second_run_before_it_trains(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    again = trainer(tmp_path)
    with pytest.raises(bucketpoint.CheckpointExistsError, match="up to step 6"):
        again.train()
    assert again.state.global_step == 0


def test_returns_a_run_to_a_named_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    back = trainer(tmp_path, max_steps=5)
    back.train(resume_from_checkpoint=tmp_path / "run" / "step-2")
    assert back.begun == 2
    assert bucketpoint.latest_checkpoint(tmp_path / "run") == f"{tmp_path}/run/step-5"


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_passes_over_a_damaged_checkpoint(kind: str, tmp_path: Path) -> None:
    trainer(tmp_path).train()
    (found,) = (tmp_path / "run" / "step-6").rglob(f"*-{kind}-0.distcp")
    found.unlink()
    made = trainer(tmp_path)
    made.train(resume_from_checkpoint=True)
    assert (made.begun, made.state.global_step) == (4, 6)


SCORES = {2: 1.0, 4: 2.0, 6: 9.0, 8: 3.0, 10: 1.0, 12: 1.0}


class Scores:
    """Mixin of a trainer whose evaluations have given scores."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        return {**found, "eval_score": SCORES[self.state.global_step]}  # type: ignore[attr-defined]


class Scored(Scores, OnBucket):
    """A trainer with checkpoints at a URL."""


class ScoredOwn(Scores, Trainer):
    """A trainer with checkpoints in folders."""


@pytest.mark.parametrize("best", [False, True])
def test_leaves_as_many_checkpoints_as_the_trainer_itself(tmp_path: Path, best: bool) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"} if best else {}
    for made, folder in ((Scored, "run"), (ScoredOwn, "logs")):
        limits = {"max_steps": 12, "save_total_limit": 2, "load_best_model_at_end": best}
        trainer(tmp_path, made=made, **limits, **options).train()
        left = {int(path.name.rpartition("-")[2]) for path in (tmp_path / folder).glob("*-*")}
        assert left == {6 if best else 10, 12}


def test_finds_the_best_model_in_a_folder_of_the_trainers_own(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    own = trainer(tmp_path, made=ScoredOwn, **best)
    own.train()
    folder = str(tmp_path / "logs" / "checkpoint-6")
    made = trainer(tmp_path, made=Scored, max_steps=8, **best)
    made.train(resume_from_checkpoint=folder)
    assert made.state.best_model_checkpoint == folder
    pairs = zip(own.model.parameters(), made.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_accepts_a_best_step_that_was_not_saved(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    for steps in (8, 12):
        made = trainer(tmp_path, made=Scored, save_steps=4, max_steps=steps, **best)
        made.train(resume_from_checkpoint=True)
        assert (made.state.best_global_step, made.state.best_model_checkpoint) == (6, f"{tmp_path}/run/step-4")


@pytest.mark.parametrize("kept", [[], [Best("eval_loss", "max")]], ids=["another metric", "another mode"])
def test_refuses_a_policy_that_does_not_keep_the_best_model(kept: list[Best], tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    with pytest.raises(bucketpoint.BucketpointError, match=r"best checkpoint by eval_loss, min .*Add the metric"):
        trainer(tmp_path, policy=RetentionPolicy(Keep(latest=1, best=kept)), **best).train()


class Terminated(TrainerCallback):
    """Sends SIGTERM to this process after a step, as a scheduler does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


BY_SCORE = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_steps": 100}, [4]),
        ({"save_strategy": "no"}, [4]),
        # The end of an epoch follows, with a save of the same step.
        ({"save_strategy": "epoch"}, [4]),
        # Step 4 is not the best one.
        ({"save_strategy": "best", "greater_is_better": False, **BY_SCORE}, [2, 4]),
    ],
    ids=lambda each: each.get("save_strategy", "steps") if isinstance(each, dict) else "",
)
def test_saves_and_ends_training_by_sigterm_if_the_policy_says_so(
    options: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    # When to save is up to the trainer but for signals.
    policy = RetentionPolicy(Keep(latest=9), save=Save(every=[SaveEvery(1)], on=["first_step", "sigterm"]))
    made = trainer(tmp_path, made=Scored, policy=policy, callbacks=[Terminated(4)], **options)
    made.train()
    assert made.state.global_step == 4
    with CheckpointManager(tmp_path / "run", policy=policy) as manager:
        assert manager.steps() == steps
    again = trainer(tmp_path, made=Scored, policy=policy, **options)
    again.train(resume_from_checkpoint=True)
    assert (again.begun, again.state.global_step) == (4, 6)


def test_exports_a_checkpoint_of_the_model_only_and_does_not_resume_it(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_only_model=True)
    made.train()
    made.export_pretrained(tmp_path / "hub")
    LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    with pytest.raises(bucketpoint.BucketpointError, match=r"step-6.*save_only_model"):
        trainer(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)


class Experts(torch.nn.Module):
    """A model with a layer that gets no gradient, and without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(8, 1)
        self.idle = torch.nn.Linear(8, 1)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": self.used(input_ids.float()).pow(2).mean()}


class OneEmptyGroup(OnBucket):
    """A trainer whose optimizer has a group without parameters, as with LoRA."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW([{"params": list(self.model.parameters())}, {"params": []}])
        return self.optimizer


def test_resumes_parameters_without_gradients_and_groups_without_parameters(tmp_path: Path) -> None:
    trainer(tmp_path, model=Experts(), made=OneEmptyGroup).train()
    made = trainer(tmp_path, model=Experts(), made=OneEmptyGroup, max_steps=8)
    made.train(resume_from_checkpoint=True)
    assert made.begun == 6
    assert len(made.optimizer.param_groups) == 2
    # An expert without gradients has a new state.
    assert {int(state["step"]) for state in made.optimizer.state.values()} == {0, 8}
    made.export_pretrained(tmp_path / "hub")
    assert [path.name for path in (tmp_path / "hub").iterdir()] == ["model.safetensors"]


def test_resumes_and_exports_tied_weights(tmp_path: Path) -> None:
    def gpt2() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=16, n_embd=16, n_layer=1, n_head=2))

    trainer(tmp_path, model=gpt2()).train()
    made = trainer(tmp_path, model=gpt2(), max_steps=8)
    made.train(resume_from_checkpoint=True)
    assert made.model.lm_head.weight is made.model.transformer.wte.weight
    made.export_pretrained(tmp_path / "hub")
    again, tokens = GPT2LMHeadModel.from_pretrained(tmp_path / "hub").eval(), torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, made.model.eval()(tokens).logits)


class Nested:
    """A tokenizer that saves a folder of templates."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates" / "tool.jinja").write_text("{{ tool }}")


def test_exports_folders_of_a_tokenizer_and_refuses_adapters(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    made.processing_class = Nested()
    made.export_pretrained(tmp_path / "hub")
    assert (tmp_path / "hub" / "templates" / "tool.jinja").read_text() == "{{ tool }}"
    made.model.peft_config = {}
    with pytest.raises(bucketpoint.BucketpointError, match="save_model"):
        made.export_pretrained(tmp_path / "adapter")


def test_refuses_an_empty_url_and_a_url_where_a_local_folder_belongs(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with pytest.raises(bucketpoint.BucketpointError, match=r"local folders only.*export_pretrained"):
        made.save_model("s3://bucket/model")
    with pytest.raises(bucketpoint.BucketpointError, match="checkpoint_url is empty"):
        type(made)(made.model, made.args, checkpoint_url="")


def test_requires_the_mixin_before_the_trainer() -> None:
    with pytest.raises(bucketpoint.BucketpointError, match=r"class Wrong\(BucketTrainerMixin, Trainer\)"):

        class Wrong(Trainer, BucketTrainerMixin):
            """Bases in the wrong order."""


PAGE = "transformers.md"


def test_changes_at_most_five_lines_of_a_plain_script(minio: S3Server, tmp_path: Path) -> None:
    text = plain(block(PAGE, "python"), block(PAGE, "diff")).replace("num_train_epochs=3", "max_steps=10")
    program = tmp_path / "plain.py"
    program.write_text(text)
    launched(program, [], 1, minio, folder=tmp_path, ACCELERATE_USE_CPU="true")
    assert (tmp_path / "logs" / "checkpoint-10").is_dir()


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    bucket = minio.make_bucket()
    code = (block(PAGE, "python") + block(PAGE, "py")).replace('"s3://bucket/', f'"s3://{bucket}/')
    for epochs, world, last in ((1, 2, 16), (2, 1, 64)):
        program.write_text(code.replace("num_train_epochs=3", f"num_train_epochs={epochs}"))
        launched(program, [], world, minio, folder=tmp_path, ACCELERATE_USE_CPU="true")
        newest = bucketpoint.latest_checkpoint(f"s3://{bucket}/run-7", storage_options=minio.options)
        assert newest == f"s3://{bucket}/run-7/step-{last}"
        minio.client().head_object(Bucket=bucket, Key="hub/model/model.safetensors")
        minio.client().delete_objects(
            Bucket=bucket,
            Delete={"Objects": [{"Key": f"hub/model/{name}"} for name in ("model.safetensors", "config.json")]},
        )
