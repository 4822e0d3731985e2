"""The comparisons between ranks, on made-up facts and links."""

from dataclasses import replace

from ring_plugins.benchmarking import Curve, Times
from ring_plugins.doctor.findings import Severity
from ring_plugins.doctor.host import Facts, NetworkInterface
from ring_plugins.doctor.job import (
    ThreadCost,
    check_agreement,
    check_host_names,
    check_links,
    check_network,
    check_placement,
    has_too_many_threads,
)
from ring_plugins.doctor.links import Link, rounds
from ring_plugins.planning import reference


def facts(count, **changes):
    """Ranks 0, 1, ... on hosts of their own, with everything in order."""
    names = [f"host{i}" for i in range(count)]
    return [
        Facts(
            rank=i,
            node=i,
            host=names[i],
            kernel=f"kernel{i}",
            cores=(0, 1),
            threads=1,
            versions={"python": "3.11.7", "torch": "2.13", "scipy": "1.0"},
            interfaces=(NetworkInterface("eth0", (f"10.0.0.{i}",), ("10.0.0.0/16",), 10_000, True),),
            resolved={name: [f"10.0.0.{j}"] for j, name in enumerate(names)},
            variables={"RING_TIMEOUT": "60"},
            **changes,
        )
        for i in range(count)
    ]


def link(a, b, there=9.4, back=9.4, microseconds=50.0, mpi=30.0, tcp_gigabits=None):
    hosts = (f"host{a}", f"host{b}")
    tcp_gigabits = {"eth0 10.0.0.0/16": min(there, back)} if tcp_gigabits is None else tcp_gigabits
    return Link((a, b), hosts, (a, b), microseconds, mpi, (there, back), ("eth0", "eth0"), tcp_gigabits)


def problems(found):
    return [finding for finding in found if finding.severity > Severity.FINE]


def test_a_healthy_job_has_no_findings():
    all_links = [link(0, 1), link(0, 2), link(1, 2)]
    said = [
        *check_placement(facts(3), all_links),
        *check_agreement(facts(3)),
        *check_host_names(facts(3)),
        *check_links(facts(3), all_links),
    ]
    assert problems(said) == []
    assert len(said) == 4


def test_ranks_bound_to_one_core_are_named_with_the_cost():
    bound = [replace(fact, kernel="same", cores=(3,)) for fact in facts(2)]
    (finding,) = check_placement(bound, [link(0, 1, mpi=8100.0)])
    assert finding.severity == Severity.ERROR
    assert "ranks 0, 1 (host0, host1) are all bound to core 3" in finding.summary
    assert "takes 8.10 ms" in finding.summary
    assert "--bind-to none" in finding.remedy


def test_more_ranks_or_threads_than_cores():
    (finding,) = check_placement([replace(fact, kernel="same") for fact in facts(3)])
    assert finding.summary == "3 ranks share 2 cores of host0"
    (finding,) = check_placement([replace(fact, kernel="same", threads=2) for fact in facts(2)])
    assert finding.remedy == "export OMP_NUM_THREADS=1"


def test_what_too_many_threads_cost_is_said_with_figures():
    crowded = [replace(fact, kernel="same", threads=2) for fact in facts(2)]
    (finding,) = check_placement(crowded, costs={"same": ThreadCost(2, 1, 6.0, 1.5)})
    assert finding.summary == (
        "2 ranks with 4 threads in all share 2 cores of host0; numpy's matrix products on all ranks at once take "
        "6.00 ms with 2 threads each, 1.50 ms with 1: 4.0 times as long"
    )
    assert finding.evidence["milliseconds_with_share"] == 1.5


def test_only_threads_beyond_the_cores_are_measured():
    assert [has_too_many_threads([replace(fact, threads=n) for fact in facts(2)]) for n in (1, 2)] == [False, True]
    assert not has_too_many_threads(facts(3))  # more ranks than cores: fewer threads do not help


