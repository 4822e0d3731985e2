"""What to type to add an optional package, and the plugins without their frameworks."""

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ring_plugins.core.base import install
from ring_plugins.core.base.install import pip_command
from tests.launch import REPOSITORY

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
