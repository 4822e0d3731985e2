import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning import Profile, reference


def test_a_saved_profile_is_read_as_it_was(tmp_path):
    reference("resnet-50").save(tmp_path / "mine.json")
    assert Profile.load(tmp_path / "mine.json") == reference("resnet-50")


def test_another_file_is_an_error_that_says_how_to_make_one(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(ArgumentError, match="planning.measure"):
            Profile.load(tmp_path / name)


def test_a_step_takes_a_positive_time():
    with pytest.raises(ArgumentError, match="positive"):
        reference("resnet-50").at_step(0)
