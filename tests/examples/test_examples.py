"""The examples run as printed, learn, and speak once."""

import json
import re

import pytest

from tests.java import java_environment, spark_home
from tests.launch import REPOSITORY, Result, run_ranks

EXAMPLES = REPOSITORY / "examples"
#: Nothing that is installed is hidden from Keras (tests/python_path).
ALL = {"HIDDEN_PACKAGES": ""}
CLOSING_LINE = re.compile(
    r"^ranks (?P<ranks>\d+), (?P<seconds>[\d.]+) s, validation accuracy (?P<accuracy>[\d.]+), "
    r"(?P<waiting>\d+)% of a step spent waiting for communication$",
    re.MULTILINE,
)


# Open MPI gives the ranks a terminal, so that Lightning's bar is drawn in color there.
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def check(result: Result, ranks: int) -> None:
    found = list(CLOSING_LINE.finditer(TERMINAL_CODES.sub("\n", result.stdout)))
    assert len(found) == 1, f"one rank, and only one, must print the closing line\n{result}"
    assert int(found[0]["ranks"]) == ranks
    assert float(found[0]["accuracy"]) >= 0.97
    assert 0 <= int(found[0]["waiting"]) < 100
    assert ranks > 1 or int(found[0]["waiting"]) == 0


# .ci/run runs the README's example, which is this one with plain python.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_lightning_digits(launcher):
    result = run_ranks(EXAMPLES / "lightning_digits.py", 2, launcher, timeout=120)
    check(result, ranks=2)
    # Lightning's notices and its progress bar come from rank 0 alone.
    assert result.output.count("GPU available") == 1, result
    assert result.output.count("`Trainer.fit` stopped") == 1, result


def test_torch_loop():
    result = run_ranks(EXAMPLES / "torch_loop.py", 2, "spawned", timeout=120)
    check(result, ranks=2)
    assert re.findall(r"^epoch (\d+),", result.stdout, re.MULTILINE) == [str(epoch + 1) for epoch in range(20)], result


@pytest.mark.slow
@pytest.mark.parametrize(("started_by", "processes"), [("spawned", 2), ("spawned", 4), ("mpirun", 4)])
def test_experts(started_by, processes):
    """Experts that are shared out among groups become those of one process."""
    one, several = (
        closing(
            run_ranks(EXAMPLES / "experts.py", ranks, launcher, ["--ranks", str(ranks), "--steps", "60"], timeout=120),
            r"^ranks \d, [\d.]+ s, loss ([\d.]+), experts' weights ([\d.]+)$",
        )
        for ranks, launcher in ((1, "spawned"), (processes, started_by))
    )
    assert several.groups() == one.groups()


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_uneven_data(number):
    result = run_ranks(EXAMPLES / "uneven_data.py", number, args=["--ranks", str(number)], timeout=120)
    line = closing(result, r"^ranks (\d), batches of each (\[.*\]), accuracy ([\d.]+)$")
    assert (line[1], json.loads(line[2])) == (str(number), {2: [19, 38], 3: [10, 19, 29]}[number])
    assert float(line[3]) >= 0.94


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "killed"),
    [("survive.py", "0, 1, 3"), ("lightning_survive.py", "0, 1, 3"), ("keras_survive.py", "0, 1, 2")],
)
def test_survive(example, killed):
    """Three of its four ranks are killed, rank 0 among them, and it learns as if none had been."""
    result = run_ranks(EXAMPLES / example, 1, "spawned", timeout=120)
    closing_line = closing(result, r"^ranks 1, [\d.]+ s, validation accuracy ([\d.]+)$")
    assert float(closing_line[1]) >= 0.96
    assert re.findall(r"^epoch +\d+, ranks (\d)", result.stdout, re.MULTILINE) == list("443332221111"), result
    assert f"ring run: ranks {killed} died, and the other 1 ended normally." in result.output, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "option"), [("steady_batch.py", "--ranks"), ("lightning_steady_batch.py", "--devices")]
)
def test_steady_batch(example, option):
    """The weights of four ranks, of which two are killed, rank 0 among them, are those of one process."""
    alone, several = (
        run_ranks(EXAMPLES / example, 1, "spawned", args, timeout=240) for args in ([option, "1", "--kill"], [])
    )
    assert closing(alone, r"weights (\w{8})$")[1] == closing(several, r"weights (\w{8})$")[1]
    assert re.findall(r"^epoch \d, ranks (\d)", several.stdout, re.MULTILINE) == list("4322"), several
    assert "ring run: ranks 0, 1 died, and the other 2 ended normally." in several.output, several


@pytest.mark.slow
@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("example", ["lightning_survive.py", "keras_survive.py"])
def test_survive_while_others_take_the_places(example, standbys):
    """How many ranks there are at the end depends on how fast processes start."""
    env = {"RING_STANDBYS": str(standbys)}
    result = run_ranks(EXAMPLES / example, 1, "spawned", ["--on-failure", "replace"], env=env, timeout=120)
    closing_line = closing(result, r"^ranks \d, [\d.]+ s, validation accuracy ([\d.]+)$")
    assert float(closing_line[1]) >= 0.96
    assert len(re.findall(r"^epoch +\d+, ranks \d", result.stdout, re.MULTILINE)) == 12, result
    assert " joined; the job goes on with " in result.output, result
    assert ("a standby process takes the place of rank" in result.output) == bool(standbys), result


