"""`ring add-ranks`: lets a running job grow."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ring_plugins.cli.run import whole_number


def add_ranks(
    number: Annotated[int, typer.Argument(parser=whole_number, help="How many ranks to add.")],
    job: Annotated[
        int | None,
        typer.Option(
            "--job",
            parser=whole_number,
            metavar="<int>",
            help="Process id of the `ring run`; not needed if only one of yours runs on this host.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Host on which they run, as `ring run -H` names it; it may be new to the job. By default each runs on "
            "a host of the job that has the fewest ranks.",
        ),
    ] = None,
) -> None:
    """Add ranks to a running job, which was started on this host with `ring run --on-failure replace --max-ranks`.

    The new processes run the script from its first line, and join the others where an epoch begins.

    **Example**

    * `ring run -n 2 --on-failure replace --max-ranks 4 python train.py`, then in another terminal `ring add-ranks 2`
    """
    from ring_plugins.core.base.errors import RingError
    from ring_plugins.launcher.growth import request_ranks, running_jobs

    jobs = running_jobs() if job is None else {}
    if len(jobs) == 1:  # the user has not said which: tell, and ask whom can answer
        ((job, command),) = jobs.items()
        which = f"add {number} {'rank' if number == 1 else 'ranks'} to process {job}: {command}"
        if not sys.stdin.isatty():
            typer.echo(f"ring add-ranks: {which}", err=True)
        elif not typer.confirm(f"ring add-ranks: {which}?", default=True, err=True):
            raise typer.Exit(1)
    try:
        typer.echo(f"ring add-ranks: {request_ranks(number, job, host)}")
    except RingError as error:
        typer.echo(f"ring add-ranks: {error}", err=True)
        raise typer.Exit(2) from None
