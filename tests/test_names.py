"""The public names of the package."""

import pytest

import ring_plugins as ring


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
