"""Skips the tests of this directory where the machine cannot build test hosts, and says why."""

from pathlib import Path

import pytest

from tests.hosts.cluster import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if here and (reason := why_not()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))
