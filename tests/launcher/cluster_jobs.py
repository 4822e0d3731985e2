"""A script that runs functions on a cluster, most of which fail, and the checks of its reports, for Spark and Ray."""

from typing import Any

_SCRIPT = """
from tests.worker import report
import contextlib, os, signal
import ring_plugins as ring

report("weights", weights, rank=0)

def fails():
    ring.init()
    if ring.rank() == 1:
        raise ValueError(os.environ["MINE"])
    ring.barrier()

def is_killed():
    ring.init()
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()

for function in (fails, is_killed):
    try:
        RUN(function, PROCESSES=2, env={"MINE": "on purpose"})
    except ring.RankFailed as error:
        report(function.__name__, [error.rank, error.host, str(error), repr(error.__cause__)], rank=0)

try:
    RUN(fails, PROCESSES=3, start_timeout=0.5)
except ring.LaunchError as error:
    report("too many", str(error), rank=0)

def endless(text):
    ring.init()
    report("where", [ring.rank(), ring.local_rank(), text])
    secret = os.environ["RING_SECRET"].encode()
    lines = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
            lines.append(file.read())
    report("secret", [len(secret), len(lines) > 1, any(secret in line for line in lines)])
    report("pid", os.getpid())
    while True:
        ring.barrier()

RUN(endless, (" here",))
"""


def script(run: str, processes: str) -> str:
    """The part after a page's example, which leaves `weights`. It ends in a job that runs until its driver is killed.

    Args:
        run: the function under test.
        processes: the name of its argument for the number of ranks.
    """
    return _SCRIPT.replace("RUN", run).replace("PROCESSES", processes)


def check(found: dict[str, Any], killed: str, *too_many: str) -> None:
    """Check what rank 0 and the driver have reported.

    Args:
        found: the reports.
        killed: words of the error about a killed rank.
        too_many: words of the error about three ranks on two processors.
    """
    assert all(abs(weight - 0.5) < 1e-6 for weight in found["weights"])
    rank, host, text, cause = found["fails"]
    assert (rank, cause) == (1, "ValueError('on purpose')")
    assert text.startswith(f"rank 1 on {host} failed: ValueError: on purpose\n\nOn rank 1:\nTraceback")
    assert found["secret"] == [64, True, False]  # of 64 characters, on no command line
    assert found["is_killed"][0] == 1
    assert killed in found["is_killed"][2]
    assert all(words in found["too many"] for words in too_many), found["too many"]
