"""The frame of every command: what it imports, its options, its exit codes, its errors, and completion."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from bucketpoint import errors
from bucketpoint.catalog.deletion.state import GoneError
from bucketpoint.cli import text
from bucketpoint.cli.app import COMMANDS, GROUPS, REPLACED, run
from bucketpoint.cli.command import Access, CommandResult, command, parse_options
from bucketpoint.cli.commands import show
from bucketpoint.cli.text import exit_code
from cli.conftest import Program, enter, save
from cli.test_retention import save_run, write
from cli.test_seen import save_with_torch
from kit.programs import run_program
from kit.servers import S3Server


def started(large: Sequence[str], *commands: Sequence[str]) -> list[str]:
    """Run commands one after the other in a new process. Return those that fail or import something large."""
    program = (
        "import json, sys\nfrom bucketpoint.cli.app import run\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code, large = run(command), sorted({*sys.argv[2:]} & sys.modules.keys())\n"
        "    if code or large: print('STARTED', command, code, large, file=sys.stderr)\n"
    )
    done = run_program(program, json.dumps(commands), *large)
    assert done.stdout
    return [line for line in done.stderr.splitlines() if line.startswith("STARTED")]


def test_imports_nothing_large_for_help() -> None:
    large = ("torch", "numpy", "boto3", "botocore", "fsspec", "awscrt", "rich", "yaml")
    assert started(large, ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)) == []


def test_imports_no_torch_where_only_metadata_is_looked_at(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    save_run(root, 1, 2, 3)
    save(f"{root}/step-4")
    save_with_torch(tmp_path / "run/step-5")
    policy = str(write(tmp_path, root))
    commands = [
        ["ls", root],
        ["ls", root, "--all", "--json"],
        ["prune", policy, "--dry-run"],
        ["overview", root],
        ["show", f"{root}/step-3", "--tensors"],
        ["show", f"{root}/step-4"],
        ["show", f"{root}/step-5", "--json"],
        ["diff", f"{root}/step-4", f"{root}/step-4", "--values"],
        ["pin", root, "2"],
        ["pin", root, "2", "--remove"],
        ["report", root, "2", "loss=1"],
        ["gc", root, "--adopt"],
        ["gc", root, "--dry-run"],
        ["doctor", root, "--size", "0"],
        ["watch", root, "--policy", policy],
        ["overview", root, "--policy", policy, "--html", str(tmp_path / "page.html")],
        ["rm", f"{root}/step-1", "--yes"],
        ["rollback", root, "4"],
        ["undo", root, "5"],
    ]
    assert started(["torch", "numpy"], *commands) == []


def test_describes_each_command_by_one_sentence_and_gives_it_the_common_options(program: Program) -> None:
    lines = program("--help").out.splitlines()
    assert [line for line in lines if line.rstrip().endswith("...")] == [
        "Usage: bucketpoint [OPTIONS] COMMAND [ARGS]..."
    ]
    for heading, names in GROUPS.items():
        described = lines[lines.index(f"{heading}:") + 1 :][: len(names)]
        assert [line.split()[0] for line in described] == [*names]
        assert all(line.endswith(".") and len(line) <= 80 for line in described)
    for name in COMMANDS:
        told = program(name, "--help").out
        assert all(option in told for option in ("--json", "--debug", "--storage-option", "--endpoint-url")), name
    own, common = program("pin", "--help").out.partition("Options:")[2].split("Common options:")
    assert re.findall(r"^  (--[\w-]+)", own, re.MULTILINE) == ["--reason", "--expires", "--remove", "--step-dir"]
    assert re.findall(r"(--[\w-]+) ", common) == ["--endpoint-url", "--storage-option", "--json", "--debug", "--help"]


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_names_the_replacement_of_a_command_that_is_gone(program: Program, name: str) -> None:
    done = program(name, "--help")
    assert (done.code, done.out) == (2, "")
    command, *flags = re.findall(r"[a-z-]{2,}", REPLACED[name])
    assert f"The command '{name}' was removed. Use `bucketpoint {REPLACED[name]}`." in done.err
    assert all(flag in program(command, "--help").out for flag in flags)


def test_says_of_a_place_that_is_not_there_that_it_is_a_local_path(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["show"], ["ls"], ["rm", "--yes"], ["verify"], ["convert", "--to", "torch"]):
        done = program(*arguments, "bucket/run", *(["out"] if arguments[0] == "convert" else []))
        assert done.code == 3, arguments
        assert "at this URL (a local path)" in done.err, arguments


LISTED = (
    "`bucketpoint ls ROOT` lists a run's checkpoints, bucketpoint.latest_checkpoint(root) names the newest whole one"
)


def test_says_in_an_error_what_where_and_what_to_do_as_text_and_as_a_document(program: Program, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/none"
    message, remedy = "There is no checkpoint at this URL (a local path)", f"Check the URL; {LISTED}"
    done = program("show", url)
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines() == [f"Error: {message}", f"  url:    {url}", f"  remedy: {remedy}"]
    done = program("show", url, "--debug", "--json")
    assert (done.code, "Traceback (most recent call last)" in done.err) == (3, True)
    error = {"kind": "CheckpointNotFoundError", "message": message, "url": url, "key": None, "remedy": remedy}
    assert done.json == {"schema": 2, "command": "show", "ok": False, "error": {**error, "exit_code": 3}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("lss", "Did you mean 'ls'?"),
        ("prune s3://bucket/run", "is not a file: pass"),
        ("prune /tmp", "/tmp is not a file: pass"),
        *((f"{name} {{root}} 5x", "'5x' is not a step: write ROOT STEP") for name in ("pin", "undo", "rollback")),
        ("pin {root} -- -1", "'-1' is not a step: write ROOT STEP"),
        ("pin {root} 5 id", "pass --remove"),
        ("pin {root} 5 --remove --expires 7d", "leave them out, or --remove"),
        ("report {root} 5 loss", "write NAME=VALUE, such as eval/loss=1.23"),
        ("report {root} 5 loss=high", "write NAME=VALUE, such as eval/loss=1.23"),
        ("gc {root} --older-than soon", "is not a duration. Write one number with one of the units"),
        ("gc {root} --adopt --name llama", "pass one of them"),
        *((f"overview {{root}} --price {price}", "--price") for price in ("nan", "inf", "1e308", "-1")),
        *((f"convert a b --max-shard-size {size}", "is not a size") for size in ("0", "5XB", "GB", "-1", "1.5GB")),
        *((f"doctor {{root}} --size {size}", "is not a size") for size in ("lots", "-1")),
        ("doctor s3://b/teams/a --iam", "--iam needs one of trainer, reader, pruner"),
        ("doctor /data/run --iam --role reader", "only s3:// URLs have IAM policies"),
    ],
)
def test_refuses_wrong_usage_and_says_what_is_meant(
    program: Program, tmp_path: Path, arguments: str, said: str
) -> None:
    done = program(*arguments.format(root=tmp_path).split())
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "model.pt") for command in ("show", "ls", "cp", "verify", "watch")),
        # `show` and `verify` read safetensors, and `cp` copies them.
        *((command, "hf") for command in ("ls", "watch", "rm", "rm --run")),
    ],
)
def test_names_the_command_that_reads_other_files(program: Program, tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "hf").mkdir()
    for file in ("model.pt", "hf/model.safetensors", "hf/config.json"):
        (tmp_path / file).write_bytes(b"a file")
    place = str(tmp_path / name)
    done = program(*command.split(), place, *(["out"] if command == "cp" else []))
    assert (done.code, f"`bucketpoint convert {place} TARGET`" in done.err) == (3, True), done.err
    assert name == "model.pt" or "Error: The folder holds no .metadata, but model.safetensors\n" in done.err


def test_exits_with_a_code_of_its_own_after_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    @command("broken")
    def broken(access: Access) -> CommandResult:
        raise ZeroDivisionError("secret of the implementation")

    assert broken.main([], standalone_mode=False) == 70
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "--debug" in said.err
    assert broken.main(["--json", "--debug"], standalone_mode=False) == 70
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err
    assert json.loads(said.out)["error"]["kind"] == "InternalError"


@command("stuck")
def stuck(access: Access) -> CommandResult:
    """Waits until somebody interrupts it."""
    raise KeyboardInterrupt


def test_exits_with_the_code_of_an_interruption(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "stuck", "show")
    monkeypatch.setattr(show, "stuck", stuck, raising=False)
    done = program("stuck")
    assert done.code == 130
    assert done.err.strip() == "Interrupted."


CODES = {
    1: (errors.CorruptDataError, errors.UnsafeDataError),
    2: (errors.InvalidURLError, errors.BucketpointError),
    3: (errors.IncompleteCheckpointError, errors.BucketNotFoundError),
    4: (errors.AccessDeniedError, errors.CredentialsError),
    5: (errors.CheckpointExistsError, errors.CommitConflictError, GoneError),
    6: (errors.EndpointError, errors.ThrottledError),
}


def test_exits_with_the_code_of_each_kind_of_error() -> None:
    for code, kinds in CODES.items():
        assert {exit_code(kind("x")) for kind in kinds} == {code}


def test_exits_with_the_codes_of_a_real_server_s_errors(reached: S3Server, program: Program) -> None:
    bucket = reached.make_bucket()
    assert program("show", f"s3://{bucket}/none").code == 3
    assert program("show", f"s3://{bucket}-not/none").code == 3
    assert program("show", "s3://").code == 2
    assert program("show", f"s3://{bucket}/x", "--storage-option", "nonsense=1").code == 2
    wrong = ["--storage-option", f"key={reached.key}", "--storage-option", "secret=wrong"]
    denied = program("show", f"s3://{bucket}/x", "--json", *wrong)
    assert denied.code == 4
    assert denied.json["error"]["kind"] == "CredentialsError"
    away = ["--endpoint-url", "http://127.0.0.1:1", "--storage-option", "retry_deadline_s=1"]
    assert program("show", f"s3://{bucket}/x", *away).code == 6


def test_reads_options_as_what_they_are() -> None:
    kinds = {"anon=true": True, "connections=8": 8, "key=123": "123", "region=eu-1": "eu-1"}
    kinds |= {'x="1"': "1", "y=a=b": "a=b", 'client_kwargs={"verify": false}': {"verify": False}}
    for pair, value in kinds.items():
        assert parse_options([pair]) == {pair.partition("=")[0]: value}
    assert parse_options(["a=1", "b=2"]) == {"a": 1, "b": 2}


NO_PAIR = "An option has no name or no value: write NAME=VALUE"


@pytest.mark.parametrize(
    ("command", "option", "pair", "said"),
    [
        ("cp", "--from-option", "endpoint_url", NO_PAIR),
        ("convert", "--to-option", "endpoint_url", NO_PAIR),
        ("diff", "--a-option", "=endpoint_url", NO_PAIR),
        ("diff", "--b-option", "endpoint_url", NO_PAIR),
        ("diff", "--storage-option", 'client_kwargs={"endpoint_url"', "the value of client_kwargs is not JSON"),
    ],
)
def test_refuses_an_option_that_is_no_pair_without_repeating_its_value(
    program: Program, command: str, option: str, pair: str, said: str
) -> None:
    done = program(command, "a", "b", option, pair)
    assert done.code == 2
    assert f"Invalid value for {option}: {said}" in done.err
    # It may be a secret that was passed without its name.
    assert "endpoint_url" not in done.err


def test_gives_an_endpoint_to_s3_alone_and_no_options_to_a_local_path() -> None:
    access = Access({"key": "k"}, "http://e")
    assert access.at("s3://b/x").storage_options == {"key": "k", "endpoint_url": "http://e"}
    assert access.at("s3://b/x", {"key": "other"}).storage_options == {"key": "other", "endpoint_url": "http://e"}
    assert access.at("gs://b/x").storage_options == {"key": "k"}
    assert access.at("file:///x").storage_options == access.at("/x").storage_options == {}
    assert "k'" not in repr(access)


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_offers_the_commands_in_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    enter(monkeypatch, {"COMP_WORDS": "bucketpoint ver", "COMP_CWORD": "1" if name != "fish" else "ver"})
    said = {}
    for asked in ("source", "complete"):
        monkeypatch.setenv("_BUCKETPOINT_COMPLETE", f"{name}_{asked}")
        with pytest.raises(SystemExit) as ended:
            run([])
        assert ended.value.code == 0
        said[asked] = capsys.readouterr().out
    assert "_BUCKETPOINT_COMPLETE" in said["source"]
    assert ("verify" in said["complete"], "show" in said["complete"]) == (True, False)


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (12_580_000, "12.6 MB")]
)
def test_writes_sizes_with_three_digits(nbytes: int, said: str) -> None:
    assert text.size(nbytes) == said
