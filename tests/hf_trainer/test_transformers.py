"""transformers' Trainer on URLs: killed in a save and resumed on other ranks, it sees each sample once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_trainer.trainer import dataset, small_model
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import bucketpoint
from bucketpoint.integrations.transformers import BucketTrainerMixin
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, RetentionPolicy, Save, SaveEvery
from kit.servers import S3Server
from kit.trainers import block, kill_and_resume, plain, run_example, train_example

PROGRAM = Path(__file__).with_name("trainer.py")

PAGE = "transformers.md"


@pytest.mark.parametrize(
    ("worlds", "env"),
    [((4, 2), {}), ((2, 2), {"DROPOUT": "0.5"}), ((4, 2), {"FSDP": "2"})],
    ids=["ddp", "dropout", "fsdp2"],
)
def test_resumes_after_a_kill_in_a_save_as_if_nothing_had_happened(
    worlds: tuple[int, int], env: dict[str, str], minio: S3Server, tmp_path: Path
) -> None:
    # Nine steps are an epoch, so that the checkpoint of step 12 lies in the middle of the second one.
    parts = {"model.model.embed_tokens.weight": 4} if "FSDP" in env else {}
    kill_and_resume(PROGRAM, server=minio, folder=tmp_path, worlds=worlds, parts=parts, **env)


class OnBucket(BucketTrainerMixin, Trainer):
    """A trainer with checkpoints at a URL, that notes the step at which it begins."""

    begun: int

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = -1
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = self.state.global_step if self.begun < 0 else self.begun
        return super().training_step(*args, **kwargs)


def trainer(folder: Path, *, made: Any = OnBucket, **options: Any) -> Any:
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
    return made(small_model(), arguments, train_dataset=data, eval_dataset=data[:8], **given)


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


class Signalled(TrainerCallback):
    """Gets a signal once, after a step, as of Ctrl-C or of a scheduler."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.step = 0
            signal.raise_signal(self.number)


def test_resumes_from_the_last_save_after_an_interrupt(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[Signalled(5, signal.SIGINT)])
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


def test_resumes_from_the_url_of_a_checkpoint_and_gives_up_those_after_it(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    longer = trainer(tmp_path, max_steps=8)
    longer.train(resume_from_checkpoint=f"{tmp_path}/run/step-6")
    assert (longer.begun, longer.state.global_step) == (6, 8)
    assert longer.model.lm_head.weight is longer.model.model.embed_tokens.weight
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

BY_SCORE = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}

BEST_BY_SCORE = {**BY_SCORE, "load_best_model_at_end": True}


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
    options = BY_SCORE if best else {}
    for made, folder in ((Scored, "run"), (ScoredOwn, "logs")):
        limits = {"max_steps": 12, "save_total_limit": 2, "load_best_model_at_end": best}
        trainer(tmp_path, made=made, **limits, **options).train()
        left = {int(path.name.rpartition("-")[2]) for path in (tmp_path / folder).glob("*-*")}
        assert left == {6 if best else 10, 12}


def test_resumes_from_a_folder_of_the_trainers_own_leaves_it_and_finds_its_best(tmp_path: Path) -> None:
    own = trainer(tmp_path, made=ScoredOwn, **BEST_BY_SCORE)
    own.train()
    folder = tmp_path / "logs" / "checkpoint-6"
    made = trainer(tmp_path, made=Scored, max_steps=8, save_total_limit=1, **BEST_BY_SCORE)
    made.train(resume_from_checkpoint=str(folder))
    assert (made.begun, made._manager.steps()) == (6, [8])
    assert made.state.best_model_checkpoint == str(folder)
    pairs = zip(own.model.parameters(), made.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    # At its end the trainer deletes checkpoints of its output folder, which it thinks it has made.
    assert {path.name for path in folder.parent.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6)}


def test_accepts_a_best_step_that_was_not_saved(tmp_path: Path) -> None:
    for steps in (8, 12):
        made = trainer(tmp_path, made=Scored, save_steps=4, max_steps=steps, **BEST_BY_SCORE)
        made.train(resume_from_checkpoint=True)
        assert (made.state.best_global_step, made.state.best_model_checkpoint) == (6, f"{tmp_path}/run/step-4")


@pytest.mark.parametrize("kept", [[], [Best("eval_loss", "max")]], ids=["another metric", "another mode"])
def test_refuses_a_policy_that_does_not_keep_the_best_model(kept: list[Best], tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    with pytest.raises(bucketpoint.BucketpointError, match=r"best checkpoint by eval_loss, min .*Add the metric"):
        trainer(tmp_path, policy=RetentionPolicy(Keep(latest=1, best=kept)), **best).train()


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
    made = trainer(tmp_path, made=Scored, policy=policy, callbacks=[Signalled(4, signal.SIGTERM)], **options)
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


class Nested:
    """A tokenizer that saves a folder of templates."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates" / "tool.jinja").write_text("{{ tool }}")


def test_exports_folders_of_a_tokenizer_and_refuses_adapters(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    # A model without a configuration.
    made.processing_class, made.model = Nested(), torch.nn.Module()
    made.export_pretrained(tmp_path / "hub")
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"model.safetensors", "templates"}
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


def test_changes_at_most_five_lines_of_a_plain_script(minio: S3Server, tmp_path: Path) -> None:
    text = plain(PAGE).replace("num_train_epochs=3", "max_steps=10")
    run_example(text, 1, minio, tmp_path, ACCELERATE_USE_CPU="true")
    assert (tmp_path / "logs" / "checkpoint-10").is_dir()


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    bucket = minio.make_bucket()
    code = (block(PAGE, "python") + block(PAGE, "py")).replace('"s3://bucket/', f'"s3://{bucket}/')
    for epochs, world, last in ((1, 2, 16), (2, 1, 64)):
        now = code.replace("num_train_epochs=3", f"num_train_epochs={epochs}")
        newest = f"s3://{bucket}/run-7/step-{last}"
        train_example(now, newest, world, minio, tmp_path, ACCELERATE_USE_CPU="true")
        minio.client().head_object(Bucket=bucket, Key="hub/model/model.safetensors")
        minio.client().delete_object(Bucket=bucket, Key="hub/model/model.safetensors")
