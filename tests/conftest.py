"""Options, markers and fixtures for every test. `tests.launch` starts the ranks."""

import gc
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch import forget_shared_launches, hear_interrupts
from tests.launchers import LAUNCHERS, find_mpirun

DEFAULT_RANKS = (2,)
STARTED = pytest.StashKey[float]()
OVER_BUDGET = "the time budget is used up"

# Where the environment forbids .pyc files, each of the many processes that tests launch would compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        action="append",
        metavar="N",
        help="run every test that takes the `ranks` fixture on N ranks instead of its own choice; may be repeated",
    )
    parser.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no further test after so many seconds, and list the tests that were left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()
    hear_interrupts()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget")
    if getattr(item, "execution_count", 1) > 1:
        forget_shared_launches()
        return  # a test that has failed runs once more, or its failure would count as a test left out
    if budget is not None and time.monotonic() - item.config.stash[STARTED] > budget:
        pytest.skip(OVER_BUDGET)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left_out = [
        report.nodeid for report in terminalreporter.getreports("skipped") if OVER_BUDGET in report.longreprtext
    ]
    if left_out:
        terminalreporter.section(f"{len(left_out)} tests left out because {OVER_BUDGET}")
        terminalreporter.write_line("\n".join(left_out))


#: Files whose tests share launches or test hosts, so that splitting them among workers would repeat these.
SHARING = re.compile(r"tests/(hosts/|torch/test_(gradients|process_group|sharded_optimizer)|lightning/test_strategy)")


def scope_of(nodeid: str) -> str:
    """A name that tests share if one worker of `pytest -n` is to run all of them."""
    keras = re.match(r"tests/keras/.*[\[-]on-(\w+-\d+)", nodeid)
    if keras:
        return f"Keras on {keras[1]}"
    return nodeid.partition("::")[0] if SHARING.match(nodeid) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class SharedLaunchScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return SharedLaunchScheduling(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("--ranks") or DEFAULT_RANKS
    return f"ranks: {', '.join(map(str, chosen))}; mpirun: {find_mpirun() or 'none, tests marked mpi are skipped'}"


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """No finalizer of other tests' objects runs while deeply nested JSON uses up the stack: it would fail there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `ranks` by --ranks, else by `@pytest.mark.ranks(1, 3)`, else by 2, and `launcher` by all three."""
    if "ranks" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        chosen = metafunc.config.getoption("--ranks") or (marker.args if marker else DEFAULT_RANKS)
        metafunc.parametrize("ranks", chosen)
    if "launcher" in metafunc.fixturenames and not _is_parametrized(metafunc, "launcher"):
        metafunc.parametrize("launcher", LAUNCHERS)


def _is_parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    return any(name in str(marker.args[0]) for marker in metafunc.definition.iter_markers("parametrize"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:  # workers of `pytest -n` would refuse to run anything, as each names its tests otherwise
        raise pytest.UsageError("give these tests ids without an address:\n" + "\n".join(changing))
    missing = _missing_for_mpi()
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("launcher") == "mpirun":
            item.add_marker("mpi")
        if missing and item.get_closest_marker("mpi"):
            item.add_marker(pytest.mark.skip(reason=f"{missing}; add it with: pip install 'ring_plugins[mpi]'"))


def _missing_for_mpi() -> str | None:
    if find_mpirun() is None:
        return "no mpirun beside this Python or on PATH"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None
