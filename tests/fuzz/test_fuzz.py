"""A short run of every fuzzer; tests/fuzz/run.py is the long one."""

import signal
import sys

import pytest

from tests.fuzz import run
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


def test_a_long_run_leaves_no_alarm_behind(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(sys, "argv", ["run", "--target", "Json", "--inputs", "10"])
    try:
        with pytest.raises(SystemExit) as end:
            run.main()
        assert signal.alarm(0) == 0
        assert signal.setitimer(signal.ITIMER_PROF, 0) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert end.value.code == 0 and "10 inputs" in capsys.readouterr().out
