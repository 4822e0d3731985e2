"""What is published: one version everywhere, and a wheel and an sdist that `twine check` accepts and that run."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

from ring_plugins import __version__
from tests.launch import REPOSITORY

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}


def test_one_version_everywhere():
    project = re.search(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.*)$", (REPOSITORY / "CITATION.cff").read_text(), re.MULTILINE)
    assert project and cited
    assert project[1] == cited[1] == __version__
    assert f"\n## {__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_problems_are_reported_with_what_the_doctor_says():
    import yaml

    form = yaml.safe_load((REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text())
    (doctor,) = [part["attributes"] for part in form["body"] if part["id"] == "doctor"]
    assert "ring doctor --json" in doctor["label"]


@pytest.mark.slow
@pytest.mark.skipif(not {"build", "twine"} <= INSTALLED, reason="needs ring_plugins[release]")
def test_wheel_and_sdist(tmp_path):
    def run(*command: object) -> str:
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", REPOSITORY)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("ring_plugins")]
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"examples/torch_loop.py", "docs/keras.md", "mkdocs.yml", "CITATION.cff", "tests/launch.py"} <= held

    # The wheel in an environment of its own, beside the packages it needs; they are not downloaded again.
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=False)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", REPOSITORY / "constraints.txt", wheel)
    script = "import numpy, ring_plugins as ring; ring.init(ranks=2); print(ring.all_reduce(numpy.ones(2), ring.SUM))"
    (tmp_path / "script.py").write_text(script)
    assert run(python, "script.py").splitlines() == ["[2. 2.]"] * 2
    assert __version__ in run(tmp_path / "venv" / "bin" / "ring", "--version")
