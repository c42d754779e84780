"""A cluster of Ray on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

from kit.servers import S3Server

# Ray reads them when it is imported.
os.environ.update(
    {
        # No report of usage leaves the machine.
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray listens on all addresses of the machine. Without this it leaves a token in the home folder.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray takes one report of each worker at a time, otherwise one in 2 s.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    }
)


@pytest.fixture(scope="session")
def cluster(bucketpoint_minio: S3Server) -> Iterator[None]:
    """A cluster of Ray on this machine, whose workers find MinIO."""
    import ray

    # Not below pytest's folders: the paths of Ray's sockets may have 107 characters at most.
    folder = tempfile.mkdtemp(prefix="bp-ray-")
    workers = {**bucketpoint_minio.env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": workers},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
