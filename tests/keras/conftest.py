"""Skips what a missing package makes impossible, and says which."""

import importlib.util

import pytest

BACKENDS = ("tensorflow", "torch", "jax")


def missing(backend: str) -> str | None:
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; add it with: pip install {package}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "keras" not in item.path.parent.name:
            continue
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        why = missing(backend or "keras")
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
