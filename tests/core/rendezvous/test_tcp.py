"""Jobs whose launcher sets RANK and MASTER_ADDR: where ranks meet, and the errors if they cannot."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from ring_plugins.core import rendezvous as launch
from ring_plugins.core.base.errors import LaunchError, MissingDependency
from ring_plugins.core.rendezvous import tcp
from ring_plugins.core.rendezvous.launchers import NONE
from tests.launch import run_ranks
from tests.launchers import FOREIGN_NAMES, FOREIGN_PREFIXES


class Provider:
    """A store in this process, which threads share as ranks would."""

    def __init__(self, owns_port):
        self.owns, self.values, self.opened = owns_port, {}, []

    def owns_port(self):
        return self.owns

    def has_own_store(self):
        return self.owns

    def open_store(self, generation):
        self.opened.append(generation)
        return self

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        while key not in self.values:
            pass
        return self.values[key]


def meet(size, port, address="127.0.0.1"):
    with ThreadPoolExecutor(size) as pool:
        monkey = pytest.MonkeyPatch()
        monkey.setenv("MASTER_PORT", str(port))
        try:
            found = list(pool.map(lambda rank: tcp._meet(rank, size, address, 5), range(size)))
            gathered = list(pool.map(lambda one: one.gather(one.rank), found))
        finally:
            monkey.undo()
        for one in found:
            one.close()
        return gathered


def test_ranks_meet_at_master_port():
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    assert meet(3, port) == [[0, 1, 2]] * 3


def test_ranks_meet_through_a_frameworks_store_where_that_holds_the_port(monkeypatch):
    provider = Provider(owns_port=True)
    monkeypatch.setattr(tcp, "_provider", provider)
    with socket.create_server(("", 0)) as taken:
        assert meet(2, taken.getsockname()[1]) == [[0, 1]] * 2
    assert provider.opened == [5, 5]


def test_a_store_of_the_scripts_own_needs_no_address(monkeypatch):
    for name in tcp.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tcp, "_provider", Provider(owns_port=True))
    assert tcp.find(NONE) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (tcp.find(NONE).rank, tcp.find(NONE).size) == (1, 2)
    assert meet(2, "", address="") == [[0, 1]] * 2


@pytest.mark.parametrize("value", [b"", b"29500", b"x y z", b"0 y z", b"99999999999 y z", b"1 \xff z", b"1 2 3 4"])
def test_a_forged_address_in_the_store_is_rejected(value):
    with pytest.raises(LaunchError, match="something other than rank 0's address"):
        tcp._read_bootstrap(value)


def test_a_store_is_loaded_when_the_agent_holds_the_port(monkeypatch):
    provider = Provider(owns_port=False)
    monkeypatch.setattr(tcp, "_provider", None)
    monkeypatch.setattr(tcp, "_load_provider", lambda: provider)
    assert tcp._open_store(0) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert tcp._open_store(0) is provider


def test_a_framework_that_is_not_installed_is_named(monkeypatch):
    def load():
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(tcp, "_provider", None)
    monkeypatch.setattr(tcp, "_load_provider", load)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(MissingDependency, match=r"pip install .*\[torch\]"):
        tcp._open_store(0)


@pytest.mark.parametrize("port", ["0", "", "99999"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_number_that_is_no_port_is_rejected(rank, port, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr(tcp, "_provider", None)
    with pytest.raises(LaunchError, match=rf"MASTER_PORT={port or 0} is no port at which rank {rank} of 2 could meet"):
        tcp._meet(rank, 2, "127.0.0.1", 5)


def test_a_port_that_stays_taken_is_named(monkeypatch):
    monkeypatch.setattr(tcp, "_PORT_RELEASE", 0.1)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT={port} is taken on {socket.gethostname()}"):
            tcp._listen(port, 2)


def test_a_port_that_is_released_in_time_is_used(monkeypatch):
    monkeypatch.setattr(tcp, "_PORT_RELEASE", 30.0)
    taken = socket.create_server(("", 0))
    monkeypatch.setattr(tcp.time, "sleep", lambda _: taken.close())
    tcp._listen(taken.getsockname()[1], 2).close()


@pytest.mark.slow
def test_ranks_that_cannot_see_each_others_memory_use_sockets_or_mpi():
    script = """
        import os
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        if os.environ.get("RANK") == "1":
            os.environ["RING_SHARED_MEMORY"] = "0"
        ring.init()
        x = np.arange(300_001, dtype=np.float32) + ring.rank()
        report("right", bool(np.array_equal(ring.all_reduce(x, ring.SUM), 2 * np.arange(300_001) + 1)))
        report("nodes", ring.num_nodes())
    """
    for launcher, everywhere in (("mpirun", "0"), ("torchrun", "1")):  # on all ranks, and on one of them
        result = run_ranks(script, 2, launcher, env={"RING_SHARED_MEMORY": everywhere})
        assert result.values("right") == [True, True]
        assert result.values("nodes") == [2, 2]


PORTS = [("127.0.0.1", 4711), ("127.0.0.1", 4712)]
PLACE = dict(zip(tcp.NAMES, ("1", "2", "1", "2", "127.0.0.1", "4711"), strict=False))


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
    tcp.export([1, 2, 1, 2], PORTS)
    config = json.loads(os.environ["TF_CONFIG"])
    assert {name: os.environ[name] for name in PLACE} == PLACE
    assert (config["cluster"]["worker"], config["task"]["index"]) == (["127.0.0.1:4711", "127.0.0.1:4712"], 1)
    assert launch.detect().launcher.is_none
    tcp.withdraw_exported()
    assert not set(os.environ) & {*tcp.NAMES, "RING_EXPORTED"}


@pytest.mark.parametrize("name", tcp.NAMES)
def test_a_child_that_lacks_some_of_them_is_not_the_rank(name):
    tcp.export([1, 2, 1, 2], PORTS)
    del os.environ[name]
    assert launch.detect().launcher.is_none


@pytest.mark.parametrize("name", ["TF_CONFIG", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_child_with_other_values_of_those_by_which_no_ranks_meet_is_not_the_rank(name):
    tcp.export([1, 2, 1, 2], PORTS)
    os.environ[name] = "0"
    assert launch.detect().launcher.is_none


def test_a_launcher_that_a_rank_starts_is_seen():
    tcp.export([1, 2, 1, 2], PORTS)
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_PORT="4713")  # the same rank of another job
    assert (str(launch.detect().launcher), launch.detect().rank, launch.detect().size) == ("rendezvous", 1, 2)
    tcp.export([1, 2, 1, 2], [("127.0.0.1", 4714)] * 2)
    assert (os.environ["MASTER_PORT"], "4711" in os.environ["TF_CONFIG"]) == ("4713", False)


def test_what_the_user_has_set_stays_unless_it_names_another_rank():
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="host1", LOCAL_RANK="0")
    tcp.export([1, 2, 1, 2], PORTS)
    assert {name: os.environ[name] for name in PLACE} == {**PLACE, "MASTER_ADDR": "host1", "LOCAL_RANK": "0"}
    tcp.withdraw_exported()
    assert {name for name in tcp.NAMES if name in os.environ} == {"MASTER_ADDR", "LOCAL_RANK"}


def test_a_configuration_too_large_for_a_variable_is_left_out():
    tcp.export([0, 2000, 0, 1], [("127.0.0.1", 4711)] * 2000)
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
