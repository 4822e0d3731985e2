"""Random faults at random moments under random launchers: every job must end in time, name the cause and leave nothing.

    python -m tests.campaigns.faults --runs 300 --seed 1 --jobs 2 --out faults.jsonl
    python -m tests.campaigns.faults --table faults.jsonl        # the table of a finished campaign
    python -m tests.campaigns.faults --only 1:17                 # run 17 of seed 1 again, with everything it printed

A run is drawn from its seed and number alone, so that it can be repeated. It starts fault_worker.py, waits for a random
moment, injects one fault, and judges how the job ends:

    ok        it ended in time and its error names the faulty rank, or it finished with the weights of a faultless run
    hang      it still ran after its bound
    silent    it ended with status 0 although a rank had failed, or with an error that does not name the rank
    diverged  it finished with other weights than without a fault, or with different ones on its ranks
    left      processes, shared memory or temporary files stayed behind
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Other jobs run beside: a file that no process of a launch maps is not laid at its door.
os.environ.setdefault("PYTEST_XDIST_WORKER", "campaign")

from tests import launch
from tests.campaigns import memory_cgroup
from tests.hosts import Cluster, hosts, why_not
from tests.launch import GRACE_SECONDS, Job, LaunchFailed, Result, hear_interrupts, start_ranks

WORKER = Path(__file__).with_name("fault_worker.py")
#: So that the bounds of a run are short. The stopped rank's peers wait RING_TIMEOUT seconds for it.
TIMES = {"RING_TIMEOUT": "8", "RING_NETWORK_TIMEOUT": "3", "RING_START_TIMEOUT": "20", "RING_STALL_WARNING": "3"}
STEPS = 200
#: torchrun waits so long for a rank that does not end on SIGTERM before it sends SIGKILL.
TORCHRUN_SECONDS = 30

LOCAL = ("spawned", "mpirun", "torchrun")
BETWEEN = ("hosts: environment", "hosts: mpirun", "hosts: ring run")
#: Drawn seldom, since their own processes take 5 to 20 s to start and to end.
CLUSTERS = ("ray", "spark")
CLUSTER_WEIGHT, CLUSTER_SECONDS = 0.25, 30
DRIVERS = {
    "ray": """
        import logging, sys
        import ray
        import ring_plugins.ray
        from tests.campaigns.fault_worker import main
        ray.init(num_cpus=RANKS, include_dashboard=False, logging_level=logging.ERROR)
        ring_plugins.ray.run(main, sys.argv[1:], num_workers=RANKS)
    """,
    "spark": """
        import os, sys
        from pyspark.sql import SparkSession
        import ring_plugins.spark
        from tests.campaigns.fault_worker import main
        builder = SparkSession.builder.master("local[RANKS]").config("spark.ui.enabled", "false")
        builder.config("spark.local.dir", os.environ["TMPDIR"]).getOrCreate().sparkContext.setLogLevel("FATAL")
        ring_plugins.spark.run(main, sys.argv[1:], num_proc=RANKS)
    """,
}


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        seconds: within which the job ends, from the fault on.
        end: what a job may do: "fails" must name the victim; "finishes" must not fail; "either".
        weight: how often it is drawn.
        starting: it may also come while ranks start.
        between: only between hosts.
        cgroup: only where a control group with a limit of memory can be made.
    """

    seconds: float
    end: str
    weight: float = 1.0
    starting: bool = False
    between: bool = False
    cgroup: bool = False


