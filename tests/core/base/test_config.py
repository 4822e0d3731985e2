"""RING_* variables: parsed once, listed in docs/environment.md."""

from pathlib import Path

import pytest

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError


def test_the_page_of_variables_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "environment.md"
    assert page.read_text() == config.page(), "run: python -m ring_plugins.core.base.config > docs/environment.md"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (config.TIMEOUT, "2.5", 2.5),
        (config.TIMEOUT, "", 1800.0),
        (config.SHARED_MEMORY, "0", False),
        (config.DRIFT_CHECK, "100", 100),
        (config.VIRTUAL_NODES, "1, 2", (1, 2)),
        (config.TRANSPORT, "mpi", "mpi"),
        (config.LAUNCHER, "grown", "spawned"),
        (config.LAUNCHER, "alone", "single"),
    ],
)
def test_values_are_parsed(variable, text, value):
    assert variable.get({variable.name: text}) == value
    assert variable.problem({variable.name: text}) == ""


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        (config.TIMEOUT, "0", "not a positive number of seconds"),
        (config.TIMEOUT, "nan", "not a positive number of seconds"),
        (config.AUTOTUNE, "yes", "neither 0 nor 1"),
        (config.DRIFT_CHECK, "-1", "not a whole number"),
        (config.VIRTUAL_NODES, "2,0", "not a comma-separated list of positive numbers"),
        (config.TRANSPORT, "ucx", "not one of tcp, mpi"),
        (config.LAUNCHER, "pvm", "not one of mpi, rendezvous, slurm, spawned, single"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(variable, text, problem):
    assert variable.problem({variable.name: text}) == problem
    with pytest.raises(ArgumentError, match=f"{variable.name}='{text}' is {problem}"):
        variable.get({variable.name: text})


def test_an_older_name_counts_where_the_new_one_is_not_set():
    assert config.TRANSPORT.get({"RING_PLANE": "mpi"}) == "mpi"
    assert config.TRANSPORT.get({"RING_PLANE": "mpi", "RING_TRANSPORT": "tcp"}) == "tcp"


def test_a_wrong_value_is_named_with_the_older_name_if_that_is_the_one_set():
    with pytest.raises(ArgumentError, match="RING_PLANE='x' is not one of tcp, mpi"):
        config.TRANSPORT.get({"RING_PLANE": "x"})


def test_a_misspelled_name_is_found_with_the_variable_that_was_meant():
    environment = {"RING_TIMEOUTS": "5", "RING_TIMEOUT": "5", "RING_PLANE": "mpi", "RING_SPAWNED": "", "HOME": "/"}
    assert config.unknown(environment) == {"RING_TIMEOUTS": "RING_TIMEOUT"}
    assert config.unknown({"RING_XYLOPHONE": "1"}, likeness=0.8) == {"RING_XYLOPHONE": ""}
    assert config.unknown({"RING_SECRETS": "1", "RING_SPAWN": "1"}, likeness=0.8) == {
        "RING_SECRETS": "",
        "RING_SPAWN": "",
    }
