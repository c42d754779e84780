"""A corpus of malicious pickles, refused by every reader before anything runs or grows."""

from __future__ import annotations

import io
import json
import pickle
import resource
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kit.checkpoints import saved
from kit.programs import run_program
from kit.tally import Tally
from security.corpus import bombs, programs, refusal

LIMIT = 64 << 20
"""What reading one small pickle may allocate."""

PROGRAM = """
import json, pickle, resource, sys, tracemalloc
from torch.distributed.checkpoint import DefaultLoadPlanner
from bucketpoint.dcp.loading.decode import load_bytes
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.item_info import ItemInfo
from security import corpus

canary = sys.argv[1]


def as_item(data):
    load_bytes(memoryview(data), ItemInfo("x", 0, len(data), None), None, key="k", trusted=False,
               planner=DefaultLoadPlanner())


READERS = {"metadata": decode_metadata, "item": as_item, "torch.save": lambda data: as_item(corpus.archive(data))}
for reader in READERS.values():  # whatever they import, they import now
    for harmless in [pickle.dumps([compile, "x", b"x"], protocol) for protocol in range(6)]:
        try:
            reader(harmless)
        except BucketpointError:
            pass
seen, WATCHED = [], ("import", "os.", "subprocess.", "exec", "compile", "open", "ctypes.", "socket.", "shutil.",
                     "pty.", "marshal.", "code.", "webbrowser.")
sys.addaudithook(lambda name, _: seen.append(name) if name.startswith(WATCHED) and name != "os.putenv" else None)


def outcomes(samples, traced):
    found = {}
    for name, data in samples.items():
        for kind, reader in READERS.items():
            seen.clear()
            if traced:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            try:
                reader(data)
                outcome = "read"
            except BucketpointError as error:
                outcome = type(error).__name__
            except BaseException as error:
                outcome = f"RAISED {type(error).__name__}: {error}"
            ran = sorted(set(seen))
            # A claim that would be allocated in one piece is beyond the limit of the address space, and would raise.
            grown = tracemalloc.get_traced_memory()[1] - before if traced else 0
            found[f"{name} as {kind}"] = [outcome, ran, grown, len(data)]
    return found


found = {"programs": outcomes(corpus.programs(canary), False)}
if sys.platform == "linux":
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), resource.RLIM_INFINITY))
    tracemalloc.start()
    found["bombs"] = outcomes({**corpus.bombs(), **corpus.crashes(), **corpus.expanding_archives()}, True)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, list[str], int, int]]]:
    """What became of each sample, in a process of its own: outcome, what ran, bytes allocated, bytes of the pickle."""
    place = tmp_path_factory.mktemp("corpus")
    done = run_program(PROGRAM, str(place / "canary"), cwd=place)
    assert list(place.iterdir()) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_reads_and_runs_no_pickle_of_the_corpus(outcomes: dict[str, Any], bucketpoint_tally: Tally) -> None:
    found = outcomes["programs"]
    bucketpoint_tally.made("malicious pickles refused", len(found))
    assert len(found) >= 3 * 75
    unsafe = {"UnsafeDataError", "MetadataError"}
    assert {name: told for name, told in found.items() if told[0] not in unsafe} == {}
    assert {name: told[1] for name, told in found.items() if told[1]} == {}


def test_checks_that_the_corpus_is_not_harmless(tmp_path: Path) -> None:
    """What is refused would run: the plain unpickler does it."""
    for name in ("os.system", "eval", "in a dictionary", "GLOBAL, REDUCE", "os.open"):
        canary = tmp_path / "canary"
        pickle.loads(programs(str(canary))[name])
        assert canary.exists(), name
        canary.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux")
def test_sets_off_no_bomb_of_the_corpus(outcomes: dict[str, Any]) -> None:
    """Refused, or read, within a bound: 64 MiB, or 200 bytes for each byte of the pickle."""
    found = outcomes["bombs"]
    assert len(found) >= 3 * 20
    assert {name: told for name, told in found.items() if told[0].startswith("RAISED")} == {}
    assert {name: told[2] for name, told in found.items() if told[2] > max(LIMIT, 200 * told[3])} == {}


@pytest.mark.parametrize(
    "name", sorted(name for name in bombs() if "any" in name or "range" in name or "computed" in name)
)
def test_refuses_calls_that_allocate_what_they_are_told(name: str) -> None:
    """These are only names of the allow-list: it is the call that is refused, as `torch.load` would make it."""
    assert refusal(bombs()[name])


def test_refuses_an_archive_that_is_compressed() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + b"N0" * 20_000_000 + b"N.")
        archive.writestr("archive/version", b"3\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(stream.getvalue()) == "<a compressed archive>"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10


def test_refuses_an_archive_whose_directory_lies_before_its_beginning() -> None:
    data = saved({"step": 5})
    assert refusal(data[:4] + data[1000:]) is None


def test_refuses_an_archive_whose_names_are_no_text() -> None:
    data = bytearray(saved({"step": 5}))
    at = data.rindex(b"version", 0, data.rindex(b"PK\x05\x06"))
    data[at : at + 2] = b"\xff\xec"
    assert refusal(bytes(data)) in (None, "")
