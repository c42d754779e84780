"""Times saves and loads of trainers beside the frameworks' own way to the same MinIO, and prints a table.

    make bench-frameworks ARGS='--pairs 5 --million 32'

Each measurement is a process of its own, and the two ways take turns. `save` is the time until the bytes are in the
bucket, `blocked` the time that training waits for it, `load` the time of a load into a prepared model. Lightning and
Fabric reach S3 through s3fs. Accelerate and transformers take a URL for a local path. Accelerate's own way is timed to
a folder in memory, and transformers' with `put` and `get` of s3fs between such a folder and the bucket. Ray copies such
a folder through pyarrow.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "src")]

FIGURES = ("save", "blocked", "load")
WAYS = ("own", "bucketpoint")

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Ray takes one report at a time, otherwise one in 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}


def timed(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def take_memory() -> None:
    """Take 2 GB from the machine's host and free them, before a load of either way.

    A virtual machine that returns unused memory to its host pays for the first use of each page again: that alone was
    0.07 to 0.54 s of the same load, which makes 256 MB of optimizer states and, for torch to make them, 128 MB of
    gradients.
    """
    import torch

    torch.ones(2 << 30, dtype=torch.uint8)


def module(million: int, seed: int) -> Any:
    """Return a model of so many million parameters, in 16 layers."""
    import torch

    torch.manual_seed(seed)
    side = int((million * 1e6 / 16) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(16)))


def fabric(way: str, url: str, million: int) -> dict[str, float]:
    import lightning
    import torch
    from lightning.fabric.strategies import SingleDeviceStrategy

    from bucketpoint.integrations.lightning import bucket_strategy

    def prepared(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        strategy: Any = "auto" if way == "own" else bucket_strategy(SingleDeviceStrategy, device="cpu")
        made = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        model = module(million, seed)
        model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters()))
        side = model.module[0].in_features
        made.backward(model(torch.ones(1, side)).sum())
        optimizer.step()
        return made, strategy, {"model": model, "optimizer": optimizer}

    made, strategy, state = prepared(0)

    def save(number: int) -> tuple[float, float]:
        begun = time.monotonic()
        blocked = timed(lambda: made.save(f"{url}/step-{number}", state))
        if way != "own":
            strategy.wait()
        return blocked, time.monotonic() - begun

    save(1)  # the first allocates staging memory, and opens connections
    blocked, whole = save(2)
    loading, _, other = prepared(1)
    take_memory()
    load = timed(lambda: loading.load(f"{url}/step-2", other))
    same = zip(state["model"].parameters(), other["model"].parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in same)
    return {"save": whole, "blocked": blocked, "load": load}


def trainer(way: str, url: str, million: int) -> dict[str, float]:
    import lightning
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from bucketpoint.integrations.lightning import bucket_strategy

    class Large(BoringModel):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.layer = module(million, seed)
            self.side = self.layer[0].in_features

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(1, self.side)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def made(steps: int) -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            strategy="auto" if way == "own" else bucket_strategy(SingleDeviceStrategy, device="cpu"),
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )

    first, model = made(1), Large(0)
    first.fit(model)

    def save(number: int) -> tuple[float, float]:
        begun = time.monotonic()
        blocked = timed(lambda: first.save_checkpoint(f"{url}/step-{number}", weights_only=False))
        if way != "own":
            first.strategy.wait()
        return blocked, time.monotonic() - begun

    save(1)
    blocked, whole = save(2)
    second, other = made(1), Large(1)
    times: list[float] = []
    load = second.strategy.load_checkpoint

    def noted(*args: Any, **kwargs: Any) -> Any:
        times.append(time.monotonic())
        return load(*args, **kwargs)

    # Lightning itself first reads a whole file, and later sets the model's and the optimizers' state from it.
    second.strategy.load_checkpoint = noted
    restored = second._checkpoint_connector.resume_end

    def ended() -> None:
        times.append(time.monotonic())
        restored()

    second._checkpoint_connector.resume_end = ended
    take_memory()
    second.fit(other, ckpt_path=f"{url}/step-2")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    return {"save": whole, "blocked": blocked, "load": times[1] - times[0]}


def accelerate(way: str, url: str, million: int) -> dict[str, float]:
    import torch
    from accelerate import Accelerator

    import bucketpoint
    from bucketpoint.integrations.accelerate import load_state, save_state

    accelerator = Accelerator(cpu=True)
    model = module(million, 0)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, model[0].in_features)).sum())
    optimizer.step()
    if way == "own":
        # A local folder: what a URL would be taken for.
        folder = f"/dev/shm/{url.rpartition('/')[2]}"
        accelerator.save_state(folder)
        whole = timed(lambda: accelerator.save_state(folder))
        take_memory()
        load = timed(lambda: accelerator.load_state(folder))
        subprocess.run(["rm", "-rf", folder], check=True)
        return {"save": whole, "blocked": whole, "load": load}
    writer = bucketpoint.BucketWriter()
    save_state(accelerator, f"{url}/step-1", storage_writer=writer).result()
    begun = time.monotonic()
    handle = save_state(accelerator, f"{url}/step-2", storage_writer=writer)
    handle.staged.result()
    blocked = time.monotonic() - begun
    handle.result()
    whole = time.monotonic() - begun
    take_memory()
    return {"save": whole, "blocked": blocked, "load": timed(lambda: load_state(accelerator, f"{url}/step-2"))}


def hf_trainer(way: str, url: str, million: int) -> dict[str, float]:
    import fsspec
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from bucketpoint.integrations.transformers import BucketTrainerMixin

    folder = f"/dev/shm/{url.replace('/', '-')}"
    remote = fsspec.filesystem("s3")
    figures: dict[str, float] = {}

    class Large(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.layers = module(million, seed)

        def forward(self, inputs: Any) -> dict[str, Any]:
            return {"loss": self.layers(inputs).sum()}

    class Loading:
        """Mixin that times what a resumed trainer loads."""

        load = 0.0

        def _load_from_checkpoint(self, *args: Any) -> None:
            self.load += timed(lambda: super(Loading, self)._load_from_checkpoint(*args))  # type: ignore[misc]

        def _load_optimizer_and_scheduler(self, *args: Any) -> None:
            self.load += timed(lambda: super(Loading, self)._load_optimizer_and_scheduler(*args))  # type: ignore[misc]

    class Own(Loading, Trainer): ...

    class Ours(Loading, BucketTrainerMixin, Trainer): ...

    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for number in (1, 2):  # the first allocates staging memory, and opens connections
                state.global_step = number
                begun = time.monotonic()
                first._save_checkpoint(first.model, trial=None)
                if way == "own":
                    remote.put(f"{folder}/checkpoint-{number}", f"{url}/step-{number}", recursive=True)
                figures["blocked"] = time.monotonic() - begun
                if way != "own":
                    first._manager.wait()
                figures["save"] = time.monotonic() - begun
            state.global_step = 1

    def made(seed: int, steps: int, **given: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        model = Large(seed)
        data = [{"inputs": torch.ones(model.layers[0].in_features)}]
        if way != "own":
            given["checkpoint_url"] = url
        return (Own if way == "own" else Ours)(model, arguments, train_dataset=data, **given)

    first = made(0, 1, callbacks=[Saves()])
    first.train()
    second = made(1, 2)
    if way == "own":
        subprocess.run(["rm", "-rf", folder], check=True)
        take_memory()
        second.load += timed(lambda: remote.get(f"{url}/step-2", f"{folder}/checkpoint-2", recursive=True))
        second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    else:
        take_memory()
        second.train(resume_from_checkpoint=f"{url}/step-2")
    subprocess.run(["rm", "-rf", folder], check=True)
    assert all(
        torch.equal(one, two) for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    return {**figures, "load": second.load}


def ray_train(way: str, url: str, million: int) -> dict[str, float]:
    """Ray's own way is `torch.save` into a folder, which Ray copies into the bucket, and out of it for a load."""
    import ray
    import ray.train.torch
    from pyarrow.fs import S3FileSystem

    def train(config: dict[str, Any]) -> None:
        import torch

        import bucketpoint
        from bucketpoint.integrations.ray import report, restore

        model = ray.train.torch.prepare_model(module(million, 0))
        optimizer = torch.optim.AdamW(model.parameters())
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        side = model[0].in_features

        def own_load() -> None:
            with ray.train.get_checkpoint().as_directory() as folder:
                loaded = torch.load(f"{folder}/state.pt")
            for name, value in loaded.items():
                state[name].load_state_dict(value)

        def own_save() -> None:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                torch.save({name: value.state_dict() for name, value in state.items()}, f"{folder}/state.pt")
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))

        if config["loads"]:
            take_memory()
            load = timed(own_load if way == "own" else lambda: restore(state))
            Path(config["figures"]).write_text(json.dumps({"load": load}))
            return
        model(torch.ones(1, side)).sum().backward()
        optimizer.step()
        writer = bucketpoint.BucketWriter()
        for step in (1, 2):  # the first save allocates staging memory, and opens connections
            begun = time.monotonic()
            if way == "own":
                own_save()
                blocked = time.monotonic() - begun
            else:
                handle = report({}, state, step=step, storage_writer=writer)
                blocked = time.monotonic() - begun
                assert handle is not None
                handle.result()
            whole = time.monotonic() - begun
        Path(config["figures"]).write_text(json.dumps({"save": whole, "blocked": blocked}))

    with tempfile.TemporaryDirectory(prefix="bp-ray-") as folder:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20, _temp_dir=folder
        )
        found: dict[str, float] = {}
        for loads in (False, True):
            figures = f"{folder}/figures"
            ray.train.torch.TorchTrainer(
                train,
                train_loop_config={"loads": loads, "figures": figures},
                run_config=ray.train.RunConfig(
                    name="run",
                    storage_path=url.removeprefix("s3://"),
                    storage_filesystem=S3FileSystem(
                        endpoint_override=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"]
                    ),
                ),
            ).fit()
            found |= json.loads(Path(figures).read_text())
        ray.shutdown()
    return found


