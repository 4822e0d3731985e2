"""What the facts and measurements of all ranks say together: pure functions, so that rare faults can be tested."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.job.facts import Facts
from ring_plugins.doctor.job.links import Link

#: A link below this share of what is expected of it is a finding.
_SHARE = 0.5
#: What a single TCP connection reaches on any machine of today, in Gbit/s: a faster card is not blamed below its rate.
_TCP = 10.0
#: Microseconds beyond which a small message between hosts is slower than any network of a data centre.
_SLOW_MESSAGE = 1000.0
#: Packages whose versions must be equal for ranks to work together, rather than merely should be.
_MUST_AGREE = ("ring_plugins", "NCCL", "torch", "keras", "tensorflow", "jax")
_BIND = "--bind-to none (ring run and mpirun), or one core a rank: mpirun --map-by ppr:N:node:PE=CORES --bind-to core"


def placement(facts: Sequence[Facts], links: Sequence[Link] = ()) -> Iterator[Finding]:
    """Ranks that take turns on the same core, and hosts with more to do than cores."""
    bad = False
    for machine in dict.fromkeys(fact.kernel for fact in facts):
        here = [fact for fact in facts if fact.kernel == machine]
        for core in sorted({fact.cores[0] for fact in here if len(fact.cores) == 1}):
            bound = [fact for fact in here if fact.cores == (core,)]
            if len(bound) < 2:
                continue
            bad = True
            hosts = list(dict.fromkeys(fact.host for fact in bound))
            between = [link for link in links if set(link.ranks) <= {fact.rank for fact in bound}]
            worst = max((max(link.microseconds, link.mpi_microseconds or 0.0) for link in between), default=0.0)
            took = f"; a small message between them takes {worst / 1e3:.2f} ms instead of 0.02 to 0.2" if worst else ""
            yield error(
                "placement",
                f"{name_ranks([f.rank for f in bound])} ({', '.join(hosts)}) are all bound to core {core} of one "
                f"machine and take turns on it{took}",
                _BIND,
                ranks=[fact.rank for fact in bound],
                core=core,
                hosts=hosts,
                message_microseconds=worst or None,
            )
            here = [fact for fact in here if fact not in bound]
        if not here:
            continue
        cores = sorted({core for fact in here for core in fact.cores})
        threads = sum(fact.threads for fact in here)
        if threads > len(cores) and len(here) > len(cores):
            bad = True
            yield warning(
                "oversubscription",
                f"{len(here)} ranks share {_cores(len(cores))} of {here[0].host}",
                f"Start at most {len(cores)} of them there, or take more hosts.",
                ranks=len(here),
                cores=len(cores),
            )
        elif threads > len(cores):
            bad = True
            yield warning(
                "oversubscription",
                f"{len(here)} ranks with {threads} threads in all share {_cores(len(cores))} of {here[0].host}",
                f"export OMP_NUM_THREADS={max(1, len(cores) // len(here))}",
                threads=threads,
                cores=len(cores),
            )
    if not bad:
        yield fine("placement", f"each of the {len(facts)} ranks has cores of its own")


def _cores(number: int) -> str:
    return f"{number} core{'s' if number > 1 else ''}"


def agreement(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Versions and variables that differ among ranks."""
    differing = False
    for name in facts[0].versions:
        by_version: dict[str, list[int]] = {}
        for fact in facts:
            version = fact.versions.get(name) or "not installed"
            if name == "python":
                version = ".".join(version.split(".")[:2])
            by_version.setdefault(version, []).append(fact.rank)
        if len(by_version) == 1:
            continue
        differing = True
        said = "; ".join(f"{version} on {name_ranks(ranks)}" for version, ranks in by_version.items())
        make = error if name in _MUST_AGREE else warning
        yield make(
            "versions",
            f"{name} differs: {said}",
            "Use the same environment on every host, for example on a shared file system.",
            package=name,
            ranks=dict(by_version),
        )
    for name in sorted({name for fact in facts for name in fact.variables}):
        by_value: dict[str, list[int]] = {}
        for fact in facts:
            by_value.setdefault(fact.variables.get(name, "not set"), []).append(fact.rank)
        if len(by_value) > 1:
            differing = True
            said = "; ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            yield warning(
                "settings",
                f"{name} differs: {said}",
                f"Hand it to every rank: mpirun -x {name} (Open MPI), mpiexec -genv {name} VALUE (MPICH).",
                variable=name,
            )
    if not differing:
        yield fine("versions", f"Python, packages and RING_* variables agree on {len(facts)} ranks")


