"""Writes `dist/bucketpoint-VERSION.cdx.json`: what an installation of the wheel with the extra `all` has, as CycloneDX.

The wheel of `dist/` is installed into an environment of its own, with the newest versions that the index has, or
those of UV_CONSTRAINT in a release, and cyclonedx-py lists it. `make dist` calls this.
"""

from __future__ import annotations

import json
import subprocess
import sys

import get_uv
import make_env

ROOT = make_env.ROOT
ENV = ROOT / ".venv-sbom"
LISTER = "cyclonedx-bom>=7,<8"


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    make_env.build(ENV, torch="", python="", extra="all", wheel=str(wheel))
    target = wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".cdx.json")
    command = ("tool", "run", "--quiet", "--from", LISTER, "cyclonedx-py", "environment", "--output-reproducible")
    # Without the project's own file, which names the library as the root, the list has no root and no graph from it.
    root = ("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library")
    listed = subprocess.run(
        [str(get_uv.obtain()), *command, *root, "--output-file", str(target), str(ENV / "bin" / "python")],
        env=make_env.uv_settings(),
        cwd=ROOT,
    )
    if listed.returncode:
        return listed.returncode
    packages = json.loads(target.read_text(encoding="utf-8"))["components"]
    print(f"{target.relative_to(ROOT)}: {len(packages)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
