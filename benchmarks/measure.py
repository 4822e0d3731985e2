"""What benchmarks share: a line about the machine, kept results, and a start on test hosts."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ring_plugins as ring
from ring_plugins.core.world import current

RESULTS = Path(__file__).parent / "results"


def machine(ranks: str = "", shared: float | None = None) -> str:
    """One line for below a table or figure: machine, ranks and their threads, what else used the cores, date.

    Call it at the end of a measurement, on rank 0 or in the process that started the ranks.

    Args:
        ranks: where they ran, if this process is not one of them.
        shared: share of the cores that other programs used, if `used_by_others()` cannot tell it here.
    """
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    if ring.is_initialized():
        hosts = f"{ring.num_nodes()} host" + "s" * (ring.num_nodes() > 1)
        ranks = f"{ring.size()} ranks on {hosts}, {threads()}"
    used = f"other programs used {used_by_others() if shared is None else shared:.0%} of the cores"
    parts = [f"{model}, {os.cpu_count()} cores", ranks, used, f"Python {platform.python_version()}"]
    return ", ".join([*filter(None, parts), time.strftime("%Y-%m-%d")])


def threads() -> str:
    """How many threads a rank computes with."""
    torch = sys.modules.get("torch")
    count = torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS", "1"))
    return f"{count} thread{'s' * (count > 1)} each"


def used_by_others(ours: float | None = None) -> float:
    """Share of all cores that programs other than this benchmark have used since it was started.

    Args:
        ours: processor seconds of all ranks, where this process cannot see them (test hosts have their own /proc).
    """
    return max(0.0, clock() - BEGIN - (own() if ours is None else ours)) / (
        (time.monotonic() - STARTED) * (os.cpu_count() or 1)
    )


def clock() -> float:
    """Seconds that the machine's cores have computed, without those that interrupts took."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """Processor seconds of all processes that run this script, and of those that they have waited for."""
    script, used = os.path.basename(sys.argv[0]).encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if script in (process / "cmdline").read_bytes():
                used += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return used / os.sysconf("SC_CLK_TCK")


def count_bytes() -> list[int]:
    """Return a list with one number, the bytes that this rank has sent to other hosts so far."""
    sent, transport = [0], current()._rendezvous.transport
    assert transport is not None
    exchange = transport.exchange

    def counting(outgoing, incoming, tag):
        sent[0] += sum(array.nbytes for _, array in outgoing)
        return exchange(outgoing, incoming, tag)

    transport.exchange = counting
    return sent


STARTED = time.monotonic()
BEGIN = clock() - own()


def save(name: str, record: Mapping[str, object], ranks: str = "", shared: float | None = None) -> None:
    """Save a result as JSON in benchmarks/results; plot.py puts it into the documentation."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(ranks, shared), **record}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def load(name: str) -> dict[str, Any]:
    """Read a kept result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def init_under_mpirun(address: str | None) -> None:
    """Join a job over sockets whose ranks mpirun has started, so that MPI can be measured beside it.

    Args:
        address: of rank 0's host; its name if None.
    """
    from ring_plugins.core.net import mpi

    rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    address = mpi.load().COMM_WORLD.bcast(address or socket.gethostname())
    os.environ |= {"RING_LAUNCHER": "rendezvous", "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address}
    os.environ["MASTER_PORT"] = "29600"
    ring.init()


def on_test_hosts(
    script: str, number: int, rate: str | None, arguments: Sequence[str], ranks: int = 2, **environment: str
) -> str:
    """Run a benchmark under mpirun on test hosts (network namespaces with shaped links), as root.

    Args:
        script: its `__file__`.
        number: of hosts.
        rate: of each link, such as "10gbit"; None for no limit.
        arguments: for the script, besides `--here`, `--address` and `--out FILE`.
        ranks: on each host.
        environment: further variables of the ranks.

    Returns:
        What rank 0 wrote to FILE.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.hosts import hosts

    with hosts(number, rate=rate) as cluster:
        out = cluster.directory / "result"
        variables = {
            # MPI's ranks poll while they wait; let them yield, since there are more ranks than cores.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PYTHONPATH": f"{Path(__file__).parent}:{cluster.environment_variables()['PYTHONPATH']}",
            **environment,
        }
        own_arguments = ["--here", "--out", str(out), "--address", "host1", *arguments]
        with cluster.mpirun(Path(script).resolve(), ranks, own_arguments, variables) as job:
            result = job.wait(900)
        if not out.exists():
            raise SystemExit(str(result))
        return out.read_text()
