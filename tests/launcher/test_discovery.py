"""Which ranks join and leave as a script lists hosts, and what `ring run` makes of a script that does not."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.launcher import discovery
from ring_plugins.launcher.added_slots import AddedSlots
from ring_plugins.launcher.discovery import Follower, HostDiscovery, first_hosts
from ring_plugins.launcher.hosts import parse_hosts
from ring_plugins.launcher.job_hosts import Host
from ring_plugins.launcher.processes import Processes
from tests.launch import slowness, start_ranks

RING = str(Path(sys.executable).parent / "ring")


class Job:
    """Two ranks on each of two hosts; may grow to six."""

    def __init__(self, min_ranks=2):
        self.told, self.asked, ranks = [], [], ([0, 1], [2, 3])
        self.slots = AddedSlots(4, 6, ranks)
        self.hosts = [Host("host1", ranks[0]), Host("me@host2", ranks[1])]
        script = SimpleNamespace(name="the script")
        self.follower = Follower(script, self.hosts, self.slots, self.add, min_ranks, self.told.append)

    def add(self, number, host):
        self.asked.append((number, host))
        known = [index for index, one in enumerate(self.hosts) if one.name == host and not one.is_over]
        if not known:
            known = [len(self.hosts)]
            self.hosts.append(Host(host, [], is_added=True))
        return self.slots.add(number, {known[0]: host})

    def lists(self, text):
        before = len(self.asked)
        self.follower.follow(parse_hosts(text))
        return self.asked[before:], sorted(self.slots.leaving)

    def end(self, index):
        self.hosts[index].report = []
        self.slots.note_end(index, [])


def test_hosts_that_are_listed_as_they_are_change_nothing():
    job = Job()
    assert job.lists("host1:2,host2:2") == ([], []) and not job.told


def test_new_slots_are_filled_once_and_up_to_the_most():
    job = Job()
    assert job.lists("host1:3,host2:2,host3:4") == ([(1, "host1"), (1, "host3")], [])
    assert job.told[1] == "host3 is listed with 4 slots: rank 5 on host3 will join where an epoch begins."
    assert job.lists("host1:3,host2:2,host3:4") == ([], [])


def test_ranks_leave_a_host_that_is_not_listed_and_others_take_their_places_when_they_have_left():
    job = Job()
    assert job.lists("host1:2,host3:4") == ([(2, "host3")], [2, 3])
    assert job.told[0] == "ranks 2, 3 on me@host2 will leave: the slots are not listed any more."
    job.slots.note_joined([4, 5])
    job.end(1)
    assert job.lists("host1:2,host3:4") == ([(2, "host3")], [])
    assert job.slots.of_host(2) == [2, 3, 4, 5]
    assert job.lists("host1:2,host2:2,host3:4") == ([], []), "no slot is free"
    assert job.lists("host1:2,host2:2,host3:2") == ([(2, "host2")], [])
    assert job.slots.of_host(2) == [4, 5], "the others had not joined, and end at once"


def test_a_host_that_was_left_may_be_used_again():
    job = Job()
    job.lists("host1:2")
    job.end(1)
    assert job.lists("host1:2,host2:1") == ([(1, "host2")], [])


def test_one_slot_less_lets_the_last_rank_leave_and_one_more_fills_it_again():
    job = Job()
    assert job.lists("host1:1,host2:2") == ([], [1])
    job.slots.take_back(1, 0)
    assert job.lists("host1:1,host2:2") == ([], [])
    assert job.lists("host1:2,host2:2") == ([(1, "host1")], [])


def test_ranks_stay_if_too_few_would_be_left_until_others_have_joined():
    job = Job(min_ranks=3)
    assert job.lists("host1:2,host3:1") == ([(1, "host3")], [3])
    kept = "rank 2 on me@host2: kept for now, though the slots are not listed any more, since fewer than 3 ranks would "
    assert [text for text in job.told if "kept" in text] == [f"{kept}be left."]
    assert job.lists("host1:2,host3:1") == ([], [3]) and len(job.told) == 3, "said once"
    job.slots.note_joined([4])
    assert job.lists("host1:2,host3:1") == ([], [2, 3])


def test_a_host_that_is_lost_gets_ranks_again_once_it_was_left_out():
    job = Job()
    job.hosts[1].is_lost = True
    job.slots.note_end(1, [])
    for _ in range(2):
        assert job.lists("host1:2,host2:2") == ([], [])
    assert job.told == ["me@host2 gets no more ranks until the script has left it out once."]
    assert job.lists("host1:2") == ([], [])
    assert job.lists("host1:2,host2:2") == ([(2, "host2")], [])


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(discovery, "_EVERY", 0.0)
    return []


def test_the_first_hosts_are_those_that_have_enough_slots(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "cat list; echo 'b slots=3' >> list"
    Path("list").write_text("# comment\na:1\n")
    assert [(host.name, host.slots) for host in first_hosts(script, 4, said.append)] == [("a", 1), ("b", 3)]
    assert len(said) == 1 and re.fullmatch("waiting for 4 slots; --host-discovery-script .* lists 1.", said[0])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no cluster >&2; exit 3", "ended with exit status 3: no cluster. It is tried again"),
        ("echo at $$ >&2; exit 3", "ended with exit status 3: at "),  # which differs each time
        ("kill -9 $$", "was killed by SIGKILL"),
        ("echo a:b", "ended well, but its output, line 1: 'b' is not a positive number of slots."),
        ("true", "ended well, but its output names no host."),
        ("head -c 3000 /dev/zero", "ended well, but its output, line 1: "),
        ("sleep 60", "did not end within 0.01 s, and was killed."),
    ],
)
def test_a_script_that_does_not_print_hosts_is_named_once_and_tried_again(said, monkeypatch, script, why):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.15")
    if script == "sleep 60":
        monkeypatch.setattr(discovery, "_LIMIT", 0.01)
    with pytest.raises(
        LaunchError, match=r"listed 0 slots within 0.15 s,( and still runs,)? of 1 that are needed: set RING_"
    ):
        first_hosts(script, 1, said.append)
    assert len(said) == 1 and why in said[0] and len(said[0]) < 700


def test_a_script_that_prints_without_end_is_killed_before_the_disk_is_full(said, monkeypatch):
    monkeypatch.setattr(discovery, "_MOST", 10)
    with Processes() as processes:
        script = HostDiscovery("echo localhost localhost; sleep 60", processes, said.append)
        while not said:
            assert script.poll() is None
        script.close()
    assert "printed more than 0 MiB, and was killed." in said[0]


def test_a_program_that_does_not_exist_is_an_error(said):
    with pytest.raises(LaunchError, match=r"cannot be run \(.*nowhere/hosts\.sh: .*\): give the path of a program"):
        first_hosts("/nowhere/hosts.sh", 1, said.append)


def test_a_signal_ends_the_wait(said):
    with Processes() as processes:
        script = HostDiscovery("echo a", processes, said.append)
        processes.signalled = signal.SIGTERM
        with pytest.raises(LaunchError, match="ended because of SIGTERM, before any rank was"):
            script.wait_for(2)
        script.close()


def test_what_the_script_has_started_ends_with_it(said, tmp_path):
    with Processes() as processes:
        script = HostDiscovery(f"sleep 60 & echo $! > {tmp_path}/pid; wait", processes, said.append)
        script.poll()
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)
        assert script.poll() is None and len(processes.helpers) == 1
        script.close()
        pid = (tmp_path / "pid").read_text().strip()
        assert not processes.helpers
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.01)


#: Goes through stages: each is a list of hosts, and the number of ranks that it leads to.
ELASTIC = """
import json, os, time
from pathlib import Path

