"""Examine a whole job: measure its links, and compare the facts and measurements of all ranks.

The comparisons are pure functions of facts and links, so that tests need not reproduce rare faults.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ring_plugins.benchmarking import Curve, all_reduce_curve, host_backends
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.world import current
from ring_plugins.doctor.facts import Facts, gather_facts
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.gpu_paths import DRIVER
from ring_plugins.doctor.links import Link, measure_links
from ring_plugins.doctor.threads import ThreadCost, measure_thread_cost

_SIZES = tuple(1 << shift for shift in (6, 10, 14, 18, 20, 22, 24))
_SECONDS_PER_SIZE = 0.4
#: A link that reaches less than this share of its expected rate is a finding.
_SHARE = 0.5
#: Gbit/s that a single TCP connection reaches on any current machine. Faster cards are expected to reach only this.
_TCP = 10.0
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


def examine_job(show_progress: Callable[[str], None] = lambda text: None) -> Examination:
    """Examine all ranks of the running job and the links between them. Collective; takes about ten seconds.

    Args:
        show_progress: called with a description of each stage.

    Returns:
        The same examination on every rank.
    """
    show_progress("gathering facts from every rank")
    facts = gather_facts()
    nodes = current().topology.num_nodes
    show_progress(f"measuring {nodes * (nodes - 1) // 2} pairs of hosts")
    links = measure_links(facts)
    show_progress("measuring all-reduce")
    curve = all_reduce_curve(host_backends(("ring",)), _SIZES, _SECONDS_PER_SIZE)
    show_progress("measuring the cost of threads")
    costs = measure_thread_cost(facts)
    findings = [
        *check_placement(facts, links, costs),
        *check_links(facts, links),
        *check_host_names(facts),
        *check_agreement(facts),
    ]
    findings.sort(key=lambda finding: -finding.severity)
    return Examination(findings, facts, links, curve, current().launcher)


def check_placement(
    facts: Sequence[Facts], links: Sequence[Link] = (), costs: Mapping[str, ThreadCost] | None = None
) -> Iterator[Finding]:
    """Find ranks that take turns on one core, and hosts with more ranks or threads than cores."""
    found = False
    for machine in dict.fromkeys(fact.kernel for fact in facts):
        here = [fact for fact in facts if fact.kernel == machine]
        for core in sorted({fact.cores[0] for fact in here if len(fact.cores) == 1}):
            bound = [fact for fact in here if fact.cores == (core,)]
            if len(bound) > 1:
                found = True
                here = [fact for fact in here if fact not in bound]
                yield _bound_to_one_core(core, bound, links)
        if finding := _oversubscribed(here, (costs or {}).get(machine)):
            found = True
            yield finding
    if not found:
        yield fine("placement", f"no core is shared by two of the {len(facts)} ranks")


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


def _oversubscribed(here: Sequence[Facts], cost: ThreadCost | None) -> Finding | None:
    """Find more ranks or threads than cores on one machine."""
    cores = len({core for fact in here for core in fact.cores})
    threads = sum(fact.threads for fact in here)
    if threads <= cores:
        return None
    share = f"share {cores} core{'s' if cores > 1 else ''} of {here[0].host}"
    if len(here) > cores:
        return warning(
            "oversubscription",
            f"{len(here)} ranks {share}",
            f"Start at most {cores} of them there, or use more hosts.",
            ranks=len(here),
            cores=cores,
        )
    return warning(
        "oversubscription",
        f"{len(here)} ranks with {threads} threads in all {share}{f'; {cost}' if cost is not None else ''}",
        f"export OMP_NUM_THREADS={max(1, cores // len(here))}",
        threads=threads,
        cores=cores,
        milliseconds=cost and cost.milliseconds,
        milliseconds_with_share=cost and cost.milliseconds_with_share,
    )


def check_agreement(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find packages and RING_* variables that differ among ranks."""
    found = False
    for package in facts[0].versions:
        ranks_by_version: dict[str, list[int]] = {}
        for fact in facts:
            version = fact.versions.get(package) or "not installed"
            if package == "python":
                version = ".".join(version.split(".")[:2])
            ranks_by_version.setdefault(version, []).append(fact.rank)
        if len(ranks_by_version) == 1:
            continue
        found = True
        listed = "; ".join(f"{version} on {name_ranks(ranks)}" for version, ranks in ranks_by_version.items())
        severity = error if package in _MUST_AGREE else warning
        yield severity(
            "versions",
            f"{package} differs: {listed}",
            "Install one release of the driver on all hosts."
            if package == DRIVER
            else "Use the same environment on every host, for example on a shared file system.",
            package=package,
            ranks=ranks_by_version,
        )
    for name in sorted({name for fact in facts for name in fact.variables}):
        ranks_by_value: dict[str, list[int]] = {}
        for fact in facts:
            ranks_by_value.setdefault(fact.variables.get(name, "not set"), []).append(fact.rank)
        if len(ranks_by_value) > 1:
            found = True
            listed = "; ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            yield warning(
                "settings",
                f"{name} differs: {listed}",
                f"Pass it to every rank: mpirun -x {name} (Open MPI), mpiexec -genv {name} VALUE (MPICH).",
                variable=name,
            )
    if not found:
        yield fine("versions", f"Python, packages and RING_* variables agree on {len(facts)} ranks")


def check_host_names(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find host names that do not resolve, or resolve to loopback or to the address of another host."""
    hosts = {fact.host: fact for fact in reversed(facts)}
    if len({fact.node for fact in facts}) < 2:
        return
    found = False
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
            found = True
            address = next(iter(named.external_addresses if named else []), "ADDRESS")
            yield warning(
                "host names",
                f"on {asking.host} the name {host} {problem}",
                f"Put `{address} {host}` into /etc/hosts of {asking.host}, or start the job with addresses instead of "
                "names.",
                asking=asking.host,
                host=host,
                addresses=addresses,
            )
    if not found:
        yield fine("host names", f"each of the {len(hosts)} hosts can resolve the names of the others")


def check_links(facts: Sequence[Facts], links: Sequence[Link]) -> Iterator[Finding]:
    """Find slow links, slow messages, and traffic on the slower of two networks."""
    if not links:
        return
    first = {fact.node: fact for fact in reversed(facts)}
    found = False
    for link in links:
        one, other = (first[node] for node in link.nodes)
        on_one_core = one.kernel == other.kernel and len(one.cores) == 1 and one.cores == other.cores
        latency = () if on_one_core else tuple(_slow_message(link))  # `check_placement` names the cause
        for finding in (*_slow_link(link, links, first), *_slower_interface(link), *latency):
            found = True
            yield finding
    if not found:
        rates = [rate for link in links for rate in link.gigabits]
        slowest = max(link.microseconds for link in links)
        yield fine(
            "links",
            f"{len(links)} pair{'s' if len(links) > 1 else ''} of hosts: {min(rates):.2f} to {max(rates):.2f} Gbit/s, "
            f"small messages in up to {slowest:.0f} µs",
        )


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
