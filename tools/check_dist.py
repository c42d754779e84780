"""Checks `dist/`: the sdist has every file that a checkout's make targets need, and the README's links lead somewhere.

With a folder as its argument, which has a second build of the wheel, it checks that both are the same bytes.

Standard library only: any Python 3.10+ runs it, in a checkout.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".ci/", ".github/", ".gitignore")


def main() -> int:
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with tarfile.open(sdist) as tar:
        packed = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {path for path in listed.splitlines() if not path.startswith(LEFT_OUT)}
    faults = [f"the sdist lacks {path}" for path in sorted(wanted - packed)]
    faults += [f"the sdist has {path}" for path in sorted(packed - wanted - {"PKG-INFO", ".gitignore"})]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    relative = re.findall(r"\]\((?!https?://|#)[^)]+\)", text)
    faults += [f"a package index cannot follow the README's link {link}" for link in relative]
    for folder in sys.argv[1:]:
        if (ROOT / folder / wheel.name).read_bytes() != wheel.read_bytes():
            faults.append(f"{wheel.name} is not reproducible: its second build, in {folder}, has other bytes")
    for fault in faults:
        print(fault)
    print(f"{len(packed)} files in the sdist, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
