"""Builds one virtual environment of the checkout with uv: bucketpoint, editable, with its development extras.

Standard library only. `make` calls it; the stamp file it leaves is what make compares with pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import get_uv

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".bucketpoint-stamp"

NOT_RESOLVED = 1
"""uv's exit status when an index has no versions that fit; 2 when, for one, the index cannot be reached."""

# An interpreter that is here before one that is downloaded; the newest torch has left Python 3.10 behind, so 3.10 last.
CHOICES = (
    (">=3.11,<3.15", "--no-python-downloads"),
    (">=3.10", "--no-python-downloads"),
    ("3.12", None),
)


SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def build(
    env: Path,
    *,
    torch: str,
    python: str,
    extra: str,
    beside: str = "",
    wheel: str = "",
    override: str = "",
    small: bool = False,
) -> None:
    """Creates or refreshes the environment; an empty `torch` means the newest that the interpreter has.

    Args:
        beside: one more requirement, of a package that not every index and platform has. Where it cannot be had there
            is no environment, and this says so and returns.
        wheel: a file to install in place of the checkout.
        override: a requirement that replaces those of other packages on the same one.
        small: on Linux take torch's build for CPUs, where PyTorch's index can be reached.
    """
    uv = get_uv.obtain()
    if uv is None:
        raise SystemExit("make_env: there is no uv, and none could be installed (see above)")
    interpreter = env / "bin" / "python"
    if python or not _runs(interpreter):
        _make_venv(uv, env, python)
    requirements = [f"torch=={torch}" if torch else "torch", *([beside] if beside else [])]
    overrides: list[str] = []
    if override:
        (env / "overrides.txt").write_text(f"{override}\n")
        overrides = ["--override", str(env / "overrides.txt")]
    if beside and not _to_be_had(uv, interpreter, requirements, overrides):
        print(f"make_env: no {env.name}: {beside} is not to be had here (see above)", file=sys.stderr)
        shutil.rmtree(env)
        return
    package = [f"{wheel}[{extra}]"] if wheel else ["--editable", f".[{extra}]" if extra else "."]
    # Not `uv sync`: its lock file would fix the torch that is meant to be the newest.
    install = ("pip", "install", "--python", str(interpreter), *overrides, *package, *requirements)
    small = small and sys.platform == "linux" and "UV_TORCH_BACKEND" not in os.environ
    if small and _call(uv, *install, "--torch-backend", "cpu"):
        print("make_env: PyTorch's index cannot be had (see above): torch comes with CUDA, 5 GB", file=sys.stderr)
        small = False
    if not small and _call(uv, *install):
        raise SystemExit(f"make_env: {env.name} could not be filled (see above)")
    (env / STAMP).write_text(f"{' '.join(requirements)} [{extra}]\n")


def _to_be_had(uv: Path, interpreter: Path, requirements: list[str], overrides: list[str]) -> bool:
    """Whether the index has these for the interpreter. That it does not answer is a failure, not a no."""
    command = [str(uv), "pip", "compile", "--quiet", *overrides, "--python", str(interpreter), "-"]
    given = "\n".join(requirements).encode()
    answer = subprocess.run(command, input=given, env=uv_settings(), cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    if answer not in (0, NOT_RESOLVED):
        raise SystemExit(f"make_env: could not look {' '.join(requirements)} up (see above)")
    return answer == 0


def _make_venv(uv: Path, env: Path, python: str) -> None:
    choices = ((python, None),) if python else CHOICES
    for version, flag in choices:
        if _call(uv, "venv", "--quiet", "--clear", "--python", version, *([flag] if flag else []), str(env)) == 0:
            return
    raise SystemExit("make_env: no Python 3.10 or newer was found; name one with `make ... PYTHON=/path/to/python3`")


def _runs(interpreter: Path) -> bool:
    try:
        return subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def uv_settings() -> dict[str, str]:
    """The environment to run uv in."""
    # An active environment of the user's must not decide what goes into this one.
    settings = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # uv's built-in authorities miss those that an administrator added to the machine's; pip and Go read the machine's.
    if any(Path(bundle).exists() for bundle in SYSTEM_BUNDLES):
        settings.setdefault("UV_SYSTEM_CERTS", "1")
    return settings


def _call(uv: Path, *command: str) -> int:
    return subprocess.run([uv, *command], env=uv_settings(), cwd=ROOT, stdout=sys.stderr).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("env", type=Path, help="folder of the environment, relative to the checkout")
    parser.add_argument("--torch", default="", help="exact torch version; default: the newest")
    parser.add_argument("--python", default="", help="interpreter or version; default: one that is here")
    parser.add_argument("--extra", default="dev", help="default: dev; empty: only what bucketpoint itself needs")
    parser.add_argument("--small-torch", action="store_true", help="torch's build for CPUs, where it can be had")
    parser.add_argument("--beside", default="", help="one more requirement; without it there is no environment")
    parser.add_argument("--wheel", default="", help="a wheel to install in place of the checkout")
    parser.add_argument("--override", default="", help="a requirement that replaces those of other packages")
    args = parser.parse_args()
    env = (ROOT / args.env).resolve()
    build(
        env,
        torch=args.torch,
        python=args.python,
        extra=args.extra,
        beside=args.beside,
        wheel=args.wheel,
        override=args.override,
        small=args.small_torch,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
