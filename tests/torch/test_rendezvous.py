"""Rendezvous of the script's process groups and ours, in any order, from any launch."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

import ring_plugins.torch  # noqa: F401 - registers the rendezvous
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import tcp as rendezvous
from ring_plugins.core.rendezvous.launchers import NONE
from ring_plugins.core.rendezvous.record import LaunchRecord
from ring_plugins.core.rendezvous.tcp import VARIABLES
from ring_plugins.torch import rendezvous as torch_rendezvous
from ring_plugins.torch.rendezvous import _listen
from tests.launch import REPOSITORY, run_ranks

BOTH = """
import os
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch

def check():
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    assert ring.all_reduce(torch.ones(1), op=ring.SUM).item() == 2

dist.init_process_group("gloo")  # the script first, on the launcher's port
ring.init()
check()
for backend in ("gloo", "ring", "gloo", "ring"):
    dist.destroy_process_group()
    dist.init_process_group(backend)
    check()
dist.destroy_process_group()
for _ in range(2):
    ring.shutdown()
    assert "RING_MEMBER" not in os.environ  # a child may be the rank now
    ring.init()  # ours first
    assert ring.all_reduce(torch.ones(1), op=ring.SUM).item() == 2
dist.init_process_group("gloo")
check()
print("both work")
"""


@pytest.mark.slow
def test_the_scripts_groups_and_ours_meet_in_any_order_under_torchrun():
    result = run_ranks(BOTH, 2, "torchrun", env={"RING_VIRTUAL_NODES": "2"})
    assert result.stdout.count("both work") == 2


def _run_without_launcher(script: str, size: int, env: dict[str, str]) -> list[tuple[str, str]]:
    """Standard output and error of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RING_", "TORCHELASTIC"))}
    environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | env
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**environment, "RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True
        )
        for rank in range(size)
    ]
    try:
        return [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_the_scripts_groups_and_ours_meet_in_any_order_without_an_agent():
    found = _run_without_launcher(BOTH, 2, {"RING_VIRTUAL_NODES": "2"})
    assert [out for out, _ in found] == ["both work\n"] * 2


RING_ONLY = """
import torch, torch.distributed as dist
import ring_plugins.torch

dist.init_process_group("ring")
value = torch.ones(1)
if WHAT == "all_reduce":
    dist.all_reduce(value)
else:
    (dist.send if dist.get_rank() == 0 else dist.recv)(value, 1 - dist.get_rank())
dist.destroy_process_group()
print(value.item())
"""


@pytest.mark.parametrize("size", [1, 2])
def test_the_backend_alone_meets_at_the_port_that_torchs_store_holds(size):
    found = _run_without_launcher(f"WHAT = 'all_reduce'\n{RING_ONLY}", size, {})
    assert [out for out, _ in found] == [f"{float(size)}\n"] * size


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all_reduce", "send"])
def test_a_job_whose_groups_are_gone_at_its_end_has_communicated(what):
    found = _run_without_launcher(f"WHAT = {what!r}\n{RING_ONLY}", 2, {})
    assert found == [(out, "") for out, _ in found]
    assert all(out for out, _ in found)


SPAWN = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import ring_plugins as ring, ring_plugins.torch

def main(rank, directory):
    dist.init_process_group("ring", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert (value.item(), ring.rank(), ring.size()) == (2, rank, 2)
    dist.destroy_process_group()
    ring.shutdown()
    assert "MASTER_PORT" not in os.environ  # a file has no port
    ring.init()  # through the same file
    assert ring.all_reduce(torch.ones(1), op=ring.SUM).item() == 2

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
    try:
        ring.init()
        dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=2)
    except ring.LaunchError as error:
        print(error)
"""


def test_a_script_that_forks_its_own_ranks_needs_no_launcher(tmp_path):
    result = run_ranks(SPAWN, 1, "spawned", args=[str(tmp_path)])
    assert "torch.distributed was asked for 2 ranks, but ring_plugins runs 1" in result.stdout


def test_a_store_for_other_hosts_listens_at_one_address():
    store = _listen("127.0.0.2", 1, timedelta(seconds=5))
    store.set("key", "value")
    assert store.host == "127.0.0.2"
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)


def test_a_store_on_a_port_of_the_systems_choice_is_described_with_that_port(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch_rendezvous, "_adopted", [])
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    torch_rendezvous.adopt(dist.PrefixStore("a", dist.PrefixStore("b", store)), 0, 2)
    assert [os.environ[name] for name in VARIABLES] == ["0", "2", "127.0.0.1", str(store.port)]
    assert store.port > 0


def test_missing_environment_variables_are_named(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        rendezvous.connect(LaunchRecord(NONE), None, 0)
    script = """
        import os
        import pytest
        import torch.distributed as dist
        import ring_plugins.torch
        os.environ["RANK"] = "0"
        with pytest.raises(ValueError, match="environment variable WORLD_SIZE expected"):  # torch's own words
            dist.init_process_group("ring")
    """
    run_ranks(script, 1, "spawned")
