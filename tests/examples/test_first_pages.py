"""What a new user copies first runs as it stands, in one process and on two ranks under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bucketpoint.cli.app import run
from kit.servers import S3Server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500  # far above what it takes: only a hang reaches it

PAGES = {
    "README.md": ["run/step-500"],
    "docs/quickstart.md": ["run/step-500", "run/step-1", "run/step-2", "run-2/step-3"],
    "docs/staging.md": [f"run/step-{step}" for step in range(0, 1000, 100)],
    "docs/manager.md": ["run/step-3"],
    "docs/loading.md: Restart from a node copy": ["run/step-1"],
    "docs/saving.md: Unchanged bytes": ["run/step-0", "run/step-100", "run/step-200"],
}
"""Pages or their sections, and the checkpoints that are in the bucket once their snippets have run."""

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist

many = int(os.environ.get("WORLD_SIZE", 1)) > 1
pages = json.loads(Path(sys.argv[1]).read_text())
snippets = pages["docs/quickstart.md"]
(join,) = [each for each in snippets if "init_process_group" in each]
snippets.remove(join)
if many:
    exec(join, {})


def given():
    '''What the pages take for granted.'''
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(*given):
        if many:
            dist.all_reduce(torch.ones(1000))

    def forward_and_backward():
        train_step()
        return torch.zeros(())

    class Loader:
        position = 0

        def __iter__(self):
            while True:
                self.position += 12
                yield torch.ones(8)

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    rank = dist.get_rank() if many else 0
    state = {"model": model.state_dict()}
    return {"state": state, "model": model, "optimizer": optimizer, "train_step": train_step, "last_step": 3,
            "loader": Loader(), "rank": rank,
            "evaluate": lambda model: 0.5, "forward_and_backward": forward_and_backward}


for page, snippets in pages.items():
    names = given()
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    if page == "docs/quickstart.md":
        for step in (1, 2):
            names["save"](names["state_of"](names["model"], names["optimizer"]), step)
        names["pending"].result()
        (resume,) = [each for each in snippets if "manager.restore" in each]
        names |= {"loader": type(names["loader"])(), "last_step": 5}
        exec(compile(resume, page, "exec"), names)
        assert names["restored"].step == 3
        assert (names["loader"].position, names["scheduler"].last_epoch) == (60, 5)
    # One write: a line that print writes in pieces mixes with the other rank's.
    print(f"ran {page}\\n", end="", flush=True)
if many:
    dist.destroy_process_group()
"""


def blocks(page: str, language: str) -> list[str]:
    path, _, section = page.partition(": ")
    text = (ROOT / path).read_text(encoding="utf-8")
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] or text
    return [each[1] for each in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def snippets(page: str) -> list[str]:
    """The Python of a page, but for what names a server that is not here."""
    return [each for each in blocks(page, "python") if "127.0.0.1:9000" not in each]


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_the_snippets_of_the_first_pages_as_they_stand(minio: S3Server, tmp_path: Path, ranks: int) -> None:
    buckets = {page: minio.make_bucket() for page in PAGES}
    pasted = {
        page: [
            each.replace("s3://bucket/", f"s3://{bucket}/")
            .replace("/tmp/run", str(tmp_path / "run"))
            .replace("/local_nvme", str(tmp_path))
            for each in snippets(page)
        ]
        for page, bucket in buckets.items()
    }
    program, said = tmp_path / "program.py", tmp_path / "pages.json"
    program.write_text(PROGRAM)
    said.write_text(json.dumps(pasted))
    start = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        start += ["--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(program), str(said)],
        env={**os.environ, **minio.env, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "uses the default process group" not in done.stdout
    assert "tensors to load into" not in done.stdout
    for page, steps in PAGES.items():
        assert done.stdout.count(f"ran {page}") == ranks
        commits = {key.removesuffix("/.metadata") for key in minio.keys(buckets[page]) if key.endswith("/.metadata")}
        assert commits >= set(steps), page


def test_runs_the_quick_start_in_a_local_folder_and_its_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, root = "docs/quickstart.md", str(tmp_path / "run")
    names: dict[str, object] = {}
    for snippet in snippets(page)[:2]:
        exec(compile(snippet.replace("s3://bucket/run", root), page, "exec"), names)
    commands = blocks(page, "bash")[-1].replace("s3://bucket/run", root).replace("run.html", str(tmp_path / "run.html"))
    said = {}
    for name, *arguments in (line.split()[1:] for line in commands.splitlines()):
        assert run([name, *arguments]) == 0
        said[name] = capsys.readouterr().out
    assert [*said] == ["ls", "show", "watch", "overview"]
    (shown,) = blocks(page, "text")
    times = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
    assert times.sub("", said["ls"]) == times.sub("", shown.replace("s3://bucket/run", root))
    assert "newest whole checkpoint: step 500" in said["watch"]
    assert (tmp_path / "run.html").exists()
