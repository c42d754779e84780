"""Checks `terraform/`: format, validity, tests, checkov, and an apply of the AWS example against moto's server.

What needs a provider is "not run" where none can be had; with REQUIRE_TERRAFORM_PROVIDERS set that is a failure. Those
that `make_terraform_providers.py` has built are taken before the registry's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_env import uv_settings
from make_terraform_providers import terraform_env

if TYPE_CHECKING:
    from kit.servers import S3Server

ROOT = Path(__file__).resolve().parent.parent
TERRAFORM = ROOT / "terraform"
PROVIDERS = (("aws", "~> 5.100"), ("aws", "~> 6.0"), ("google", ">= 6.0"))
"""The generations that the modules support, each of which is checked."""
MODULES = {"aws": "aws", "google": "gcp"}
"""The folder of each provider's module."""
ROLES = ("trainer", "reader", "pruner")
EXAMPLE = "-var-file=example.tfvars"
CHECKOV = "checkov>=3.2,<4"
CHANGES = 2
"""The exit status of a plan that finds some."""
TIMEOUT_S = 1200

VERSION = """
terraform {
  required_providers {
    %(provider)s = {
      source  = "hashicorp/%(provider)s"
      version = "%(version)s"
    }
  }
}
"""

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

# What is off by default. Not the alarm: moto does not know the request metrics that it looks at.
EVERYTHING = """
module "checkpoints" {
  versioning     = true
  create_kms_key = true
  log_bucket     = { name = "%(logs)s" }
  vpc_endpoint   = { vpc_id = "%(vpc)s", route_table_ids = ["%(table)s"] }
  tags           = { team = "trial" }
}
"""

EVERYTHING_ON_GCP = """
provider "google" {
  access_token = "none"
}

module "checkpoints" {
  versioning       = true
  soft_delete_days = 7
  log_bucket       = { name = "acme-logs" }
  alarm            = {}
}
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
    for provider, version in PROVIDERS:
        yield f"terraform validate and test, {provider} {version}", partial(_validate_and_test, provider, version)
    yield "checkov", _checkov
    yield "terraform plan for Google's cloud", _plan
    for provider, version in PROVIDERS:
        if provider == "aws":
            yield (
                f"terraform apply on moto's server, a run in its bucket, terraform destroy, {provider} {version}",
                partial(_apply, version),
            )


def terraform() -> str:
    """The program. Raises NotRunError: there is none."""
    found = shutil.which(os.environ.get("TERRAFORM", "terraform"))
    if found is None:
        raise NotRunError("there is no terraform on the PATH")
    return found


def _validate_and_test(provider: str, version: str) -> None:
    for kind in ("modules", "examples"):
        with _initialised(TERRAFORM / kind / MODULES[provider], provider, version) as root:
            root.ran("validate", "-no-color")
            if (root.folder / "tests").is_dir():
                root.ran("test", "-no-color")


@dataclass(frozen=True)
class Root:
    """A folder of Terraform's with its providers installed.

    Attributes:
        folder: in a copy of all modules, so that nothing is left in the checkout.
        env: to run Terraform in.
    """

    folder: Path
    env: dict[str, str]

    def ran(self, *arguments: str) -> str:
        """What Terraform says."""
        return _ran(terraform(), *arguments, cwd=self.folder, env=self.env)


@contextmanager
def _initialised(folder: Path, provider: str, version: str) -> Iterator[Root]:
    """Copy the folder, and install the provider in one of its versions."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(TERRAFORM, Path(scratch) / "terraform")
        shutil.copytree(ROOT / "policies", Path(scratch) / "policies")
        root = Root(Path(scratch) / folder.relative_to(ROOT), terraform_env(Path(scratch)))
        (root.folder / "version_override.tf").write_text(VERSION % {"provider": provider, "version": version})
        try:
            root.ran("init", "-backend=false", "-no-color", "-input=false")
        except subprocess.CalledProcessError as error:
            # Its messages are drawn in boxes.
            said = (error.stderr or "").rpartition("Error: ")[2].replace("│", " ").replace("╵", " ")
            raise NotRunError(f"its provider cannot be had: {' '.join(said.split())[:400]}") from None
        yield root


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


def _plan() -> None:
    """What the provider itself has to say to a plan. Nothing is there yet, so it asks Google for nothing."""
    with _initialised(TERRAFORM / "examples" / "gcp", "google", ">= 6.0") as root:
        (root.folder / "everything_override.tf").write_text(EVERYTHING_ON_GCP)
        # For a key of the bucket's own it would ask Google who will use it.
        root.ran("plan", "-input=false", "-no-color", EXAMPLE, "-var=create_kms_key=false")


