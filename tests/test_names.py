"""The public names of the package, and names of tests."""

from pathlib import Path

import pytest

import ring_plugins as ring

PACKAGE, TESTS = Path(ring.__file__).parent, Path(__file__).parent
#: Modules that neighbors' tests test. Take out those that get a test of their name; put none in.
TESTED_ELSEWHERE = """
core/base/types.py
"""


@pytest.mark.parametrize(
    ("former", "name"), [("is_initialised", "is_initialized"), ("NotInitialised", "NotInitialized")]
)
def test_a_former_name_still_works_and_names_the_new_one(former, name):
    with pytest.warns(DeprecationWarning, match=f"ring_plugins.{name}"):
        assert getattr(ring, former) is getattr(ring, name)


def test_every_public_name_exists():
    assert [name for name in ring.__all__ if not hasattr(ring, name)] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'all_reduse'"):
        _ = ring.all_reduse


def test_every_module_has_a_test_of_its_name():
    """The test of `ring_plugins/core/net/tcp.py` is `tests/core/net/test_tcp.py`."""
    modules = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if not file.name.startswith("__")]
    without = {str(one) for one in modules if not (TESTS / one.parent / f"test_{one.name}").exists()}
    allowed = {*TESTED_ELSEWHERE.split()}
    assert without <= allowed, "give it one"
    assert allowed <= without, "which has one now, or is gone: take it out of the list"
