"""`ring bench`: measure all-reduce by message size."""

from __future__ import annotations

import json as json_module
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ring_plugins.benchmarking import Curve


class MemoryKind(str, Enum):
    """The memory that is reduced."""

    ALL = "all"
    HOST = "host"
    DEVICE = "device"


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "4096", "64K", "25MiB", "1G"."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 4096, 64K, 25M or 1G.")
    return int(match[1]) * _UNITS[match[2]]


def bench(
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="Ranks to start without a launcher; one per core by default, at least 2."),
    ] = None,
    memory: Annotated[
        MemoryKind, typer.Option(help="Memory to reduce: the host's, the GPUs', or both.")
    ] = MemoryKind.ALL,
    plane: Annotated[MemoryKind | None, typer.Option(hidden=True, help="Former name of --memory.")] = None,
    smallest: Annotated[str, typer.Option(help="Bytes of the first message.")] = "64",
    largest: Annotated[str, typer.Option(help="Bytes of the last message.")] = "64M",
    factor: Annotated[int, typer.Option(min=2, help="Each size is this many times the previous one.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.01, help="Approximate time to spend on each size.")] = 2.0,
    only: Annotated[
        str | None,
        typer.Option("--with", help="Host backends to measure: some of `ring,ring bucket,plain copy,MPI,gloo`."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; `ring plan` reads it.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
) -> None:
    """Measure all-reduce by message size, as nccl-tests do, beside MPI, gloo, NCCL and a plain copy.

    All backends take turns in one run. `algbw` is bytes / time; `busbw` = `algbw` * 2(n-1)/n is the rate of a ring over
    each link. Each sample is the time of the slowest rank.

    **Examples**

    * `ring bench -n 2`
    * `ring bench -n 2 --largest 256M --png curves.png`
    * `ring run -H node1:4,node2:4 ring bench --json > network.json`
    * `mpirun -n 4 ring bench --with ring,MPI`
    * `torchrun --nproc-per-node 4 -m ring_plugins bench --memory device`
    """
    from rich.console import Console
    from rich.progress import Progress

    import ring_plugins as ring
    from ring_plugins.benchmarking import all_reduce_curve, check_names, device_backends, host_backends, sizes
    from ring_plugins.core.base.errors import ArgumentError
    from ring_plugins.core.linux.process import cores

    kind = plane or memory
    names = None if only is None else [name.strip() for name in only.split(",")]
    try:
        wanted = sizes(parse_size(smallest), parse_size(largest), factor)
        check_names(names or [])
        ring.init(ranks or max(2, cores()))
        backends = {} if kind == MemoryKind.DEVICE else host_backends(names)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if kind != MemoryKind.HOST:
        backends.update(device_backends())
    if not backends:
        raise typer.BadParameter("--memory device needs a GPU, and torch sees none here.")
    first = ring.rank() == 0
    with Progress(console=Console(stderr=True), disable=not first, transient=True) as progress:
        task = progress.add_task(f"all-reduce of {smallest} to {largest} bytes", total=len(wanted))
        curve = all_reduce_curve(backends, wanted, seconds, lambda *_: progress.advance(task))
    if first and json:
        print(json_module.dumps(curve.record(), indent=1))
    elif first:
        _print(Console(), curve)
    if first and png is not None:
        from ring_plugins.planning.drawing import draw_curve

        draw_curve(curve, png)
    ring.shutdown()


def _print(console: Console, curve: Curve) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    caption = "µs: median; min µs: shortest; algbw, busbw: GB/s; ratio: median / that of the first backend"
    table = Table(title=f"all-reduce of float32, {curve.job}", caption=caption, box=SIMPLE, pad_edge=False)
    for column in ("bytes", "backend", "µs", "min µs", "algbw", "busbw", "ratio"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    for nbytes, times in curve.times.items():
        reference = next(iter(times.values())).median
        for i, (name, t) in enumerate(times.items()):
            table.add_row(
                f"{nbytes:,}" if i == 0 else "",
                name,
                f"{t.median * 1e6:,.1f}",
                f"{t.least * 1e6:,.1f}",
                f"{curve.algbw(nbytes, name):.3f}",
                "" if name == "plain copy" else f"{curve.busbw(nbytes, name):.3f}",
                f"{t.median / reference:.2f}",
                end_section=i == len(times) - 1,
            )
    console.print(table)
