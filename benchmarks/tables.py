"""Write kept results into the documentation, as tables and sentences.

    python benchmarks/tables.py            # reads benchmarks/results, writes the pages that have tables

Each stands between the comments `<!-- results: NAME -->` and `<!-- end -->`, where NAME is a function below. Figures
inside a sentence do, too; the first comment then does not begin a line.
tests/test_documentation.py checks that both agree.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from between_hosts import limit
from kills import kept
from measure import load

from ring_plugins.planning import parse, predict, remedies, typical

#: The share of a step that may wait for the network before compression, and before local updates are recommended.
ENOUGH, TOO_MUCH = 0.15, 0.5


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def size(nbytes: int) -> str:
    """Format bytes, as "64 KiB"."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def messages() -> str:
    """Median µs, and ratios."""
    record = load("all_reduce")
    rows = []
    for nbytes, times in record["seconds"].items():
        m = {name: t["median"] * 1e6 for name, t in times.items()}
        ratios = (
            m["gloo"] / m["ring"],
            m["MPI"] / m["ring"],
            m["ring"] / m["plain copy"],
            m["ring bucket"] / m["plain copy"],
        )
        rows.append([size(int(nbytes)), *(f"{m[n]:,.1f}" for n in m), *(f"{r:.2f}" for r in ratios)])
    header = ["", *(f"{n}, µs" for n in m), "gloo / ring", "MPI / ring", "ring / copy", "bucket / copy"]
    return table(header, rows) + f"\n\n({record['machine']})"


def steps() -> str:
    """Median ms with quartiles, and ratios."""
    record = load("training_step")
    rows = []
    for model, times in record["seconds"].items():
        none = times["no communication"]["median"]
        ratios = [t["median"] / none for name, t in times.items() if name in ("copied", "ring_plugins")]
        ratios.append(times["ring_plugins"]["median"] / times["DDP (gloo)"]["median"])
        cells = [f"{t['median'] * 1e3:.2f} ({t['low'] * 1e3:.2f}-{t['high'] * 1e3:.2f})" for t in times.values()]
        profile = [f"{record['profile'][model][what] * 1e3:.2f}" for what in ("reducing", "waited")]
        rows.append([model, *cells, *(f"{ratio:.3f}" for ratio in ratios), *profile])
    names = [*(["copied / none"] if "copied" in times else []), "ring / none", "ring / DDP"]
    header = ["", *(f"{n}, ms" for n in times), *names, "reducing, ms", "waited, ms"]
    return table(header, rows) + f"\n\n({record['machine']})"


def overlap() -> str:
    """Median ms with quartiles by the value of `overlap`, and the ratio of "auto" to the better of both ways."""
    record = load("overlap")
    rows = []
    for model, times in record["seconds"].items():
        cells = [f"{t['median'] * 1e3:.2f} ({t['low'] * 1e3:.2f}-{t['high'] * 1e3:.2f})" for t in times.values()]
        _, auto, *fixed = (t["median"] for t in times.values())
        rows.append([model, *cells, f"{auto / min(fixed):.3f}"])
    header = ["", *(f"{n}, ms" for n in times), "auto / the better"]
    return table(header, rows) + f"\n\n({record['machine']})"


def memory() -> str:
    """Peak and growth."""
    record = load("memory")
    base = record["peak"]["no communication"]
    rows = [[n, f"{p / 1e6:,.0f}", f"{(p - base) / record['gradients']:.2f}"] for n, p in record["peak"].items()]
    return table(["", "peak resident memory, MB", "growth / bytes of gradients"], rows) + f"\n\n({record['machine']})"


def overhead() -> str:
    """ms per step by ranks and parameters."""
    record = load("overhead")
    counts = list(next(iter(record["seconds"].values())))
    rows = [[ranks, *(f"{max(row[c], 0) * 1e3:.2f}" for c in counts)] for ranks, row in record["seconds"].items()]
    return table(["ranks", *(f"{int(c):,} parameters, ms" for c in counts)], rows) + f"\n\n({record['machine']})"