def test_a_slow_link_is_found_by_what_its_card_states_and_by_the_others():
    (finding,) = check_links(facts(2), [link(0, 1, 0.94, 0.95)])
    assert "host0 and host1: 0.94 Gbit/s, 9 % of the 10 Gbit/s" in finding.summary
    (finding,) = check_links(facts(3), [link(0, 1, 6.0, 6.0), link(0, 2, 6.0, 6.0), link(1, 2, 0.9, 0.9)])
    assert "host1 and host2: 0.90 Gbit/s; other pairs of hosts reach 6.00" in finding.summary
    pairs = [pair for together in rounds(4) for pair in together]
    said = problems(check_links(facts(4), [link(a, b, *([0.9] * 2 if b == 3 else [6.0] * 2)) for a, b in pairs]))
    assert len(said) == 3
    assert all("host3 is in every slow pair" in finding.summary for finding in said)
    busy_processor = link(0, 1, 4.0, 4.1, tcp_gigabits={"eth0 10.0.0.0/16": 8.0})
    assert problems(check_links(facts(2), [busy_processor])) == []
    (finding,) = check_links(facts(2), [link(0, 1, 9.0, 3.0, tcp_gigabits={"eth0 10.0.0.0/16": 9.0})])
    assert "host0 to host1: 9.00 Gbit/s, in reverse: 3.00" in finding.summary


def test_what_a_step_waits_for_is_said_with_what_makes_it_less():
    def curve(gigabits):  # between two hosts an all-reduce sends its bytes once
        seconds = {nbytes: 2e-4 + nbytes * 8e-9 / gigabits for nbytes in (64, 1 << 20, 1 << 24)}
        return Curve(2, 2, {nbytes: {"ring": Times(took, took, took, took)} for nbytes, took in seconds.items()})

    (finding,) = check_network(facts(2), curve(0.9), None)
    assert finding.severity == Severity.FINE
    assert finding.summary == (
        "This network moves 0.9 Gbit/s: a model of 10 million parameters and 250 ms a step on 2 ranks would wait for "
        'it in 58% of each step, with compression="auto" 28%, with sync_every=64 2% (docs/slow_networks.md).'
    )
    assert "ring doctor --profile" in finding.remedy
    (finding,) = check_network(facts(2), curve(0.9), reference("vgg-16"))
    assert "vgg-16 on 2 ranks would wait for it in 9" in finding.summary and not finding.remedy
    assert check_network(facts(2), curve(90), None) == []
    assert check_network([replace(fact, node=0) for fact in facts(2)], curve(0.9), None) == []


def test_data_on_the_slower_of_two_networks():
    tcp_gigabits = {"eth0 10.0.0.0/16": 0.94, "eth1 10.1.0.0/16": 9.4}
    said = problems(check_links(facts(2), [link(0, 1, 0.9, 0.9, tcp_gigabits=tcp_gigabits)]))
    assert [finding.check for finding in said] == ["interface"]
    assert "export RING_INTERFACE=eth1" in said[0].remedy


def test_slow_messages():
    (finding,) = check_links(facts(2), [link(0, 1, mpi=8000.0)])
    assert "a small message through MPI takes 8.00 ms" in finding.summary


def test_ranks_that_differ():
    changed = facts(3)
    changed[1] = replace(changed[1], versions={"python": "3.11.2", "torch": "2.12", "scipy": "1.1"}, variables={})
    said = {finding.summary: finding.severity.name for finding in check_agreement(changed)}
    assert said == {
        "torch differs: 2.13 on ranks 0, 2; 2.12 on rank 1": "ERROR",
        "scipy differs: 1.0 on ranks 0, 2; 1.1 on rank 1": "WARNING",
        "RING_TIMEOUT differs: '60' on ranks 0, 2; 'not set' on rank 1": "WARNING",
    }


def test_different_drivers():
    changed = [
        replace(fact, versions={"NVIDIA driver": release})
        for fact, release in zip(facts(3), ("570.86.15", "570.86.15", "535.104.05"), strict=True)
    ]
    (finding,) = check_agreement(changed)
    assert finding.summary == "NVIDIA driver differs: 570.86.15 on ranks 0, 1; 535.104.05 on rank 2"
    assert (finding.severity.name, finding.remedy) == ("WARNING", "Install one release of the driver on all hosts.")


def test_names_that_do_not_resolve_or_resolve_to_loopback():
    changed = facts(3)
    changed[0] = replace(changed[0], resolved={"host0": ["127.0.1.1"], "host1": [], "host2": ["10.9.9.9"]})
    said = list(check_host_names(changed))
    assert [finding.summary for finding in said] == [
        "on host0 the name host0 resolves to 127.0.1.1, a loopback address, which is every host's own",
        "on host0 the name host1 does not resolve",
        "on host0 the name host2 resolves to 10.9.9.9, which is not an address of host2",
    ]
    assert "`10.0.0.1 host1`" in said[1].remedy
