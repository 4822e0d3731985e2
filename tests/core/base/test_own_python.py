"""Nothing that this package starts imports what others have left in the current directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ring_plugins.core.base import own_python
from tests.launchers import clean_environment, launcher_command

#: Modules that Python or this package imports early, and the package itself.
PLANTED = ("json", "contextlib", "linecache", "socket", "sitecustomize", "usercustomize", "mpi4py", "ring_plugins")
CONTINUE = ("--on-failure", "continue")
PYTHON, RING = sys.executable, str(Path(sys.executable).parent / "ring")
SCRIPT = r"""
import os, sys
import ring_plugins as ring

def place():
    ring.init()
    return ring.__file__

if sys.argv[1] == "init":
    ring.init(ranks=2, on_failure=(sys.argv[2:] or [None])[0])
    os.write(1, f"found {ring.__file__}\n".encode())
elif sys.argv[1] == "run":
    print("found", *set(ring.run(place, ranks=2, **dict(word.split("=") for word in sys.argv[2:]))))
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, where each module writes its name into a file when it is imported."""
    directory = tmp_path / "shared"
    directory.mkdir()
    (directory / "ring_plugins").mkdir()
    for name in PLANTED:
        file = directory / ("ring_plugins/__init__.py" if name == "ring_plugins" else f"{name}.py")
        file.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + ' ')\n")
    monkeypatch.chdir(directory)
    return tmp_path


def imported(where: Path) -> str:
    file = where / "imported"
    return file.read_text() if file.exists() else ""


def start(line: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["init"],
        ["init", "continue"],
        ["run"],
        ["run", "hosts=localhost:2"],
        ["run", "on_failure=continue"],
        [*launcher_command("mpirun", 2), "init"],
        [
            RING,
            "run",
            "-n",
            "2",
            "-H",
            "far:1,localhost",
            "--agent",
            "AGENT",
            "--on-failure",
            "continue",
            PYTHON,
            "init",
        ],
        [RING, "doctor"],
    ],
    ids=" ".join,
)
def test_no_start_imports_from_the_current_directory(shared: Path, words: list[str]) -> None:
    (shared / "home").mkdir()
    script = shared / "home" / "train.py"
    script.write_text(SCRIPT)
    agent = shared / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    place = words.index("init") if "init" in words else 0 if words[0] == "run" else len(words)
    line = words if place == len(words) else [*(words[:place] or [PYTHON]), str(script), *words[place:]]
    line = [str(agent) if word == "AGENT" else word for word in line]
    done = start(line)
    assert imported(shared) == "", done.stderr
    if place < len(words):
        assert done.returncode == 0, done.stderr
        package = Path(own_python.__file__).parents[2] / "__init__.py"
        assert {line for line in done.stdout.splitlines() if line.startswith("found")} == {f"found {package}"}, done


MINE = """
import ring_plugins as ring

def place():
    import late
    ring.init()
    return late.__file__
"""


@pytest.mark.parametrize("options", ["", "hosts='localhost:2'"])
def test_a_function_of_the_current_directory_runs_where_the_caller_searches_that(shared: Path, options: str) -> None:
    here = Path.cwd()
    (here / "ring_plugins").rename(here / "unused")
    for name in {*PLANTED}.difference(["sitecustomize", "usercustomize", "ring_plugins"]):  # the caller imports these
        (here / f"{name}.py").unlink()
    (here / "mine.py").write_text(MINE)
    (here / "late.py").write_text("")
    program = f"import mine, ring_plugins as ring; print(*ring.run(mine.place, ranks=2, {options}))"
    assert start([PYTHON, "-c", program]).stdout.split() == [str(here / "late.py")] * 2
    assert imported(shared) == ""


@pytest.mark.parametrize("has_option", [True, False])
def test_code_of_this_package_runs_without_the_current_directory(
    shared: Path, monkeypatch: pytest.MonkeyPatch, has_option: bool
) -> None:
    if not has_option:
        monkeypatch.setattr(own_python, "_OPTIONS", ())
        monkeypatch.setattr(own_python, "_VARIABLE", "NOTHING")
    code = "import json, os, ring_plugins; print(json.__name__, os.environ.get('PYTHONSAFEPATH'), '' in sys.path)"
    assert start(own_python.own_python(code)).stdout.strip() == "json None False"
    assert start(["env", *own_python.own_python_elsewhere(PYTHON, code)]).stdout.strip() == "json None False"
    assert imported(shared) == ""
