"""Jobs whose launcher sets RANK and MASTER_ADDR: where ranks meet, and the errors if they cannot."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ring_plugins.core.base.errors import LaunchError, MissingDependency
from ring_plugins.core.rendezvous import tcp
from ring_plugins.core.rendezvous.launchers import NONE
from tests.launch import run_ranks


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