from tests.campaigns.light_torch import import_torch

import_torch()
import torch

import ring_plugins.horovod.torch as hvd
from tests.worker import report

hvd.init()
stages, hosts = json.loads(os.environ["TEST_STAGES"]), Path(os.environ["TEST_HOSTS_FILE"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0, stage=0, sizes=[])


@hvd.elastic.run
def train(state):
    while state.stage < len(stages):
        if hvd.rank() == 0 and state.batch % 10 == 0:
            new = hosts.with_suffix(".new")
            new.write_text(stages[state.stage][0].replace(",", "\\n"))
            new.rename(hosts)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        state.batch += 1
        time.sleep(0.02)
        if not state.sizes or state.sizes[-1] != hvd.size():
            state.sizes = [*state.sizes, hvd.size()]
        if hvd.size() == stages[state.stage][1]:
            state.stage += 1
        state.commit()


train(state)
report("sizes", state.sizes)
report("weights", model.weight.tolist())
"""


def stages(file, *stages):
    """The variables of a script that leads through these, by writing hosts into a file."""
    file.write_text(stages[0][0].replace(",", "\n"))
    return {"TEST_STAGES": json.dumps(stages), "TEST_HOSTS_FILE": str(file)}


@pytest.mark.slow
def test_a_job_on_this_host_grows_and_shrinks_as_the_script_says(tmp_path):
    """As docs/launching/ring_run.md starts train.py."""
    file = tmp_path / "list"
    env = stages(file, ["localhost:2", 2], ["localhost:4", 4], ["localhost:3", 3], ["localhost:4", 4])
    options = [
        "--host-discovery-script",
        f"cat {file}",
        "--on-failure",
        "replace",
        "--min-ranks",
        "2",
        "--max-ranks",
        "4",
    ]
    exported = [word for name in (*env, "TEST_LAUNCH", "TEST_REPORTS") for word in ("-x", name)]
    command = [RING, "run", *options, *exported, sys.executable]
    with start_ranks(ELASTIC, 4, command, env=env) as job:
        result = job.wait(180 * slowness())
    assert result.returncode == 0, str(result)
    found = result.values("sizes")
    assert [size for size in found[0] if size in (2, 3, 4)][:1] == [2] and found == [found[0]] * 4
    assert found[0][0] == 2 and 4 in found[0] and 3 in found[0][found[0].index(4) :] and found[0][-1] == 4
    assert len({str(weights) for weights in result.values("weights")}) == 1
    assert "rank 3 on localhost will leave: the slots are not listed any more." in result.output