def _apply(version: str) -> None:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from kit import servers

    with servers.moto() as moto, _initialised(TERRAFORM / "examples" / "aws", "aws", version) as root:
        bucket, anybody = f"trial-{os.getpid()}", {"arns": ["arn:aws:iam::123456789012:root"]}
        surroundings = _surroundings(moto)
        given = (
            *("-input=false", "-no-color", f"-var=bucket={bucket}", "-var=region=us-east-1"),
            f"-var=endpoint={moto.endpoint}",
            f"-var=principals={json.dumps(dict.fromkeys(ROLES, anybody))}",
        )
        # Its providers and its cluster are not there: it can be planned, not applied.
        root.ran("plan", "-input=false", "-no-color", EXAMPLE, f"-var=endpoint={moto.endpoint}")
        try:
            _settled(root, given)
            outputs = {name: found["value"] for name, found in json.loads(root.ran("output", "-json")).items()}
            _roles_are_the_policies(moto.client("iam"), bucket, outputs["roles"])
            _plain_http_is_refused(moto, bucket)
            # Or it would refuse the trial, too. The next apply puts it back.
            moto.client().delete_bucket_policy(Bucket=bucket)
            _a_run_is_saved_and_pruned(root.folder, {**os.environ, **moto.env, **outputs["environment"]}, outputs)
            left = [key for key in moto.keys(bucket) if key.endswith("/.metadata")]
            if not any("step-3" in key for key in left) or any("step-2" in key for key in left):
                raise AssertionError(f"a prune left {left}")
            # What is off by default, switched on and off again in place.
            override = root.folder / "everything_override.tf"
            override.write_text(EVERYTHING % surroundings)
            _settled(root, given)
            made = root.ran("state", "list")
            for kind in ("kms_key", "s3_bucket_versioning", "s3_bucket_logging", "vpc_endpoint", "iam_role_policy.key"):
                if f"aws_{kind}" not in made:
                    raise AssertionError(f"no aws_{kind} was made of what is off by default:\n{made}")
            override.unlink()
            _settled(root, given)
        finally:
            root.ran("destroy", "-auto-approve", *given)
        left = [bucket["Name"] for bucket in moto.client().list_buckets()["Buckets"]]
        left += [role["RoleName"] for role in moto.client("iam").list_roles()["Roles"]]
        if left != [surroundings["logs"]]:
            raise AssertionError(f"a destroy left {left}")


def _settled(root: Root, given: Sequence[str]) -> None:
    """Applies without a warning; what the service says that it has must then be what was asked for."""
    said = root.ran("apply", "-auto-approve", *given)
    if "Warning: " in said:
        raise AssertionError(f"an apply warns:\n{said[said.index('Warning: ') :]}")
    try:
        root.ran("plan", "-detailed-exitcode", *given)
    except subprocess.CalledProcessError as error:
        if error.returncode != CHANGES:
            raise
        raise AssertionError(f"after an apply there is something to change:\n{error.stdout}") from None


def _roles_are_the_policies(iam: Any, bucket: str, roles: dict[str, str]) -> None:
    """Each has the rights of policies/aws."""
    if set(roles) != set(ROLES):
        raise AssertionError(f"the roles are {sorted(roles)}")
    for role, arn in roles.items():
        name = arn.rpartition("/")[2]
        if (names := iam.list_role_policies(RoleName=name)["PolicyNames"]) != ["checkpoints"]:
            raise AssertionError(f"the policies of {role} are {names}")
        found = iam.get_role_policy(RoleName=name, PolicyName="checkpoints")["PolicyDocument"]
        text = (ROOT / "policies" / "aws" / f"{role}.json").read_text()
        if found != json.loads(text.replace("BUCKET", bucket).replace("PREFIX", "runs")):
            raise AssertionError(f"{role} may do something else than policies/aws/{role}.json: {json.dumps(found)}")


def _plain_http_is_refused(moto: S3Server, bucket: str) -> None:
    from botocore.exceptions import ClientError

    try:
        moto.client().put_object(Bucket=bucket, Key="runs/x", Body=b"x")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.FORBIDDEN:
            return
        raise
    raise AssertionError("an object went up without TLS")


def _a_run_is_saved_and_pruned(folder: Path, env: dict[str, str], outputs: dict[str, Any]) -> None:
    env, policy = {**env, "RUN_NAME": "trial"}, folder / "retention.yaml"
    bucketpoint = str(Path(sys.executable).with_name("bucketpoint"))
    policy.write_text(outputs["retention_yaml"].replace("grace: 24h", "grace: 0s").replace("latest: 3", "latest: 1"))
    _ran(sys.executable, "-W", "ignore", "-c", TRIAL, str(policy), env=env)
    _ran(bucketpoint, "prune", str(policy), "--yes", env=env)
    policy.write_text(outputs["retention_yaml"])
    _ran(bucketpoint, "prune", str(policy), "--dry-run", env=env)


def _surroundings(moto: S3Server) -> dict[str, str]:
    """What an account has beside the module: a VPC with a route table, and a bucket that S3 may write its logs to."""
    ec2, logs = moto.client("ec2"), moto.make_bucket("logs")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "logging.s3.amazonaws.com"},
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{logs}/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    moto.client().put_bucket_policy(Bucket=logs, Policy=policy)
    return {"vpc": vpc, "table": table, "logs": logs}


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
