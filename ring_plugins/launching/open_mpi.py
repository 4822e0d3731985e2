"""Open MPI's mpirun: version 5, which stands on PRRTE, and version 4, which stands on ORTE."""

from __future__ import annotations

from ring_plugins.core.silence import patience
from ring_plugins.launching.mpirun import Mpirun, Request


def command_line(mpirun: Mpirun, request: Request) -> list[str]:
    """The options of Open MPI that a request needs."""
    new = mpirun.flavour == "Open MPI 5"
    daemons = "--prtemca" if new else "--mca"
    line = [mpirun.path]
    if request.as_root:
        line += ["--allow-run-as-root"]
    line += ["-n", str(request.ranks)]
    if request.shares:
        line += ["-H", ",".join(f"{share.host}:{share.ranks}" for share in request.shares)]
    if request.agent:
        line += [daemons, "plm_ssh_agent" if new else "plm_rsh_agent", request.agent]
    line += ["--map-by", "slot:OVERSUBSCRIBE" if request.crowded else "slot", "--bind-to", _bind(request, new)]
    if request.interface:
        line += ["--mca", "btl_tcp_if_include", request.interface]
        line += [daemons, "prte_if_include" if new else "oob_tcp_if_include", request.interface]
    if request.shares:
        # A lost network is noticed a little later than by the ranks, which have more to say about it.
        for word, number in {"time": 1, "intvl": 1, "probes": round(patience()) + 1}.items():
            line += [daemons, f"oob_tcp_keepalive_{word}", str(number)]
    line += _output(request, new)
    for name, value in request.exports.items():
        line += ["-x", name if value is None else f"{name}={value}"]
    return [*line, *request.options, *request.command]


def _bind(request: Request, new: bool) -> str:
    return "package" if new and request.bind == "socket" else request.bind


def _output(request: Request, new: bool) -> list[str]:
    if not new:
        line = ["--tag-output"] if request.tag_output else []
        return [*line, "--output-filename", request.output_directory] if request.output_directory else line
    wishes = ["tag"] if request.tag_output else []
    if request.output_directory:
        wishes.append(f"dir={request.output_directory}")
    return ["--output", ",".join(wishes)] if wishes else []