def between_hosts() -> str:
    """Median ms by network and size, and the limit of the wire."""
    record = load("between_hosts")
    names = [name for name in _BETWEEN if name in next(iter(record["networks"][0]["seconds"].values()))]
    rows = []
    for one in record["networks"]:
        for nbytes, times in one["seconds"].items():
            if int(nbytes) not in _SHOWN:
                continue
            m = {name: t["median"] * 1e3 for name, t in times.items()}
            least = limit(int(nbytes), one["hosts"], one["rate"]) * 1e3
            cells = [f"{m[name]:,.2f}" if name in m else "" for name in names]
            best = min(m["ring"], m["ring bucket"])
            shares = [f"{least / best:.2f}" if least else ""]
            shares.append(f"{m['bare sockets'] / best:.2f}" if "bare sockets" in m else "")
            shares += [f"{m[name] / m['ring']:.2f}" if name in m else "" for name in ("MPI", "gloo")]
            network = f"{one['hosts']} hosts, {one['rate'] or 'no limit'}"
            rows.append([network, size(int(nbytes)), *cells, f"{least:,.2f}" if least else "", *shares])
    header = [
        "",
        "message",
        *(f"{name}, ms" for name in names),
        "limit, ms",
        "limit / ring",
        "bare / ring",
        "MPI / ring",
        "gloo / ring",
    ]
    return table(header, rows) + f"\n\n({record['machine']})"


#: Sizes in the table; the plot has all.
_SHOWN = (64, 16 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)
_BETWEEN = ("ring", "ring bucket", "ring over MPI", "bare sockets", "sockets and sums", "MPI", "gloo")


def summary() -> str:
    """A sentence: the range of ratios to DDP and to no communication, over all models."""
    record = load("training_step")
    medians = [{name: t["median"] for name, t in times.items()} for times in record["seconds"].values()]
    ranges = []
    for name in ("DDP (gloo)", "no communication"):
        ratios = sorted(m["ring_plugins"] / m[name] for m in medians)
        ranges.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    return (
        f"On two cores with two ranks, a training step takes {ranges[0]} times as long as with torch DDP (gloo), "
        f"and {ranges[1]}\ntimes as long as without any communication."
    )


def span(ratios: Sequence[float], scale: int = 1) -> str:
    """The least and the largest of them, as "0.49 to 0.90", or with a scale of 100, as "18 to 44 %"."""
    least, largest = min(ratios) * scale, max(ratios) * scale
    return f"{least:.0f} to {largest:.0f} %" if scale == 100 else f"{least:.2f} to {largest:.2f}"


def bucket_to_copy() -> str:
    """The range of an all-reduce in a bucket to a plain copy, from 16 MiB on."""
    found = load("all_reduce")["seconds"].items()
    return span([t["ring bucket"]["median"] / t["plain copy"]["median"] for n, t in found if int(n) >= 16 << 20])


def ratios_to_ring(name: str, least: int = 0, most: int = 1 << 40, hosts: Sequence[int] = (2, 3, 4)) -> list[float]:
    """An all-reduce's time by one way to that of "ring", in the rows of the table between hosts that have both."""
    return [
        times[name]["median"] / times["ring"]["median"]
        for one in load("between_hosts")["networks"]
        for n, times in one["seconds"].items()
        if one["hosts"] in hosts and name in times and least <= int(n) <= most and int(n) in _SHOWN
    ]


def sockets_to_mpi() -> str:
    """The range of our all-reduce over sockets to the same over MPI."""
    return span([1 / ratio for ratio in ratios_to_ring("ring over MPI")])


def of_the_wire(nbytes: int, hosts: int, rate: str, *names: str) -> str:
    """The share of the wire's limit that the fastest of these ways reaches."""
    (one,) = (one for one in load("between_hosts")["networks"] if (one["hosts"], one["rate"]) == (hosts, rate))
    best = min(one["seconds"][str(nbytes)][name]["median"] for name in names)
    return f"{limit(nbytes, hosts, rate) / best:.0%}".replace("%", " %")