TRAINERS = {
    "fabric": fabric,
    "trainer": trainer,
    "accelerate": accelerate,
    "hf_trainer": hf_trainer,
    "ray_train": ray_train,
}


def measure(names: list[str], pairs: int, million: int) -> None:
    import get_minio
    from kit.servers import minio

    with minio(get_minio.obtain()) as server:
        env = {**os.environ, **server.env, "AWS_ENDPOINT_URL": server.endpoint, **RAY_SETTINGS}
        print(
            f"{12 * million} MB of state; "
            + ", ".join(
                f"{name} {version(name)}"
                for name in ("torch", "lightning", "accelerate", "transformers", "ray", "s3fs")
            )
        )
        print("| | own: save / blocked / load, s | bucketpoint | ratios |\n|---|---|---|---|")
        for name in names:
            seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(pairs):
                for way in WAYS:
                    bucket = server.make_bucket()
                    call = [sys.executable, __file__, "--one", name, way, f"s3://{bucket}/run", str(million)]
                    ran = subprocess.run(call, env=env, capture_output=True, text=True, check=False)
                    if ran.returncode:
                        raise SystemExit(f"{name}, {way}, round {number}: {ran.stderr[-3000:]}")
                    seen[way].append(json.loads(ran.stdout.splitlines()[-1]))
            means = {way: [statistics.mean(one[f] for one in seen[way]) for f in FIGURES] for way in WAYS}
            ratios = [
                statistics.median(two[f] / one[f] for one, two in zip(seen["own"], seen["bucketpoint"], strict=True))
                for f in FIGURES
            ]
            cells = [" / ".join(f"{value:.2f}" for value in row) for row in (*means.values(), ratios)]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--million", type=int, default=32)
    parser.add_argument("--only", choices=TRAINERS, nargs="+", default=list(TRAINERS))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, way, url, million = given.one
        print(json.dumps(TRAINERS[name](way, url, int(million))))
    else:
        measure(given.only, given.pairs, given.million)


if __name__ == "__main__":
    main()
