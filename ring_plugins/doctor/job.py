"""Examine a whole job: measure its links, and compare the facts and measurements of all ranks.

The comparisons are pure functions of facts and links, so that tests need not reproduce rare faults.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

import ring_plugins as ring
from ring_plugins.benchmarking import Curve, all_reduce_curve, host_backends
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.linux import thread_count
from ring_plugins.core.world import current
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.gpus import DRIVER
from ring_plugins.doctor.host import Facts, own_facts
from ring_plugins.doctor.links import Link, measure_links
from ring_plugins.planning import Profile, advice, fitted, typical

_SIZES = tuple(1 << shift for shift in (6, 10, 14, 18, 20, 22, 24))
_SECONDS_PER_SIZE = 0.4
#: A link that reaches less than this share of its expected rate is a finding.
_SHARE = 0.5
#: Gbit/s that a single TCP connection reaches on any current machine. Faster cards are expected to reach only this.
_TCP = 10.0
#: The model of which a report speaks if it is given none, in million parameters: most gain there below 5 Gbit/s.
_TYPICAL = 10
#: Microseconds. No network inside a data center takes longer for a small message.
_SLOW_MESSAGE = 1000.0
#: Milliseconds.
_USUAL_MESSAGE = "0.02 to 0.2"
#: Packages whose versions must be equal on all ranks; a difference in any other package is only a warning.
_MUST_AGREE = ("ring_plugins", "NCCL", "torch", "keras", "tensorflow", "jax")
_UNBIND = (
    "mpirun --bind-to none, or ring run, which does not bind; or one core per rank: mpirun --map-by "
    "ppr:N:node:PE=CORES --bind-to core"
)
_ROUNDS, _SECONDS, _WIDTH = 3, 0.15, 384


@dataclass(frozen=True)
class Examination:
    """The results of examining a job.

    Attributes:
        findings: worst first.
        facts: facts of every rank.
        links: links between all pairs of hosts.
        curve: time of an all-reduce by size.
        started_by: launcher of the job.
    """

    findings: list[Finding]
    facts: list[Facts]
    links: list[Link]
    curve: Curve
    started_by: str

    def record(self) -> dict[str, Any]:
        """The examination as JSON values."""
        return {
            "started_by": self.started_by,
            "findings": [finding.record() for finding in self.findings],
            "ranks": [fact.record() for fact in self.facts],
            "links": [asdict(link) for link in self.links],
            "all_reduce": self.curve.record(),
        }


def examine_job(
    profile: Profile | None = None, show_progress: Callable[[str], None] = lambda text: None
) -> Examination:
    """Examine all ranks of the running job and the links between them. Collective; takes about ten seconds.

    Args:
        profile: of the model that is to be trained, equal on all ranks; None for a typical one.
        show_progress: called with a description of each stage.

    Returns:
        The same examination on every rank.
    """
    show_progress("gathering facts from every rank")
    own = current().topology
    facts: list[Facts] = ring.all_gather_object(own_facts(own.rank, own.node_rank, own.hosts))
    nodes = own.num_nodes
    show_progress(f"measuring {nodes * (nodes - 1) // 2} pairs of hosts")
    links = measure_links(facts)
    show_progress("measuring all-reduce")
    curve = all_reduce_curve(host_backends(("ring",)), _SIZES, _SECONDS_PER_SIZE)
    show_progress("measuring the cost of threads")
    costs = measure_thread_cost(facts)
    findings = [
        *check_placement(facts, links, costs),
        *check_links(facts, links),
        *check_network(facts, curve, profile),
        *check_host_names(facts),
        *check_agreement(facts),
    ]
    findings.sort(key=lambda finding: -finding.severity)
    return Examination(findings, facts, links, curve, str(current().launcher))


def check_placement(
    facts: Sequence[Facts], links: Sequence[Link] = (), costs: Mapping[str, ThreadCost] | None = None
) -> list[Finding]:
    """Find ranks that take turns on one core, and hosts with more ranks or threads than cores."""
    found = []
    for machine, ranks in by_kernel(facts).items():
        here = list(ranks)
        for core in sorted({fact.cores[0] for fact in here if len(fact.cores) == 1}):
            bound = [fact for fact in here if fact.cores == (core,)]
            if len(bound) > 1:
                here = [fact for fact in here if fact not in bound]
                found.append(_bound_to_one_core(core, bound, links))
        found += _oversubscribed(here, (costs or {}).get(machine))
    return found or [fine("placement", f"no core is shared by two of the {len(facts)} ranks")]


def _bound_to_one_core(core: int, bound: Sequence[Facts], links: Sequence[Link]) -> Finding:
    hosts = list(dict.fromkeys(fact.host for fact in bound))
    ranks = [fact.rank for fact in bound]
    slowest = max((link.slowest_message for link in links if set(link.ranks) <= set(ranks)), default=0.0)
    cost = f"; a small message between them takes {slowest / 1e3:.2f} ms instead of {_USUAL_MESSAGE}" if slowest else ""
    return error(
        "placement",
        f"{name_ranks(ranks)} ({', '.join(hosts)}) are all bound to core {core} of one machine and take turns on it"
        f"{cost}",
        _UNBIND,
        ranks=ranks,
        core=core,
        hosts=hosts,
        message_microseconds=slowest or None,
    )


def _oversubscribed(here: Sequence[Facts], cost: ThreadCost | None) -> Iterator[Finding]:
    """Find more ranks or threads than cores on one machine."""
    cores, threads = cores_of(here), sum(fact.threads for fact in here)
    if threads <= cores:
        return
    share = f"share {cores} core{'s' if cores > 1 else ''} of {here[0].host}"
    if len(here) > cores:
        yield warning(
            "oversubscription",
            f"{len(here)} ranks {share}",
            f"Start at most {cores} of them there, or use more hosts.",
            ranks=len(here),
            cores=cores,
        )
    else:
        yield warning(
            "oversubscription",
            f"{len(here)} ranks with {threads} threads in all {share}{f'; {cost}' if cost is not None else ''}",
            f"export OMP_NUM_THREADS={max(1, cores // len(here))}",
            threads=threads,
            cores=cores,
            milliseconds=cost and cost.milliseconds,
            milliseconds_with_share=cost and cost.milliseconds_with_share,
        )


class ThreadCost(NamedTuple):
    """Time of a matrix product while all ranks of a host compute.

    Attributes:
        threads, share: number of threads of a rank, and its share of the cores.
        milliseconds, milliseconds_with_share: with either.
    """

    threads: int
    share: int
    milliseconds: float
    milliseconds_with_share: float

    def __str__(self) -> str:
        ratio = self.milliseconds / self.milliseconds_with_share
        return (
            f"numpy's matrix products on all ranks at once take {self.milliseconds:.2f} ms with {self.threads} threads "
            f"each, {self.milliseconds_with_share:.2f} ms with {self.share}: {ratio:.1f} times as long"
        )


def measure_thread_cost(facts: Sequence[Facts]) -> dict[str, ThreadCost]:
    """What its threads cost each host that has fewer cores, by `Facts.kernel`. Collective; takes about a second.

    All ranks multiply matrices at once, as in training: in turns with their number of threads and with their share of
    the cores. numpy's library stands for the frameworks', which take long to load; they suffer more, having more
    parallel regions in a step.
    """
    hosts = by_kernel(facts)
    too_many = [kernel for kernel, here in hosts.items() if has_too_many_threads(here)]
    if not too_many:
        return {}
    own = facts[current().topology.rank].kernel
    share = max(1, cores_of(hosts[own]) // len(hosts[own]))
    times: list[list[float]] = [[], []]
    threads = 0
    for _ in range(_ROUNDS):
        for number, found in zip((None, share), times, strict=True):
            with thread_count.linear_algebra_threads(number) as used:
                threads = max(threads, used)
                ring.barrier()
                found.append(_product())
    medians = [statistics.median(found) * 1e3 for found in times]
    everyone = ring.all_gather_object([own, threads, share, *medians])
    slowest = sorted(everyone, key=lambda item: item[3])
    return {kernel: ThreadCost(*item) for kernel, *item in slowest if kernel in too_many}


def by_kernel(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The ranks that share cores."""
    found: dict[str, list[Facts]] = {}
    for fact in facts:
        found.setdefault(fact.kernel, []).append(fact)
    return found


