"""Libraries that ask the environment which rank this is see the job, whatever started it; children of a rank do not."""

import json
import os
from unittest import mock

import pytest

from ring_plugins.core import rendezvous as launch
from ring_plugins.core.rendezvous import exported
from tests.launch import run_ranks
from tests.launchers import FOREIGN_NAMES, FOREIGN_PREFIXES

PORTS = [("127.0.0.1", 4711), ("127.0.0.1", 4712)]
PLACE = dict(zip(exported.NAMES, ("1", "2", "1", "2", "127.0.0.1", "4711"), strict=False))


@pytest.fixture(autouse=True)
def _nothing_set():
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name == "TF_CONFIG" or name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
                del os.environ[name]
        yield


READERS = """
import os, subprocess, sys
import ring_plugins as ring
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))

import torch.distributed as dist  # not ring_plugins.torch, whose rendezvous needs no variables

dist.init_process_group("gloo")
report("torch", [dist.get_rank(), dist.get_world_size()])
report("ring", [ring.rank(), ring.size()])
report("local", [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]])
dist.barrier()
dist.destroy_process_group()
if ring.rank() == 0 and "OMPI_COMM_WORLD_RANK" not in os.environ:
    child = "import ring_plugins as ring; ring.init(); print(ring.size(), end='')"
    report("child", subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
ring.barrier()
rank = ring.rank()
ring.shutdown()
report("left", [name for name in ("RANK", "MASTER_PORT", "RING_EXPORTED") if name in os.environ], rank=rank)
"""


@pytest.mark.parametrize("launcher", ["spawned", "mpirun"])
def test_torch_finds_the_job_in_the_environment(launcher):
    result = run_ranks(READERS, 2, launcher)
    assert result.values("torch") == result.values("ring") == [[0, 2], [1, 2]]
    assert result.values("local") == [["0", "2"], ["1", "2"]]
    assert result.values("left") == [[], []]
    if launcher == "spawned":  # mpirun's own variables say that the child is that rank, so it is rejected
        assert result.values("child") == ["1"]


def test_exported_variables_are_no_launchers():
    exported.export([1, 2, 1, 2], PORTS)
    config = json.loads(os.environ["TF_CONFIG"])
    assert {name: os.environ[name] for name in PLACE} == PLACE
    assert (config["cluster"]["worker"], config["task"]["index"]) == (["127.0.0.1:4711", "127.0.0.1:4712"], 1)
    assert launch.detect().launcher.is_none
    exported.withdraw()
    assert not set(os.environ) & {*exported.NAMES, "RING_EXPORTED"}


@pytest.mark.parametrize("name", exported.NAMES)
def test_a_child_that_lacks_some_of_them_is_not_the_rank(name):
    exported.export([1, 2, 1, 2], PORTS)
    del os.environ[name]
    assert launch.detect().launcher.is_none


@pytest.mark.parametrize("name", ["TF_CONFIG", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_child_with_other_values_of_those_by_which_no_ranks_meet_is_not_the_rank(name):
    exported.export([1, 2, 1, 2], PORTS)
    os.environ[name] = "0"
    assert launch.detect().launcher.is_none


def test_a_launcher_that_a_rank_starts_is_seen():
    exported.export([1, 2, 1, 2], PORTS)
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_PORT="4713")  # the same rank of another job
    assert (str(launch.detect().launcher), launch.detect().rank, launch.detect().size) == ("rendezvous", 1, 2)
    exported.export([1, 2, 1, 2], [("127.0.0.1", 4714)] * 2)
    assert (os.environ["MASTER_PORT"], "4711" in os.environ["TF_CONFIG"]) == ("4713", False)


def test_what_the_user_has_set_stays_unless_it_names_another_rank():
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="host1", LOCAL_RANK="0")
    exported.export([1, 2, 1, 2], PORTS)
    assert {name: os.environ[name] for name in PLACE} == {**PLACE, "MASTER_ADDR": "host1", "LOCAL_RANK": "0"}
    exported.withdraw()
    assert {name for name in exported.NAMES if name in os.environ} == {"MASTER_ADDR", "LOCAL_RANK"}


def test_a_configuration_too_large_for_a_variable_is_left_out():
    exported.export([0, 2000, 0, 1], [("127.0.0.1", 4711)] * 2000)
    assert os.environ["WORLD_SIZE"] == "2000" and "TF_CONFIG" not in os.environ


STRATEGY = """
import ring_plugins as ring
from tests.worker import report

ring.init(ranks=2)
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
add = tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None))
report("sum", float(add()))
"""


@pytest.mark.slow
def test_a_strategy_of_tensorflow_finds_all_ranks():
    pytest.importorskip("tensorflow")
    result = run_ranks(STRATEGY, 2, "spawned", timeout=120, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert result.values("sum") == [2, 2]
    assert "without communicating" not in result.stderr


JAX = """
import os
import ring_plugins as ring
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
import jax
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", ring.size(), ring.rank())
from jax.experimental import multihost_utils
report("of JAX", float(multihost_utils.process_allgather(jax.numpy.ones(1)).sum()))
report("ours", float(ring.all_reduce(1.0, ring.SUM)))
"""


@pytest.mark.slow
def test_jax_connects_the_ranks_as_the_documentation_says():
    pytest.importorskip("jax")
    result = run_ranks(JAX, 2, "spawned", timeout=120)
    assert result.values("of JAX") == result.values("ours") == [2.0, 2.0]
