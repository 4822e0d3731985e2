"""Share launches among tests, and skip tests that need a missing package."""

import importlib.util
import os
from typing import Any
from unittest import mock

import pytest

from tests.keras.launches import Case, launch
from tests.launch import LaunchFailed

if importlib.util.find_spec("keras") and importlib.util.find_spec("torch"):
    # For the tests that launch nothing: other modules import torch anyway, and TensorFlow would take seconds more in
    # each worker of `pytest -n`.
    with mock.patch.dict(os.environ, KERAS_BACKEND="torch"):
        import keras  # noqa: F401

#: Files that import Keras would end the collection where it is missing, as on a machine for `pytest -m gpu`.
collect_ignore_glob = [] if importlib.util.find_spec("keras") else ["*"]

WANTED = pytest.StashKey[set[Case]]()


def missing(backend: str) -> str | None:
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; add it with: pip install {package}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "keras" not in item.path.parts:
            continue
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        seen = parameters.get("seen")
        if seen is not None:
            item.add_marker(pytest.mark.timeout(900))  # the first test waits for the whole launch
        why = missing(seen.backend if seen is not None else parameters.get("backend") or "keras")
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect the cases that the launches have to run, after -k, -m and other selections."""
    parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in session.items]
    session.stash[WANTED] = {found["seen"] for found in parameters if isinstance(found.get("seen"), Case)}


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> list[Any]:
    """The result of each rank, in rank order."""
    wanted: Case = request.param
    cases = request.session.stash[WANTED]
    names = {found.name for found in cases if (found.backend, found.ranks) == (wanted.backend, wanted.ranks)}
    attempt = getattr(request.node, "execution_count", 1)  # by pytest-rerunfailures
    if attempt > 1:
        names = {wanted.name}
    result = launch(wanted.backend, wanted.ranks, tuple(sorted(names)), attempt)
    if isinstance(result, LaunchFailed):
        raise result
    values = result.values(wanted.name)
    assert len(values) == wanted.ranks
    for value in values:
        assert "error" not in value, value["error"]
    return [value["value"] for value in values]
