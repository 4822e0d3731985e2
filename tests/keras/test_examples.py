"""The Keras examples run as printed, learn, and print on one rank only."""

import re

import pytest

from tests.keras.launches import BACKENDS, environment
from tests.launch import REPOSITORY, Result, run_ranks

EXAMPLES = REPOSITORY / "examples"


def accuracy(result: Result, ranks: int) -> float:
    waiting = r"(?:, \d+% of a step spent waiting for communication)?"
    line = rf"^ranks {ranks}, .*[\d.]+ s, validation accuracy ([\d.]+){waiting}$"
    found = re.findall(line, result.stdout, re.MULTILINE)
    assert len(found) == 1, f"one rank, and only one, must print the closing line\n{result}"
    return float(found[0])


@pytest.mark.slow  # twenty epochs; by default the README's fragments run, and behaviors test the rest
@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        pytest.param("tensorflow", "mpirun", marks=pytest.mark.mpi),
        *((backend, "spawned") for backend in ("tensorflow", "torch", "jax")),
    ],
)
def test_digits(backend, launcher):
    result = run_ranks(
        EXAMPLES / "keras_digits.py", 2, launcher, env=environment(backend, HIDDEN_PACKAGES=""), timeout=280
    )
    assert accuracy(result, 2) >= 0.97
    assert result.stdout.count("Epoch 20/20") == 1, f"progress comes from one rank\n{result}"


@pytest.mark.slow  # behaviors test that training resumes, and the other example that it learns
@pytest.mark.parametrize("backend", BACKENDS)
def test_image_folder_resumes(backend, tmp_path):
    where = ["--images", str(tmp_path / "images"), "--checkpoint", str(tmp_path / "model.keras")]
    run = lambda epochs: run_ranks(  # noqa: E731 - twice the same
        EXAMPLES / "keras_imagefolder.py",
        2,
        args=[*where, "--epochs", epochs],
        env=environment(backend, HIDDEN_PACKAGES=""),
        timeout=280,
    )
    accuracy(run("3"), 2)
    second = run("6")
    assert accuracy(second, 2) >= 0.9
    assert "epochs 3 to 6" in second.stdout and "Epoch 3/6" not in second.stdout
