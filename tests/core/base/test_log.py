"""What the package logs."""

import io
import logging
import logging.config

from ring_plugins.core.base import log


def test_records_go_to_the_current_standard_error_with_a_prefix(monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    log.logger.info("hello")
    assert stream.getvalue() == "ring_plugins: hello\n"


def test_records_carry_the_rank(monkeypatch):
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(log, "_rank", None)
    monkeypatch.setattr(log.logger, "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", records.append)
    log.logger.info("before init")
    log.set_rank(3)
    log.logger.info("after")
    assert [record.rank for record in records] == [None, 3]


def test_a_broken_pipe_is_ignored(monkeypatch):
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", ClosedPipe())
    log.logger.info("nobody reads this")


def test_a_script_that_configures_logging_does_not_silence_the_reason_why_a_rank_ends(monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    monkeypatch.setattr(logging, "_handlerList", [])  # dictConfig closes all: absl's would close pytest's own stream
    handlers = log.logger.handlers[:]
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True, "loggers": {"mine": {"level": "INFO"}}})
    try:
        log.logger.error("rank 0 ends")
    finally:
        log.logger.handlers[:] = handlers
    assert stream.getvalue() == "ring_plugins: rank 0 ends\n"


def test_output_can_be_flushed_where_streams_are_closed_or_absent(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", None)  # what Python sets if a process starts without the file
    monkeypatch.setattr("sys.stderr", closed)
    log.flush_output()
