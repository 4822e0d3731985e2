"""`ring plan`: predict how a model scales, and which network it needs."""

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
        Path | None,
        typer.Option(help="Your own model: a file that `ring_plugins.planning.measure(..., file=...)` wrote."),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="Network between hosts: a rate such as `25gbit`, a name such as `ib-hdr`, or a file that `ring bench "
            "--json` wrote."
        ),
    ] = "25gbit",
    transport: Annotated[
        str,
        typer.Option(help="Transport: `rdma` or `tcp` (NCCL), `cpu` (MPI on CPUs), `ring` (ring_plugins on CPUs)."),
    ] = "tcp",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Largest number of ranks to predict.")] = 1024,
    per_host: Annotated[int, typer.Option(min=1, help="Ranks (GPUs) per host.")] = 8,
    inside: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="GB/s inside a host: 10 with PCIe 3, 100 or more with NVLink. The default is the transport's.",
        ),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option("--step-ms", help="Milliseconds of a step on your device, on one rank without communication."),
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            help="Whether communication runs during backward; on CPUs of which every core computes, it does not."
        ),
    ] = True,
    target: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Efficiency for which to find the rate that the network needs.")
    ] = 0.9,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw efficiency by ranks into this file.")] = None,
) -> None:
    """Predict how training scales with the number of ranks, and which network it needs.

    Gradients become ready during backward, buckets are reduced in order, and an all-reduce costs a latency per hop and
    a time per byte. Communication that backward does not hide makes the step longer, as does waiting for the slowest
    rank. `docs/planning.md` compares predictions with measured jobs.

    **Examples**

    * `ring plan --model vgg-16 --network 25gbit --transport rdma --per-host 4`
    * `ring plan --model gpt2-small --step-ms 120 --network ib-hdr --transport rdma --png scaling.png`
    * `ring plan --profile mine.json --network network.json -n 64`
    """
    from ring_plugins.core.base.errors import ArgumentError
    from ring_plugins.planning import (
        Profile,
        advice,
        counts,
        default_sizes,
        needed_gigabits,
        parse,
        predict,
        reference,
        remedies,
    )

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
    most = predictions[-1].ranks, per_host, overlap
    if json:
        finite = {count: None if math.isinf(rate) else rate for count, rate in needed.items()}  # JSON has no infinity
        record = {
            "model": what.name,
            "source": what.source,
            "network": asdict(between),
            "per_host": per_host,
            "target": target,
            "predictions": [
                {**asdict(one), "efficiency": one.efficiency, "needed_gigabits": finite[one.ranks]}
                for one in predictions
            ],
            "remedies": {name: asdict(one) for name, one in remedies(what, between, *most).items()},
        }
        print(json_module.dumps(record, indent=1))
    else:
        _print(what, between, per_host, predictions, needed, target, advice(what, between, *most))
    if png is not None:
        from ring_plugins.planning.drawing import draw_scaling

        draw_scaling({between.name: predictions}, f"{what.name}, {_count(per_host, 'rank')} per host", png)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _print(
    profile: Profile,
    network: Network,
    per_host: int,
    predictions: list[Prediction],
    needed: dict[int, float],
    target: float,
    advised: str,
) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{profile.name}: {profile.nbytes / 1e6:,.1f} MB of gradients; "
        f"a step of {_count(profile.batch, 'sample')} takes {profile.step * 1e3:.1f} ms on one rank\n({profile.source})"
    )
    title = f"{network.name}, {_count(per_host, 'rank')} per host"
    caption = (
        "waiting: for the slowest rank; not hidden: communication that backward does not hide; efficiency: throughput "
        f"relative to that without communication; {target:.0%} needs: rate per host that reaches {target:.0%}"
    )
    table = Table(title=title, caption=caption, box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    titles = ("ranks", "hosts", "step, ms", "waiting, ms", "not hidden, ms", "efficiency", "samples/s")
    for column in (*titles, f"{target:.0%} needs, Gbit/s"):
        table.add_column(column, justify="right")
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
        console.print(
            f"All {most.ranks} ranks are assumed to be on one host (--per-host {per_host}), where they use no network: "
            f"--per-host {max(1, most.ranks // 2)} predicts for more hosts."
        )
        return
    rate = needed[most.ranks]
    if math.isinf(rate):
        console.print(
            f"No network lets {most.ranks:,} ranks reach {target:.0%}: latency, the bytes that are ready last, and "
            "waiting for the slowest rank remain. A larger batch per rank helps."
        )
    elif rate > network.gigabits:
        console.print(
            f"{most.ranks:,} ranks reach {most.efficiency:.1%}; {target:.0%} needs {rate:.3g} Gbit/s per host with "
            "this transport, or a larger batch per rank."
        )
    else:
        console.print(
            f"{most.ranks:,} ranks reach {most.efficiency:.1%}; {target:.0%} would need {rate:.3g} Gbit/s per host."
        )
    if advised:
        console.print(advised)
