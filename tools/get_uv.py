"""Finds or obtains uv and prints its path. Standard library only, needs no root, and touches no system Python.

Order: a uv on the PATH that runs, the checkout's cache, a venv of its own, `pip --target`, uv's own installer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / ".cache" / "uv"
CACHED = HOME / "bin" / "uv"
INSTALLER = "https://astral.sh/uv/install.sh"
INSTALL_TIMEOUT_S = 600
CONNECT_TIMEOUT_S = 20


def obtain() -> Path | None:
    """A uv that runs, or None after saying why each route failed."""
    on_path = shutil.which("uv")
    # A version manager's shim is on the PATH even where the selected Python has no uv.
    if on_path and _runs(Path(on_path)):
        return Path(on_path)
    if _runs(CACHED):
        return CACHED
    routes: dict[str, Callable[[], None]] = {
        "a venv of its own": _from_venv,
        "pip --target": _from_pip_target,
        "uv's installer": _from_installer,
    }
    for name, route in routes.items():
        _say(f"installing uv into {HOME} by {name}")
        shutil.rmtree(HOME, ignore_errors=True)
        try:
            route()
        except (OSError, subprocess.SubprocessError) as error:
            _say(f"that did not work: {error}")
        if _runs(CACHED):
            return CACHED
    return None


def _from_venv() -> None:
    # Debian splits ensurepip off; this route then fails and the next needs only pip.
    _call(sys.executable, "-m", "venv", str(HOME))
    _call(str(HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv")


def _from_pip_target() -> None:
    # An externally managed Python still installs into a folder that is not its own.
    _call(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(HOME), "uv")


def _from_installer() -> None:
    with urllib.request.urlopen(INSTALLER, timeout=CONNECT_TIMEOUT_S) as answer:
        script = answer.read()
    HOME.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "UV_UNMANAGED_INSTALL": str(CACHED.parent)}
    subprocess.run(["sh"], input=script, env=env, stdout=sys.stderr, check=True, timeout=INSTALL_TIMEOUT_S)


def _call(*command: str) -> None:
    subprocess.run(command, stdout=sys.stderr, check=True, timeout=INSTALL_TIMEOUT_S)


def _runs(uv: Path) -> bool:
    try:
        return subprocess.run([uv, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _say(message: str) -> None:
    sys.stderr.write(f"get_uv: {message}\n")


def main() -> int:
    uv = obtain()
    if uv is None:
        _say("uv could not be installed: install it as https://docs.astral.sh/uv/ says, and try again")
        return 1
    sys.stdout.write(f"{uv}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
