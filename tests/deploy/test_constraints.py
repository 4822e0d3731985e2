"""The package and the versions in constraints.txt work on every Python that the package supports."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.requirements import Requirement

from tests.launch import REPOSITORY

# What builds the documentation needs Python 3.11, and what runs notebooks comes with it.
DOCS = {
    "asttokens", "babel", "backrefs", "colorama", "comm", "debugpy", "executing", "fastjsonschema", "ghp-import",
    "griffelib", "ipykernel", "ipython", "ipython_pygments_lexers", "jedi", "jupyter_client", "jupyter_core",
    "Markdown", "matplotlib-inline", "mergedeep", "mkdocs", "mkdocs-get-deps", "mkdocs-material",
    "mkdocs-material-extensions", "nbclient", "nbformat", "nest-asyncio2",
    "paginate", "parso", "pexpect", "platformdirs", "prompt_toolkit", "ptyprocess", "pure_eval",
    "pymdown-extensions", "pyyaml_env_tag", "pyzmq", "stack-data", "tornado", "traitlets", "watchdog", "wcwidth",
}  # fmt: skip
PYTHONS = ("3.10.0", "3.11.0", "3.12.0", "3.13.0")


def pins() -> list[Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def chosen_for(pin: Requirement, python: str) -> bool:
    return pin.marker is None or pin.marker.evaluate({"python_version": python.rpartition(".")[0]})


def test_every_pin_that_is_installed_supports_the_pythons_that_it_is_chosen_for():
    rejected = []
    for pin in pins():
        try:
            installed = metadata(pin.name)
        except PackageNotFoundError:
            continue
        if installed["Version"] in pin.specifier and (needs := installed.get("Requires-Python")):
            supported = Requirement(f"python{needs}").specifier
            rejected += [
                f"{pin} on {python}" for python in PYTHONS if chosen_for(pin, python) and python not in supported
            ]
    assert rejected == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_has_one_version_for_a_python(python):
    chosen = sorted(pin.name for pin in pins() if chosen_for(pin, python))
    assert len(chosen) == len(set(chosen))
    missing = {pin.name for pin in pins()} - set(chosen)
    assert missing == (DOCS if python.startswith("3.10") else set())


def test_no_class_has_bases_that_python_3_10_rejects():
    """The only Python that the other tests run on may be a newer one, and type checkers accept both of these."""
    rejected = []
    for file in sorted((REPOSITORY / "ring_plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 10))):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            is_generic_tuple = "NamedTuple" in bases and len(bases) > 1
            if is_generic_tuple or any(base.startswith("logging.") and "[" in base for base in bases):
                rejected.append(f"{file.relative_to(REPOSITORY)}: class {node.name}({', '.join(bases)})")
    assert rejected == []
