"""Relays what ranks print, with pipes written by the test itself."""

import os

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


def test_each_rank_gets_its_own_files_in_a_directory(tmp_path):
    with Relay(tag=False, directory=str(tmp_path / "logs")) as relay:
        out, _ = relay.files(3)
        os.write(out, b"hello\n")
    assert (tmp_path / "logs" / "rank.3.out").read_text() == "hello\n"
    assert (tmp_path / "logs" / "rank.3.err").read_text() == ""


def test_by_default_ranks_inherit_the_terminal():
    with Relay(tag=False) as relay:
        assert relay.files(0) == (None, None)