KINDS = {
    "SIGKILL": Kind(10, "fails", 3, starting=True),
    "SIGSEGV": Kind(10, "fails"),
    "SIGTERM": Kind(10, "fails"),
    "SIGSTOP": Kind(25, "fails", 2, starting=True),
    "SIGSTOP, SIGCONT": Kind(40, "finishes", 2),
    "Ctrl-C": Kind(10, "fails", starting=True),
    "exception": Kind(10, "fails", 2),
    "sys.exit(3)": Kind(10, "fails"),
    "os._exit(3)": Kind(10, "fails"),
    "memory": Kind(40, "either", 2),
    "memory of a cgroup": Kind(15, "fails", 2, cgroup=True),
    "files": Kind(40, "either"),
    "disk": Kind(40, "either"),
    "clock": Kind(40, "finishes"),
    "connection": Kind(15, "either", between=True),
    "cut link": Kind(20, "fails", 2, between=True),
    "cut link, healed": Kind(40, "finishes", 2, between=True),
    "closed ports": Kind(20, "fails", 2, between=True),
    "link at 1 Mbit/s for 2 s": Kind(40, "finishes", 1, between=True),
}
ITSELF = {
    *("exception", "sys.exit(3)", "os._exit(3)", "memory", "memory of a cgroup"),
    *("files", "disk", "clock", "connection"),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True)
class Plan:
    """One run of the campaign, drawn from `seed` and `number`."""

    seed: int
    number: int
    launcher: str
    ranks: int
    model: str
    fault: str
    victim: int
    starting: bool
    delay: float

    def __str__(self) -> str:
        when = "while starting" if self.starting else "while training"
        return (
            f"{self.seed}:{self.number} {self.fault} of rank {self.victim}/{self.ranks} "
            f"{when} +{self.delay:.2f} s, {self.model}, {self.launcher}"
        )


@dataclass(frozen=True)
class Machine:
    """What can be drawn here.

    Attributes:
        hosts: whether there are test hosts.
        cgroups: whether a control group with a limit of memory can be made.
        clusters: of CLUSTERS, those that are installed.
    """

    hosts: bool = True
    cgroups: bool = True
    clusters: tuple[str, ...] = CLUSTERS

    @classmethod
    def this(cls) -> Machine:
        found = {
            "ray": importlib.util.find_spec("ray") is not None,
            "spark": importlib.util.find_spec("pyspark") is not None
            and bool(os.environ.get("JAVA_HOME") or shutil.which("java")),
        }
        return cls(not why_not(), memory_cgroup.can_be_made(), tuple(name for name in CLUSTERS if found[name]))


def draw(seed: int, number: int, machine: Machine) -> Plan:
    chance = random.Random(f"{seed}:{number}")
    equal = [*LOCAL, *BETWEEN] if machine.hosts else LOCAL
    weights = [1.0] * len(equal) + [CLUSTER_WEIGHT] * len(machine.clusters)
    launcher = chance.choices([*equal, *machine.clusters], weights)[0]
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if (launcher in BETWEEN or not kind.between) and (machine.cgroups or not kind.cgroup)
    }
    fault = chance.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
    ranks = 2 if launcher in CLUSTERS else chance.choice([2, 4] if launcher in BETWEEN else [2, 3, 4])
    starting = KINDS[fault].starting and chance.random() < 0.3 and launcher not in CLUSTERS
    return Plan(
        seed,
        number,
        launcher,
        ranks,
        chance.choices(["numpy", "torch", "lightning", "keras"], [4, 4, 1, 1])[0]
        if launcher not in CLUSTERS
        else "torch",
        fault,
        chance.randrange(ranks),
        starting,
        chance.uniform(0, 2.5 if starting else 1.5),
    )


class Verdict(Exception):
    """How a run ended, if not well."""

    def __init__(self, word: str, text: str) -> None:
        super().__init__(text)
        self.word = word


