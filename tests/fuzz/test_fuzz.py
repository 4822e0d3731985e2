"""A short run of every fuzzer; tests/fuzz/run.py is the long one."""

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
@pytest.mark.usefixtures("no_garbage_collection")
def test_parsers_withstand_mutated_input(make):
    target = make()
    try:
        fuzz(target, range(400))
    finally:
        target.close()
