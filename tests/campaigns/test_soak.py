"""The short form of the soak, and the arithmetic of its judgment."""

import pytest

from tests.campaigns.soak import growth, problems, run


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seconds"), [(2, 8), (4, 60), (3, 60)])
def test_everything_public_mixed_gives_right_results_and_holds_on_to_nothing(size, seconds):
    result = run(seconds, size, "spawned", seed=size)
    assert len(result.values("counts")) == size
    for measured in result.values("held"):
        assert problems(growth(measured)) == [], measured


def test_what_grows_is_named():
    measured = [{"memory": 400 + 5 * i, "threads": 12, "files": 60 + i, "mappings": 900} for i in range(20)]
    assert growth(measured) == {"memory": 65, "threads": 0, "files": 13, "mappings": 0}
    assert problems(growth(measured)) == ["memory grew by 65", "files grew by 13"]
