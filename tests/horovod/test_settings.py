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


#: All that Horovod 0.28 reads where it runs, by what becomes of them here, and those of its build.
OBEYED = """
AUTOTUNE GLOO_IFACE LOG_LEVEL STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS START_TIMEOUT
"""
NAMED = """
ADASUM_MPI_CHUNK_SIZE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE AUTOTUNE_LOG
AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_WARMUP_SAMPLES BATCH_D2D_MEMCOPIES CACHE_CAPACITY CCL_CACHE CONTROLLER
CPU_OPERATIONS CYCLE_TIME DISABLE_GROUP_FUSION DISABLE_NVTX_RANGES ELASTIC_TIMEOUT ENABLE_ASYNC_COMPLETION
ENABLE_XLA_OPS FUSION_THRESHOLD GLOO_TIMEOUT_SECONDS HIERARCHICAL_ALLGATHER HIERARCHICAL_ALLREDUCE LOG_HIDE_TIME
MPI_THREADS_DISABLE NUM_NCCL_STREAMS SPARK_PYTHONPATH SPARK_START_TIMEOUT SPARK_USE_LOCAL_RANK_GPU_INDEX
SPARK_WORK_DIR THREAD_AFFINITY TIMELINE TIMELINE_MARK_CYCLES TORUS_ALLREDUCE
"""
#: Set by its launcher rather than by users, or true here anyway.
ITS_OWN = """
CROSS_RANK CROSS_SIZE DYNAMIC_PROCESS_SETS ELASTIC GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT HOSTNAME LOCAL_RANK
LOCAL_SIZE RANK SECRET_KEY SIZE
"""
OF_ITS_BUILD = """
ALLOW_MIXED_GPU_IMPL BUILD_ARCH_FLAGS BUILD_CUDA_CC_LIST CMAKE CUDA_HOME DEBUG GPU GPU_ALLGATHER GPU_ALLREDUCE
GPU_ALLTOALL GPU_BROADCAST GPU_OPERATIONS GPU_REDUCESCATTER LOCAL_VERSION MIXED_INSTALL NCCL_HOME NCCL_INCLUDE NCCL_LIB
NCCL_LINK NVTX_INCLUDE ROCM_HOME SKIP_COMPILE WITH_GLOO WITH_MPI WITH_MXNET WITH_PYTORCH WITH_TENSORFLOW WITHOUT_GLOO
WITHOUT_MPI WITHOUT_MXNET WITHOUT_PYTORCH WITHOUT_TENSORFLOW
"""


def test_every_variable_of_horovod_is_obeyed_or_named(monkeypatch):
    monkeypatch.setattr(settings, "logger", logging.getLogger("tests"))
    for name in OBEYED.split():
        text = {"LOG_LEVEL": "error", "GLOO_IFACE": "eth0"}.get(name, "1")
        environment = {f"HOROVOD_{name}": text}
        assert settings.obey(environment) == [], name
        assert len(environment) == 2 or name == "LOG_LEVEL", name
    for name in NAMED.split():
        (note,) = settings.obey({f"HOROVOD_{name}": "1"})
        assert note.startswith(f"HOROVOD_{name} has no effect here: ") and "does not know it" not in note
    for name in [*ITS_OWN.split(), *OF_ITS_BUILD.split()]:
        assert settings.obey({f"HOROVOD_{name}": "1"}) == []


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
