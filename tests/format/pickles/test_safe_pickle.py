"""What a safe load refuses, found without running any of it."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import random
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from bucketpoint.format.metadata import codec
from bucketpoint.format.pickles import items
from format.pickles.allowed import ITEM_GLOBALS, METADATA_GLOBALS
from kit.checkpoints import saved
from security.corpus import Call, archive, bombs, programs, refusal

np = pytest.importorskip("numpy")


WRITERS = {
    "torch.save": saved,
    "torch.save protocol 5": lambda value: saved(value, pickle_protocol=5),
    "pickle": pickle.dumps,
    "pickle protocol 2": lambda value: pickle.dumps(value, 2),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def training_state() -> dict[str, Any]:
    return {
        "step": 5,
        "big": 1 << 100,
        "loss": 0.25,
        "name": "ünï",
        "raw": b"\x00\xff",
        "flags": (True, None, ...),
        "sets": [{1, 2}, frozenset([3]), 1j, bytearray(b"x"), bytearray(), range(1 << 40), slice(1, 2)],
        "python rng": random.getstate(),
        "containers": [
            collections.OrderedDict(a=1),
            collections.defaultdict(list, a=[1]),
            collections.deque([1], maxlen=3),
            collections.Counter("abca"),
        ],
        "times": [
            datetime.datetime.now(datetime.timezone.utc),
            datetime.date(2026, 1, 2),
            datetime.time(3),
            datetime.timedelta(4),
        ],
        "paths": [pathlib.Path("/x/y"), pathlib.PurePosixPath("z")],
        "spaces": [argparse.Namespace(lr=1e-4), types.SimpleNamespace(a=1)],
        "numpy": [
            np.ones((2, 3)),
            np.float32(1),
            np.array(["a", None], dtype=object),
            np.random.get_state(),
            np.datetime64("2026-01-02"),
        ],
    }


def tensors() -> dict[str, Any]:
    sparse = torch.eye(3).to_sparse()
    return {
        "plain": torch.ones(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "dtypes": [torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.uint16), torch.bfloat16],
        "values": [torch.Size((1, 2)), torch.device("cpu"), torch.strided],
        "sparse": sparse,
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "generator state": torch.Generator().get_state(),
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        "storage": torch.ones(2).untyped_storage(),
        "meta": torch.ones(2, device="meta"),
    }


@writers
def test_allows_what_real_training_states_hold(write: Any) -> None:
    assert refusal(write(training_state())) == ""


@pytest.mark.parametrize("write", [WRITERS[name] for name in WRITERS if "torch.save" in name])
def test_allows_tensors_of_all_kinds(write: Any) -> None:
    assert refusal(write(tensors())) == ""


def test_allows_distributed_tensors() -> None:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        data = saved([distribute_tensor(torch.ones(4), mesh, [Shard(0)]), mesh, Replicate(), Partial()])
    finally:
        distributed.destroy_process_group()
    assert refusal(data) == ""


def test_names_what_the_corpus_would_run_and_runs_none_of_it(tmp_path: Path) -> None:
    found = programs(str(tmp_path / "canary"))
    for name, data in found.items():
        assert refusal(data), name
        assert refusal(archive(data)), name
    for name in ("os.system", "subprocess.Popen", "functools.partial", "torch.hub.load", "ctypes.CDLL", "numpy.load"):
        assert name.rpartition(".")[2] in (refusal(found[name]) or ""), name
    assert refusal(pickle.dumps(1) + found["GLOBAL, REDUCE"])
    # A memo number for which CPython would allocate 32 GiB.
    assert refusal(bombs()["LONG_BINPUT"])
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_torchscript_archive_because_torch_load_would_run_it() -> None:
    stream = io.BytesIO(saved(1))
    with zipfile.ZipFile(stream, "a") as file:
        file.writestr("archive/constants.pkl", b"")
    assert refusal(stream.getvalue()) == "torch.jit.load"


def _stored(*records: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, body in records:
            file.writestr(name, body)
    return stream.getvalue()


REST = (("archive/version", b"3\n"), ("archive/byteorder", b"little"))


@pytest.mark.filterwarnings("ignore")  # zipfile knows that two of a name are odd
def test_reads_the_same_zip_directory_as_torch_load() -> None:
    """Two records of one name: whichever torch.load takes is the one that must have been judged."""
    evil = pickle.dumps(Call(os.getcwd), 2)
    data = _stored(("archive/data.pkl", pickle.dumps(5, 2)), ("archive/data.pkl", evil), *REST)
    if refusal(data) == "":
        assert torch.load(io.BytesIO(data), weights_only=False) == 5


def ambiguous() -> dict[str, bytes]:
    """Archives of which torch.load and `zipfile` take different pickles."""
    evil = pickle.dumps(Call(os.getcwd), 2)
    good = b"\x80\x02" + b"N0" * ((len(evil) - 4) // 2) + (b"N." if len(evil) % 2 == 0 else b"\x88\x85.")
    assert len(good) == len(evil)
    parts = []
    for body in (evil, good):
        data = _stored(("archive/data.pkl", body), *REST)
        start = zipfile.ZipFile(io.BytesIO(data)).start_dir
        parts.append((data[:start], data[start:-22], data[-22:]))
    (files, directory, end), (others, last, _) = parts
    return {
        "two folders": _stored(
            ("archive/data.pkl", evil), *REST, ("b/data.pkl", good), ("b/version", b"3\n"), ("b/byteorder", b"little")
        ),
        "names in two cases": _stored(("archive/data.pkl", good), ("archive/DATA.PKL", evil), *REST),
        "two directories": files + directory + others + last + end,
    }


@pytest.mark.parametrize("name", ambiguous())
def test_refuses_an_archive_in_which_readers_find_different_records(name: str) -> None:
    assert refusal(ambiguous()[name])


@pytest.mark.parametrize("value", [np.arange(3), np.array([1, "a"], object), torch.ones(3, device="meta")], ids=str)
def test_reads_a_bare_pickle_of_a_value_that_compares_its_elements(value: Any) -> None:
    data = pickle.dumps(value)
    (read,) = items.read_item(data).values
    assert type(read) is type(value)
    assert read.shape == value.shape


REMOVED = [
    ("torch.save before torch 1.6: save it again", saved(torch.ones(2), _use_new_zipfile_serialization=False)),
    *(("protocol 0 or 1, or of Python 2: save it again", pickle.dumps([1 << 70, {"a": "b"}], n)) for n in (0, 1)),
    ("protocol 0 or 1, or of Python 2: save it again", b"\x80\x02]q\x00(U\x01aU\x01be."),
    ("torch._utils._rebuild_tensor", b"\x80\x02ctorch._utils\n_rebuild_tensor\n)R."),
    ("decimal.Decimal", pickle.dumps(decimal.Decimal(1))),
    ("fractions.Fraction", pickle.dumps(fractions.Fraction(1, 2))),
    ("uuid.UUID", pickle.dumps({"run": uuid.UUID(int=5)})),
    ("builtins.NotImplemented", pickle.dumps(NotImplemented)),
    ("numpy.random._pickle.__generator_ctor", pickle.dumps(np.random.default_rng(3))),
    ("numpy.random._pickle.__randomstate_ctor", pickle.dumps(np.random.RandomState(4))),
]


@pytest.mark.parametrize(("name", "data"), REMOVED)
def test_names_what_bucketpoint_0_2_read(name: str, data: bytes) -> None:
    assert name in (refusal(data) or "")


@pytest.mark.parametrize(
    "data", [b"", b"hello world", b"{}", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\0" * 50]
)
def test_distinguishes_bytes_that_are_no_pickle(data: bytes) -> None:
    assert refusal(data) is None


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.frozensets(st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_allows_plain_data_in_every_protocol_from_2_on(value: Any, protocol: int) -> None:
    assert refusal(pickle.dumps(value, protocol)) == ""


PLAIN = {
    "a": [1, 2.5, None],
    "b": collections.OrderedDict(x=datetime.timedelta(1)),
    "c": {datetime.date(2026, 1, 2)},
    "d": b"x",
}
SEEDS = [pickle.dumps(PLAIN, protocol) for protocol in (0, 2, 4)]


class Asking(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """The real machine, which stops at the first name that is not on the list."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ITEM_GLOBALS and module not in ("__builtin__", "copy_reg"):
            raise PermissionError(f"{module}.{name}")
        return super().find_class(module, name)


