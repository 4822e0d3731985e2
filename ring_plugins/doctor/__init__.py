"""`ring doctor`: checks that return findings about one host and, inside a job, about all ranks and their links."""

from ring_plugins.doctor.findings import Finding, Severity, status
from ring_plugins.doctor.host import examine_host
from ring_plugins.doctor.job import Examination, examine_job

__all__ = ["Examination", "Finding", "Severity", "examine_host", "examine_job", "status"]