def slow_wire() -> str:
    """Shares of the limit where the wire is the bottleneck."""
    two, four = (of_the_wire(25 << 20, hosts, "1gbit", "ring", "ring bucket") for hosts in (2, 4))
    return f"{two} of the wire's limit with two hosts and {four} with four"


def fast_wire() -> str:
    """Shares of the limit where the cores are the bottleneck, with 25 and 100 MiB."""
    ways = ("ring", "ring bucket"), ("bare sockets",), ("MPI",), ("gloo",)
    (ring, large), *others = (
        [of_the_wire(mib << 20, 2, "10gbit", *names) for mib in (25, 100)] for names in ways
    )  # fmt: skip
    rest = ", ".join(
        f"{names[0]} {one.removesuffix(' %')} and {two}" for names, (one, two) in zip(ways[1:], others, strict=True)
    )
    return f"25 MiB reach {ring} of the limit, and 100 MiB {large}; {rest.replace('sockets', 'sockets reach')}"


def mpi_is_faster() -> str:
    """How much less time MPI takes for small messages; it and gloo are faster for none from 1 MiB on."""
    large = [*ratios_to_ring("MPI", 1 << 20), *ratios_to_ring("gloo", 1 << 20)]
    assert min(large) > 1, "the sentence behind this one is not true any more"
    two, more = (
        span([1 - ratio for ratio in ratios_to_ring("MPI", 0, 16 << 10, hosts)], 100) for hosts in ((2,), (3, 4))
    )
    medium = span([1 - ratio for ratio in ratios_to_ring("MPI", 64 << 10, 64 << 10, (3, 4))], 100)
    return (
        f"Between two hosts, MPI takes {two} less time up to 16 KiB, because its C is faster than our Python.\n"
        f"Between three and four hosts it takes {more} less up to 16 KiB, and {medium} less for 64 KiB."
    )


def kills() -> str:
    """What is kept of a training while ranks are killed, the time that a kill costs, and the longest pause."""
    record = load("kills")
    names = {
        "replace": '`on_failure="replace"`',
        "spare": '`on_failure="replace"`, with a standby',
        "restart": "ring_plugins, restarted from a checkpoint",
        "torchrun": "DDP, `torchrun --max-restarts`",
        "torchft": "DDP, torchft",
    }
    rows, intervals = [], list(next(iter(record["variants"].values()))["kills"])
    for variant, found in record["variants"].items():
        cells = [names[variant]]
        for every in intervals:
            share, cost = kept(found["kills"], every)
            cells += [f"{share:.0%}", f"{cost:.1f}", f"{found['kills'][every]['longest']:.2f}"]
        rows.append(cells)
    header = [""]
    for every in intervals:
        header += [f"a kill every {every} s: kept", "s lost a kill", "longest pause, s"]
    return table(header, rows) + f"\n\n({record['machine']})"


