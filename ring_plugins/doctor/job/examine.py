"""The examination of a whole job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ring_plugins.benchmarking import Curve, all_reduce_curve, host_contestants
from ring_plugins.core.world import current
from ring_plugins.doctor.findings import Finding
from ring_plugins.doctor.job.comparisons import agreement, links, name_resolution, placement
from ring_plugins.doctor.job.facts import Facts, gather
from ring_plugins.doctor.job.links import Link, measure

_SIZES = tuple(1 << shift for shift in (6, 10, 14, 18, 20, 22, 24))
_SECONDS_A_SIZE = 0.4


@dataclass(frozen=True)
class Examination:
    """Everything found out about a job.

    Attributes:
        findings: worst first.
        facts: of every rank.
        links: between every pair of hosts.
        curve: all-reduce by size.
        started_by: the launcher.
    """

    findings: list[Finding]
    facts: list[Facts]
    links: list[Link]
    curve: Curve
    started_by: str

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "started_by": self.started_by,
            "findings": [finding.record() for finding in self.findings],
            "ranks": [fact.record() for fact in self.facts],
            "links": [asdict(link) for link in self.links],
            "all_reduce": self.curve.record(),
        }


def examine_job(say: Callable[[str], None] = lambda what: None) -> Examination:
    """Look at all ranks of the running job and at what lies between them; collective, ten seconds or so.

    Args:
        say: told what is being measured.

    Returns:
        The same on every rank.
    """
    say("asking every rank")
    facts = gather()
    say(f"measuring {current().topology.num_nodes * (current().topology.num_nodes - 1) // 2} pairs of hosts")
    found = measure(facts)
    say("measuring all-reduce")
    curve = all_reduce_curve(host_contestants(("ring",)), _SIZES, _SECONDS_A_SIZE)
    findings = [*placement(facts, found), *links(facts, found), *name_resolution(facts), *agreement(facts)]
    findings.sort(key=lambda finding: -finding.severity)
    return Examination(findings, facts, found, curve, current().launcher)
