"""How many threads each rank computes with: its share of its host's cores.

Every numerical library starts one thread per core unless it is told otherwise. Four ranks on eight cores then compute
with 32 threads, which wait for each other in every parallel region; training steps take several times as long. So
`init` computes each rank's share and sets it:

- in the environment, where OpenMP and the frameworks read it once they are loaded or started, in this process and in
  the processes that it starts;
- in libraries that are loaded already, through their own functions. The frameworks' are registered from outside, with
  `register_library`; the libraries for linear algebra that numpy may use are found among the loaded files.

What the user has set is never changed: a library is left alone if one of its variables is set, or if its number of
threads is below the number of cores, which no default is.

The share counts cores, not hardware threads: two threads of one core mostly wait for the same units. Each core that
this rank may run on is divided among the ranks that may run on it, so ranks that a launcher has bound keep all of
theirs. A container's quota is divided among the ranks in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Cores
from ring_plugins.core.linux.process import boot_id, cpu_quota, loaded_libraries

_CPUS = Path("/sys/devices/system/cpu")
OPENMP_VARIABLE = "OMP_NUM_THREADS"
#: Part of a library's file name -> its functions that get and set the number of threads.
_LINEAR_ALGEBRA = {
    "openblas": [
        (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
        for prefix in ("scipy_", "")
        for suffix in ("64_", "")
    ],
    "mkl_rt": [("MKL_Get_Max_Threads", "MKL_Set_Num_Threads")],
    "libblis": [("bli_thread_get_num_threads", "bli_thread_set_num_threads")],
}
_LINEAR_ALGEBRA_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS")
#: OpenBLAS, as numpy's wheels contain it, starts no more threads than this.
_MOST = 64


class Applied(Enum):
    """What came of setting the number of threads in a library that may be loaded."""

    NOT_LOADED = "not loaded"
    DONE = "done"
    KEPT = "kept what the user set"
    TOO_LATE = "its threads have started"


class Library(NamedTuple):
    """A library that starts threads of its own.

    Attributes:
        name: for messages.
        variables: environment variables that choose its number of threads; any that is set leaves the library alone.
            The first one is set otherwise.
        apply: sets the number in this process, if the library is loaded.
    """

    name: str
    variables: tuple[str, ...]
    apply: Callable[[int], Applied]


def own_cores() -> Cores:
    """The cores of this process."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return Cores(boot_id(), container, _ranges(physical_cores()), cpu_quota())