def cores_of(here: Sequence[Facts]) -> int:
    """How many cores the ranks of a host may use together."""
    return len({core for fact in here for core in fact.cores})


def has_too_many_threads(here: Sequence[Facts]) -> bool:
    """Whether the ranks of a host, of which there is a core for each, start more threads than cores."""
    return len(here) <= cores_of(here) < sum(fact.threads for fact in here)


def _product() -> float:
    """Seconds of a matrix product, the median over a while."""
    matrix = np.ones((_WIDTH, _WIDTH), np.float32)
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def check_agreement(facts: Sequence[Facts]) -> list[Finding]:
    """Find packages and RING_* variables that differ among ranks."""

    def differing(values: Iterable[str]) -> dict[str, list[int]]:
        """The ranks by their value; empty if all have one."""
        ranks: dict[str, list[int]] = {}
        for fact, value in zip(facts, values, strict=True):
            ranks.setdefault(value, []).append(fact.rank)
        return ranks if len(ranks) > 1 else {}

    found = []
    for package in facts[0].versions:
        versions = [fact.versions.get(package) or "not installed" for fact in facts]
        if package == "python":
            versions = [".".join(version.split(".")[:2]) for version in versions]
        if ranks := differing(versions):
            listed = "; ".join(f"{version} on {name_ranks(those)}" for version, those in ranks.items())
            severity = error if package in _MUST_AGREE else warning
            remedy = (
                "Install one release of the driver on all hosts."
                if package == DRIVER
                else "Use the same environment on every host, for example on a shared file system."
            )
            found.append(severity("versions", f"{package} differs: {listed}", remedy, package=package, ranks=ranks))
    for name in sorted({name for fact in facts for name in fact.variables}):
        if ranks := differing(fact.variables.get(name, "not set") for fact in facts):
            listed = "; ".join(f"{value!r} on {name_ranks(those)}" for value, those in ranks.items())
            remedy = f"Pass it to every rank: mpirun -x {name} (Open MPI), mpiexec -genv {name} VALUE (MPICH)."
            found.append(warning("settings", f"{name} differs: {listed}", remedy, variable=name))
    return found or [fine("versions", f"Python, packages and RING_* variables agree on {len(facts)} ranks")]


