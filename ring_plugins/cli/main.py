"""The `ring` command."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ring_plugins import __version__
from ring_plugins.cli.add_ranks import add_ranks
from ring_plugins.cli.bench import bench
from ring_plugins.cli.doctor import doctor
from ring_plugins.cli.horovodrun import HorovodrunCommand
from ring_plugins.cli.plan import plan
from ring_plugins.cli.run import run
from ring_plugins.cli.top import top
from ring_plugins.core.base import config


class _PlainFlags:
    """A command whose help shows no type for options that take no value, where typer writes `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return params


class _Group(_PlainFlags, TyperGroup):
    pass


class _Command(_PlainFlags, TyperCommand):
    pass


class _Run(_PlainFlags, HorovodrunCommand):
    pass


app = typer.Typer(
    name="ring",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
#: What a job does when ranks are lost; and what our launchers tell each rank.
_POLICY = (config.ON_FAILURE.name, config.MIN_RANKS.name, config.MAX_RANKS.name, *config.STANDBYS.names)
_PLACE = (config.SPAWNED.name, config.LOSSES_TOLERATED.name, config.JOINS.name, config.SLOT.name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ring_plugins {__version__}")
        raise typer.Exit


# Options after the program's name belong to the program: `ring run -n 2 python train.py -n 5`.
_END_AT_PROGRAM = {"allow_interspersed_args": False}
app.command("run", cls=_Run, context_settings=_END_AT_PROGRAM, no_args_is_help=True)(run)
app.command("add-ranks", cls=_Command, no_args_is_help=True)(add_ranks)
app.command("doctor", cls=_Command)(doctor)
app.command("bench", cls=_Command)(bench)
app.command("plan", cls=_Command)(plan)
app.command("top", cls=_Command)(top)


def forget_outer_job(environment: MutableMapping[str, str] = os.environ) -> str:
    """In a rank of a job, remove what tells of that job, as another one is to be started here.

    If the job goes on after losses, the rank has the options of its `ring run` as variables. They would be taken for
    options of the new job.

    Args:
        environment: of this process.

    Returns:
        These options, as text; "" if there are none.
    """
    recovers = config.LOSSES_TOLERATED.is_set(environment)
    for name in (*_PLACE, *([config.LAUNCHER.name] if config.SLOT.is_set(environment) else [])):
        environment.pop(name, None)
    if not recovers:
        return ""
    found = {name: environment.pop(name) for name in _POLICY if name in environment}
    return " ".join(f"{name}={value}" for name, value in found.items())


@app.callback()
def ring(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Start training on many processes, diagnose hosts and networks, measure all-reduce, and predict scaling."""
    # `ring run` reads variables in place of options, once this function has returned.
    if context.invoked_subcommand == "run" and (forgotten := forget_outer_job()):
        typer.echo(f"ring run: {forgotten} of the job whose rank runs this do not count here; give options.", err=True)


def main() -> None:
    """Run the `ring` command."""
    app()
