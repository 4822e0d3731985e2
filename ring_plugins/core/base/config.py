"""Every RING_* environment variable, declared once: name, type, default and meaning.

The code reads a variable with `.get()`, `ring doctor` checks all of them, and docs/environment.md is generated from
them (`python -m ring_plugins.core.base.config`). Nothing else in the package reads a RING_* variable.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ring_plugins.core.base.errors import ArgumentError

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):  # Python 3.10 has no generic NamedTuple
    """A type of value.

    Attributes:
        parse: turns a text into a value, or raises ValueError or KeyError.
        problem: completes "NAME='value' is ..." for a text that `parse` rejects.
    """

    parse: Callable[[str], T]
    problem: str


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(_whole(part.strip()) for part in text.split(","))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not 0 < _whole(port) < 2**16:
        raise ValueError(text)
    return host or "127.0.0.1", int(port)


SECONDS = Kind(_positive, "not a positive number of seconds")
SWITCH = Kind(_switch, "neither 0 nor 1")
WHOLE_NUMBER = Kind(_whole, "not a whole number")
COUNTS = Kind(_counts, "not a comma-separated list of positive numbers")
TEXT: Kind[str] = Kind(str, "not a text")
ADDRESS: Kind[tuple[str, int] | None] = Kind(_address, "not HOST:PORT, such as 127.0.0.1:9400 or :9400")


def one_of(*choices: str, synonyms: Mapping[str, str] | None = None) -> Kind[str]:
    """One of several words; a synonym, documented by earlier releases, counts as the word it stands for."""
    words = {**{choice: choice for choice in choices}, **(synonyms or {})}
    return Kind(lambda text: words[text], f"not one of {', '.join(choices)}")


class Variable(Generic[T]):
    """An environment variable.

    Args:
        name: of the variable.
        kind: type of its value.
        default: value if it is not set or empty.
        meaning: one line of Markdown for docs/environment.md, "" for a variable that only our launchers set.
        shown_default: the default in words.
        older: its name in earlier releases, still read.
    """

    def __init__(
        self,
        name: str,
        kind: Kind[T],
        default: T,
        meaning: str,
        shown_default: str = "",
        older: str = "",
    ) -> None:
        self.name, self.kind, self.default, self.meaning = name, kind, default, meaning
        self.shown_default, self.older = shown_default, older
        ALL[name] = self

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and the older one if it has one."""
        return (self.name, self.older) if self.older else (self.name,)

    @property
    def is_internal(self) -> bool:
        """Whether only our launchers set it, for the processes that they start."""
        return not self.meaning

    def text(self, environment: Mapping[str, str] = os.environ) -> str:
        """Its raw text, "" if not set."""
        return environment.get(self.name) or (environment.get(self.older, "") if self.older else "")

    def is_set(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Whether it has a text."""
        return bool(self.text(environment))

    def problem(self, environment: Mapping[str, str] = os.environ) -> str:
        """What is wrong with its text, completing "NAME='value' is ..."; "" if it is valid."""
        text = self.text(environment)
        try:
            if text:
                self.kind.parse(text)
        except (ValueError, KeyError):
            return self.kind.problem
        return ""

    def get(self, environment: Mapping[str, str] = os.environ) -> T:
        """Its value.

        Raises:
            ArgumentError: its text cannot be used.
        """
        text = self.text(environment)
        if not text:
            return self.default
        try:
            return self.kind.parse(text)
        except (ValueError, KeyError):
            name = self.name if environment.get(self.name) else self.older
            raise ArgumentError(f"{name}={text!r} is {self.kind.problem}.") from None


ALL: dict[str, Variable] = {}  # type: ignore[type-arg]  # of all types

TIMEOUT = Variable(
    "RING_TIMEOUT", SECONDS, 1800.0, "seconds that an operation waits for a rank that is alive but does not arrive"
)
STALL_WARNING = Variable(
    "RING_STALL_WARNING",
    SECONDS,
    30.0,
    "seconds of waiting after which rank 0 reports the missing ranks and what they do ([observing](observing.md))",
)
STALL_ABORT = Variable(
    "RING_STALL_ABORT",
    SECONDS,
    0.0,
    "seconds of waiting after which a stalled job is ended with that report",
    shown_default="never",
)
METRICS = Variable(
    "RING_METRICS",
    ADDRESS,
    None,
    "`HOST:PORT` at which rank 0 serves [numbers for Prometheus](observing.md#watch-a-running-job); `:9400` is on this "
    "host only; needs `ring_plugins[metrics]`",
    shown_default="none",
)
TIMELINE = Variable(
    "RING_TIMELINE",
    TEXT,
    "",
    "directory into which rank 0 writes a timeline of all ranks ([observing](observing.md))",
    shown_default="none",
)
DRIFT_CHECK = Variable(
    "RING_DRIFT_CHECK",
    WHOLE_NUMBER,
    0,
    "steps between two comparisons of all ranks' weights, 0 for never ([observing](observing.md))",
)
WEIGHT_CHECK = Variable(
    "RING_WEIGHT_CHECK",
    SWITCH,
    True,
    "0 switches off the comparison of all ranks' weights after the first step, after 2, 4, 8... "
    "steps, and with Lightning and Keras before checkpoints "
    "([observing](observing.md#do-all-ranks-still-have-the-same-weights)); ranks may then train models of their own",
)
START_TIMEOUT = Variable(
    "RING_START_TIMEOUT",
    SECONDS,
    300.0,
    "seconds that ranks wait for each other in `init()`, for NCCL to connect their GPUs and, if set to more than 18, "
    "for hosts to answer `ring run`",
)
INTERFACE = Variable(
    "RING_INTERFACE",
    TEXT,
    "",
    "network between the hosts: an interface (`eth1`), several, or a subnet (`10.1.0.0/16`); `ring run` passes it to "
    "mpirun, NCCL and gloo too: see [networks](networks.md)",
    shown_default="fastest",
)
TRANSPORT = Variable(
    "RING_TRANSPORT",
    one_of("tcp", "mpi"),
    "",
    "what moves data between hosts under mpirun and `srun --mpi=pmix`: see [networks](networks.md#how-data-moves)",
    shown_default="`tcp`, or `mpi` over InfiniBand and the like",
    older="RING_PLANE",
)
NETWORK_TIMEOUT = Variable(
    "RING_NETWORK_TIMEOUT",
    SECONDS,
    6.0,
    "seconds without any acknowledgment from another host's kernel after which its network counts as lost: see "
    "[networks](networks.md#while-training)",
)
SECRET = Variable(
    "RING_SECRET",
    TEXT,
    "",
    "secret of a job on several hosts under torchrun, srun and other launchers without MPI, the same on all ranks: see "
    "[security](security.md#set-a-secret)",
    shown_default="none",
)
LAUNCHER = Variable(
    "RING_LAUNCHER",
    one_of("mpi", "rendezvous", "slurm", "spawned", "single", synonyms={"grown": "spawned", "alone": "single"}),
    "",
    "`mpi`, `slurm`, `rendezvous` (the variables of torchrun) or `single` (no launcher) overrides what `init()` "
    "detects",
    shown_default="detected",
)
SHARED_MEMORY = Variable(
    "RING_SHARED_MEMORY",
    SWITCH,
    True,
    "0 sends data between ranks of one host over sockets or MPI, as between hosts; slower",
)
VIRTUAL_NODES: Variable[tuple[int, ...]] = Variable(
    "RING_VIRTUAL_NODES",
    COUNTS,
    (),
    "for debugging: `2` treats the ranks of each host as if they were on two hosts, `1,2` as one rank on one host and "
    "two on another; needs mpirun or torchrun",
    shown_default="none",
)
OVERLAP = Variable(
    "RING_OVERLAP",
    one_of("auto", "0", "1"),
    "auto",
    "1 averages gradients while backward still runs, 0 when it is over, `auto` measures both: see "
    "[performance](performance_details.md#overlap)",
    shown_default="`auto`",
)
KEEP_MEMORY = Variable(
    "RING_KEEP_MEMORY",
    SWITCH,
    True,
    "0 lets glibc give back to the kernel what each step frees: see [page faults](performance_details.md#page-faults)",
)
AUTOTUNE = Variable(
    "RING_AUTOTUNE",
    SWITCH,
    False,
    "1 tries other bucket sizes in the first steps and keeps the fastest, with PyTorch and Lightning: see "
    "[performance](performance.md#other-bucket-sizes)",
)
ON_FAILURE = Variable(
    "RING_ON_FAILURE",
    one_of("end", "continue", "replace"),
    "end",
    "`continue` trains on with the surviving ranks when one is killed or crashes; `replace` also starts a new process "
    "for it: see [fault tolerance](fault_tolerance.md)",
    shown_default="`end`",
)
MIN_RANKS = Variable(
    "RING_MIN_RANKS",
    WHOLE_NUMBER,
    1,
    "the fewest ranks with which a job continues if RING_ON_FAILURE is not `end`: see "
    "[fault tolerance](fault_tolerance.md)",
)
MAX_RANKS = Variable(
    "RING_MAX_RANKS",
    WHOLE_NUMBER,
    0,
    "up to how many ranks `ring add-ranks` may let a job grow if RING_ON_FAILURE is `replace`: see "
    "[fault tolerance](add_ranks.md#add-ranks)",
    shown_default="as at the start",
)
STANDBYS = Variable(
    "RING_STANDBYS",
    WHOLE_NUMBER,
    0,
    "how many further processes wait to take the places of lost ranks at once if RING_ON_FAILURE is `replace`: see "
    "[fault tolerance](replace_ranks.md#standbys)",
    older="RING_SPARES",
)
NCCL_LIBRARY = Variable(
    "RING_NCCL_LIBRARY",
    TEXT,
    "",
    "path of the NCCL to use; by default the one already in the process, else that of pip, else the system's",
    shown_default="found",
)
TENSORFLOW_NCCL = Variable(
    "RING_TENSORFLOW_NCCL",
    SWITCH,
    False,
    "1 averages gradients of Keras on TensorFlow in GPU memory; not yet tested on a GPU: see [gpu](gpu.md#use)",
)
JAX_NCCL = Variable(
    "RING_JAX_NCCL",
    SWITCH,
    False,
    "1 averages gradients of Keras on JAX in GPU memory; not yet tested on a GPU: see [gpu](gpu.md#use)",
)
NCCL_REPORT = Variable(
    "RING_NCCL_REPORT",
    SWITCH,
    False,
    "1 logs in one line what NCCL has chosen: see [gpu](gpu.md#between-hosts)",
)
NCCL_REGISTER = Variable(
    "RING_NCCL_REGISTER",
    SWITCH,
    False,
    "1 puts gradients into memory that NCCL allocates and registers; not yet run on a GPU: see "
    "[gpu](gpu.md#registered-memory)",
)
SHARE_GPU = Variable("RING_SHARE_GPU", SWITCH, False, "1 lets several ranks share one GPU, for tests; slow")

# Set by our launchers for the processes that they start.
SPAWNED = Variable("RING_SPAWNED", TEXT, "", "")
MEMBER = Variable("RING_MEMBER", TEXT, "", "")
EXPORTED = Variable("RING_EXPORTED", TEXT, "", "")
LOSSES_TOLERATED = Variable("RING_LOSSES_TOLERATED", TEXT, "", "")
OTHERS_MAY_COME = "hosts"  # its value if all ranks may be on one host now, and on others later
JOINS = Variable("RING_JOINS", WHOLE_NUMBER, 0, "")
SLOT = Variable("RING_SLOT", TEXT, "", "")
HOST_JOB = Variable("RING_HOST_JOB", TEXT, "", "")
PARENT_NOTIFIER = Variable("RING_PARENT_NOTIFIER", TEXT, "", "")
DRIVER = Variable("RING_DRIVER", TEXT, "", "")

#: Those that `init` reads once for the whole job: a change after it has no effect.
READ_BY_INIT = (
    ON_FAILURE, MIN_RANKS, MAX_RANKS, TRANSPORT, SHARED_MEMORY, VIRTUAL_NODES, TIMELINE, STALL_WARNING, STALL_ABORT
)  # fmt: skip


def unknown(environment: Mapping[str, str] = os.environ, likeness: float = 0.6) -> dict[str, str]:
    """The RING_* names of an environment that nothing reads, each with the variable that was probably meant, or "".

    Args:
        environment: to look at.
        likeness: from 0 to 1, how alike two names must be for one to be a misspelling of the other.
    """
    known = {**ALL, **{variable.older: variable for variable in ALL.values() if variable.older}}
    names = [name for name in environment if name.startswith("RING_") and name not in known]
    public = [name for name, variable in ALL.items() if not variable.is_internal and variable is not SECRET]
    return {name: next(iter(difflib.get_close_matches(name, public, 1, likeness)), "") for name in names}


def page() -> str:
    """The text of docs/environment.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Environment variables\n"
    yield "None is needed. Set them before the job starts. Rank 0 warns of misspelled names then, and `ring doctor`"
    yield "reports misspelled names and invalid values.\n"
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for variable in ALL.values():
        if not variable.is_internal:
            default = variable.default
            shown = variable.shown_default or (str(int(default)) if isinstance(default, bool) else f"{default:g}")
            older = f" (formerly `{variable.older}`, which still works)" if variable.older else ""
            yield f"| `{variable.name}` | {shown} | {variable.meaning}{older} |"


if __name__ == "__main__":
    print(page(), end="")
