"""What is published: one version everywhere, and a wheel and an sdist that pass `twine check` and run an example."""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from ring_plugins import __version__
from tests.launch import REPOSITORY

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}

SCRIPT = """
import ring_plugins as ring
ring.init(ranks=2)
total = ring.all_reduce(1.0, ring.SUM)
if ring.rank() == 0:
    print(float(total), ring.__file__.partition("/lib/")[0])
"""


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
def test_wheel_and_sdist(tmp_path, monkeypatch):
    def run(*command: object) -> str:
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", REPOSITORY)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("ring_plugins")]
    run("tar", "-xzf", source)
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    for held in ("examples/torch_loop.py", "docs/keras.md", "mkdocs.yml", "CITATION.cff", "tests/launch.py"):
        assert (unpacked / held).exists()

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", REPOSITORY / "constraints.txt", wheel)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run(python, "script.py").split() == ["2.0", str(tmp_path / "venv")]
    assert __version__ in run(tmp_path / "venv" / "bin" / "ring", "--version")

    # An example of the sdist with the wheel, and with torch and scikit-learn as they are installed here. A path in a
    # .pth file comes last, and .pth files of that directory (an editable install) are not read.
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    assert "ranks 2, " in run(python, unpacked / "examples" / "torch_loop.py")
