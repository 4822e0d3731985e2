"""`ring run`: start a program on several ranks, here or on several hosts."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import Annotated

import typer


class Binding(str, Enum):
    """To what each rank is bound."""

    NONE = "none"
    CORE = "core"
    NUMA = "numa"
    SOCKET = "socket"


class Starter(str, Enum):
    """What starts the ranks."""

    AUTO = "auto"
    MPIRUN = "mpirun"
    PYTHON = "python"


_WHERE, _HOW, _OUT, _MPI = "Where", "How", "Output", "mpirun"


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, handed on unchanged.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "-np",
            "--ranks",
            help="How many. By default as many as the hosts have slots; on this host alone one a GPU, "
            "or where there is none one a core.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="`host1:2,host2:2`", rich_help_panel=_WHERE)
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", help="Lines such as `host1 slots=2`, `host1:2` or `host1`.", rich_help_panel=_WHERE),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            envvar="RING_INTERFACE",
            help="Network that carries the traffic: `eth0`, several (`eth0,ib0`), or a subnet (`10.2.0.0/16`).",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="What is run in place of ssh: `AGENT HOST COMMAND`.", rich_help_panel=_WHERE),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Before starting on several hosts, see that each answers and has the same versions.",
            rich_help_panel=_WHERE,
        ),
    ] = True,
    bind: Annotated[
        Binding,
        typer.Option(
            "--bind",
            help="Bind each rank. A rank bound to a core keeps its data loaders and its communication there as well.",
            rich_help_panel=_HOW,
        ),
    ] = Binding.NONE,
    export: Annotated[
        list[str] | None,
        typer.Option(
            "-x",
            "--export",
            help="`NAME` or `NAME=VALUE` for every rank, besides what libraries of training read.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    starter: Annotated[
        Starter,
        typer.Option("--with", help="`python` starts the ranks of this host without MPI.", rich_help_panel=_HOW),
    ] = Starter.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and end.", rich_help_panel=_HOW)
    ] = False,
    tag_output: Annotated[
        bool, typer.Option("--tag-output", help="Put its rank in front of every line.", rich_help_panel=_OUT)
    ] = False,
    output_directory: Annotated[
        str | None,
        typer.Option("--output-dir", help="Write each rank's output to files in here instead.", rich_help_panel=_OUT),
    ] = None,
    mpirun: Annotated[
        str | None,
        typer.Option(
            "--mpirun",
            help="The mpirun to use; by default the one beside this Python, else the first on PATH.",
            rich_help_panel=_MPI,
        ),
    ] = None,
    mpirun_options: Annotated[
        str,
        typer.Option(
            "--mpirun-options", help="More options for it, in one argument: `'--mca pml ob1'`.", rich_help_panel=_MPI
        ),
    ] = "",
) -> None:
    """Run a program on several ranks, on this host or on several.

    A front for the mpirun that is there (Open MPI, MPICH, Intel MPI), which prints the command it runs. Without
    mpirun it starts the ranks of one host itself. All ranks on all hosts end when one fails, or this command does.

    **Examples**

    `ring run -n 4 python train.py --epochs 5`

    `ring run -n 4 -H node1:2,node2:2 --interface eth0 python train.py`

    `ring run --hostfile hosts --tag-output --dry-run python train.py`
    """
    from ring_plugins.core.base.errors import RingError
    from ring_plugins.launcher import preflight
    from ring_plugins.launcher.job import carry_out, printable, say
    from ring_plugins.launcher.plan import Options, fit, plan

    try:
        planned = plan(
            Options(
                command=tuple(command),
                ranks=ranks,
                hosts=hosts,
                hostfile=hostfile,
                interface=interface,
                bind=bind.value,
                exports=tuple(export or ()),
                agent=agent,
                tag_output=tag_output,
                output_directory=output_directory,
                mpirun=mpirun,
                mpirun_options=tuple(shlex.split(mpirun_options)),
                by=starter.value,
            )
        )
        if dry_run:
            typer.echo(printable(planned))
            return
        if check and planned.hosts and planned.by is not None:
            planned = fit(planned, preflight.check(planned.request, planned.by, planned.hosts))
        for notice in planned.notices:
            say(notice)
        say(f"$ {printable(planned)}")
        status = carry_out(planned, say)
    except RingError as error:
        say(str(error))
        raise typer.Exit(2) from None
    raise typer.Exit(status)
