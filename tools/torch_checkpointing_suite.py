"""Run torch_checkpointing's own storage tests against `BucketStorage`: python tools/torch_checkpointing_suite.py

Run it with the Python of .venv-torch-checkpointing. The tests come from the sdist on the package index and are unpacked
into a temporary folder. A `conftest.py` beside them replaces the storage for local files by `BucketStorage` on a local
folder, for paths as the tests write them.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SUITES = (
    "test_local_filesystem.py",
    "test_metadata_serialization.py",
    "test_safetensors_serialization.py",
    "test_torch_serialization.py",
    "test_checkpoint_loader.py",
    "test_checkpoint_manager.py",
    "test_checkpoint_writer.py",
    "test_checkpoint_reader.py",
    "test_consolidation.py",
    "test_hf_loading.py",
)

OPTIONS = ("-q", "-s", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider")

LOCAL = (
    r"\bos\.(path|listdir|makedirs)|\bopen\(|shutil\.|torch\.load\(|load_file\(|save_file\(|_text\(|_bytes\("
    r"|\.is_file\("
)
"""Code that looks at local files, or makes them, past the storage."""

CONFTEST = f"""
import inspect, re, tempfile
from dataclasses import dataclass
import pytest
from torch_checkpointing.storage import filesystem
from bucketpoint.integrations.torch_checkpointing import BucketStorageConfig

@dataclass
class OnBucketStorage(filesystem.StorageConfig):
    use_direct_io: bool = True
    root: str = ""

    def create_storage(self):
        return BucketStorageConfig(self.root or ROOT).create_storage()

ROOT = tempfile.mkdtemp(prefix="bucketpoint-suite-")
filesystem.LocalFileSystemStorageConfig = OnBucketStorage

def pytest_runtest_logreport(report):
    if report.failed:
        reason = re.sub(r"\\s+", " ", str(getattr(report.longrepr, "reprcrash", report.longrepr)))[-160:]
        print(f"\\nRESULT failed {{report.nodeid.partition('::')[2]}}: {{WHY.get(report.nodeid, '')}}{{reason}}")

WHY = {{}}

def pytest_collection_modifyitems(items):
    for item in items:
        text = inspect.getsource(item.cls or item.function)
        if re.search({LOCAL!r}, text):
            WHY[item.nodeid] = "(its code uses local files beside the storage) "
"""


def main() -> int:
    """Run the tests and print a line for each file and for each test that failed. Return 1 if no test ran."""
    version = importlib.metadata.version("torch_checkpointing")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The environments that uv makes have no pip.
        python = Path(sys.base_prefix) / "bin" / "python3"
        download = [str(python), "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*download, "-d", name, f"torch_checkpointing=={version}"], check=True)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder / "more"),
            "expecttest",
        ]
        subprocess.run(install, check=True)
        env = {**os.environ, "PYTHONPATH": str(folder / "more")}
        (sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tests,) = folder.glob("*/tests")
        (tests / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        seen = 0
        for suite in SUITES:
            command = [sys.executable, "-m", "pytest", *OPTIONS, suite]
            try:
                ran = subprocess.run(
                    command, cwd=tests, env=env, capture_output=True, text=True, check=False, timeout=300
                )
            except subprocess.TimeoutExpired:
                print(f"{suite}: still running after 300 s", flush=True)
                continue
            lines = ran.stdout.splitlines()
            print(f"{suite}: {lines[-1] if lines else ran.stderr[-300:]}", flush=True)
            for line in lines:
                if "RESULT failed " in line:
                    print("   ", line.partition("RESULT failed ")[2], flush=True)
            seen += any(" passed" in line or " failed" in line for line in lines[-1:])
    return int(not seen)


if __name__ == "__main__":
    sys.exit(main())