def name_resolution(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Host names that lead nowhere, or to the asking host itself."""
    hosts = {fact.host: fact for fact in reversed(facts)}
    if len({fact.node for fact in facts}) < 2:
        return
    bad = False
    for asking in hosts.values():
        for host, addresses in asking.resolves.items():
            known = {address for one in hosts[host].interfaces for address in one.addresses} if host in hosts else set()
            if not addresses:
                bad, problem = True, "cannot be resolved"
            elif all(address.startswith("127.") for address in addresses):
                bad, problem = True, f"is {', '.join(addresses)}, which is every host itself"
            elif known and known.isdisjoint(addresses):
                bad, problem = True, f"is {', '.join(addresses)}, which is no address of {host}"
            else:
                continue
            reachable = (
                [a for one in hosts[host].interfaces if one.leads_out for a in one.addresses] if host in hosts else []
            )
            yield warning(
                "host names",
                f"on {asking.host} the name {host} {problem}",
                f"In /etc/hosts of {asking.host}: {reachable[0] if reachable else 'ADDRESS'} {host}; or start with an "
                "address instead of a name.",
                asking=asking.host,
                host=host,
                addresses=addresses,
            )
    if not bad:
        yield fine("host names", f"each of {len(hosts)} hosts finds the others by name")


def links(facts: Sequence[Facts], found: Sequence[Link]) -> Iterator[Finding]:
    """Slow links, slow messages, and data that takes the slower of two networks."""
    if not found:
        return
    first = {fact.node: fact for fact in reversed(facts)}
    bad = False
    for link in found:
        one, other = (first[node] for node in link.nodes)
        together = one.kernel == other.kernel and len(one.cores) == 1 and one.cores == other.cores
        delays = () if together else tuple(_late(link))  # `placement` says it better
        for finding in (*_slow(link, found, first), *_wrong_interface(link), *delays):
            bad = True
            yield finding
    if not bad:
        rates = [rate for link in found for rate in link.gigabits]
        late = max(link.microseconds for link in found)
        yield fine(
            "links",
            f"{len(found)} pair{'s' if len(found) > 1 else ''} of hosts: {min(rates):.2f} to {max(rates):.2f} Gbit/s, "
            f"small messages in up to {late:.0f} µs",
        )


def _slow(link: Link, found: Sequence[Link], first: dict[int, Facts]) -> Iterator[Finding]:
    here, there = link.hosts
    others = [rate for other in found if other is not link for rate in other.gigabits]
    usual = statistics.median(others) if others else 0.0
    stated = {
        f"{fact.host}'s {one.name}": one.megabits / 1000
        for fact, name in zip((first[link.nodes[0]], first[link.nodes[1]]), link.carried_by, strict=True)
        for one in fact.interfaces
        if one.name == name and one.megabits
    }
    slow, fast = sorted(link.gigabits)
    evidence = {"gigabits": link.gigabits, "other_pairs_gigabits": usual or None, "stated_gigabits": stated}
    limit = min(stated.values(), default=0.0)
    if others and slow < _SHARE * usual:
        often = [other for other in found if other is not link and min(other.gigabits) < _SHARE * max(usual, fast)]
        common = {*link.nodes}.intersection(*({*other.nodes} for other in often)) if often else set()
        blame = f"; every slow pair has {first[min(common)].host} in it" if often and common else ""
        yield warning(
            "links",
            f"{here} and {there}: {slow:.2f} Gbit/s, where other pairs of hosts have {usual:.2f}{blame}",
            "Look at that link: cable, switch port, negotiated speed (ethtool INTERFACE), other traffic.",
            **evidence,
        )
    elif limit and max(slow, *link.streams.values(), 0.0) < _SHARE * min(limit, _TCP):
        who = min(stated, key=lambda one: stated[one])
        yield warning(
            "links",
            f"{here} and {there}: {slow:.2f} Gbit/s, {100 * slow / limit:.0f} % of the {limit:g} Gbit/s that {who} "
            "states",
            "Look for a limit on the way (tc qdisc show dev INTERFACE, a switch port, a cloud's quota), for other "
            "traffic, and for a processor that is busy.",
            **evidence,
        )
    elif fast > 2 * slow:
        yield warning(
            "links",
            f"{here} to {there}: {link.gigabits[0]:.2f} Gbit/s, back: {link.gigabits[1]:.2f}",
            "Look at the slower direction: duplex (ethtool INTERFACE), a limit on one host, other traffic.",
            **evidence,
        )


def _wrong_interface(link: Link) -> Iterator[Finding]:
    """Another network between the same two hosts that is twice as fast as the one that was used."""
    used = [name for name in link.streams if name.split()[0] == link.carried_by[0]]
    if not used:
        return
    best = max(link.streams, key=lambda one: link.streams[one])
    if link.streams[best] > 2 * max(link.streams[used[0]], *link.gigabits):
        name = best.split()[0]
        yield warning(
            "interface",
            f"{link.hosts[0]} and {link.hosts[1]} talk over {used[0]} ({link.streams[used[0]]:.2f} Gbit/s by plain "
            f"TCP), though {best} carries {link.streams[best]:.2f}",
            f"export RING_INTERFACE={name}; for Open MPI also --mca btl_tcp_if_include {name}",
            streams_gigabits=link.streams,
            used=used[0],
        )


def _late(link: Link) -> Iterator[Finding]:
    worst = max(link.microseconds, link.mpi_microseconds or 0.0)
    if worst > _SLOW_MESSAGE:
        by = "MPI" if link.microseconds < worst else "ring_plugins"
        yield warning(
            "latency",
            f"{link.hosts[0]} and {link.hosts[1]}: a small message by {by} takes {worst / 1e3:.2f} ms, "
            "where networks need 0.02 to 0.2 ms",
            f"Ranks that share a core do this ({_BIND}), and busy hosts; across sites it is the distance.",
            microseconds=link.microseconds,
            mpi_microseconds=link.mpi_microseconds,
        )
