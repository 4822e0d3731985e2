"""The Keras examples run as printed, learn, and print on one rank only."""

import re
import signal
import time

import pytest

from tests.keras.launches import BACKENDS, environment
from tests.launch import REPOSITORY, Result, run_ranks, start_ranks

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


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_data(backend, tmp_path):
    """It stops on SIGTERM, and goes on."""
    example, env = EXAMPLES / "keras_uneven.py", environment(backend, HIDDEN_PACKAGES="")
    arguments = ["--backup", str(tmp_path / "backup"), "--epochs", "8"]
    with start_ranks(example, 3, args=arguments, env=env) as job:
        deadline = time.monotonic() + 240
        while "Epoch 2/8" not in (job.directory / "stdout").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(120).returncode == 143
    result = run_ranks(example, 3, args=arguments, env=env, timeout=280)
    found = re.findall(r"^ranks 3, batches of an epoch \[8, 15, 22\], test accuracy ([\d.]+)$", result.stdout, re.M)
    assert len(found) == 1 and float(found[0]) >= 0.94, result
    assert "Epoch 1/8" not in result.stdout and result.stdout.count("Epoch 8/8") == 1, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [*(("keras_slow_network", backend) for backend in BACKENDS), ("jax_slow_network", "jax")]
)
def test_slow_networks(name, backend):
    env = environment(backend, HIDDEN_PACKAGES="", RING_VIRTUAL_NODES="1,2")
    result = run_ranks(EXAMPLES / f"{name}.py", 3, "exported", env=env, timeout=280)
    (found,) = re.findall(r"^ranks 3, hosts 2, validation accuracy ([\d.]+)(.*)$", result.stdout, re.MULTILINE)
    assert float(found[0]) >= 0.9
    assert found[1] in ("", ", equal weights")
