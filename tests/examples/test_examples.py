"""The examples run as printed, learn, and speak once."""

import re

import pytest

from tests.launch import REPOSITORY, Result, run_ranks

EXAMPLES = REPOSITORY / "examples"
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
@pytest.mark.parametrize(("example", "option"), [("lightning_digits.py", "--devices"), ("torch_loop.py", "--ranks")])
def test_one_process(example, option):
    check(run_ranks(EXAMPLES / example, 1, args=[option, "1"], timeout=120), ranks=1)
