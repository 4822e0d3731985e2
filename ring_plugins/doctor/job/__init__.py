"""What can only be seen with all ranks of a job running."""

from ring_plugins.doctor.job.examine import Examination, examine_job

__all__ = ["Examination", "examine_job"]
