"""Open MPI ends with status 0 after it has lost a host, and kills ranks that could not say anything by then."""

import pytest

from ring_plugins.launcher import job
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun

#: As PRRTE prints it.
BANNER = "PRTE has lost communication with a remote daemon."


@pytest.mark.parametrize(("printed", "status"), [(f"step 1\n{BANNER}\n", 1), ("step 1\n", 0)])
def test_a_lost_host_is_a_failure(tmp_path, capfd, printed, status):
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\nprintf '%s' '{printed}' >&2\n")
    script.chmod(0o755)
    spec = JobSpec(("/bin/true",), 2, shares=(Share("a", 1), Share("b", 1)))
    lines: list[str] = []
    assert job.run(LaunchPlan(spec, Mpirun(str(script), "Open MPI", "5.0.11")), lines.append) == status
    assert capfd.readouterr().err == printed
    assert lines == ["mpirun lost a host and ended the ranks of the others."] * status
