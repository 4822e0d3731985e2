"""`ring top`: what the ranks of a running job do, in one screen."""

from __future__ import annotations

import contextlib
import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ring_plugins.cli.run import whole_number

if TYPE_CHECKING:
    from ring_plugins.core.net.frames import FrameSocket

#: Bytes of the longest line that a job may send: one row for each of its ranks.
_LONGEST = 1 << 22
#: Seconds to wait for a job's answer, which comes once a second.
_WAITS = 10.0
#: Rows of a screen; of larger jobs the slowest ranks are shown.
_ROWS = 32


def top(
    job: Annotated[
        int | None,
        typer.Option(
            "--job",
            parser=whole_number,
            metavar="<int>",
            help="Process id of rank 0, or of what started it, such as `ring run` or mpirun; not needed if only one of "
            "your jobs has its rank 0 on this host.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON a second instead of a screen.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Watch a running job: ranks, hosts, step times, who waits for whom, bytes, losses and memory, once a second.

    Start it on the host of rank 0, as the user of the job. It only reads, and Ctrl-C ends it, not the job.

    **Examples**

    * `ring top`

    * `ring top --json --once`
    """
    from ring_plugins.core.base.errors import RingError
    from ring_plugins.core.net.auth import Disconnected

    try:
        frames = _watch(job)
        with contextlib.closing(frames), contextlib.suppress(KeyboardInterrupt):
            _show(frames, json, once)
    except Disconnected:
        typer.echo("ring top: the job has ended, or more than 8 watch it.", err=True)
        raise typer.Exit(2 if once else 0) from None
    except (RingError, OSError) as error:
        typer.echo(f"ring top: {error}", err=True)
        raise typer.Exit(2) from None


def _watch(job: int | None) -> FrameSocket:
    """A connection to the rank that shows a job.

    Raises:
        ArgumentError: there is no such job, or there are several.
    """
    from ring_plugins.core.base.errors import ArgumentError, LaunchError
    from ring_plugins.core.net.local_service import connected, processes
    from ring_plugins.core.net.sockets import why_users_are_unknown
    from ring_plugins.core.observe.live import SERVICE

    if why := why_users_are_unknown():
        raise LaunchError(f"no process can tell your job from a stranger's, as {why}.")
    jobs = processes(SERVICE)
    listed = "".join(f"\n  {pid}: {' '.join(words)}" for pid, words in jobs.items())
    found = [pid for pid in jobs if job is None or job in _line_of(pid)]
    if not jobs:
        raise ArgumentError(
            "no job of yours has its rank 0 on this host, and answers. Ask on that of rank 0. A job of one rank cannot "
            "be watched, nor one whose rank 0 is stopped."
        )
    if not found:
        raise ArgumentError(f"--job {job} is none of your jobs with rank 0 on this host:{listed}")
    if len(found) > 1:
        raise ArgumentError(f"several jobs run here; choose one with --job and its process id:{listed}")
    try:
        frames = connected(SERVICE, found[0], _LONGEST, _WAITS)
    except TimeoutError:
        raise LaunchError(f"the job of process {found[0]} does not answer; its rank 0 may be stopped.") from None
    if frames is None:
        raise LaunchError(f"the job of process {found[0]} has just ended.")
    return frames


def _line_of(pid: int) -> list[int]:
    """A process and those that started it."""
    line = [pid]
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            line.append(pid)
    return line


def _show(frames: FrameSocket, json: bool, once: bool) -> None:
    """Print what comes until the job ends."""
    from rich.console import Console
    from rich.live import Live

    from ring_plugins.core.base.errors import printable

    def snapshots() -> Any:
        while True:
            line = frames.receive(_WAITS)
            if line is None:
                raise TimeoutError(f"the job has not answered for {_WAITS:.0f} s; its rank 0 may be stopped.")
            yield json_module.loads(line)
            if once:
                return

    if json:
        for one in snapshots():
            typer.echo(json_module.dumps(one))
        return
    console = Console()
    if once:
        console.print(_screen(printable(next(snapshots()))))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for one in snapshots():
            live.update(_screen(printable(one)), refresh=True)


def _screen(job: dict[str, Any]) -> Any:
    """One screen: the job in a line or two, and a row for each rank."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = job["rows"]
    steps = max((row.get("steps", 0) for row in rows), default=0)
    hosts = len({row["host"] for row in rows})
    head = (
        f"{job['command']} (process {job['pid']}): {job['ranks']} of {job['ranks_at_start']} ranks on {hosts} "
        f"{'host' if hosts == 1 else 'hosts'}, {_duration(job['seconds'])}, step {steps:,}"
    )
    if job["changes"]:
        times = f"{job['changes']} {'change' if job['changes'] == 1 else 'changes'}"
        head += f"; {times} of ranks, {len(job['lost'])} lost or left"
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("rank", "host", "step", "ms a step", "waits", "moves", "MB a step", "memory", "now"):
        table.add_column(name, justify="left" if name in ("host", "now") else "right")
    shown = rows if len(rows) <= _ROWS else sorted(rows, key=lambda row: row.get("waiting", 0.0))[:_ROWS]
    for row in shown:
        table.add_row(*map(Text, _cells(row)))
    left_out = f"\nthe {_ROWS} ranks that wait least are shown" if len(rows) > _ROWS else ""
    return Group(Text(f"{time.strftime('%H:%M:%S')}  {head}"), table, Text(f"Ctrl-C ends this, not the job.{left_out}"))


def _cells(row: dict[str, Any]) -> list[str]:
    if "steps" not in row:
        return [str(row["rank"]), row["host"], *[""] * 6, "has not answered yet"]
    seconds = row["step_seconds"]
    waits = f"waits for rank {', '.join(map(str, row['waits_for'][:3]))}" if row["waits_for"] else ""
    if waits:
        waits += f"{' ...' * (len(row['waits_for']) > 3)} in {row['waits_in']}, {row['waits_seconds']:.0f} s"
    codec = f" {row['compression']}" if row["compression"] else ""
    return [
        str(row["rank"]),
        row["host"],
        f"{row['steps']:,}",
        f"{seconds * 1e3:.1f}" if seconds else "",
        f"{row['waiting']:.0%}",
        f"{row['moving']:.0%}",
        f"{row['step_bytes'] / 1e6:.1f}{codec}",
        f"{row['memory_bytes'] / 1e6:,.0f} MB",
        waits if row["answers"] else "does not answer",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
