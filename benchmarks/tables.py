"""Print the results of the other benchmarks as Markdown tables for docs/performance.md.

python benchmarks/tables.py            # reads benchmarks/results
"""

from __future__ import annotations

import json
from typing import Any

from between_hosts import limit
from measure import RESULTS


def load(name: str) -> dict[str, Any]:
    """Read the results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


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


def memory() -> str:
    """Peak and growth."""
    record = load("memory")
    base = record["peak"]["no communication"]
    rows = [[n, f"{p / 1e6:,.0f}", f"{(p - base) / record['gradients']:.2f}"] for n, p in record["peak"].items()]
    return table(["", "peak resident memory, MB", "growth / bytes of gradients"], rows)


def overhead() -> str:
    """ms per step by ranks and parameters."""
    record = load("overhead")
    counts = list(next(iter(record["seconds"].values())))
    rows = [[ranks, *(f"{max(row[c], 0) * 1e3:.2f}" for c in counts)] for ranks, row in record["seconds"].items()]
    return table(["ranks", *(f"{int(c):,} parameters, ms" for c in counts)], rows)


def between_hosts() -> str:
    """Median ms by network and size, and the limit of the wire."""
    record = load("between_hosts")
    rows = []
    for one in record["networks"]:
        for nbytes, times in one["seconds"].items():
            if int(nbytes) not in _SHOWN:
                continue
            m = {name: t["median"] * 1e3 for name, t in times.items()}
            least = limit(int(nbytes), one["hosts"], one["rate"]) * 1e3
            cells = [f"{m[name]:,.2f}" if name in m else "" for name in _BETWEEN]
            best = min(m["ring"], m["ring bucket"])
            shares = [f"{least / best:.2f}" if least else ""]
            shares.append(f"{m['bare sockets'] / best:.2f}" if "bare sockets" in m else "")
            shares += [f"{m[name] / m['ring']:.2f}" if name in m else "" for name in ("MPI", "gloo")]
            network = f"{one['hosts']} hosts, {one['rate'] or 'no limit'}"
            rows.append([network, size(int(nbytes)), *cells, f"{least:,.2f}" if least else "", *shares])
    header = [
        "",
        "message",
        *(f"{name}, ms" for name in _BETWEEN),
        "limit, ms",
        "limit / ring",
        "bare / ring",
        "MPI / ring",
        "gloo / ring",
    ]
    return table(header, rows) + f"\n\n({record['machine']})"


#: Sizes in the table; the plot has all.
_SHOWN = (64, 16 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)
_BETWEEN = ("ring", "ring bucket", "ring over MPI", "bare sockets", "MPI", "gloo")


if __name__ == "__main__":
    print("\n\n".join(make() for make in (messages, steps, memory, overhead, between_hosts)))
