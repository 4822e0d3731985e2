import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from ring_plugins.lightning.loggers import take_over, take_versions, versions_of


@pytest.fixture
def logger(tmp_path):
    """Of the first rank 0, with one line in its file."""
    found = CSVLogger(tmp_path)
    found.log_hyperparams({"rate": 0.5})
    log(found, 0, loss=8)
    return found


def log(logger, step, **metrics):
    logger.log_metrics(metrics, step)
    logger.save()


def successor(logger):
    """A logger of another process, which takes over."""
    found = CSVLogger(logger.save_dir)
    assert found.version == 1
    take_versions([found], versions_of([logger]))
    take_over(found)
    return found


def lines(logger):
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_ranks_that_take_over_in_turn_add_lines_to_one_file(logger):
    second = successor(logger)
    log(second, 1, loss=7)
    third = successor(logger)
    log(third, 2, accuracy=1, loss=6)
    log(second, 3, loss=5)  # it has another column than those that this one knows
    take_over(second)  # it has a writer already
    log(second, 4, loss=4)
    assert lines(logger) == [
        ["accuracy", "loss", "step"], ["", "8", "0"], ["", "7", "1"], ["1", "6", "2"], ["", "5", "3"], ["", "4", "4"],
    ]  # fmt: skip
    assert [path.name for path in Path(logger.root_dir).iterdir()] == ["version_0"]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "rate: 0.5\n"


def test_a_line_that_was_not_written_to_its_end_is_removed(logger):
    with (Path(logger.log_dir) / "metrics.csv").open("a") as file:
        file.write("7,")
    log(successor(logger), 1, loss=7)
    assert lines(logger) == [["loss", "step"], ["8", "0"], ["7", "1"]]


def test_one_that_takes_over_before_anything_was_written_begins_the_file(tmp_path):
    logger = CSVLogger(tmp_path)
    take_over(logger)
    log(logger, 0, loss=8)
    assert lines(logger) == [["loss", "step"], ["8", "0"]]


def test_versions_of_loggers_for_files_are_taken_over_and_others_stay():
    """TensorBoardLogger needs a package that tests do not have."""
    kind = type("TensorBoardLogger", (), {"__module__": "lightning.pytorch.loggers.tensorboard", "version": 3})
    ours, theirs, other = kind(), kind(), object()
    assert versions_of([theirs, other]) == [("TensorBoardLogger", 3), ("object", None)]
    take_versions([ours, other], versions_of([theirs, other]))
    assert ours._version == 3
    take_versions([other], versions_of([theirs]))  # a script may give ranks different loggers
    take_over(ours)
