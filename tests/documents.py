"""Blocks of code in the documentation, for the tests that run them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.launch import REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    marker: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(language: str | None = None, document: str | None = None) -> list[Block]:
    """Every block, or those in a language or of a document such as `docs/launching/spark.md`."""
    return [
        Block(path, text.count("\n", 0, match.start()) + 1, match["marker"] or "", match["language"], match["text"])
        for path in DOCUMENTS
        if document is None or path == REPOSITORY / document
        for text in [path.read_text()]
        for match in BLOCK.finditer(text)
        if language in (None, match["language"])
    ]


def commands(document: str, test: str) -> list[str]:
    """The shell commands that `test` runs for a document such as `docs/launching/mpirun.md`."""
    return [
        line
        for block in blocks("bash", document)
        if block.marker == f"tested by {test}"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line and not line.startswith("#")
    ]
