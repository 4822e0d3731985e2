"""`ring plan`: how a model will scale, and which network it needs."""

from __future__ import annotations

import json as json_module
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ring_plugins.planning import Network, Prediction, Profile


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A reference model: `resnet-50`, `resnet-101`, `inception-v3`, `vgg-16`, `gpt2-small`.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Your own, as `ring_plugins.planning.measure(..., file=...)` wrote it.")
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="Between hosts: a rate such as `25gbit`, a name such as `ib-hdr`, or a file of `ring bench --json`."
        ),
    ] = "25gbit",
    transport: Annotated[
        str, typer.Option(help="What uses it: `rdma` or `tcp` (NCCL), `cpu` (MPI on CPUs), `ring` (ours on CPUs).")
    ] = "tcp",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="The most ranks to look at.")] = 1024,
    per_host: Annotated[int, typer.Option(min=1, help="Ranks, or GPUs, of a host.")] = 8,
    inside: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="GB/s between the ranks of a host: 10 with PCIe 3 (default), 100 and more with NVLink."
        ),
    ] = None,
    step: Annotated[
        float | None, typer.Option("--step-ms", help="Milliseconds of a step of one rank alone on your device.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option(help="Whether communication gets on during backward: not on CPUs whose every core computes.")
    ] = True,
    target: Annotated[float, typer.Option(min=0.01, max=0.999, help="Efficiency to find the network for.")] = 0.9,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw efficiency against ranks into this file.")] = None,
) -> None:
    """Predict how training scales with the number of ranks, and which network it needs.

    Gradients become ready during backward, buckets leave in order, and an all-reduce costs a latency a hop and a time a
    byte; what is not hidden behind backward makes the step longer, and so does waiting for the slowest of many ranks.
    `docs/planning.md` compares the predictions with measured jobs.

    **Examples**

    * `ring plan --model vgg-16 --network 25gbit --transport rdma --per-host 4`
    * `ring plan --model gpt2-small --step-ms 120 --network ib-hdr --transport rdma --png scaling.png`
    * `ring plan --profile mine.json --network network.json -n 64`
    """
    from ring_plugins.core.base.errors import ArgumentError
    from ring_plugins.planning import Profile, counts, default_sizes, draw, needed_gigabits, parse, predict, reference

    if (model is None) == (profile is None):
        raise typer.BadParameter("give either --model or --profile.")
    try:
        what = reference(model) if model is not None else Profile.load(profile or "")
        what = what if step is None else what.at_step(step / 1e3)
        between = parse(network, transport)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    between = between if inside is None else between.inside(inside)
    sizes = default_sizes(between)
    predictions = [predict(what, between, n, per_host, sizes, overlap=overlap) for n in counts(ranks)]
    needed = {n: needed_gigabits(what, between, n, per_host, target, sizes, overlap) for n in counts(ranks)}
    if json:
        record = {
            "model": what.name,
            "source": what.source,
            "network": asdict(between),
            "per_host": per_host,
            "target": target,
            "predictions": [
                {**asdict(one), "efficiency": one.efficiency, "needed_gigabits": _finite(needed[one.ranks])}
                for one in predictions
            ],
        }
        print(json_module.dumps(record, indent=1))
    else:
        _print(what, between, per_host, predictions, needed, target)
    if png is not None:
        draw({between.name: predictions}, f"{what.name}, {per_host} ranks a host", png)


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _print(
    profile: Profile,
    network: Network,
    per_host: int,
    predictions: list[Prediction],
    needed: dict[int, float],
    target: float,
) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{profile.name}: {profile.nbytes / 1e6:,.1f} MB of gradients, {profile.step * 1e3:.1f} ms a step of "
        f"{profile.batch} samples alone\n({profile.source})"
    )
    title = f"{network.name}, {per_host} ranks a host"
    caption = (
        "late: waiting for the slowest rank; open: communication that backward does not hide; kept: efficiency, the "
        f"share left of as many ranks without communication; {target:.0%} Gbit/s: the rate a host needs for that"
    )
    table = Table(title=title, caption=caption, box=SIMPLE, pad_edge=False)
    for column in ("ranks", "hosts", "step ms", "late ms", "open ms", "kept", "samples/s", f"{target:.0%} Gbit/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in predictions:
        rate = needed[one.ranks]
        table.add_row(
            f"{one.ranks:,}",
            f"{-(-one.ranks // per_host):,}",
            f"{one.step * 1e3:.1f}",
            f"{one.waiting * 1e3:.1f}",
            f"{one.exposed * 1e3:.1f}",
            f"{one.efficiency:.1%}",
            f"{one.ranks * profile.batch / one.step:,.0f}",
            "-" if one.ranks <= per_host else "none" if math.isinf(rate) else f"{rate:.3g}",
        )
    console.print(table)
    most = predictions[-1]
    if most.ranks <= per_host:
        return
    rate = needed[most.ranks]
    if math.isinf(rate):
        console.print(
            f"{target:.0%} of {most.ranks:,} ranks' throughput cannot be had from a faster network alone: latency, the "
            "bytes that are ready last and waiting for the slowest rank remain. A larger batch a rank helps."
        )
    elif rate > network.gigabits:
        console.print(
            f"{most.ranks:,} ranks reach {most.efficiency:.1%}; {target:.0%} needs {rate:.3g} Gbit/s a host with this "
            f"transport, or a larger batch a rank."
        )
    else:
        console.print(
            f"{most.ranks:,} ranks reach {most.efficiency:.1%}; {target:.0%} would need {rate:.3g} Gbit/s a host."
        )
