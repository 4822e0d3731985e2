"""Horovod's environment variables count where they have a counterpart, and are named once where they have none."""

import logging
import re

import pytest

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.horovod import settings
from tests.launch import run_ranks


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({"HOROVOD_AUTOTUNE": "1"}, {"RING_AUTOTUNE": "1"}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, {"RING_STALL_WARNING": "7"}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {}),  # never, as here by default
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"RING_STALL_WARNING": "1e9"}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, {}),
        ({"HOROVOD_GLOO_IFACE": "eth1", "RING_INTERFACE": "eth0"}, {"RING_INTERFACE": "eth0"}),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_WITH_TORCH": "1", "HOROVOD_NCCL_HOME": "/"}, {}),
        ({"HOROVOD_TIMELINE": ""}, {}),
    ],
)
def test_variables_with_a_counterpart_set_it_unless_it_is_set(given, set_to):
    environment = dict(given)
    assert settings.obey(environment) == []
    assert {name: text for name, text in environment.items() if name.startswith("RING_")} == set_to


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("HOROVOD_TIMELINE", "t.json", "has no effect here: use RING_TIMELINE=directory"),
        ("HOROVOD_CYCLE_TIME", "3", "no cycles"),
        ("HOROVOD_AUTOTUNE_LOG", "x", "RING_AUTOTUNE=1 needs no settings"),
        ("HOROVOD_HIERARCHICAL_ALLGATHER", "1", "docs/networks.md"),
        ("HOROVOD_FUSION", "1", "does not know it either"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon", "not a positive number of seconds; here it stands for RING_STALL"),
    ],
)
def test_others_are_named(name, text, said):
    environment = {name: text}
    (note,) = settings.obey(environment)
    assert note.startswith(name) and said in note and environment == {name: text}


def test_what_replaces_a_variable_exists():
    for text in settings.INSTEAD.values():
        assert {*re.findall(r"RING_\w+", text)} <= {*config.ALL}, text


def test_the_level_of_messages_is_taken_over():
    before = logger.level
    try:
        settings.obey({"HOROVOD_LOG_LEVEL": "error"})
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


PLACES = """
import os
import ring_plugins.horovod.basics as hvd
from tests.worker import report
hvd.init()
report("place", [os.environ[f"HOROVOD_{one}"] for one in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE")])
report("stall", os.environ["RING_STALL_WARNING"])
hvd.init()
"""


def test_ranks_know_their_place_and_rank_0_speaks_once():
    given = {"HOROVOD_CYCLE_TIME": "3", "HOROVOD_STALL_CHECK_TIME_SECONDS": "20"}
    result = run_ranks(PLACES, 2, "exported", env=given)
    assert result.values("place") == [["0", "2", "0", "2", "1"], ["1", "2", "1", "2", "1"]]
    assert result.values("stall") == ["20", "20"]
    assert result.output.count("HOROVOD_CYCLE_TIME has no effect here") == 1
