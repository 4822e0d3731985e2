"""Where in the user's code something happened."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ring_plugins.core.base import places
from ring_plugins.core.base.places import called_here, place, place_of, place_of_call
from tests.launch import run_ranks

OURS = (str(Path(places.__file__).parents[1] / "collectives" / "executor.py"), 125)
INSTALLED = ("/env/lib/python3.11/site-packages/lightning/pytorch/loop.py", 7)
PYTHON = (json.__file__, 3)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (
            [OURS, ("/a/train.py", 12), ("/a/train.py", 40), ("/a/main.py", 3)],
            "12, called from line 40 and /a/main.py, line 3",
        ),
        ([OURS, PYTHON, ("/a/train.py", 12)], "/a/train.py, line 12"),
        ([OURS, INSTALLED, ("/a/train.py", 12)], "/a/train.py, line 12, in lightning/pytorch/loop.py, line 7"),
        ([OURS, INSTALLED, PYTHON], "lightning/pytorch/loop.py, line 7"),
        ([("/a/train.py", 12), INSTALLED, ("/a/main.py", 3)], "/a/train.py, line 12, called from /a/main.py, line 3"),
        ([OURS, ("<frozen runpy>", 198)], ""),
    ],
)
def test_a_place_is_the_users(frames, text):
    assert place(frames).endswith(text)
    assert str(OURS[0]) not in place(frames)


def test_an_error_is_told_from_the_innermost_line_of_the_user():
    def fail():
        json.loads("{")

    try:
        fail()
    except ValueError as error:
        first = fail.__code__.co_firstlineno
        assert place_of(error) == f"{__file__}, line {first + 1}, called from line {first + 4}"


def test_a_call_is_told_where_it_stands():
    line = test_a_call_is_told_where_it_stands.__code__.co_firstlineno + 2
    assert place_of_call().startswith(f"{__file__}, line {line}")


def test_places_that_differ_anywhere_have_different_texts():
    frames = [("/a/train.py", line) for line in range(20)]
    others = [place([*frames[:i], ("/a/other.py", 1), *frames[i + 1 :]]) for i in range(20)]
    assert len({place(frames), *others}) == 21
    assert place(frames).startswith("/a/train.py, line 0, called from line 1 and line 2 and line 3 and 13 more (")
    assert place(frames).endswith(") and line 17 and line 18 and line 19")


def test_a_call_in_another_thread_is_told_where_it_was_made():
    def make():
        return called_here(place_of_call)

    first = make.__code__.co_firstlineno
    call = make()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result().startswith(f"{__file__}, line {first + 1}, called from line {first + 4}")
    assert place_of_call().startswith(f"{__file__}, line {first + 7}")


SCRIPT = """
import numpy as np
import ring_plugins as ring

ring.init(ranks=2)

def average(n):
    ring.all_reduce(np.ones(n))

def evaluate():
    average(1)

def train():
    average(2)

if __name__ == "__main__":
    evaluate() if ring.rank() == 0 else train()
"""


@pytest.mark.parametrize(("launcher", "nodes"), [("spawned", ""), ("exported", "2")])
def test_ranks_that_fail_in_different_lines_of_the_script_show_both(launcher, nodes):
    """Also where both are in one helper of the script's."""
    result = run_ranks(SCRIPT, 2, launcher, env={"RING_VIRTUAL_NODES": nodes}, timeout=60, check=False)
    assert result.returncode != 0
    assert ", in evaluate" in result.output and ", in train" in result.output, result
    assert "at the same place" not in result.output
    assert "Usually a size depends on the rank, such as the last batch's" in result.output
    assert "line 8, called from line 11 and line 17" in result.output
    assert "line 8, called from line 14 and line 17" in result.output


def test_one_traceback_is_enough_for_ranks_that_fail_in_the_same_line():
    result = run_ranks(SCRIPT.replace("evaluate() if", "train() if").replace("average(2)", "1 / 0"), 2, check=False)
    assert result.output.count("Traceback") == 1, result
    assert "failed at the same place as rank" in result.output