class Campaign:
    """Runs plans, several at once, each on hosts of its own."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._digests: dict[tuple[str, str, int], str] = {}
        self._lock = threading.Lock()
        self._ports = iter(range(29_500, 32_000))

    def run(self, plan: Plan) -> dict[str, Any]:
        """Run a plan; its line of the campaign's file."""
        line = {**asdict(plan), "verdict": "ok", "seconds": None, "text": "", "load": os.getloadavg()[0]}
        try:
            with contextlib.ExitStack() as stack:
                cluster = stack.enter_context(hosts(2)) if plan.launcher in BETWEEN else None
                reference = "" if plan.starting else self._reference(plan, cluster)
                group = (
                    stack.enter_context(memory_cgroup.memory_cgroup(f"{plan.seed}-{plan.number}"))
                    if KINDS[plan.fault].cgroup
                    else None
                )
                job = stack.enter_context(self._start(plan, cluster))
                line.update(self._judge(plan, job, cluster, group, reference))
        except Verdict as verdict:
            line.update(verdict=verdict.word, text=str(verdict))
        except Exception:
            line.update(verdict="campaign failed", text=traceback.format_exc())
        return line

    def _start(self, plan: Plan, cluster: Cluster | None) -> Any:
        directory = Path(os.environ["CAMPAIGN_DIRECTORY"]) / f"{plan.number}-{threading.get_ident()}"
        directory.mkdir(exist_ok=True)
        (directory / "fault").write_text(plan.fault)
        words = [plan.model, str(STEPS), str(directory)]
        times = dict(TIMES)
        if plan.fault.startswith("link at"):
            # What the slow queue held is dropped when the link is fast again, and TCP repeats it later and later.
            del times["RING_NETWORK_TIMEOUT"]
        if plan.launcher in CLUSTERS:
            script = DRIVERS[plan.launcher].replace("RANKS", str(plan.ranks))
            quiet = {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "SPARK_LOCAL_IP": "127.0.0.1",
            }
            return start_ranks(script, plan.ranks, "spawned", words, {**times, **quiet})
        if cluster is None:
            return start_ranks(WORKER, plan.ranks, plan.launcher, words, times)  # type: ignore[arg-type]
        each = plan.ranks // 2
        if plan.launcher == "hosts: environment":
            with self._lock:
                port = next(self._ports)
            return cluster.environment(WORKER, each, words, times, port)
        if plan.launcher == "hosts: mpirun":
            return cluster.mpirun(WORKER, each, words, times)
        ring = [str(Path(sys.executable).parent / "ring"), "run", "-H", f"host1:{each},host2:{each}", "--no-check"]
        return cluster.start([*ring, "--interface", "eth0", sys.executable], WORKER, plan.ranks, words, times)

    def _reference(self, plan: Plan, cluster: Cluster | None) -> str:
        """The digest of the weights of the same run without a fault."""
        key = (plan.launcher, plan.model, plan.ranks)
        with self._lock:
            known = self._digests.get(key)
        if known is None:
            with self._start(plan, cluster) as job:
                result = job.wait(120 * self._slack)
            if result.returncode != 0 or len(set(result.values("digest"))) != 1:
                raise Verdict("diverged", f"without a fault:\n{result}")
            known = result.values("digest")[0]
            with self._lock:
                self._digests[key] = known
        return known

    def _judge(
        self, plan: Plan, job: Job, cluster: Cluster | None, group: Path | None, reference: str
    ) -> dict[str, Any]:
        kind = KINDS[plan.fault]
        if plan.starting:
            time.sleep(plan.delay)
        else:
            job.wait_for("step", (120 if plan.launcher in CLUSTERS else 60) * self._slack)
            time.sleep(plan.delay)
        is_late = job.reports().get(plan.victim, {}).get("step", 0) >= STEPS - 20
        began = time.monotonic()
        with inject(plan, job, cluster, group):
            bound = (25 if plan.starting else kind.seconds) * self._slack
            if plan.launcher == "torchrun" and plan.fault == "SIGSTOP":
                bound += TORCHRUN_SECONDS
            if plan.launcher in CLUSTERS:
                bound += CLUSTER_SECONDS * self._slack
            if plan.fault in ("cut link", "closed ports"):
                wait_for_ranks_to_end(job, bound)
        try:
            grace = CLUSTER_SECONDS if plan.launcher in CLUSTERS else GRACE_SECONDS
            result = job.wait(bound, grace=grace * self._slack)
        except LaunchFailed as failed:
            raise Verdict("hang" if "still running" in str(failed) else "left", str(failed)) from None
        seconds = time.monotonic() - began
        if result.returncode == 0:
            check_weights(plan, result, reference, is_late)
        elif kind.end == "finishes":
            raise Verdict("silent", f"it should have finished\n{result}")
        else:
            check_cause(plan, result)
        return {"seconds": round(seconds, 1), "status": result.returncode, "text": last_words(result)}


