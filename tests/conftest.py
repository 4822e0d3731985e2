"""Options, markers and fixtures that every test can use; ranks themselves are started by `tests.launch`."""

import importlib.util
import re
from typing import Any

import pytest

from tests.launchers import LAUNCHERS, find_mpirun

DEFAULT_RANKS = (2,)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        action="append",
        metavar="N",
        help="run every test that takes the `ranks` fixture on N ranks instead of its own choice; may be repeated",
    )


#: Files whose tests share launches or test hosts.
SHARING = re.compile(r"tests/(hosts/|torch/test_(gradients|process_group)|lightning/test_strategy)")


def together(nodeid: str) -> str:
    """What tests have in common that one of `pytest -n`'s workers runs one after the other."""
    keras = re.match(r"tests/keras/.*[\[-]on-(\w+-\d+)", nodeid)
    if keras:
        return f"Keras on {keras[1]}"
    return nodeid.partition("::")[0] if SHARING.match(nodeid) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByLaunch(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return ByLaunch(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("--ranks") or DEFAULT_RANKS
    return f"ranks: {', '.join(map(str, chosen))}; mpirun: {find_mpirun() or 'none, tests marked mpi are skipped'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` comes from --ranks, else from `@pytest.mark.ranks(1, 3)`, else is 2; `launcher` is each of the three."""
    if "ranks" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        chosen = metafunc.config.getoption("--ranks") or (marker.args if marker else DEFAULT_RANKS)
        metafunc.parametrize("ranks", chosen)
    if "launcher" in metafunc.fixturenames and not _is_parametrized(metafunc, "launcher"):
        metafunc.parametrize("launcher", LAUNCHERS)


def _is_parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    return any(name in str(marker.args[0]) for marker in metafunc.definition.iter_markers("parametrize"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