def check_host_names(facts: Sequence[Facts]) -> list[Finding]:
    """Find host names that do not resolve, or resolve to loopback or to the address of another host."""
    hosts = {fact.host: fact for fact in reversed(facts)}
    if len({fact.node for fact in facts}) < 2:
        return []
    found = []
    for asking in hosts.values():
        for host, addresses in asking.resolved.items():
            named = hosts.get(host)
            own = {address for one in named.interfaces for address in one.addresses} if named else set()
            if not addresses:
                problem = "does not resolve"
            elif all(address.startswith("127.") for address in addresses):
                problem = f"resolves to {', '.join(addresses)}, a loopback address, which is every host's own"
            elif own and own.isdisjoint(addresses):
                problem = f"resolves to {', '.join(addresses)}, which is not an address of {host}"
            else:
                continue
            address = next(iter(named.external_addresses if named else []), "ADDRESS")
            remedy = (
                f"Put `{address} {host}` into /etc/hosts of {asking.host}, or start the job with addresses instead of "
                "names."
            )
            text = f"on {asking.host} the name {host} {problem}"
            found.append(warning("host names", text, remedy, asking=asking.host, host=host, addresses=addresses))
    return found or [fine("host names", f"each of the {len(hosts)} hosts can resolve the names of the others")]


def check_links(facts: Sequence[Facts], links: Sequence[Link]) -> list[Finding]:
    """Find slow links, slow messages, and traffic on the slower of two networks."""
    if not links:
        return []
    first = {fact.node: fact for fact in reversed(facts)}
    found: list[Finding] = []
    for link in links:
        one, other = (first[node] for node in link.nodes)
        found += [*_slow_link(link, links, first), *_slower_interface(link)]
        if not (one.kernel == other.kernel and len(one.cores) == 1 and one.cores == other.cores):
            found += _slow_message(link)  # else `check_placement` names the cause
    rates = [rate for link in links for rate in link.gigabits]
    return found or [
        fine(
            "links",
            f"{len(links)} pair{'s' if len(links) > 1 else ''} of hosts: {min(rates):.2f} to {max(rates):.2f} Gbit/s, "
            f"small messages in up to {max(link.microseconds for link in links):.0f} µs",
        )
    ]