@contextlib.contextmanager
def inject(plan: Plan, job: Job, cluster: Cluster | None, group: Path | None) -> Iterator[None]:
    """Do what the plan says; lasting faults of the network end with the block."""
    host = "host2" if plan.victim >= plan.ranks // 2 else "host1"
    if plan.fault == "cut link":
        assert cluster is not None
        cluster.cut(host)
        yield
        cluster.mend(host)
    elif plan.fault == "closed ports":
        assert cluster is not None
        with cluster.firewall("host1", "1024-65534", sources="1024-65534"):
            yield
    else:
        if plan.fault == "cut link, healed":
            assert cluster is not None
            cluster.cut(host)
            time.sleep(1.2)  # well below RING_NETWORK_TIMEOUT
            cluster.mend(host)
        elif plan.fault.startswith("link at"):
            assert cluster is not None
            cluster.shape(host, "1mbit")
            time.sleep(2)
            cluster.shape(host, None)
        else:
            if group is not None:
                (group / "cgroup.procs").write_text(str(job.pids()[plan.victim]))
            pid = inject_into_process(plan, job)
            # A script that is stopped before it has spawned ranks has nobody who could end it, either.
            is_alone = plan.launcher == "spawned" and plan.starting and pid == job.process.pid
            if plan.fault == "SIGSTOP" and (plan.launcher == "hosts: environment" or is_alone):
                end_of_a_stopped_rank(plan, job)
        yield


def inject_into_process(plan: Plan, job: Job) -> int | None:
    """Returns the process, None for a fault of all or if there is none."""
    if plan.fault == "Ctrl-C":
        if plan.launcher in BETWEEN:
            job.signal_parent(signal.SIGINT)
        else:
            job.interrupt()
        return None
    pid = some_process(plan, job) if plan.starting else job.pids().get(plan.victim)
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        if plan.fault in ITSELF:
            os.kill(pid, signal.SIGUSR2)
        elif plan.fault == "SIGSTOP, SIGCONT":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2 + plan.delay)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, SIGNALS[plan.fault])
    return pid


def some_process(plan: Plan, job: Job) -> int | None:
    """A rank's process while ranks start: which rank it will be is not known yet."""
    ranks = sorted(p.pid for p in job.processes() if str(WORKER) in " ".join(p.cmdline()[:3]))
    return ranks[plan.victim % len(ranks)] if ranks else None


def end_of_a_stopped_rank(plan: Plan, job: Job) -> None:
    """Without a launcher nobody ends a stopped process: the others end, and it ends by itself once it goes on."""
    if plan.starting:
        time.sleep(25)
    else:
        wait_for_ranks_to_end(job, 60, without=plan.victim)
    for process in job.processes():
        process.send_signal(signal.SIGCONT)


def wait_for_ranks_to_end(job: Job, seconds: float, without: int | None = None) -> None:
    """Over a cut cable launchers cannot end; ranks must."""
    deadline = time.monotonic() + seconds
    ranks = {pid for rank, pid in job.pids().items() if rank != without}
    while alive := ranks & {process.pid for process in job.processes()}:
        if time.monotonic() > deadline:
            raise Verdict(
                "hang", f"ranks still ran after {seconds:.0f} s: {alive}\n{job._result()}{job._dump_stacks()}"
            )
        time.sleep(0.1)


