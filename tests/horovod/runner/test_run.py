"""`horovod.run` takes Horovod's arguments, and gives those of `ring_plugins.run` that mean the same."""

import sys

import pytest

import ring_plugins.horovod
from ring_plugins import ArgumentError
from ring_plugins.horovod.runner import run
from ring_plugins.horovod.runner import run as run_of_runner
from ring_plugins.horovod.runner.run import ring_run

MODULE = sys.modules["ring_plugins.horovod.runner.run"]


@pytest.fixture
def asked(monkeypatch):
    """The calls of `ring_plugins.run`."""
    found = []
    monkeypatch.setattr(MODULE, "ring_run", lambda *args, **options: found.append((args, options)))
    return found


def test_it_is_in_both_modules():
    assert ring_plugins.horovod.run is run_of_runner is run and ring_run.__module__ == "ring_plugins.launcher.function"


@pytest.mark.parametrize("number", [{"np": 3}, {"num_proc": 3}])
def test_the_number_of_ranks_has_two_names(asked, number):
    run(print, (1,), {"sep": ""}, **number, use_gloo=True, verbose=2, disable_cache=True)
    (((function, args, kwargs, ranks), options),) = asked
    assert (function, args, kwargs, ranks) == (print, (1,), {"sep": ""}, 3)
    assert options == {"hosts": None, "interface": None, "env": None, "on_failure": None, "min_ranks": None}


def test_hosts_interfaces_and_losses(asked, tmp_path, caplog):
    (tmp_path / "hosts").write_text("here slots=2\nthere slots=1\n")
    run(print, num_proc=3, hostfile=tmp_path / "hosts", network_interfaces=["eth0", "eth1"], start_timeout=40)
    run(print, np=2, hosts="a:1,b:1", min_np=1, max_np=4, network_interface="eth0")
    assert asked[0][1]["hosts"] == "here:2,there:1" and asked[0][1]["interface"] == "eth0,eth1"
    assert asked[0][1]["env"] == {"RING_START_TIMEOUT": "40"}
    assert asked[1][1]["on_failure"] == "replace" and asked[1][1]["min_ranks"] == 1
    assert asked[1][1]["interface"] == "eth0" and "max_num_proc=4: no effect" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": "a", "hostfile": "b"}, "both say where ranks run"),
        ({"use_gloo": True, "use_mpi": True}, "contradict each other"),
        ({"ssh_port": 2222}, "~/.ssh/config"),
        ({"host_discovery_script": "./find.sh"}, "`ring run` takes such a script"),
        ({"executable": "/other/python"}, "call run"),
    ],
)
def test_what_is_not_supported_is_rejected(asked, options, said):
    with pytest.raises(ArgumentError, match=said):
        run(print, **options)
    assert asked == []
