"""The exit status of a job on one host or several, and what the user hears of it."""

import pytest

from ring_plugins.launcher.job_hosts import End, Host, verdict

GONE = None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([(0, 0, ""), (1, 0, "")], [(2, 0, ""), (3, 0, "")], (0, None)),
        ([(0, -9, ""), (1, 0, "")], [(2, 0, "left"), (3, 0, "")], (0, "rank 2 left, rank 0 died, and the other 2")),
        ([(0, 0, "lost"), (1, 0, "")], [(2, 0, ""), (3, 0, "")], (0, "rank 0 died, and the other 3 ended normally")),
        ([(0, 0, "lost"), (1, -9, "")], GONE, (137, "ranks 0, 1 died, me@host2 was lost")),
        ([(0, 0, ""), (1, 0, "")], GONE, (0, "me@host2 was lost, with ranks 2, 3, and the other 2 ended normally")),
        (
            [(0, 0, ""), (1, 0, "")],
            [(2, 1, "excluded"), (3, 1, "excluded")],
            (0, "ranks 2, 3 ended as the others could"),
        ),
        ([(0, 1, "excluded"), (1, 1, "excluded")], GONE, (1, "The ranks on me@host2 may have gone on")),
        ([(0, 1, "failed"), (1, 1, "failed")], [(2, 3, "failed"), (3, -9, "")], (3, "rank 2 ended with exit status 3")),
        ([(0, 0, ""), (1, 1, "failed")], GONE, (1, "rank 1 ended with exit status 1")),
        (
            [(0, 1, "followed"), (1, 1, "followed")],
            [(2, 0, ""), (3, 1, "failed")],
            (1, "rank 3 ended with exit status 1"),
        ),
        ([(0, -9, ""), (1, -9, "")], [(2, -9, ""), (3, -11, "")], (137, "ranks 0, 1, 2, 3 died, and no rank is left")),
        ([(0, -9, ""), (1, -9, "")], GONE, (137, "me@host2 was lost, with ranks 2, 3, and no rank is left")),
        (GONE, GONE, (1, "may have gone on")),
        ([(0, 0, "left"), (1, -9, "")], [(2, 0, "left"), (3, 0, "late")], (137, "rank 1 was killed by SIGKILL")),
        ([(0, 0, "left"), (1, 143, "")], [(2, 0, "left"), (3, 0, "left")], (143, "rank 1 ended with exit status 143")),
        ([(0, 0, "left"), (1, 0, "left")], GONE, (1, "The ranks on me@host2 may have gone on")),
    ],
)
def test_the_verdict_follows_those_that_went_on(first, second, expected):
    hosts = [Host("host1", [0, 1]), Host("me@host2", [2, 3])]
    for host, report in zip(hosts, (first, second), strict=True):
        host.report = None if report is None else [End(*end) for end in report]
    failed = [end for host in hosts for end in host.report or () if end.how in ("failed", "followed")]
    status, why = verdict(hosts, failed, 4)
    assert status == expected[0]
    assert (why is None) if expected[1] is None else (expected[1] in why)


def test_the_verdict_names_the_ranks_that_were_added():
    hosts = [Host("host1", [0, 1]), Host("me@host2", [2, 3])]
    for host, ranks in zip(hosts, ([0, 1, 4], [2, 3, 5]), strict=True):
        host.report = [End(rank, 0, "late" if rank == 5 else "") for rank in ranks]
    hosts[0].added = [4]
    text = "rank 4 joined, rank 5 had not joined yet, and the other 5 ended normally."
    assert verdict(hosts, [], 4) == (0, text)