def check_weights(plan: Plan, result: Result, reference: str, is_late: bool) -> None:
    """A job that ends well has all steps, the weights of a run without a fault, and had no fault that must end it."""
    digests = result.values("digest")
    if len(digests) != plan.ranks:
        raise Verdict("silent", f"status 0, but only {len(digests)} of {plan.ranks} ranks finished\n{result}")
    if len(set(digests)) != 1 or (reference and digests[0] != reference):
        raise Verdict("diverged", f"weights {digests}, without a fault {reference}\n{result}")
    if KINDS[plan.fault].end == "fails" and not (is_late or plan.starting):
        raise Verdict("silent", f"status 0 after {plan.fault}\n{result}")


def check_cause(plan: Plan, result: Result) -> None:
    """An error names the rank it came from; while ranks start, any text will do."""
    if plan.fault == "Ctrl-C":  # who presses it needs no explanation
        return
    text = " ".join(result.output.split())
    if not text:
        # The user's shell reports the death of the process that it started, which may be the only one yet.
        if plan.launcher == "spawned" and (plan.victim == 0 or result.returncode < 0):
            return
        raise Verdict("silent", f"an error without a word\n{result}")
    if plan.starting:
        return
    if plan.fault in ("cut link", "closed ports", "connection"):
        wanted = r"host[12]|rank \d"
    elif plan.launcher == "spawned" and plan.victim == 0:
        wanted = r"rank 0\b|injected fault|rank \d"
    else:
        # mpirun, which may end the other ranks before they say anything, calls rank 3 [prterun-host1-18@1,3].
        wanted = rf"rank\W+{plan.victim}\b|@1,{plan.victim}\]"
    if not re.search(wanted, text):
        raise Verdict("silent", f"nothing about {wanted!r}\n{result}")


def last_words(result: Result) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("ring_plugins")]
    return lines[0][:300] if lines else ""


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: for every fault the number of runs, how they ended, and the longest time to the end."""
    rows = ["| fault | runs | passed | other | median s | worst s |", "|---|---|---|---|---|---|"]
    for fault in [*KINDS, None]:
        chosen = [line for line in lines if fault in (None, line["fault"])]
        if not chosen:
            continue
        verdicts = Counter(line["verdict"] for line in chosen)
        seconds = sorted(line["seconds"] for line in chosen if line["seconds"] is not None)
        other = ", ".join(f"{number} {word}" for word, number in verdicts.items() if word != "ok") or "-"
        middle, worst = (seconds[len(seconds) // 2], seconds[-1]) if seconds else ("-", "-")
        rows.append(f"| {fault or 'all'} | {len(chosen)} | {verdicts['ok']} | {other} | {middle} | {worst} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the bounds, for a busy machine")
    parser.add_argument("--out", type=Path, help="a line of JSON a run is added to this file")
    parser.add_argument("--table", type=Path, help="print the table of such a file and end")
    parser.add_argument("--only", metavar="SEED:NUMBER", help="repeat one run and print what it printed")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return
    hear_interrupts()
    launch.slowness = lambda: 1.0  # the bounds are in question; --slack stretches them
    lines = run_campaign(arguments)
    print(table(lines))
    sys.exit(any(line["verdict"] != "ok" for line in lines))


def run_campaign(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import tempfile

    if missing := why_not():
        print(f"only on one host: {missing}", file=sys.stderr)
    numbers = range(arguments.first, arguments.first + arguments.runs)
    seed = arguments.seed
    if arguments.only:
        seed, number = map(int, arguments.only.split(":"))
        numbers = range(number, number + 1)
    machine = Machine.this()
    if not machine.cgroups:
        print("no memory control groups: only limits of address space", file=sys.stderr)
    plans = [draw(seed, number, machine) for number in numbers]
    campaign = Campaign(arguments.slack)
    lines = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        os.environ["CAMPAIGN_DIRECTORY"] = directory
        for plan, line in zip(plans, pool.map(campaign.run, plans), strict=True):
            lines.append(line)
            print(f"{line['verdict']:9}{line['seconds'] or '':>6} {plan}", flush=True)
            if (line["verdict"] != "ok" and not arguments.out) or arguments.only:
                print(line["text"])
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return lines


if __name__ == "__main__":
    main()