@pytest.mark.slow
@pytest.mark.parametrize(("example", "option"), [("lightning_digits.py", "--devices"), ("torch_loop.py", "--ranks")])
def test_one_process(example, option):
    check(run_ranks(EXAMPLES / example, 1, args=[option, "1"], timeout=120), ranks=1)


def closing(result: Result, pattern: str) -> re.Match[str]:
    found = list(re.finditer(pattern, TERMINAL_CODES.sub("\n", result.stdout), re.MULTILINE))
    assert len(found) == 1, f"one rank, and only one, must print the closing line\n{result}"
    return found[0]


@pytest.mark.slow
def test_fabric():
    result = run_ranks(EXAMPLES / "fabric_digits.py", 2, args=["--epochs", "8"], timeout=120)
    assert float(closing(result, r"^ranks 2, .* accuracy ([\d.]+)$")[1]) >= 0.9


@pytest.mark.slow
def test_lightning_gpt_resumes_and_writes(tmp_path):
    shortened = ["--files", "5", "--checkpoint", str(tmp_path / "gpt.ckpt"), "--steps"]
    line = r"^ranks 2, step (\d+), resumed (\w+), loss ([\d.]+)\n(def .*)"
    first = closing(run_ranks(EXAMPLES / "lightning_gpt.py", 2, args=[*shortened, "60"], timeout=200), line)
    second = closing(run_ranks(EXAMPLES / "lightning_gpt.py", 2, args=[*shortened, "90"], timeout=200), line)
    assert (first[1], first[2], second[1], second[2]) == ("60", "False", "90", "True")
    assert float(second[3]) < 4.0  # a model that knows nothing has 5.5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_keras_gpt_resumes_and_writes(backend, tmp_path):
    shortened = ["--files", "2", "--checkpoint", str(tmp_path / "gpt.keras"), "--epochs"]
    line = r"^ranks 2, epochs (\d) to (\d), loss ([\d.]+)\n(def .*)"
    run = lambda epochs: run_ranks(  # noqa: E731 - twice the same
        EXAMPLES / "keras_gpt.py", 2, args=[*shortened, epochs], env={"KERAS_BACKEND": backend, **ALL}, timeout=280
    )
    first, second = closing(run("1"), line), closing(run("2"), line)
    assert (first[1], first[2], second[1], second[2]) == ("0", "1", "1", "2")
    assert float(second[3]) < float(first[3])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_gan(backend):
    result = run_ranks(
        EXAMPLES / "keras_gan.py", 2, args=["--epochs", "1"], env={"KERAS_BACKEND": backend, **ALL}, timeout=280
    )
    closing(result, r"^ranks 2, epochs 1, critic_loss [\d.]+, generator_loss [\d.]+$")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["ray", "spark"])
def test_clusters(cluster, tmp_path, monkeypatch):
    """As printed, on a cluster that the script starts on this machine."""
    pytest.importorskip({"ray": "ray", "spark": "pyspark"}[cluster])
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)  # for the cluster's own processes
    env = {"RAY_USAGE_STATS_ENABLED": "0"}
    if cluster == "spark":
        env |= java_environment(tmp_path) | {"SPARK_HOME": str(spark_home(tmp_path)), "SPARK_LOCAL_IP": "127.0.0.1"}
    result = run_ranks(EXAMPLES / f"{cluster}_digits.py", 1, args=["--epochs", "2"], env=env, timeout=280)
    closing(result, r"^ranks 2, validation accuracy 0\.\d+$")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["ray", "spark"])
def test_training_functions_of_the_clusters(cluster):
    """tests/launcher runs functions on both; what the examples pass to them runs here on two ranks of this host."""
    script = f"""
import runpy
import ring_plugins as ring
example = runpy.run_path("{EXAMPLES}/{cluster}_digits.py")
print("accuracies", ring.run(example["train"], args=(10,), ranks=2))
"""
    found = closing(run_ranks(script, 1, timeout=200), r"^accuracies \[([\d.]+), ([\d.]+)\]$")
    assert found[1] == found[2] and float(found[1]) >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "keras"])
def test_notebook(name):
    """The cells one after the other, in one process, as a kernel runs them."""
    cells = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    interactive = "import sys\nsys.ps1 = '>>> '"  # by which Lightning knows a notebook
    code = "\n\n".join([interactive, *("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")])
    result = run_ranks(code, 1, env={"MPLBACKEND": "Agg", "KERAS_BACKEND": "tensorflow", **ALL}, timeout=280)
    assert float(closing(result, r"^accuracy ([\d.]+)$")[1]) >= 0.85
    assert name == "lightning" or "\nTrue" in result.stdout


@pytest.mark.parametrize("name", ["lightning", "keras"])
def test_notebook_keeps_what_its_cells_printed_and_drew(name):
    """`python docs/_site/execute_notebooks.py` runs them in a kernel, and keeps nothing of the machine."""
    text = (EXAMPLES / "notebooks" / f"{name}.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("accuracy 0." in "".join(output.get("text", "")) for output in outputs)
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert "site-packages" not in text and "Warning" not in text


def test_every_example_is_documented_and_short():
    page = (REPOSITORY / "docs" / "examples.md").read_text()
    for example in EXAMPLES.rglob("*.*"):
        if "__pycache__" not in example.parts:
            assert example.name in page
            assert len(example.read_text().splitlines()) <= 150 or example.suffix == ".ipynb"
