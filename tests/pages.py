"""Runs the blocks of a page of the documents as a reader would: in order, in one folder, which is empty at first.

| block | what it is |
|---|---|
| any language, first line `# NAME.EXT` | a file, which is saved |
| `sh` | commands, which must succeed; with the first line `# terminal N` in the background, until the end of the page |
| `sh`, first line `# fails` | commands of which the last must fail with a sentence |
| `sh`, first line `# needs REASON` | not run here; REASON is in `NOT_HERE` |
| `python` | statements; the blocks of a page share their names |
| `text` | lines that the block before has printed, in this order, spaces apart; `...` stands for anything |

Blocks of other languages, and files, are only saved or shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240.0
NOT_HERE = ("Docker", "Slurm", "Ray", "Kubernetes", "a network", "several machines", "root", "a GPU", "minutes")
_FENCE = re.compile(
    r"^(?P<fence>```+)(?:\{code-block\} )?(?P<language>[a-z]+)[^\n]*\n(?P<body>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"# ([\w./{}-]+\.[a-z]+)\n")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int

    @property
    def first(self) -> str:
        """Its first line, without `# `; "" if that is no comment."""
        line = self.text.partition("\n")[0]
        return line.removeprefix("# ") if line.startswith("# ") else ""

    @property
    def file(self) -> str | None:
        found = _FILE.match(self.text)
        return None if found is None or self.language == "text" else found.group(1)


def site_pages() -> Sequence[Path]:
    """The pages of the site, without what a build has copied."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]


def blocks_of(page: Path) -> Sequence[Block]:
    """The blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(one["language"], one["body"], text.count("\n", 0, one.start()) + 1) for one in _FENCE.finditer(text)]


@dataclass
class Reader:
    """Somebody who follows a page in a folder."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    said: str = ""  # by the latest block
    terminals: list[tuple[Block, subprocess.Popen[str]]] = field(default_factory=list)

    def follow(self, page: Path) -> None:
        """AssertionError with the line of the first block that does not do what the page says."""
        try:
            for block in blocks_of(page):
                try:
                    self._do(block)
                except Exception as error:
                    raise AssertionError(f"{page.relative_to(ROOT)}, line {block.line}: {error}\n{block.text}\n{self.said}") from error
            for block, process in self.terminals:
                said = process.communicate(timeout=DEADLINE_S)[0]
                assert process.returncode == 0, f"{page.relative_to(ROOT)}, line {block.line}: exit code {process.returncode}\n{said}"
        finally:
            for _, process in self.terminals:
                process.kill()

    def _do(self, block: Block) -> None:
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text.partition("\n")[2], encoding="utf-8")
        elif block.language == "sh":
            self._shell(block)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, f"line {block.line}", "exec"), self.names)  # noqa: S102 - a page of ours
            self.said = out.getvalue()
        elif block.language == "text":
            self._compare(block)

    def _shell(self, block: Block) -> None:
        kind, _, reason = block.first.partition(" ")
        if kind == "needs":
            assert reason in NOT_HERE, f"needs {reason!r}, want one of {NOT_HERE}"
            return
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}
        process = subprocess.Popen(
            ["/bin/bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if kind == "terminal":
            self.terminals.append((block, process))
            return
        try:
            self.said = process.communicate(timeout=DEADLINE_S)[0]
        finally:
            process.kill()
        assert (process.returncode != 0) == (kind == "fails"), f"exit code {process.returncode}"
        assert "Traceback" not in self.said

    def _compare(self, block: Block) -> None:
        said, at = " ".join(self.said.split()), 0
        for line in block.text.splitlines():
            wanted = ".*?".join(re.escape(" ".join(part.split())) for part in line.strip().split("..."))
            found = re.compile(wanted).search(said, at)
            assert found is not None, f"the block before does not print {line.strip()!r} there"
            at = found.end()
