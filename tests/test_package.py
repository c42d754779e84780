"""What `import bucketpoint` gives, and what it leaves for later."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import bucketpoint
from bucketpoint import errors
from kit.programs import run_program

HEAVY = ("torch", "boto3", "botocore", "fsspec", "awscrt", "accelerate", "torchtitan")
OFF = (
    *("boto3", "fsspec", "google.cloud.storage", "bucketpoint.stores.s3", "bucketpoint.stores.gcs"),
    *("bucketpoint.stores.fsspec", "bucketpoint.catalog.catalog", "bucketpoint.retention", "bucketpoint.dcp.meshes"),
    *("bucketpoint.dcp.cooperative", "bucketpoint.dcp.collective_call", "bucketpoint.transfer.helper"),
)
"""Libraries and modules of features that a save into a folder by one rank does not use."""


def test_imports_nothing_large_with_the_package() -> None:
    program = f"import bucketpoint, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_program(program).stdout.strip() == "[]"


def test_imports_no_feature_that_is_off_with_a_plain_save_and_load(tmp_path: Path) -> None:
    program = (
        "import sys, torch, torch.distributed.checkpoint as dcp, bucketpoint\n"
        "dcp.save({'w': torch.ones(8)}, checkpoint_id=sys.argv[1], storage_writer=bucketpoint.BucketWriter())\n"
        "dcp.load({'w': torch.ones(8)}, checkpoint_id=sys.argv[1], storage_reader=bucketpoint.BucketReader())\n"
        f"print([name for name in {OFF!r} if name in sys.modules])"
    )
    assert run_program(program, str(tmp_path / "step-1")).stdout.strip() == "[]"


@pytest.mark.parametrize("name", bucketpoint.__all__)
def test_lists_every_public_name_and_says_in_its_signature_what_may_be_passed(name: str) -> None:
    public = getattr(bucketpoint, name)
    assert public is not None
    assert name in dir(bucketpoint)
    if callable(public) and not hasattr(errors, name):
        kinds = {each.kind for each in inspect.signature(public).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_installs_by_a_remedy_what_an_extra_requires() -> None:
    package = Path(bucketpoint.__file__).parent
    named = {
        requirement
        for file in package.rglob("*.py")
        for requirement in re.findall(r"pip install '([^']+)'", file.read_text(encoding="utf-8"))
    }
    assert len(named) == 8
    required = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert [requirement for requirement in named if not re.search(f'"{re.escape(requirement)}[";]', required)] == []


def test_raises_attribute_error_for_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'bucketpoint' has no attribute 'S4Writer'"):
        bucketpoint.S4Writer  # noqa: B018


def test_shows_type_checkers_each_public_name_in_its_module_at_run_time() -> None:
    tree = ast.parse(Path(bucketpoint.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"bucketpoint.{module}" for name, module in bucketpoint._MODULES.items()}
    assert seen.keys() == {name for name in bucketpoint.__all__ if not hasattr(errors, name)} - {"__version__"}


@pytest.mark.parametrize("name", ["accelerate", "lightning", "megatron", "ray", "torch_checkpointing", "transformers"])
def test_says_what_to_install_for_an_integration_without_its_framework(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, f"bucketpoint.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"pip install '?{name}"):
        importlib.import_module(f"bucketpoint.integrations.{name}")
