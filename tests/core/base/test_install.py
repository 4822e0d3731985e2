"""What to type to add an optional package, and the plugins without their frameworks."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ring_plugins.core.base import install
from ring_plugins.core.base.install import pip_command
from tests.launch import REPOSITORY
from tests.launchers import clean_environment, launcher_command

HIDE = """
import importlib, sys

class Hidden:
    def __init__(self, *names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def error_of(module):
    try:
        importlib.import_module(module)
    except ImportError as error:
        from ring_plugins import MissingDependency
        assert type(error) is MissingDependency, repr(error)
        return str(error)
"""
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


@pytest.mark.parametrize(
    ("hidden", "plugin", "text"),
    [
        (("torch",), "torch", "needs PyTorch, which cannot be imported (No module named 'torch'). [torch]"),
        (LIGHTNING, "lightning", "needs Lightning, which is not installed. [lightning]"),
        (("torch",), "lightning", "needs PyTorch, which cannot be imported (No module named 'torch'). [lightning]"),
        (("keras",), "keras", "needs Keras 3 and its backend, which cannot be imported (No module named 'keras')."),
        (
            ("jax",),
            "keras",
            "needs Keras 3 and its backend, which cannot be imported (No module named 'jax'). [keras,jax]",
        ),
    ],
)
def test_a_plugin_without_its_framework_names_the_command(hidden, plugin, text):
    if plugin not in hidden and hidden != LIGHTNING and find_spec(plugin) is None:
        pytest.skip(f"{plugin} is not installed, which would be named first")
    script = f"{HIDE}sys.meta_path.insert(0, Hidden{hidden!r})\nprint(error_of('ring_plugins.{plugin}'))"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    before, _, extras = text.partition(" [")
    assert f"ring_plugins.{plugin} {before}" in ended.stdout
    assert (f'Add it with: pip install "ring_plugins[{extras}"' if extras else "pip install") in ended.stdout


def test_pip_finds_the_installed_package_without_an_index():
    pytest.importorskip("pip")
    command = pip_command("torch")
    assert command == 'pip install "ring_plugins[torch]"'
    words = [sys.executable, "-m", *command.replace('"', "").split(), "--dry-run", "--no-index", "--no-deps"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert ended.returncode == 0, ended.stderr


def test_a_clone_that_is_not_installed_is_named_by_its_path(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert install.pip_command("keras", "jax") == f'pip install "{REPOSITORY}[keras,jax]"'


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
        package = Path(install.__file__).parents[2] / "__init__.py"
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


#: Python 3.10 has no option for it, and this Python without the option stands for it; but not 3.13, which imports
#: linecache before the code of `-c` begins.
WITHOUT = pytest.param(False, marks=pytest.mark.skipif(sys.version_info >= (3, 13), reason="stands for Python 3.10"))


@pytest.mark.parametrize("has_option", [True, WITHOUT])
def test_code_of_this_package_runs_without_the_current_directory(
    shared: Path, monkeypatch: pytest.MonkeyPatch, has_option: bool
) -> None:
    if not has_option:
        monkeypatch.setattr(install, "_OPTIONS", ())
        monkeypatch.setattr(install, "_VARIABLE", "NOTHING")
    code = "import json, os, ring_plugins; print(json.__name__, os.environ.get('PYTHONSAFEPATH'), '' in sys.path)"
    assert start(install.own_python(code)).stdout.strip() == "json None False"
    assert start(["env", *install.own_python_elsewhere(PYTHON, code)]).stdout.strip() == "json None False"
    assert imported(shared) == ""
