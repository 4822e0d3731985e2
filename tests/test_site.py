"""The documentation site builds without a warning: no dead link or anchor, no page outside the navigation.

The reference in docs/api and docs/cli.md is that of the source."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

from tests.launch import REPOSITORY

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("griffe") is None, reason="needs ring_plugins[docs]"),
    pytest.mark.xdist_group("site"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_reference_is_that_of_the_source(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "_site")
    reference = importlib.import_module("reference")
    for page in reference.PAGES:
        assert page.read_text() == reference.filled(page.read_text()), "python docs/_site/reference.py"


@pytest.mark.parametrize("package", ["", "torch", "keras", "lightning"])
def test_reference_documents_what_is_public(package):
    tree = ast.parse((REPOSITORY / "ring_plugins" / package / "__init__.py").read_text())
    (public,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    errors = set(re.findall(r"`(\w+)`", (REPOSITORY / "docs" / "errors.md").read_text()))
    expected = set(public) - errors - {"RingError", "AVERAGE", "MAX", "MIN", "PRODUCT", "SUM"}
    text = (REPOSITORY / "docs" / "api" / f"{package or 'ring_plugins'}.md").read_text()
    headings = set(re.findall(r"^#+ (?:[\w.]+\.)?(\w+)$", text, re.MULTILINE))
    assert expected - headings == set()


def test_command_line_lists_every_option(site):
    from ring_plugins.cli.main import app

    text = (site / "cli" / "index.html").read_text()
    for command in app.registered_commands:
        assert f'id="ring-{command.name}"' in text
    for option in ("-n", "-H", "--with", "--output-dir", "--json", "--step-ms"):
        assert f'<code><span class="option">{option}</span></code>' in text


def test_nothing_is_loaded_from_other_servers(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="?(https?://[^">\s]+)', page.read_text())
        assert loaded == [], page
