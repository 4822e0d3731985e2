"""Hydra's mpiexec, which is MPICH's, and Intel MPI's child of it."""

from __future__ import annotations

import shlex
import shutil

from ring_plugins.launching.mpirun import Mpirun, Request


def command_line(mpirun: Mpirun, request: Request) -> list[str]:
    """The options of Hydra that a request needs. It hands the whole environment on by itself."""
    intel = mpirun.flavour == "Intel MPI"
    line = [mpirun.path]
    if request.agent:
        program, *words = shlex.split(request.agent)
        if words:  # Hydra takes one word as the agent, and its options from a variable
            variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if intel else "HYDRA_LAUNCH_EXTRA_ARGS"
            line = ["env", f"{variable}={shlex.join(words)}", mpirun.path]
        line += ["-launcher", "ssh", "-launcher-exec", shutil.which(program) or program]
    if request.interface and not set("/,") & set(request.interface):  # Hydra knows one interface, by its name
        line += ["-iface", request.interface]
    if intel:
        line += ["-genv", "I_MPI_PIN", "off"] if request.bind == "none" else _intel_pinning(request.bind)
    else:
        line += ["-bind-to", request.bind]
    if request.tag_output:
        line += ["-prepend-rank"]
    if request.output_directory:
        line += ["-outfile-pattern", f"{request.output_directory}/rank.%r.out"]
        line += ["-errfile-pattern", f"{request.output_directory}/rank.%r.err"]
    for name, value in request.exports.items():
        if value is not None:
            line += ["-genv", name, value]
    line += request.options
    if not request.shares:
        return [*line, "-n", str(request.ranks), *request.command]
    if not intel:
        hosts = ",".join(f"{share.host}:{share.ranks}" for share in request.shares)
        return [*line, "-hosts", hosts, "-n", str(request.ranks), *request.command]
    # Intel MPI knows no `host:number`: every host gets an argument set of its own.
    for number, share in enumerate(request.shares):
        line += [":"] if number else []
        line += ["-host", share.host, "-n", str(share.ranks), *request.command]
    return line


def _intel_pinning(bind: str) -> list[str]:
    return ["-genv", "I_MPI_PIN", "on", "-genv", "I_MPI_PIN_DOMAIN", bind]
