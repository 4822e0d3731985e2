"""Every command in the documentation is run, or says why it is not.

A fenced block of Python is run on its own, unless a comment on the line above says `tested by tests/PATH.py`: that test
reads it from the document. For a block of shell commands, the comment says what runs it:

    <!-- run by .ci/run: NAME ... -->       .ci/run reads it from the document, or runs a command that contains it
    <!-- tested by tests/PATH.py -->        that test takes the commands out of the document, or names every script,
                                            launcher, subcommand, long option and variable's value in them
    <!-- collected by tests/test_documentation.py -->   a block of pytest commands, each of which must select tests
    <!-- not run: REASON -->
"""

import importlib
import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, Block, blocks
from tests.launch import REPOSITORY, run_ranks

SHELLS = ("bash", "console", "shell", "sh")


def is_excused(block: Block) -> bool:
    return re.fullmatch(r"not run: \S.{9,}", block.marker) is not None


def is_run_by_its_own_test(block: Block, reader: str = "blocks") -> bool:
    """Whether a test other than the one here runs the block, by taking it out of the document."""
    if not block.marker.startswith("tested by "):
        return False
    test = (REPOSITORY / block.marker.removeprefix("tested by ")).read_text()
    return bool(re.search(rf'{reader}\((?:"\w+", )?"{block.document.relative_to(REPOSITORY)}"', test))


COLLECTED = "collected by tests/test_documentation.py"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.slow] * (block.marker == COLLECTED))
        for block in blocks()
        if block.language in SHELLS
    ],
    ids=str,
)
def test_shell_commands_are_run_somewhere(block):
    if is_excused(block):
        return
    if block.marker == COLLECTED:
        lines = block.text.splitlines()
        for line, (status, output) in zip(lines, collected(lines), strict=True):
            assert status == 0, f"{line}\n{output}"
            if "--ranks 3" in line:
                assert re.search(r"\[3-mpirun\]$", output, re.MULTILINE), output
        return
    if block.marker.startswith("run by .ci/run: "):
        name = block.marker.removeprefix("run by .ci/run: ")
        read_there = f'"$(readme_command {name})"' in (REPOSITORY / ".ci" / "run").read_text()
        readme = (REPOSITORY / "README.md").read_text()
        assert read_there or block.text.strip() in readme, f"{block}: .ci/run does not run this"
        return
    assert block.marker.startswith("tested by "), f"{block}: say above this block what runs it, or why nothing can"
    test = (REPOSITORY / block.marker.removeprefix("tested by ")).read_text()
    if is_run_by_its_own_test(block, "commands"):
        return
    for named in names(block):
        assert named in test, f"{block}: {block.marker.removeprefix('tested by ')} never mentions {named}"


def names(block: Block) -> set[str]:
    """What a test must mention that runs these commands in its own words."""
    found = {Path(script).name for script in re.findall(r"[\w/]+\.py\b", block.text)}
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        found |= {word.partition("=")[0] for word in words if word.startswith("--")}
        found |= {value for name, equals, value in (word.partition("=") for word in words) if name.isupper() and equals}
        found |= {word for word in words if word in ("mpirun", "torchrun")}
        found |= {after for word, after in itertools.pairwise(words) if word == "ring"}
    # Where torchrun meets is the harness's choice: tests/launchers.py.
    return found - {"--nproc-per-node"}


COLLECT = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    print("\\nstatus", int(pytest.main([*arguments, "--collect-only", "-q"])))
"""


def collected(lines: list[str]) -> list[tuple[int, str]]:
    """Exit status and output of pytest commands that only collect, run in one process."""
    commands = [shlex.split(line, comments=True) for line in lines]
    assert all(command[0] == "pytest" for command in commands)
    found = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps([[*command[1:], *one_file(command)] for command in commands])],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    output = re.split(r"^status (\d+)$", found.stdout, flags=re.MULTILINE)
    return [(int(status), text) for text, status in zip(output[::2], output[1::2], strict=False)]


def one_file(command: list[str]) -> list[str]:
    """A file with the marker that `pytest -m MARKER` asks for: collecting the whole suite would take a minute."""
    if command[1] != "-m":
        return []
    marked = (
        file
        for file in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if f"pytest.mark.{command[2]}" in file.read_text() and file != Path(__file__)
    )
    return [str(min(marked, key=lambda file: file.stat().st_size))]


@pytest.mark.parametrize(
    "block",
    [
        # Each of these starts ranks with a framework. Plain pytest runs those of the README, which users copy first.
        pytest.param(block, marks=() if block.document.name == "README.md" else pytest.mark.slow)
        for block in blocks("python")
        if not is_excused(block) and not is_run_by_its_own_test(block)
    ],
    ids=str,
)
def test_python_runs_as_printed(block):
    run_ranks(block.text, timeout=120)


def test_the_fragment_of_a_test_passes():
    """CONTRIBUTING's example of a test, with what pytest would give it."""
    (fragment,) = [block for block in blocks("python", "CONTRIBUTING.md") if is_excused(block)]
    namespace: dict[str, object] = {}
    exec(fragment.text, namespace)
    namespace["test_sum"](ranks=2, launcher="spawned")


def test_links_inside_the_repository_lead_somewhere():
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def anchors(document: Path) -> set[str]:
    """What GitHub makes of a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names}


def test_links_to_headings_lead_to_one():
    broken = [
        f"{document.name}: {target}#{anchor}"
        for document in DOCUMENTS
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", document.read_text())
        for file in [document.parent / target if target else document]
        if file.suffix == ".md" and anchor not in anchors(file)
    ]
    assert broken == []


def test_tables_and_sentences_are_those_of_kept_results(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    tables = importlib.import_module("tables")
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert text.count("<!-- results: ") == len(tables.RESULT.findall(text)) >= 1
        assert text == tables.filled(text), "python benchmarks/tables.py"


def test_kept_results_say_how_they_came_about():
    """Machine, threads or hosts, and date, which stand below every table and picture."""
    for file in (REPOSITORY / "benchmarks" / "results").glob("*.json"):
        machine = json.loads(file.read_text())["machine"]
        assert re.fullmatch(r".+, \d+ cores, .*Python [\d.]+, \d{4}-\d\d-\d\d", machine), file


def test_every_error_is_documented():
    defined = set(
        re.findall(r"^class (\w+)\(", (REPOSITORY / "ring_plugins/core/base/errors.py").read_text(), re.MULTILINE)
    )
    documented = set(re.findall(r"^\| `(\w+)`", (REPOSITORY / "docs/errors.md").read_text(), re.MULTILINE))
    assert defined - {"RingError"} == documented


def test_every_error_has_a_cause_and_a_remedy():
    table = (REPOSITORY / "docs/errors.md").read_text().partition("| error | cause | remedy |\n|---|---|---|\n")[2]
    rows = [re.split(r" \| ", row.strip("| ")) for row in table.partition("\n\n")[0].splitlines()]
    assert len(rows) >= 14
    assert all(len(row) == 3 and min(map(len, row)) > 8 for row in rows), rows


def test_every_argument_of_the_strategy_is_in_its_guide():
    """Those that Lightning passes to any strategy stand in one sentence below the table."""
    from ring_plugins.lightning.strategy import RingTrainerLogic

    arguments = {
        name
        for name, parameter in inspect.signature(RingTrainerLogic).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    page = (REPOSITORY / "docs/lightning.md").read_text()
    table = page.partition("## Arguments\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == arguments
