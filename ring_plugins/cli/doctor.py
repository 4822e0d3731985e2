"""`ring doctor`: find problems of this host, or of the job it runs in, and print how to fix them."""

from __future__ import annotations

import json as json_module
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ring_plugins.doctor import Examination, Finding

_MARKS = {0: "[green]fine[/]", 1: "[yellow]warning[/]", 2: "[bold red]error[/]"}


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, for scripts and bug reports.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="In a job: the model to advise on, one that `ring plan --model` knows."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="In a job: your own model, a file that `ring_plugins.planning.measure(..., file=...)` wrote."
        ),
    ] = None,
) -> None:
    """Check this host, or all hosts of a job and the links between them.

    Outside a job it checks this host: packages, MPI, NCCL, GPUs, cores, memory, networks, limits and settings. Under
    `ring run`, `mpirun` or `torchrun` it also measures every pair of hosts and all-reduce, compares the ranks, and says
    what share of a step a model would wait for the network, and what makes that less.

    The exit status is 0 if nothing is wrong, 1 after warnings, 2 after errors.

    **Examples**

    * `ring doctor`
    * `ring doctor --json > report.json`
    * `ring run -H node1:4,node2:4 ring doctor`
    * `ring run -H node1:4,node2:4 ring doctor --profile mine.json`
    * `mpirun -n 4 --hostfile hosts ring doctor`
    """
    from rich.console import Console

    import ring_plugins as ring
    from ring_plugins.core.base.errors import ArgumentError
    from ring_plugins.core.rendezvous import detect
    from ring_plugins.doctor import Severity, examine_host, examine_job, status
    from ring_plugins.planning import Profile, reference

    if model is not None and profile is not None:
        raise typer.BadParameter("give either --model or --profile.")
    try:
        what = reference(model) if model is not None else Profile.load(profile) if profile is not None else None
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    examination, is_job = None, not detect().launcher.is_none
    if is_job:
        ring.init(on_failure="end")  # whatever the job to come does: pairs of hosts are groups, which do not heal
    is_first = not is_job or ring.rank() == 0
    with Console(stderr=True, quiet=not is_first).status("checking this host") as progress:
        findings = list(examine_host()) if not is_job or ring.local_rank() == 0 else []
        if is_job:
            name = socket.gethostname()
            problems = [replace(one, check=f"{name}: {one.check}") for one in findings if one.severity > Severity.FINE]
            hosts = [finding for part in ring.all_gather_object(problems) for finding in part]
            examination = examine_job(what, progress.update)
            findings = [*examination.findings, *hosts]
    if is_first and json:
        record = examination.record() if examination is not None else {}
        print(json_module.dumps({**record, "findings": [finding.record() for finding in findings]}, indent=1))
    elif is_first:
        console = Console()
        if examination is not None:
            _print_job(console, examination)
        _print_findings(console, findings)
    ring.shutdown()
    raise typer.Exit(status(findings) if is_first else 0)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, box=None)
    table.add_column("")
    table.add_column("", style="bold")
    table.add_column("", overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.severity], escape(finding.check), escape(finding.summary))
        if finding.remedy:
            table.add_row("", "", f"[cyan]-> {escape(finding.remedy)}[/]")
    console.print(table)
    problems = sum(one.severity > 0 for one in findings)
    console.print(f"\n{problems} of {len(findings)} findings need attention." if problems else "\nNothing is wrong.")


def _print_job(console: Console, examination: Examination) -> None:
    console.print(f"{examination.curve.job}, started by {examination.started_by}\n")
    if examination.links:
        between = _table("between hosts", "µs per message", "Gbit/s", "reverse", "interface", "plain TCP Gbit/s")
        for link in examination.links:
            between.add_row(
                " - ".join(link.hosts),
                f"{link.microseconds:,.0f}",
                *(f"{rate:.2f}" for rate in link.gigabits),
                "\n".join(dict.fromkeys(name or "?" for name in link.interfaces)),
                "\n".join(f"{name.split()[0]} {rate:.2f}" for name, rate in link.tcp_gigabits.items()),
            )
        console.print(between)
    curve = examination.curve
    table = _table("all-reduce, bytes", "µs", "algbw, GB/s", "busbw, GB/s")
    for nbytes, times in curve.times.items():
        (name,) = times
        table.add_row(
            f"{nbytes:,}",
            f"{times[name].median * 1e6:,.1f}",
            f"{curve.algbw(nbytes, name):.3f}",
            f"{curve.busbw(nbytes, name):.3f}",
        )
    console.print(table, "")


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
