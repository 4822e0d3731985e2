"""`ring doctor`: on this host, in a job, and on misconfigured test hosts."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

import ring_plugins.doctor
from ring_plugins.cli.main import app
from ring_plugins.doctor.findings import fine, warning
from tests.hosts import hosts, why_not
from tests.launch import run_ranks
from tests.launchers import find_mpirun

DOCTOR = """
from ring_plugins.cli.main import main
main()
"""


def findings(report):
    return {(one["check"], one["severity"]): one for one in report["findings"]}


def test_outside_a_job_it_examines_this_host():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)["findings"]
    worst = {"fine": 0, "warning": 1, "error": 2}
    assert result.exit_code == max(worst[finding["severity"]] for finding in report), result.output
    by_check = {finding["check"]: finding for finding in report}
    assert by_check["packages"]["evidence"]["versions"].keys() >= {"python", "ring_plugins", "numpy"}
    assert {"packages", "MPI", "NCCL", "GPUs", "cores", "shared memory", "network", "settings"} <= by_check.keys()


def test_findings_are_printed_with_their_remedies(monkeypatch):
    found = [fine("cores", "2 of 2"), warning("limits", "few files [n]", "ulimit -n 4096")]
    monkeypatch.setattr(ring_plugins.doctor, "examine_host", lambda: found)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["warning", "limits", "few", "files", "[n]"] in lines
    assert ["->", "ulimit", "-n", "4096"] in lines
    assert "1 of 2 findings need attention." in result.stdout


@pytest.mark.mpi
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.slow
def test_two_hosts_on_one_core_over_a_slow_link_with_a_name_that_is_loopback():
    with hosts(2, rate="10gbit", loopback_names=True) as cluster:
        cluster.shape("host2", "1gbit")
        command = [find_mpirun(), "-H", ",".join(cluster.hosts), "--map-by", "ppr:1:node:oversubscribe"]
        command += ["--bind-to", "core", "--prtemca", "prte_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
        command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "-n", "2", sys.executable]
        result = cluster.start(command, DOCTOR, 2, ["doctor", "--json", "--model", "vgg-16"]).run(
            timeout=180, check=False
        )
    assert result.returncode == 2, result
    report = json.loads(result.stdout)
    found = findings(report)
    bound = found["placement", "error"]
    assert "ranks 0, 1 (host1, host2) are all bound to core 0" in bound["summary"]
    assert bound["evidence"]["message_microseconds"] > 0
    slow = found["links", "warning"]
    assert max(slow["evidence"]["gigabits"]) < 1.0
    assert "of the 10 Gbit/s that host" in slow["summary"]
    advised = found["network", "fine"]["summary"]
    assert re.match(
        r"This network moves 0\.[6-9]\d* Gbit/s: vgg-16 on 2 ranks would wait for it in \d\d% of each step, with "
        r'compression="auto" \d\d%, with sync_every=64 \d\d?% \(docs/slow_networks\.md\)\.$',
        advised,
    ), advised
    assert "resolves to 127.0.1.1, a loopback address" in found["host names", "warning"]["summary"]
    (link,) = report["links"]
    assert link["interfaces"] == ["eth0", "eth0"]
    assert max(link["tcp_gigabits"].values()) < 1.0


@pytest.mark.slow
def test_on_one_host_ranks_are_compared_and_all_reduce_is_measured():
    with_doctor = run_ranks(
        DOCTOR, 2, "torchrun", args=["doctor", "--json"], env={"OMP_NUM_THREADS": "64"}, check=False, timeout=180
    )
    assert with_doctor.returncode != 0, with_doctor
    report = json.loads(with_doctor.stdout)
    crowded = findings(report)["oversubscription", "warning"]
    assert "threads in all share" in crowded["summary"] and "numpy's matrix products on all ranks" in crowded["summary"]
    assert crowded["evidence"]["milliseconds"] > 0 and crowded["evidence"]["milliseconds_with_share"] > 0
    assert report["started_by"] == "rendezvous"
    assert [row["bytes"] for row in report["all_reduce"]["curve"]][-1] == 1 << 24
