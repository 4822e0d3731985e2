"""Hosts as users and schedulers write them, and how ranks are placed on them."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.rendezvous import slurm
from ring_plugins.launcher.hosts import Host, Share, allocated_hosts, parse_hosts, read_hostfile, share, slots


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2", [Host("a", 2), Host("b", 2)]),
        ("node-1.site, 10.0.0.2:4", [Host("node-1.site"), Host("10.0.0.2", 4)]),
        ("me@a:1,a:2", [Host("me@a", 1), Host("a", 2)]),
        ("a,a,b", [Host("a", 2), Host("b")]),
    ],
)
def test_hosts_on_the_command_line_are_parsed(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:two", "a;b", "-x", "a:2,,b"])
def test_an_invalid_host_is_named(text):
    with pytest.raises(ArgumentError, match="not a host|not a positive number"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# ours\na slots=4\nb slots=2 max_slots=8  # slow\n", [Host("a", 4), Host("b", 2)]),
        ("a:4\n\nb:2\n", [Host("a", 4), Host("b", 2)]),
        ("a\nb\n", [Host("a"), Host("b")]),
        ("a\na\nb\n", [Host("a", 2), Host("b")]),
    ],
)
def test_hostfiles_of_each_kind_are_read(text, hosts, tmp_path):
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [("a slots=many", "line 1: 'many'"), ("a cores=4", "'cores=4' is not known"), ("#\n", "no host")],
)
def test_a_hostfile_that_cannot_be_read_says_where(text, message, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(ArgumentError, match="No such file"):
        read_hostfile(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("total", "text", "shares"),
    [
        (4, "a:2,b:2", [2, 2]),
        (3, "a:2,b:2", [2, 1]),
        (2, "a:2,b:2", [2]),
        (5, "a:2,b:2", [3, 2]),
        (5, "a,b", [3, 2]),
        (7, "a:1,b:4", [2, 5]),
    ],
)
def test_hosts_are_filled_in_order(total, text, shares):
    names = ["a", "b"]
    assert share(total, parse_hosts(text)) == [Share(name, n) for name, n in zip(names, shares, strict=False)]


def test_a_plain_name_counts_as_one_slot():
    assert slots(parse_hosts("a,b:3")) == 4


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a1,a2", ["a1", "a2"]),
        ("rack[03-05,12]-gpu", ["rack03-gpu", "rack04-gpu", "rack05-gpu", "rack12-gpu"]),
        ("n[5,7-8],login", ["n5", "n7", "n8", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("", []),
    ],
)
def test_slurms_node_lists_are_expanded(nodelist, hosts):
    assert slurm.expand(nodelist) == hosts


def test_hosts_come_from_the_schedulers_variables(tmp_path):
    allocated = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),1"}
    assert allocated_hosts(allocated) == [Host("n1", 4), Host("n2", 4), Host("n3", 1)]
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    assert allocated_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")}) == [Host("n1", 2), Host("n2")]
    assert allocated_hosts({}) == []
