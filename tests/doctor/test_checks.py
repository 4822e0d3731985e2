"""The parts of `ring doctor` that need no ranks: what it makes of texts, variables, and facts of unlucky ranks."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from ring_plugins.doctor.findings import Severity, error, fine, perform, status, warning
from ring_plugins.doctor.job.comparisons import agreement, links, name_resolution, placement
from ring_plugins.doctor.job.facts import Facts
from ring_plugins.doctor.job.links import Link, rounds
from ring_plugins.doctor.mpi import Flavour, difference, flavour
from ring_plugins.doctor.network import Interface
from ring_plugins.doctor.packages import minima, number
from ring_plugins.doctor.settings import KNOWN, examine
from tests.launch import REPOSITORY


def test_the_worst_finding_is_the_status_and_a_check_that_breaks_is_a_finding():
    def broken():
        raise ZeroDivisionError("no")

    assert status([]) == 0
    assert status([fine("a", "b"), warning("a", "b", "c"), fine("a", "b")]) == 1
    assert status([warning("a", "b", "c"), error("a", "b", "c")]) == 2
    (finding,) = perform(broken)
    assert finding.severity == Severity.WARNING and "ZeroDivisionError: no" in finding.summary


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@build Distribution, ident: 5.0.11", ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", ("Open MPI", "4.1.4")),
        ("MPICH Version:      4.2.1\nMPICH Release date: x", ("MPICH", "4.2.1")),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", ("MPICH", "5.0.2")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", ("Intel MPI", "2021.11")),
        ("", ("unknown", "")),
    ],
)
def test_mpi_is_known_by_its_words(said, expected):
    assert flavour(said) == expected


def test_a_launcher_must_belong_to_the_library():
    open_mpi, mpich = Flavour("Open MPI", "5.0.11"), Flavour("MPICH", "5.0.2")
    assert difference(open_mpi, Flavour("Open MPI", "5.0.3")) == ""
    assert "major" in difference(open_mpi, Flavour("Open MPI", "4.1.4"))
    assert "alone" in difference(open_mpi, mpich)
    assert difference(Flavour("Intel MPI", "2021"), mpich) == ""


def test_variables_with_misspelt_names_or_values_are_found():
    said = list(examine({"RING_TIMOUT": "5", "RING_AUTOTUNE": "yes", "RING_TIMEOUT": "60", "RING_SECRET": "hush"}))
    assert "hush" not in str(said)
    assert [finding.severity.name for finding in said] == ["WARNING", "ERROR", "FINE"]
    assert "Did you mean RING_TIMEOUT?" in said[0].remedy
    assert "'yes' is neither 0 nor 1" in said[1].summary


def test_small_readers():
    assert minima(["torch>=2.4; extra == 'torch'", "numpy>=1.24", "rich"]) == {"torch": "2.4", "numpy": "1.24"}
    assert number("2.13.0+cpu") == (2, 13, 0) > number("2.4")


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_pair_of_hosts_is_measured_once_and_no_host_twice_at_a_time(hosts):
    seen = [pair for together in rounds(hosts) for pair in together]
    assert sorted(seen) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    for together in rounds(hosts):
        met = [host for pair in together for host in pair]
        assert len(set(met)) == len(met)


def facts(count, **changes):
    """Ranks 0, 1, ... on hosts of their own with everything in order."""
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
            interfaces=(Interface("eth0", (f"10.0.0.{i}",), ("10.0.0.0/16",), 10_000, True),),
            resolves={name: [f"10.0.0.{j}"] for j, name in enumerate(names)},
            variables={"RING_TIMEOUT": "60"},
            **changes,
        )
        for i in range(count)
    ]


def link(a, b, there=9.4, back=9.4, microseconds=50.0, mpi=30.0, streams=None):
    hosts = (f"host{a}", f"host{b}")
    streams = {"eth0 10.0.0.0/16": min(there, back)} if streams is None else streams
    return Link((a, b), hosts, (a, b), microseconds, mpi, (there, back), ("eth0", "eth0"), streams)


def problems(found):
    return [finding for finding in found if finding.severity > Severity.FINE]


def test_a_healthy_job_has_no_findings():
    all_links = [link(0, 1), link(0, 2), link(1, 2)]
    said = [
        *placement(facts(3), all_links),
        *agreement(facts(3)),
        *name_resolution(facts(3)),
        *links(facts(3), all_links),
    ]
    assert problems(said) == []
    assert len(said) == 4


def test_ranks_bound_to_one_core_are_named_with_what_it_costs():
    bound = [replace(fact, kernel="same", cores=(3,)) for fact in facts(2)]
    (finding,) = placement(bound, [link(0, 1, mpi=8100.0)])
    assert finding.severity == Severity.ERROR
    assert "ranks 0, 1 (host0, host1) are all bound to core 3" in finding.summary
    assert "takes 8.10 ms" in finding.summary
    assert "--bind-to none" in finding.remedy


def test_more_ranks_or_threads_than_cores():
    (finding,) = placement([replace(fact, kernel="same") for fact in facts(3)])
    assert finding.summary == "3 ranks share 2 cores of host0"
    (finding,) = placement([replace(fact, kernel="same", threads=2) for fact in facts(2)])
    assert finding.remedy == "export OMP_NUM_THREADS=1"


def test_a_slow_link_is_found_by_what_its_card_states_and_by_the_others():
    (finding,) = links(facts(2), [link(0, 1, 0.94, 0.95)])
    assert "host0 and host1: 0.94 Gbit/s, 9 % of the 10 Gbit/s" in finding.summary
    (finding,) = links(facts(3), [link(0, 1, 6.0, 6.0), link(0, 2, 6.0, 6.0), link(1, 2, 0.9, 0.9)])
    assert "host1 and host2: 0.90 Gbit/s, where other pairs of hosts have 6.00" in finding.summary
    pairs = [pair for together in rounds(4) for pair in together]
    said = list(links(facts(4), [link(a, b, *([0.9] * 2 if b == 3 else [6.0] * 2)) for a, b in pairs]))
    assert len(said) == 3
    assert all("every slow pair has host3 in it" in finding.summary for finding in said)
    assert (
        problems(links(facts(2), [link(0, 1, 4.0, 4.1, streams={"eth0 10.0.0.0/16": 8.0})])) == []
    )  # a busy processor
    (finding,) = links(facts(2), [link(0, 1, 9.0, 3.0, streams={"eth0 10.0.0.0/16": 9.0})])
    assert "host0 to host1: 9.00 Gbit/s, back: 3.00" in finding.summary


def test_data_on_the_slower_of_two_networks():
    streams = {"eth0 10.0.0.0/16": 0.94, "eth1 10.1.0.0/16": 9.4}
    said = problems(links(facts(2), [link(0, 1, 0.9, 0.9, streams=streams)]))
    assert [finding.check for finding in said] == ["interface"]
    assert "export RING_INTERFACE=eth1" in said[0].remedy


def test_late_messages():
    (finding,) = links(facts(2), [link(0, 1, mpi=8000.0)])
    assert "a small message by MPI takes 8.00 ms" in finding.summary


def test_ranks_that_differ():
    changed = facts(3)
    changed[1] = replace(changed[1], versions={"python": "3.11.2", "torch": "2.12", "scipy": "1.1"}, variables={})
    said = {finding.summary: finding.severity.name for finding in agreement(changed)}
    assert said == {
        "torch differs: 2.13 on ranks 0, 2; 2.12 on rank 1": "ERROR",
        "scipy differs: 1.0 on ranks 0, 2; 1.1 on rank 1": "WARNING",
        "RING_TIMEOUT differs: '60' on ranks 0, 2; 'not set' on rank 1": "WARNING",
    }


def test_names_that_lead_nowhere_or_home():
    changed = facts(3)
    changed[0] = replace(changed[0], resolves={"host0": ["127.0.1.1"], "host1": [], "host2": ["10.9.9.9"]})
    said = list(name_resolution(changed))
    assert [finding.summary for finding in said] == [
        "on host0 the name host0 is 127.0.1.1, which is every host itself",
        "on host0 the name host1 cannot be resolved",
        "on host0 the name host2 is 10.9.9.9, which is no address of host2",
    ]
    assert "10.0.0.1 host1" in said[1].remedy


def test_alone_it_reports_on_this_host():
    done = subprocess.run(
        [sys.executable, "-m", "ring_plugins", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    findings = json.loads(done.stdout)["findings"]
    worst = {"fine": 0, "warning": 1, "error": 2}
    assert done.returncode == max(worst[finding["severity"]] for finding in findings), done
    by_check = {finding["check"]: finding for finding in findings}
    assert by_check["packages"]["evidence"]["versions"].keys() >= {"python", "ring_plugins", "numpy"}
    assert {"packages", "MPI", "NCCL", "GPUs", "cores", "shared memory", "network", "settings"} <= by_check.keys()


def test_the_doctor_knows_every_documented_variable():
    page = (REPOSITORY / "docs" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `(RING_[A-Z_]+)`", page, re.MULTILINE))
    assert documented <= KNOWN.keys(), "add to KNOWN in ring_plugins/doctor/settings.py what a value must look like"
