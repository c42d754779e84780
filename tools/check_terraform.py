"""Checks `terraform/`: format, validity, tests, checkov, and an apply of the AWS example against moto's server.

What needs a provider is "not run" where none can be had; with REQUIRE_TERRAFORM_PROVIDERS set that is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from make_env import uv_settings

ROOT = Path(__file__).resolve().parent.parent
TERRAFORM = ROOT / "terraform"
MODULES = ("aws", "gcp")
CHECKOV = "checkov>=3.2,<4"
TIMEOUT_S = 1200

# A training run's worth of bucketpoint, in the bucket that the example has made.
TRIAL = """
import os, sys
import torch, torch.distributed.checkpoint as dcp
from bucketpoint import S3Writer, S3Reader
root = os.environ["BUCKETPOINT_ROOT"] + "/trial"
for step in (1, 2, 3):
    writer = S3Writer(f"{root}/step-{step}", retention=sys.argv[1])
    dcp.save({"w": torch.full((1000,), float(step))}, storage_writer=writer)
state = {"w": torch.zeros(1000)}
dcp.load(state, storage_reader=S3Reader(f"{root}/step-3"))
assert state["w"].eq(3).all()
"""


class NotRunError(Exception):
    """A step that cannot be run here, and why."""


def main() -> int:
    required = bool(os.environ.get("REQUIRE_TERRAFORM_PROVIDERS"))
    failed = False
    for name, step in steps():
        try:
            step()
        except NotRunError as reason:
            failed |= required
            print(f"{name}: not run: {reason}")
        except AssertionError as error:
            failed = True
            print(f"{name}: FAILED: {error}")
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"{name}: FAILED\n{error.stdout or ''}{error.stderr or ''}")
        else:
            print(f"{name}: passed")
    return int(failed)


def steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every step with its name."""
    yield "terraform fmt", lambda: _ran(terraform(), "fmt", "-check", "-recursive", "-diff", str(TERRAFORM))
    for module in MODULES:
        yield f"terraform validate and test, {module}", partial(_validate_and_test, module)
    yield "checkov", _checkov
    yield "terraform apply on moto's server, a run in its bucket, terraform destroy", _apply


def terraform() -> str:
    """The program. Raises NotRunError: there is none."""
    found = shutil.which(os.environ.get("TERRAFORM", "terraform"))
    if found is None:
        raise NotRunError("there is no terraform on the PATH")
    return found


def _validate_and_test(module: str) -> None:
    for folder in (TERRAFORM / "modules" / module, TERRAFORM / "examples" / module):
        with _initialised(folder) as copy:
            _ran(terraform(), "validate", "-no-color", cwd=copy)
            if (copy / "tests").is_dir():
                _ran(terraform(), "test", "-no-color", cwd=copy)


@contextmanager
def _initialised(folder: Path) -> Iterator[Path]:
    """A copy of all modules, so that nothing is left in the checkout, with the folder's providers installed."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(TERRAFORM, Path(scratch) / "terraform")
        shutil.copytree(ROOT / "policies", Path(scratch) / "policies")
        copy = Path(scratch) / folder.relative_to(ROOT)
        try:
            _ran(terraform(), "init", "-backend=false", "-no-color", "-input=false", cwd=copy)
        except subprocess.CalledProcessError as error:
            # Its messages are drawn in boxes.
            said = (error.stderr or "").rpartition("Error: ")[2].replace("│", " ").replace("╵", " ")
            raise NotRunError(f"its provider cannot be had: {' '.join(said.split())[:400]}") from None
        yield copy


def _checkov() -> None:
    uv, env = _ran(sys.executable, str(ROOT / "tools" / "get_uv.py")).strip(), uv_settings()
    command = [uv, "tool", "run", "--from", CHECKOV, "checkov"]
    try:
        _ran(*command, "--version", env=env)
    except subprocess.CalledProcessError as error:
        raise NotRunError(f"checkov cannot be had: {(error.stderr or '').strip()[-300:]}") from None
    # Without a platform account it knows no severities: every finding counts, and each exception is argued in place.
    _ran(
        *command,
        "--directory",
        str(TERRAFORM),
        "--quiet",
        "--compact",
        "--framework",
        "terraform",
        "--skip-download",
        env=env,
    )


def _apply() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    from bucketpoint.testing import servers

    with servers.moto() as moto, _initialised(TERRAFORM / "examples" / "aws") as copy:
        given = [f"-var=bucket=trial-{os.getpid()}", "-var=region=us-east-1", f"-var=endpoint={moto.endpoint}"]
        _ran(terraform(), "apply", "-auto-approve", "-input=false", "-no-color", *given, cwd=copy)
        try:
            outputs = json.loads(_ran(terraform(), "output", "-json", cwd=copy))
            policy = copy / "retention.yaml"
            policy.write_text(
                outputs["retention_yaml"]["value"].replace("grace: 24h", "grace: 0s").replace("latest: 3", "latest: 1")
            )
            env = {**os.environ, **moto.env, **outputs["environment"]["value"], "RUN_NAME": "trial"}
            _ran(sys.executable, "-W", "ignore", "-c", TRIAL, str(policy), env=env)
            _ran(str(Path(sys.executable).with_name("bucketpoint")), "prune", str(policy), "--yes", env=env)
            left = [key for key in moto.keys(outputs["bucket"]["value"]) if key.endswith("/.metadata")]
            if not any("step-3" in key for key in left) or any("step-2" in key for key in left):
                raise AssertionError(f"a prune left {left}")
        finally:
            _ran(terraform(), "destroy", "-auto-approve", "-input=false", "-no-color", *given, cwd=copy)


def _ran(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