def physical_cores(directory: Path = _CPUS) -> list[int]:
    """The cores that this process may run on; a core with several hardware threads counts once.

    Args:
        directory: where the kernel describes the processors.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted({_core_of(cpu, directory) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int, directory: Path) -> int:
    """The lowest number among the hardware threads of a core, which the kernel lists as "0,64" or "0-1"."""
    try:
        siblings = (directory / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return int(siblings.replace("-", ",").partition(",")[0])
    except (OSError, ValueError):
        return cpu


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order as the kernel writes them: "0-3,8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _numbers(ranges: str) -> set[int]:
    """The inverse of `_ranges`."""
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def share(rank: int, ranks: Sequence[Cores]) -> int:
    """How many threads a rank should compute with, at least one.

    Args:
        rank: the rank.
        ranks: the cores of every rank.
    """
    own = ranks[rank]
    here = [other for other in ranks if other.kernel == own.kernel]
    users = Counter(core for other in here for core in _numbers(other.cores))
    available = sum(1 / users[core] for core in _numbers(own.cores))
    if own.quota is not None:
        available = min(available, own.quota / sum(other.container == own.container for other in here))
    return max(1, int(available + 1e-6))


def ranks_beside(rank: int, ranks: Sequence[Cores]) -> int:
    """How many ranks, including this one, run on the same host.

    Args:
        rank, ranks: as for `share`.
    """
    return sum(other.kernel == ranks[rank].kernel for other in ranks)


def share_among(rank: int, ranks: Sequence[Cores]) -> None:
    """Have this process compute with its share of its host's cores, unless the user has set a number of threads.

    Args:
        rank: of this process.
        ranks: the cores of every rank.
    """
    here = ranks_beside(rank, ranks)
    if here == 1:
        return
    number = share(rank, ranks)
    changed, too_late = set_threads(number)
    if changed and rank == 0:
        each = "1 thread" if number == 1 else f"{number} threads"
        logger.info(
            f"each of the {here} ranks on this host computes with {each}, its share of the cores; "
            f"{OPENMP_VARIABLE} chooses another number."
        )
    for library in too_late if rank == 0 else ():
        logger.warning(
            f"{library.name} computed before init() and keeps a thread per core in each of the {here} ranks on "
            f"this host, which slows all of them: call ring_plugins.init() first, or export "
            f"{library.variables[0]}={number}."
        )


def threads_per_rank(ranks: int) -> int:
    """The share of each of several ranks that this process is about to start on this host."""
    return share(0, [own_cores()] * ranks)


_libraries: list[Library] = []
#: Variables that this module has set, which do not count as the user's.
_set_here: dict[str, str] = {}


def register_library(library: Library) -> None:
    """Have `init` set the number of threads of a library too."""
    _libraries.append(library)


def variables(threads: int) -> dict[str, str]:
    """Environment variables that give a process this many threads, without those that the user has chosen."""
    return {library.variables[0]: str(threads) for library in _undecided()}


def set_threads(threads: int) -> tuple[bool, list[Library]]:
    """Have every library of this process, and of processes that it starts, compute with this many threads.

    Returns:
        Whether that changed what torch, OpenMP or a loaded library would have done, and the libraries whose threads
        have started already, so that nothing can change their number.
    """
    undecided = _undecided()
    applied = {library.name: library.apply(threads) for library in undecided}
    changed = Applied.DONE in applied.values()
    for name, value in variables(threads).items():
        changed |= name == OPENMP_VARIABLE and not os.environ.get(name)
        os.environ[name] = _set_here[name] = value
    return changed, [library for library in undecided if applied[library.name] is Applied.TOO_LATE]


def is_default(threads: int, most: int | None = None) -> bool:
    """Whether a library has its number of threads by default or from here, rather than from the user.

    Args:
        threads: the number.
        most: how many threads the library can have by default.
    """
    cores = len(physical_cores())
    return threads >= min(cores, most or cores) or str(threads) in _set_here.values()


def threads_in_use() -> int:
    """How many threads this process computes with: the largest number that OpenMP or a loaded library has."""
    exported = os.environ.get(OPENMP_VARIABLE, "")
    numbers = [get() for get, _ in _loaded_linear_algebra()]
    return max([*numbers, int(exported) if exported.isdigit() else 0, 1])


@contextlib.contextmanager
def linear_algebra_threads(threads: int | None) -> Iterator[int]:
    """Let the loaded libraries for linear algebra compute with another number of threads inside the context.

    Args:
        threads: the number, None for the one that they have.

    Yields:
        The largest number that one of them then has.
    """
    found = list(_loaded_linear_algebra())
    before = [get() for get, _ in found]
    try:
        if threads is not None:
            for _, put in found:
                put(threads)
        yield max((get() for get, _ in found), default=1)
    finally:
        for (_, put), number in zip(found, before, strict=True):
            put(number)


def _undecided() -> list[Library]:
    """The libraries for which the user has set no variable."""
    everything = [
        Library("OpenMP", (OPENMP_VARIABLE, "MKL_NUM_THREADS"), lambda threads: Applied.NOT_LOADED),
        Library("linear algebra", (OPENMP_VARIABLE, *_LINEAR_ALGEBRA_VARIABLES), _set_linear_algebra),
        *_libraries,
    ]
    return [
        library
        for library in everything
        if all(os.environ.get(name, "") in ("", _set_here.get(name)) for name in library.variables)
    ]


def _set_linear_algebra(threads: int) -> Applied:
    """Set the number of threads of the loaded libraries that numpy and scipy compute with."""
    found = Applied.NOT_LOADED
    for get, put in _loaded_linear_algebra():
        if is_default(get(), _MOST):
            put(threads)
            found = Applied.DONE
    return found


def _loaded_linear_algebra() -> Iterator[tuple[Callable[[], int], Callable[[int], object]]]:
    """The functions that get and set the numbers of threads, of the loaded libraries for linear algebra."""
    for path in loaded_libraries():
        for part, functions in _LINEAR_ALGEBRA.items():
            if part not in Path(path).name:
                continue
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
                known = [(get, put) for get, put in functions if hasattr(library, get) and hasattr(library, put)]
                if known:
                    get, put = known[0]
                    yield getattr(library, get), getattr(library, put)
