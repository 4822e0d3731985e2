"""Settings of local updates that are impossible, or do not suit each other."""

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.local_settings import Settings


@pytest.mark.parametrize("every", [0, -1, True, 2.0, None, "", "30", "0s", "1h", [1]])
def test_an_interval_is_a_number_of_steps_or_a_time(every):
    with pytest.raises(ArgumentError, match="sync_every=.* must be a number of steps from 1, or a time"):
        Settings.checked(every, name="sync_every")


@pytest.mark.parametrize(
    "outer", ["sgd", (0, 0.5), (1.0, 1.0), (1.0, -0.1), (float("nan"), 0), 1, (1,), None, (1, 2, 3)]
)
def test_an_outer_optimizer_is_named_or_two_numbers(outer):
    with pytest.raises(ArgumentError, match=r'outer=.* must be "average", "nesterov"'):
        Settings.checked(4, outer)


@pytest.mark.parametrize("fragments", [0, True, 1.5, "2", 3, 8])
def test_fragments_divide_the_interval(fragments):
    with pytest.raises(ArgumentError, match=f"fragments={fragments!r} must"):
        Settings.checked(4, fragments=fragments)


def test_settings_that_do_not_suit_each_other_are_told():
    assert Settings.checked(np.int64(4), compression=Compression("int8", True)).every == 4
    with pytest.raises(ArgumentError, match=r"with 9 exchanges: .* about 100, .* every is 10, and steps"):
        Settings.checked(10, (0.7, 0.9), steps=99)
    settings = Settings.checked(32, (0.7, 0.9), steps=999)
    assert "with 31 exchanges" in settings.misfit(31)
    assert not settings.misfit(100)
    assert not Settings.checked(8, "average", steps=8).misfit(1)
    assert "with 8 steps between exchanges" in Settings.checked(8, "nesterov").misfit(500)
