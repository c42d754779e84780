"""Draws docs/demo.svg from the output of a real run: `make demo </dev/null >demo.txt`, then this with demo.txt."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"

COLUMNS = 100
"""The longest line of the demo."""

LEFT_OUT = re.compile(r"requests: | +saved |step +\d+ +loss |MinIO on | +(4|12|20|28|36) +\d")
"""Lines that repeat what others show."""

STYLES = {
    r"^\d  .*": "bold cyan",
    r"^SIGKILL.*": "bold red",
    r"\binterrupted  .*|^loading it: \w+": "red",
    r"\bwhole  |^yes ": "green",
    r"^resumed from.*": "bold green",
}


def chosen(output: str) -> list[str]:
    """Return the lines of the run that is killed and of all that follows, without those that repeat."""
    lines = output[output.index("\n2  ") + 1 : output.index("\nThe bucket at the end")].splitlines()
    lines += output[output.index("\n5  ") :].splitlines()
    return [line for line in lines if not LEFT_OUT.match(line)]


def picture(lines: list[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        text = Text(line)
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    # Any monospaced font: a page is not to ask another server for one.
    drawn = re.sub(
        r"@font-face \{.*?\}\s*", "", console.export_svg(title="make demo", unique_id="demo"), flags=re.DOTALL
    )
    return re.sub(r"[ \t]+$", "", drawn.replace("Fira Code, ", ""), flags=re.MULTILINE)


def main() -> int:
    PICTURE.write_text(picture(chosen(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
