"""`ring doctor`: small checks that return findings, of one host and, inside a job, of what lies between its ranks."""

from ring_plugins.doctor.alone import examine_host
from ring_plugins.doctor.findings import Finding, Severity, status
from ring_plugins.doctor.job import Examination, examine_job

__all__ = ["Examination", "Finding", "Severity", "examine_host", "examine_job", "status"]
