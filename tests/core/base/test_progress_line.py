"""The line about ranks that are still missing."""

import io
import logging
import sys

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.progress_line import ProgressLine, arrivals


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_line, "time", clock)
    return clock


def shown(clock, line, seconds):
    """Let the time pass in tenths of a second; the text changes every four seconds."""
    for _ in range(seconds * 10):
        clock.now += 0.1
        line.show(lambda: f"{int(clock.now - 100) // 4} of 8 ranks have come")


def test_a_short_wait_shows_nothing(clock, capsys):
    with ProgressLine() as line:
        shown(clock, line, 4)
    assert capsys.readouterr().err == ""


def test_elsewhere_than_on_a_terminal_it_is_a_message_that_becomes_rarer(clock, capsys):
    with ProgressLine() as line:
        shown(clock, line, 45)
        for _ in range(1000):
            clock.now += 1.0
            line.show(lambda: "10 of 8 ranks have come")
    assert capsys.readouterr().err.splitlines() == [
        "ring_plugins: 1 of 8 ranks have come, after 5 s.",
        "ring_plugins: 2 of 8 ranks have come, after 10 s.",
        "ring_plugins: 5 of 8 ranks have come, after 20 s.",
        "ring_plugins: 10 of 8 ranks have come, after 40 s.",
    ]


def test_on_a_terminal_one_line_is_updated_and_removed(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    with ProgressLine() as line:
        shown(clock, line, 8)
        assert terminal.getvalue().endswith("\rring_plugins: 1 of 8 ranks have come...\x1b[K")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "\n" not in terminal.getvalue()


def test_who_has_redirected_the_messages_gets_messages(clock, monkeypatch):
    terminal, records = Terminal(), []
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logger, "handlers", [handler])
    shown(clock, ProgressLine(), 6)
    assert [record.getMessage() for record in records] == ["1 of 8 ranks have come, after 5 s."]
    assert terminal.getvalue() == ""


def test_it_names_hosts_and_missing_ranks():
    assert arrivals({0: "", 1: "", 2: ""}, 3, " to reach init()") == "all 3 ranks have come"
    assert arrivals({0: "", 2: ""}, 3) == "2 of 3 ranks have come, waiting for rank 1"
    came = {0: "a", 1: "b", 3: "a"}
    assert (
        arrivals(came, 5, " to connect")
        == "3 of 5 ranks have come (2 from a, 1 from b), waiting for ranks 2, 4 to connect"
    )
    many = {rank: f"host{rank}" for rank in range(10)}
    assert arrivals(many, 40).endswith(
        "and 2 more hosts), waiting for ranks " + ", ".join(map(str, range(10, 30))) + " and 10 more"
    )
