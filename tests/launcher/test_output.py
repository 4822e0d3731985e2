"""Relays what ranks print, with pipes written by the test itself."""

import os
import sys
import time

from ring_plugins.launcher.output import Relay


def test_lines_are_tagged_with_their_rank_and_a_last_line_is_completed(capsys):
    with Relay(tag=True) as relay:
        files = [relay.files(rank) for rank in range(2)]
        for rank, (out, err) in enumerate(files):
            os.write(out, f"out {rank}\nunfinished".encode())
            os.write(err, f"err {rank}\n".encode())
        relay.start()
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["[0] out 0", "[0] unfinished", "[1] out 1", "[1] unfinished"]
    assert sorted(printed.err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_lines_of_a_standby_are_tagged_with_the_rank_that_it_becomes(capsys):
    with Relay(tag=True) as relay:
        out, err = (os.dup(file) for file in relay.files(3))
        os.close(err)
        relay.start()
        relay.rename(3, 0)
        os.write(out, b"hello\n")
        os.close(out)
    assert capsys.readouterr().out == "[0] hello\n"


def test_each_rank_gets_its_own_files_in_a_directory(tmp_path):
    with Relay(tag=False, directory=str(tmp_path / "logs")) as relay:
        out, _ = relay.files(3)
        os.write(out, b"hello\n")
    assert (tmp_path / "logs" / "rank.3.out").read_text() == "hello\n"
    assert (tmp_path / "logs" / "rank.3.err").read_text() == ""


def test_by_default_ranks_inherit_the_terminal():
    with Relay(tag=False) as relay:
        assert relay.files(0) == (None, None)


class Printed(list):
    """Stands in for standard output."""

    write = list.append

    def flush(self):
        pass

    def wait_for(self, text):
        while text not in "".join(self):
            time.sleep(0.001)


def test_a_progress_bar_and_a_question_show_before_their_line_ends(monkeypatch):
    printed = Printed()
    monkeypatch.setattr(sys, "stdout", printed)  # here: pytest sets its own after the fixtures
    with Relay(tag=True) as relay:
        out = os.dup(relay.files(0)[0])
        relay.start()
        os.write(out, b"\r 10 %")
        printed.wait_for("10 %")
        os.write(out, "\r 20 % €".encode()[:-1])  # in the middle of a character
        os.write(out, "€".encode()[-1:] + b"\ndone? ")
        printed.wait_for("done? ")
        os.close(out)
    assert "".join(printed) == "[0] \r[0]  10 %\r[0]  20 % €\n[0] done? \n"


def test_a_bar_that_ends_with_a_carriage_return_is_ended_without_a_second_tag(monkeypatch):
    printed = Printed()
    monkeypatch.setattr(sys, "stdout", printed)  # here: pytest sets its own after the fixtures
    with Relay(tag=True) as relay:
        out = os.dup(relay.files(0)[0])
        relay.start()
        os.write(out, b"100 %\r")
        printed.wait_for("100 %\r")
        os.write(out, b"\n\nnext\r\n")
        os.close(out)
    assert "".join(printed) == "[0] 100 %\r\n[0] \n[0] next\r\n"


def test_another_rank_begins_a_line_of_its_own(monkeypatch):
    printed = Printed()
    monkeypatch.setattr(sys, "stdout", printed)  # here: pytest sets its own after the fixtures
    with Relay(tag=True) as relay:
        ends = [os.dup(relay.files(rank)[0]) for rank in range(2)]
        relay.start()
        os.write(ends[0], b"half")
        printed.wait_for("half")
        os.write(ends[1], b"whole\n")
        printed.wait_for("whole\n")
        os.write(ends[0], b" and half\n")
        for end in ends:
            os.close(end)
    assert "".join(printed) == "[0] half\n[1] whole\n[0]  and half\n"


def test_a_line_that_is_written_in_pieces_stays_whole(capsys):
    with Relay(tag=True) as relay:
        ends = [os.dup(relay.files(rank)[0]) for rank in range(2)]
        relay.start()
        for piece in (b"a", b" ", b"b", b"\n") * 50:
            for end in ends:
                os.write(end, piece)
        for end in ends:
            os.close(end)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] a b"] * 50 + ["[1] a b"] * 50


def test_output_goes_on_if_standard_output_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with Relay(tag=True) as relay:
        out = os.dup(relay.files(0)[0])
        relay.start()
        os.write(out, b"x" * 1_000_000 + b"\n")
        os.close(out)