def check_network(facts: Sequence[Facts], curve: Curve, profile: Profile | None) -> list[Finding]:
    """Say what a step waits for on the network that was measured, and what would make that less.

    Args:
        facts: of all ranks.
        curve: of all-reduces among them.
        profile: of the model; None for a typical one.
    """
    hosts = Counter(fact.node for fact in facts)
    if len(hosts) < 2:
        return []
    points = [(nbytes, times[name].median) for nbytes, times in curve.times.items() for name in times]
    network = fitted("measured", points, len(facts), len(hosts))
    said = advice(profile or typical(_TYPICAL), network, len(facts), max(hosts.values()), overlap=False)
    if not said:
        return []
    own = "" if profile is not None else "`ring doctor --profile` says it of your model."
    return [fine("network", said, own, gigabits=network.gigabits)]


def _slow_link(link: Link, links: Sequence[Link], first: dict[int, Facts]) -> Iterator[Finding]:
    """Find a pair below half the rate of others or of its cards, or a direction below half the rate of the other."""
    here, there = link.hosts
    others = [rate for other in links if other is not link for rate in other.gigabits]
    usual = statistics.median(others) if others else 0.0
    stated = {
        f"{fact.host}'s {one.name}": one.megabits / 1000
        for fact, name in zip((first[link.nodes[0]], first[link.nodes[1]]), link.interfaces, strict=True)
        for one in fact.interfaces
        if one.name == name and one.megabits
    }
    slow, fast = sorted(link.gigabits)
    evidence = {"gigabits": link.gigabits, "other_pairs_gigabits": usual or None, "stated_gigabits": stated}
    limit = min(stated.values(), default=0.0)
    if others and slow < _SHARE * usual:
        slow_too = [other for other in links if other is not link and min(other.gigabits) < _SHARE * max(usual, fast)]
        common = {*link.nodes}.intersection(*({*other.nodes} for other in slow_too)) if slow_too else set()
        culprit = f"; {first[min(common)].host} is in every slow pair" if common else ""
        yield warning(
            "links",
            f"{here} and {there}: {slow:.2f} Gbit/s; other pairs of hosts reach {usual:.2f}{culprit}",
            "Check that link: cable, switch port, negotiated speed (ethtool INTERFACE), other traffic.",
            **evidence,
        )
    elif limit and max(slow, *link.tcp_gigabits.values(), 0.0) < _SHARE * min(limit, _TCP):
        slower_card = min(stated, key=lambda one: stated[one])
        yield warning(
            "links",
            f"{here} and {there}: {slow:.2f} Gbit/s, {100 * slow / limit:.0f} % of the {limit:g} Gbit/s that "
            f"{slower_card} states",
            "Look for a rate limit (tc qdisc show dev INTERFACE, a switch port, a cloud's quota), other traffic, and "
            "a busy processor.",
            **evidence,
        )
    elif fast > 2 * slow:
        yield warning(
            "links",
            f"{here} to {there}: {link.gigabits[0]:.2f} Gbit/s, in reverse: {link.gigabits[1]:.2f}",
            "Check the slower direction: duplex (ethtool INTERFACE), a limit on one host, other traffic.",
            **evidence,
        )


def _slower_interface(link: Link) -> Iterator[Finding]:
    """Find a network between the same two hosts that is more than twice as fast as the one in use."""
    used = next((name for name in link.tcp_gigabits if name.split()[0] == link.interfaces[0]), None)
    if used is None:
        return
    best = max(link.tcp_gigabits, key=lambda one: link.tcp_gigabits[one])
    if link.tcp_gigabits[best] > 2 * max(link.tcp_gigabits[used], *link.gigabits):
        name = best.split()[0]
        yield warning(
            "interface",
            f"{link.hosts[0]} and {link.hosts[1]} use {used} ({link.tcp_gigabits[used]:.2f} Gbit/s by plain TCP), "
            f"although {best} reaches {link.tcp_gigabits[best]:.2f}",
            f"export RING_INTERFACE={name}; for Open MPI also --mca btl_tcp_if_include {name}",
            tcp_gigabits=link.tcp_gigabits,
            used=used,
        )


def _slow_message(link: Link) -> Iterator[Finding]:
    """Find a small message that takes longer than on any network inside a data center."""
    if link.slowest_message > _SLOW_MESSAGE:
        by = "MPI" if link.microseconds < link.slowest_message else "ring_plugins"
        yield warning(
            "latency",
            f"{link.hosts[0]} and {link.hosts[1]}: a small message through {by} takes "
            f"{link.slowest_message / 1e3:.2f} ms; {_USUAL_MESSAGE} ms is usual",
            f"Ranks that share a core ({_UNBIND}), busy hosts, and distance between sites cause this.",
            microseconds=link.microseconds,
            mpi_microseconds=link.mpi_microseconds,
        )
