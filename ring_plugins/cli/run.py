"""`ring run`: runs a program on several ranks, on this host or several."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

# Values of --bind, --with and --on-failure.
Binding = Enum("Binding", {"NONE": "none", "CORE": "core", "NUMA": "numa", "SOCKET": "socket"}, type=str)
Starter = Enum("Starter", {"AUTO": "auto", "MPIRUN": "mpirun", "PYTHON": "python"}, type=str)
OnFailure = Enum("OnFailure", {"END": "end", "CONTINUE": "continue", "REPLACE": "replace"}, type=str)
_WHERE, _HOW, _OUT, _MPI = "Where", "How", "Output", "mpirun"


def whole_number(text: str | int) -> int:
    """The number that a text is; typer's own error would not show the text.

    Raises:
        typer.BadParameter: it is none. typer adds the argument's name and its variable's.
    """
    try:
        return int(text)  # a number already: the default
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number. Give one, such as 2.") from None


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, passed on unchanged.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "-np",
            "--ranks",
            parser=whole_number,
            metavar="<int>",
            help="Number of ranks. By default one for each slot of the hosts; on this host alone one for each GPU, "
            "or for each core if it has no GPU.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H", "--hosts", help="Hosts, with the number of ranks on each: `host1:2,host2:2`.", rich_help_panel=_WHERE
        ),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            "--hostfile",
            help="File of hosts, with lines such as `host1 slots=2`, `host1:2` or `host1`.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    host_discovery: Annotated[
        str | None,
        typer.Option(
            "--host-discovery-script",
            metavar="<command>",
            help="Command that prints the hosts of the moment, as lines of a hostfile. It is run about once a second, "
            "and ranks join and leave as it says, with `--on-failure replace`; `--min-ranks` start, and up to "
            "`--max-ranks` run.",
            rich_help_panel=_WHERE,
        ),
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
        typer.Option(
            "--agent", help="Program that replaces ssh, called as `AGENT HOST COMMAND`.", rich_help_panel=_WHERE
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Check that each of several hosts answers and has the same versions before starting.",
            rich_help_panel=_WHERE,
        ),
    ] = True,
    bind: Annotated[
        Binding,
        typer.Option(
            "--bind",
            help="Bind each rank to cores. Its data loaders and its communication then share them.",
            rich_help_panel=_HOW,
        ),
    ] = Binding.NONE,
    export: Annotated[
        list[str] | None,
        typer.Option(
            "-x",
            "--export",
            help="`NAME` or `NAME=VALUE` for every rank. Variables that training libraries read are always exported.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    starter: Annotated[
        Starter,
        typer.Option(
            "--with", help="What starts the ranks. `python` needs no MPI, and works on one host.", rich_help_panel=_HOW
        ),
    ] = Starter.AUTO,
    on_failure: Annotated[
        OnFailure,
        typer.Option(
            "--on-failure",
            envvar="RING_ON_FAILURE",
            help="What happens when a rank is killed or crashes. `continue` trains on with the surviving ranks; "
            "`replace` also starts a new process for the lost rank, on its host. On GPUs this has only been rehearsed.",
            rich_help_panel=_HOW,
        ),
    ] = OnFailure.END,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            "--min-ranks",
            parser=whole_number,
            metavar="<int>",
            envvar="RING_MIN_RANKS",
            help="Smallest number of ranks that still trains, with `--on-failure continue` or `replace`; 1 by default.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            "--max-ranks",
            parser=whole_number,
            metavar="<int>",
            envvar="RING_MAX_RANKS",
            help="Largest number of ranks after `ring add-ranks`, with `--on-failure replace`; by default the number "
            "at the start.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    standbys: Annotated[
        int,
        typer.Option(
            "--standbys",
            "--spares",
            parser=whole_number,
            metavar="<int>",
            envvar=["RING_STANDBYS", "RING_SPARES"],
            help="Number of idle processes that wait in `init()`, and replace a lost rank or become an added one "
            "without a start, with `--on-failure replace`. One host only. `--spares` is the older name.",
            rich_help_panel=_HOW,
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and exit.", rich_help_panel=_HOW)
    ] = False,
    tag_output: Annotated[
        bool, typer.Option("--tag-output", help="Put the rank in front of every line.", rich_help_panel=_OUT)
    ] = False,
    output_directory: Annotated[
        str | None,
        typer.Option(
            "--output-dir", help="Write each rank's output to files in this directory instead.", rich_help_panel=_OUT
        ),
    ] = None,
    mpirun: Annotated[
        str | None,
        typer.Option(
            "--mpirun",
            help="The mpirun to use. By default the one beside this Python, else the first on PATH.",
            rich_help_panel=_MPI,
        ),
    ] = None,
    mpirun_options: Annotated[
        str,
        typer.Option(
            "--mpirun-options",
            help="Further options for mpirun, in one argument: `'--mca pml ob1'`.",
            rich_help_panel=_MPI,
        ),
    ] = "",
) -> None:
    """Run a program on several ranks, on this host or several.

    Wraps the installed mpirun (Open MPI, MPICH or Intel MPI) and prints the command it runs. Without mpirun it starts
    the ranks of one host itself. When a rank fails, or this command ends, all ranks on all hosts end. With
    `--on-failure continue`, the surviving ranks train on when one is killed or a host is lost, and mpirun is not used;
    with `replace`, a new process replaces the lost one.

    **Examples**

    * `ring run -n 4 python train.py --epochs 5`
    * `ring run -n 4 -H node1:2,node2:2 --interface eth0 python train.py`
    * `ring run --hostfile hosts --tag-output --dry-run python train.py`
    * `ring run -n 2 --on-failure replace --max-ranks 4 python train.py`, and later `ring add-ranks 2`
    * `ring run --host-discovery-script ./hosts.sh --on-failure replace --min-ranks 2 --max-ranks 8 python train.py`
    """
    from ring_plugins.core.base.errors import RingError
    from ring_plugins.launcher import job
    from ring_plugins.launcher.launch_plan import Options, adapt, make_plan
    from ring_plugins.launcher.preflight import check_hosts

    try:
        plan = make_plan(
            Options(
                command=tuple(command),
                ranks=ranks,
                hosts=hosts,
                hostfile=hostfile,
                interface=interface,
                bind=bind.value,
                export=tuple(export or ()),
                agent=agent,
                tag_output=tag_output,
                output_directory=output_directory,
                mpirun=mpirun,
                mpirun_options=tuple(shlex.split(mpirun_options)),
                starter=starter.value,
                on_failure=on_failure.value,
                min_ranks=min_ranks,
                max_ranks=max_ranks,
                standbys=standbys,
                host_discovery=host_discovery,
            ),
            _notify,
        )
        if dry_run:
            typer.echo(job.shell_command(plan))
            return
        if check and plan.hosts:
            own, cores_of = check_hosts(plan.job, plan.mpirun, plan.hosts)
            plan = replace(adapt(plan, cores_of), own_report=own)
        for notice in plan.notices:
            _notify(notice)
        _notify(f"$ {job.shell_command(plan)}")
        status = job.run(plan, _notify)
    except RingError as error:
        _notify(str(error))
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _notify(text: str) -> None:
    """Print a line for the user beside the ranks' own output."""
    typer.echo(f"ring run: {text}", err=True)