@given(
    st.sampled_from(SEEDS),
    st.lists(
        st.tuples(
            st.integers(0, 10_000), st.sampled_from(b"\x93\x94\x8c(c0123thgqpioRb.\x81\x92u") | st.integers(0, 255)
        )
    ),
)
def test_sees_whatever_name_the_real_machine_asks_for(seed: bytes, damage: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for position, value in damage:
        data[position % len(data)] = value
    found = refusal(bytes(data))
    asked = None
    try:
        Asking(io.BytesIO(bytes(data))).load()
    except PermissionError as error:
        asked = error
    except Exception:  # noqa: BLE001, S110 - damaged pickles fail in every way
        pass
    assert asked is None or found, f"{asked} would have been looked up"


class Registered:
    pass


def test_allows_classes_that_the_user_registered_with_torch() -> None:
    data = saved({"x": Registered()})
    assert refusal(data) == f"{__name__}.Registered"
    with torch.serialization.safe_globals([Registered]):
        assert refusal(data) == ""
    assert refusal(data) == f"{__name__}.Registered"


def test_lists_nothing_that_executes_imports_or_loads_and_no_translated_name() -> None:
    import _compat_pickle

    for module, name in ITEM_GLOBALS:
        assert (module, name) not in _compat_pickle.NAME_MAPPING
        assert module not in _compat_pickle.IMPORT_MAPPING
    names = {name for _, name in ITEM_GLOBALS}
    assert not names & {"getattr", "eval", "exec", "compile", "__import__", "open", "type", "partial", "attrgetter"}
    assert not {name for name in names if "load" in name.lower()}
    assert ("builtins", "getattr") in METADATA_GLOBALS  # a stand-in that gives members of one enum; see test_metadata
    modules = {module.partition(".")[0] for module, _ in ITEM_GLOBALS}
    assert not modules & {"os", "posix", "nt", "sys", "subprocess", "operator", "functools", "importlib", "ctypes"}


def test_knows_the_names_of_the_lists_and_no_others() -> None:
    known = set(items.vocabulary().names)
    # Not every torch has all of its own.
    assert {name for name in ITEM_GLOBALS - known if name[0].partition(".")[0] != "torch"} == set()
    assert set(items._known().names) <= ITEM_GLOBALS
    assert set(codec.vocabulary().names) <= METADATA_GLOBALS
