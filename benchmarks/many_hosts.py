"""All-reduce among 2 to 1,024 hosts, simulated with constants that are measured between two test hosts.

    python benchmarks/many_hosts.py            # measures and simulates, as root; half a minute
    python benchmarks/many_hosts.py --simulate  # with the constants of benchmarks/results/many_hosts.json

The simulation follows one host through the pipeline of core/collectives/hierarchical.py: which messages it sends in
which round, what it waits for, what it adds. All hosts do the same at the same time, so what a host receives arrives
when what it sent itself arrives elsewhere. The constants are the least times of many. The network is a switch that
gives every host its full rate. The simulation knows no lost packets, no slow host and no oversubscribed link between
switches.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from measure import RESULTS, save

SIZES = [4 << 10, 1 << 20, 25 << 20, 100 << 20]
HOSTS = [2, 3, 4, 6, 8, 12, 14, 15, 16, 17, 20, 24, 32, 34, 48, 64, 96, 100, 127, 128, 256, 500, 512, 1000, 1024]
MOST_MESSAGES = 8
#: Seconds that real switches and cables add to the latency between test hosts, whose wire takes no time.
WIRE = 30e-6


@dataclass(frozen=True)
class Constants:
    """What the simulation knows of a host and its network.

    Attributes:
        latency: seconds from the moment a message has left until the receiver has noticed it.
        message: seconds of the processor for sending one message and receiving another.
        rate: bytes per second of a host's link, in each direction.
        adding: bytes per second of terms that are added up.
    """

    latency: float
    message: float
    rate: float
    adding: float


@dataclass(frozen=True)
class Round:
    """What a host does in one round with one chunk: `messages` of `nbytes` each, of which it adds up `added` bytes."""

    messages: int
    nbytes: float
    added: float


def grouped(radices: Sequence[int], nbytes: float) -> list[Round]:
    """The rounds of a butterfly over a chunk: reduce-scatter, then all-gather."""
    scatter = []
    for radix in radices:
        nbytes /= radix
        scatter.append(Round(radix - 1, nbytes, radix * nbytes))
    return scatter + [Round(one.messages, one.nbytes, 0) for one in reversed(scatter)]


def around(hosts: int, nbytes: float) -> list[Round]:
    """The rounds of a ring over a chunk."""
    part = nbytes / hosts
    return [Round(1, part, 2 * part)] * (hosts - 1) + [Round(1, part, 0)] * (hosts - 1)


def at_once(radices: Sequence[int], nbytes: float) -> list[Round]:
    """The rounds of a small message, of which everyone in a group receives all of everyone."""
    return [Round(radix - 1, nbytes, radix * nbytes) for radix in radices]


def simulate(chunks: Sequence[list[Round]], of: Constants) -> float:
    """Seconds of an all-reduce whose chunks take these rounds, one round in each step of the pipeline."""
    now = link = 0.0
    under_way: deque[tuple[deque[Round], float]] = deque()

    def start(one: Round) -> float:
        """Send a round's messages; returns when the others' have arrived."""
        nonlocal now, link
        for _ in range(one.messages):
            now += of.message
            link = max(now, link) + one.nbytes / of.rate
        return link + of.latency

    waiting = deque(chunks)
    while waiting or under_way:
        older = list(under_way)
        under_way.clear()
        new = None
        if waiting:
            new = deque(waiting.popleft())
            arrival = start(new[0])
        for rounds, arrived in older:
            now = max(now, arrived)
            now += rounds.popleft().added / of.adding
            if rounds:
                under_way.append((rounds, start(rounds[0])))
        if new is not None:
            under_way.append((new, arrival))
    return max(now, link)


def alternatives(hosts: int, nbytes: int, of: Constants) -> dict[str, float]:
    """Seconds of an all-reduce by each algorithm, and by the one that ring_plugins chooses."""
    from ring_plugins.core.collectives.algorithms import choose_algorithm, radices, ring
    from ring_plugins.core.collectives.hierarchical import largest_small, piece_bytes

    length = piece_bytes(nbytes, 1, hosts)
    lengths = [min(length, nbytes - start) for start in range(0, nbytes, length)]
    twos = [2] * (hosts.bit_length() - 1)
    seconds = {
        "groups": simulate([grouped(radices(hosts), chunk) for chunk in lengths], of),
        "direct": simulate([grouped([hosts], chunk) for chunk in lengths], of),
        "ring": simulate([around(hosts, chunk) for chunk in lengths], of),
    }
    if 2 ** len(twos) == hosts:
        seconds["halving and doubling"] = simulate([grouped(twos, chunk) for chunk in lengths], of)
    if nbytes <= largest_small(hosts):
        seconds["small, in groups"] = simulate([at_once(radices(hosts), nbytes)], of)
        seconds["small, at once"] = simulate([at_once([hosts], nbytes)], of)
        chosen = "small, in groups"
    elif hosts == 2 and nbytes <= 2 << 20:
        seconds["small, at once"] = chosen_seconds = simulate([at_once([2], chunk) for chunk in lengths], of)
        return seconds | {"chosen": chosen_seconds}
    else:
        chosen = "ring" if choose_algorithm(hosts, nbytes)[0] is ring else "groups"
    return seconds | {"chosen": seconds[chosen]}


def worker(options: argparse.Namespace) -> None:
    """Measure on one of two hosts: exchanges of one to eight small messages, each over a connection of its own."""
    import ring_plugins as ring
    from ring_plugins.benchmarking import interleaved
    from ring_plugins.core.arrays.arithmetic import reduce_into
    from ring_plugins.core.arrays.dtypes import Op
    from ring_plugins.core.net import mpi
    from ring_plugins.core.world import current

    rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    address = mpi.load().COMM_WORLD.bcast(options.address or socket.gethostname())
    os.environ |= {"RING_LAUNCHER": "rendezvous", "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address}
    os.environ["MASTER_PORT"] = "29600"
    ring.init()
    transport, peer = current()._rendezvous.transport, 1 - ring.rank()
    assert transport is not None
    data, buffer = np.ones(576, np.uint8), np.empty(576, np.uint8)

    def exchange(messages: int) -> None:
        pending = [transport.exchange([(peer, data)], [(peer, buffer)], 2_000_000 + i) for i in range(messages)]
        for request in pending:
            while not request.done():
                request.nap(1e-3)

    terms = [np.ones(64 << 10, np.float32) for _ in range(4)]
    times = interleaved({str(i): lambda i=i: exchange(i) for i in (1, MOST_MESSAGES)}, 200, 20)  # type: ignore[misc]
    adding = interleaved({"add": lambda: reduce_into(terms[0], terms, Op.SUM, "float32", 1)}, 100, 10)["add"]
    if ring.rank() == 0:
        message = (times[str(MOST_MESSAGES)].least - times["1"].least) / (MOST_MESSAGES - 1)
        adds = 4 * terms[0].nbytes / adding.least
        Path(options.out).write_text(f"{times['1'].least - message} {message} {adds}")
    ring.barrier()


def measured(gigabits: float) -> Constants:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.hosts import hosts

    with hosts(2, rate="10gbit") as cluster:
        out = cluster.directory / "result.txt"
        path = f"{Path(__file__).parent}:{cluster.environment_variables()['PYTHONPATH']}"
        arguments = ["--here", "--out", str(out), "--address", "host1"]
        with cluster.mpirun(Path(__file__).resolve(), 1, arguments, {"PYTHONPATH": path}) as job:
            result = job.wait(120)
        if not out.exists():
            raise SystemExit(str(result))
        latency, message, adding = map(float, out.read_text().split())
    return Constants(latency + WIRE, message, gigabits * 1e9 / 8, adding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, default=10.0, help="rate of a host's link in the simulation")
    parser.add_argument("--simulate", action="store_true", help="use the constants that were measured before")
    parser.add_argument("--here", action="store_true", help="measure between the two ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        worker(options)
        return
    if options.simulate:
        import json

        of = Constants(**json.loads((RESULTS / "many_hosts.json").read_text())["constants"])
    else:
        of = measured(options.gigabits)
    seconds = {nbytes: {hosts: alternatives(hosts, nbytes, of) for hosts in HOSTS} for nbytes in SIZES}
    save("many_hosts", {"constants": asdict(of), "seconds": seconds})
    print(of)
    for nbytes, by_hosts in seconds.items():
        print(f"\n{nbytes >> 10:,} KiB, ms")
        for hosts, times in by_hosts.items():
            best = min(times, key=lambda name: times[name])
            text = "  ".join(f"{name} {value * 1e3:.2f}" for name, value in times.items())
            print(f"{hosts:>6} hosts  {text}  chosen / best ({best}) {times['chosen'] / times[best]:.2f}")


if __name__ == "__main__":
    main()
