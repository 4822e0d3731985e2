"""Several hosts on one machine; see cluster.py."""

from tests.hosts.cluster import Cluster, HostsJob, everywhere, find_mpich, hosts, why_not

__all__ = ["Cluster", "HostsJob", "everywhere", "find_mpich", "hosts", "why_not"]
