"""A plan runs to its end, and can be printed as a command; its ranks are shells here."""

import pytest

from ring_plugins.launcher import job
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.mpirun import JobSpec, Mpirun


def plan(command, ranks=2, **options):
    return LaunchPlan(JobSpec(command, ranks, environment={"MINE": "a b"}), None, is_local=True, **options)


def test_the_command_of_a_plan_can_be_pasted():
    assert job.shell_command(plan(("python", "x.py"))) == "env 'MINE=a b' python x.py"
    spec = JobSpec(("python", "x.py"), 3, (Share("a", 1), Share("b", 2)))
    assert job.shell_command(LaunchPlan(spec, None)) == "python x.py  # ranks: 1 on a, 2 on b"
    assert job.shell_command(LaunchPlan(spec, Mpirun("/bin/mpirun", "Open MPI", "5.0"))).startswith("/bin/mpirun ")


@pytest.mark.parametrize(
    ("script", "recovers", "status", "told"),
    [
        ("exit 0", False, 0, []),
        ('exit "$LOCAL_RANK"', False, 1, ["rank 1 ended with exit status 1."]),
        (
            'test "$MINE" = "a b" && [ "$LOCAL_RANK" = 0 ] || kill -9 $$',
            True,
            0,
            ["rank 1 died, and the other 1 ended normally."],
        ),
        ("kill -9 $$", True, 137, ["ranks 0, 1 died, and no rank is left."]),
    ],
)
def test_a_job_on_one_host_ends_with_the_verdict_on_its_ranks(script, recovers, status, told):
    lines: list[str] = []
    assert job.run(plan(("sh", "-c", script), recovers=recovers), lines.append) == status
    assert lines == told