def target(records: Sequence[Mapping[str, Any]]) -> float:
    """The loss of synchronous training after three quarters of its steps."""
    losses = records[0]["losses"]
    return float(losses[len(losses) * 3 // 4 - 1])


def step_and_target(record: Mapping[str, Any], loss: float) -> tuple[float, float | None]:
    """The mean seconds of a step, and the seconds until a loss is reached; None if it is not."""
    reached = (end for end, found in zip(record["ends"], record["losses"], strict=True) if found <= loss)
    return statistics.mean(record["seconds"][10:]), next(reached, None)


def time_to_loss() -> str:
    """Seconds to a loss, by the rate of the network."""
    record = load("time_to_loss")
    goals = {rate: target(runs) for rate, runs in record["rates"].items()}
    header, rows = [""], []
    for rate, goal in goals.items():
        header += [f"{rate}: ms a step", f"s to a loss of {goal:.2f}"]
    for index, run in enumerate(next(iter(record["rates"].values()))):
        cells = [f"`{run['run']}`" if "=" in run["run"] or run["run"] == "LocalUpdates" else run["run"]]
        for rate, goal in goals.items():
            step, seconds = step_and_target(record["rates"][rate][index], goal)
            cells += [f"{step * 1e3:.0f}", "never" if seconds is None else f"{seconds:.0f}"]
        rows.append(cells)
    return table(header, rows) + f"\n\n({record['machine']})"


def compression() -> str:
    """Median ms of an all-reduce between hosts by codec, and of steps with each way that "auto" tries, where kept."""
    record, codecs = load("compression"), ["none", "bf16", "fp16", "int8"]
    reduced, trained = [], []
    for one in record["networks"]:
        rate = one["rate"].replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
        ms = {name: times["median"] * 1e3 for name, times in one["seconds"].items()}
        for size, shown in (("0.001", "1e-3"), ("1e-05", "1e-5")):
            first, *others = [ms[f"{codec}, {size}"] for codec in codecs]
            cells = [f"{first:,.0f}", *(f"{other:,.0f} ({first / other:.1f}x)" for other in others)]
            reduced.append([f"{rate}, numbers of size {shown}", *cells])
        if "auto" in one:
            cells = [f"{ms[f'step, {way}']:,.0f}" for way in ("none", "bf16", "int8", "auto")]
            trained.append([rate, *cells, {"None": "none"}.get(one["auto"], one["auto"].removeprefix("sent as "))])
    text = table(["", "none", *(f'`"{codec}"`' for codec in codecs[1:])], reduced)
    if trained:
        text += "\n\nSteps of a perceptron with 10 MiB of weights, in milliseconds:\n\n"
        text += table(["", "none", '`"bf16"`', '`"int8"`', '`"auto"`', '`"auto"` chose'], trained)
    return f"{text}\n\n({record['machine']})"


def codec_losses() -> str:
    """Mean and standard deviation of the losses of seeds, by model and codec."""
    rows = []
    for model, losses in load("codec_losses")["losses"].items():
        cells = [f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}" for found in losses.values()]
        rows.append([model, *cells])
    return table(["", "none", *(f'`"{codec}"`' for codec in list(losses)[1:])], rows)


def network_needs() -> str:
    """By `ring plan`'s model: the share of a step of 250 ms that waits for the network, and what brings it down."""
    rows = []
    for million in (1, 10, 100):
        profile = typical(million)
        for hosts in (2, 8):
            cells = [f"{million} million, {hosts} hosts"]
            for gigabits in (0.1, 1, 10):
                network = parse(f"{gigabits:g}gbit", "ring")
                shares = [predict(profile, network, hosts, overlap=False).exposed_share]
                shares += [one.exposed_share for one in remedies(profile, network, hosts, overlap=False).values()]
                best = "nothing" if shares[0] <= ENOUGH else '`"auto"`' if shares[1] <= TOO_MUCH else "local updates"
                cells.append(" / ".join(f"{share:.0%}" for share in shares) + f": {best}")
            rows.append(cells)
    return table(["parameters", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"], rows)


def healing_campaign() -> str:
    """What jobs of forked ranks came to in which ranks died, by the point of the first death."""
    record = load("healing_campaign")
    campaigns = {kind: one for kind, one in record["campaigns"].items() if "launchers" not in one}
    columns = {"jobs": "jobs", "deaths": "deaths", "went on": "went on", "ended": "ended as documented", "bad": "wrong"}
    rows = []
    for kind, campaign in campaigns.items():
        rows += campaign_rows(campaign["points"], columns, f"{kind}: ", kind)
    seeds = ", ".join(f"{kind}: seed {campaign['seed']}" for kind, campaign in campaigns.items())
    return table(["ranks die first in", *columns.values()], rows) + f"\n\n({seeds}; {record['machine']})"


def healing_launchers() -> str:
    """What jobs came to that were started as users start them, by launcher and framework, and all faults by point."""
    campaign = load("healing_campaign")["campaigns"]["healing_launchers"]
    columns = {"jobs": "jobs", "faults": "faults", "joins": "joined", "went on": "went on",
               "ended": "ended as documented", "bad": "wrong"}  # fmt: skip
    rows = campaign_rows(campaign["launchers"], columns)
    rows += campaign_rows(campaign["faces"], columns, "all of them: ", "all")
    struck = sorted(campaign["struck"].items(), key=lambda one: -one[1])
    points = [[_POINTS.get(point, point), str(count)] for point, count in struck]
    jobs, faults = table(["started by", *columns.values()], rows), table(["a process was lost in", "times"], points)
    return f"{jobs}\n\n{faults}\n\n(seed {campaign['seed']}; {campaign['machine']})"


#: What the points are called at which the campaign's processes die, where their names do not say so.
_POINTS = {
    "round": "an exchange of a join", "waiting": "the time before it joins", "stopped": "a join: SIGSTOP",
    "stop": "a step: SIGSTOP, later SIGCONT", "SIGTERM": "a step: SIGTERM", "init": "`init()`",
    "commit": "the time between `commit()`s", "healing": "the agreement on who is left",
}  # fmt: skip


def campaign_rows(
    groups: dict[str, dict[str, int]], columns: dict[str, str], prefix: str = "", total: str = ""
) -> list[list[str]]:
    """A row for each group of a campaign's jobs, and one of their sums if it has a name."""
    rows = [
        [f"{prefix}{_POINTS.get(name, name)}", *(str(found[one]) for one in columns)] for name, found in groups.items()
    ]
    sums = [f"**{sum(found[one] for found in groups.values())}**" for one in columns]
    return [*rows, [f"**{total}**", *sums]] if total else rows


def healing_cost() -> str:
    """What going on after a loss adds to a step between hosts, in ms with its 95 % interval."""
    record = load("healing_between_hosts")
    rows = []
    for hosts, models in record["cost"].items():
        for model, row in models.items():
            added = [f"{more * 1e3:+.2f} ({low * 1e3:+.2f} to {high * 1e3:+.2f})" for more, low, high in
                     (row["more"], row["copy"])]  # fmt: skip
            rows.append([f"{hosts} hosts, {model} of parameters", f"{row['end'] * 1e3:.2f}", *added])
    header = ["", 'a step with `"end"`, ms', '`"continue"` adds, ms', "a mere copy of the gradients adds, ms"]
    return table(header, rows) + f"\n\n({record['machine']})"


def healing_recovery() -> str:
    """Seconds from a loss between hosts to the end of the next step."""
    record = load("healing_between_hosts")
    cut = record["cut"]
    rows = [(f"one of {hosts} hosts: SIGKILL", row) for hosts, row in record["kill"].items()]
    rows.append((f"one of 4, 3 or 2 hosts: its network, RING_NETWORK_TIMEOUT={cut['timeout']:g}", cut))
    cells = [[name, str(row["losses"]), f"{row['median']:.3f}", f"{row['worst']:.3f}"] for name, row in rows]
    return table(["lost", "losses", "median, s", "worst, s"], cells) + f"\n\n({record['machine']})"


ROOT = Path(__file__).parent.parent
PAGES = (
    "slow_networks",
    "networks",
    "performance",
    "performance_details",
    "fault_tolerance_launchers",
    "how_recovery_works",
    "testing",
)
DOCUMENTS = *(ROOT / "docs" / f"{page}.md" for page in PAGES), ROOT / "README.md"
RESULT = re.compile(r"(<!-- results: (\w+) -->\n?).*?(\n?<!-- end -->)", re.DOTALL)
MADE = {
    make.__name__: make
    for make in (
        messages,
        steps,
        overlap,
        memory,
        overhead,
        between_hosts,
        kills,
        time_to_loss,
        compression,
        codec_losses,
        network_needs,
        healing_campaign,
        healing_launchers,
        healing_cost,
        healing_recovery,
        summary,
        bucket_to_copy,
        sockets_to_mpi,
        slow_wire,
        fast_wire,
        mpi_is_faster,
    )
}


def filled(text: str) -> str:
    """A document with its tables and sentences from kept results."""
    return RESULT.sub(lambda match: match[1] + MADE[match[2]]() + match[3], text)


def write() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
        print(f"wrote {document}")


if __name__ == "__main__":
    write()
