"""The manifests of examples/kubernetes: schemas, references, and the command of the pods, run as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from bucketpoint.retention import from_yaml
from kit.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "examples" / "kubernetes"
VERSIONS = ("1.31", "1.37")
LIMIT_S = 240
"""Far above the time that any step takes: only a hang reaches it."""

STOPPED = 75

Object = dict[str, Any]

TORCHRUN = """
import json, os, signal, sys, time
def stop(*_):
    open(os.environ["NOTE"], "w").write("stopped")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
open(os.environ["SAID"], "w").write(json.dumps(sys.argv[1:]))
if os.environ["ENDS"] == "told":
    time.sleep(600)
sys.exit(int(os.environ["ENDS"]))
"""


def manifests() -> list[Object]:
    files = [one for one in sorted((MANIFESTS / "base").glob("*.yaml")) if one.name not in KUSTOMIZE]
    return [one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


KUSTOMIZE = ("kustomization.yaml", "policy.yaml")


def named(kind: str, name: str) -> Object:
    (found,) = [one for one in manifests() if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod_of(manifest: Object) -> Object:
    spec = manifest["spec"]
    template: Object = (spec["jobTemplate"]["spec"] if manifest["kind"] == "CronJob" else spec)["template"]
    return template


def pods() -> list[Object]:
    return [pod_of(one) for one in manifests() if one["kind"] in {"Job", "CronJob"}]


def env_of(pod: Object) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value", "") for one in container["env"]}


def rendered(cloud: str) -> list[Object]:
    """What `kubectl apply -k` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here")
    text = subprocess.run(
        [kubectl, "kustomize", str(MANIFESTS / cloud)], capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("cloud", ["base", "eks", "gke"])
@pytest.mark.parametrize("version", VERSIONS)
def test_accepts_every_manifest_in_kubernetes(cloud: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = rendered(cloud) if cloud != "base" or shutil.which("kubectl") else manifests()
    assert len({(one["kind"], one["metadata"]["name"]) for one in found}) == len(found) >= 7
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("cloud", "annotation", "scheme"),
    [("eks", "eks.amazonaws.com/role-arn", "s3"), ("gke", "iam.gke.io/gcp-service-account", "gs")],
)
def test_gives_each_cloud_an_identity_for_each_role_and_no_key(cloud: str, annotation: str, scheme: str) -> None:
    found = rendered(cloud)
    accounts = {
        one["metadata"]["name"]: one["metadata"]["annotations"] for one in found if one["kind"] == "ServiceAccount"
    }
    workloads = [pod_of(one) for one in found if one["kind"] in {"Job", "CronJob"}]
    assert {pod["spec"]["serviceAccountName"] for pod in workloads} == set(accounts)
    identities = [annotations[annotation] for annotations in accounts.values()]
    assert len(set(identities)) == 2
    # kustomize gives the ConfigMap a name with a digest, and must have followed it.
    (policy,) = [one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"]
    for pod in workloads:
        assert policy in [volume.get("configMap", {}).get("name") for volume in pod["spec"]["volumes"]]
        assert env_of(pod)["BUCKETPOINT_ROOT"].startswith(f"{scheme}://")
    assert not re.search(r"secretKeyRef|ACCESS_KEY|PASSWORD", json.dumps(found))


def test_leads_every_reference_of_the_pods_somewhere() -> None:
    accounts = {one["metadata"]["name"] for one in manifests() if one["kind"] == "ServiceAccount"}
    generated = yaml.safe_load((MANIFESTS / "base/kustomization.yaml").read_text(encoding="utf-8"))
    (policy,) = generated["configMapGenerator"]
    assert all((MANIFESTS / "base" / name).exists() for name in policy["files"] + generated["resources"])
    for pod in pods():
        spec = pod["spec"]
        (container,) = spec["containers"]
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert set(mounts) == set(volumes)
        assert env_of(pod)["HOME"] in [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
        assert volumes["policy"]["configMap"]["name"] == policy["name"]
        text = " ".join(container["command"])
        assert f"{mounts['policy']}/{policy['files'][0]}" in text
        # JOB_COMPLETION_INDEX is Kubernetes' own, in Indexed Jobs. The other lower-case names are the shell's.
        used = set(re.findall(r"\$\{?([A-Z_]+)", text)) - {"JOB_COMPLETION_INDEX"}
        root = from_yaml((MANIFESTS / "base/policy.yaml").read_text(encoding="utf-8"), environ=env_of(pod)).root
        assert used <= set(env_of(pod))
        assert root == f"{env_of(pod)['BUCKETPOINT_ROOT']}/{env_of(pod)['RUN_NAME']}"
        assert spec["serviceAccountName"] in accounts
    job, service = named("Job", "train"), named("Service", "train")
    labels = pod_of(job)["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"
    # Kubernetes gives the pods of an Indexed Job these names, below the service of their `subdomain`.
    assert pod_of(job)["spec"]["subdomain"] == service["metadata"]["name"]
    assert env_of(pod_of(job))["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def cron_example() -> Object:
    with (ROOT / "examples/cron/kubernetes.yaml").open(encoding="utf-8") as file:
        (cron,) = [one for one in yaml.safe_load_all(file) if one["kind"] == "CronJob"]
    return cron


def test_gives_the_pods_no_more_rights_than_they_must_have() -> None:
    for pod in [*pods(), pod_of(cron_example())]:
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])


def test_selects_the_pods_by_network_policies_and_lets_training_reach_itself() -> None:
    policies = [one for one in manifests() if one["kind"] == "NetworkPolicy"]
    for pod in pods():
        labels = pod["metadata"]["labels"].items()
        chosen = {
            one["metadata"]["name"] for one in policies if one["spec"]["podSelector"]["matchLabels"].items() <= labels
        }
        name = pod["metadata"]["labels"]["app.kubernetes.io/name"]
        assert chosen == ({"object-store", "train"} if name == "train" else {"object-store"})
    train = next(one for one in policies if one["metadata"]["name"] == "train")["spec"]
    (ingress,), (egress,) = train["ingress"], train["egress"]
    assert ingress["from"] == egress["to"] == [{"podSelector": train["podSelector"]}]
    assert "ports" not in ingress
    assert "ports" not in egress
    store = next(one for one in policies if one["metadata"]["name"] == "object-store")["spec"]
    open_to = {one["ipBlock"]["cidr"]: one["ipBlock"]["except"] for one in store["egress"][-1]["to"]}
    assert open_to == {"0.0.0.0/0": ["169.254.0.0/16"], "::/0": ["fe80::/10", "fd00:ec2::/32", "fd20:ce::/32"]}
    assert "ingress" not in store
    assert {port["port"] for rule in store["egress"] for port in rule["ports"]} == {53, 443}


def test_makes_each_limit_of_time_longer_than_the_one_inside_it() -> None:
    job = named("Job", "train")
    env = env_of(pod_of(job))
    torchrun_s = int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert int(env["GRACE_S"]) < torchrun_s < pod_of(job)["spec"]["terminationGracePeriodSeconds"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["NODES"]) >= int(env["MIN_NODES"])
    policy = from_yaml((MANIFESTS / "base/policy.yaml").read_text(encoding="utf-8"), environ=env)
    assert "sigterm" in policy.save.on
    assert policy.prune.when == "manual"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [STOPPED]
    assert rules[0]["onExitCodes"]["containerName"] == pod_of(job)["spec"]["containers"][0]["name"]


def test_runs_in_the_pruning_job_the_command_that_is_tested_for_cron() -> None:
    cron, ours = cron_example(), named("CronJob", "bucketpoint-prune")
    assert [pod_of(one)["spec"]["containers"][0]["command"] for one in (cron, ours)] == [
        ["bucketpoint", "prune", "/etc/bucketpoint/policy.yaml"]
    ] * 2
    assert ours["spec"]["concurrencyPolicy"] == "Forbid"


class Pod:
    """One pod of the Job as a process: its command, with the paths and the sizes of this machine."""

    def __init__(self, index: int, folder: Path, **settings: str) -> None:
        pod = pod_of(named("Job", "train"))
        (container,) = pod["spec"]["containers"]
        assert container["command"][:2] == ["bash", "-c"]
        script = container["command"][2].replace("/app/", f"{ROOT}/examples/slurm/")
        script = script.replace("/etc/bucketpoint/", f"{MANIFESTS}/base/")
        self.note, self.log = folder / f"note-{index}", folder / f"log-{index}"
        self.note.touch()
        local = {"HEAD": "127.0.0.1", "POD_IP": "127.0.0.1", "PROCS_PER_NODE": "1", "HOME": str(folder)}
        assert set(local | settings) - {"PATH", "PYTHONPATH", "SAID", "ENDS"} <= set(env_of(pod))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script],
                env={
                    **os.environ,
                    **env_of(pod),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "JOB_COMPLETION_INDEX": str(index),
                    "NOTE": str(self.note),
                    **local,
                    **settings,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Send SIGTERM to process 1 alone, as kubelet does."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        return self.process.wait(LIMIT_S)


@pytest.fixture
def started() -> Iterator[list[Pod]]:
    """Pods that a test has begun: those that still run are stopped at its end."""
    running: list[Pod] = []
    yield running
    for pod in running:
        if pod.process.poll() is None:
            pod.stop()
            pod.process.wait(LIMIT_S)


def until_one_says(pods: list[Pod], words: str, *files: Path) -> None:
    """Wait for words in a file, or else for those of rank 0, which may be in the log of either pod."""
    limit = time.monotonic() + LIMIT_S
    while not any(file.exists() and words in file.read_text() for file in files or [pod.log for pod in pods]):
        said = "\n".join(pod.log.read_text()[-3000:] for pod in pods)
        assert time.monotonic() < limit, said
        assert all(pod.process.poll() is None for pod in pods), said
        time.sleep(0.1)


def stub(folder: Path) -> str:
    """A `torchrun` that notes its arguments, on a PATH."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(f"#!{sys.executable}\n{TORCHRUN}", encoding="utf-8")
    (programs / "torchrun").chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(("ends", "status"), [("0", 0), ("1", 1), ("told", STOPPED)])
def test_ends_a_stopped_pod_with_another_status_than_a_failed_one(
    ends: str, status: int, tmp_path: Path, started: list[Pod]
) -> None:
    said = tmp_path / "said"
    pod = Pod(1, tmp_path, PATH=stub(tmp_path), SAID=str(said), ENDS=ends)
    started.append(pod)
    if ends == "told":
        until_one_says([pod], "policy.yaml", said)
        pod.stop()
    assert pod.end() == status, pod.log.read_text()
    args = get_args_parser().parse_args(json.loads(said.read_text()))
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == ("2:4", "c10d", "127.0.0.1:29400")
    assert args.rdzv_conf == "is_host=0,last_call_timeout=60"
    assert Path(args.training_script).name == "train.py"


@pytest.mark.broad
def test_stops_the_pods_together_and_resumes_with_those_left_until_one_joins(
    tmp_path: Path, started: list[Pod]
) -> None:
    run = {"BUCKETPOINT_ROOT": str(tmp_path), "RUN_NAME": "run", "NODES": "2", "STEPS": "1000000"}
    port = str(free_port())
    started += [Pod(index, tmp_path, **run, MIN_NODES="2", PORT=port) for index in (0, 1)]
    until_one_says(started, "2 ranks begin with step 1\n")
    started[1].stop()
    assert [pod.end() for pod in started] == [STOPPED, STOPPED], started[0].log.read_text()[-5000:]
    notes = {pod.note.read_text() for pod in started}
    (step,) = [int(note.removeprefix("stopped after step ")) for note in notes]
    assert (tmp_path / "run" / f"step-{step}" / ".metadata").exists()

    again = tmp_path / "again"
    again.mkdir()
    run |= {"PORT": str(free_port()), "MIN_NODES": "1", "LAST_CALL_S": "1"}
    left = Pod(0, again, **run)
    started.append(left)
    until_one_says([left], f"1 ranks begin with step {step + 1}\n")
    # torchrun stops the rank for the pod that joins, and starts it again.
    started.append(Pod(1, again, **run))
    until_one_says(started[-2:], "2 ranks begin with step ")
    said = "".join(pod.log.read_text() for pod in started[-2:])
    (stopped,) = re.findall(r"^stopped after step (\d+)$", said, re.MULTILINE)
    assert f"2 ranks begin with step {int(stopped) + 1}\n" in said
    started[-1].stop()
    assert [pod.end() for pod in started[-2:]] == [STOPPED, STOPPED], left.log.read_text()[-5000:]
