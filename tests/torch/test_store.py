"""Objects and barriers through a store; ranks are threads."""

import concurrent.futures
import os
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ring_plugins.core.base.errors import PeerFailed, RingError, TimeoutExceeded
from ring_plugins.torch.store import GroupStore, monitored_barrier, sign

SECRET = b"of the job"


def arrive(ranks, size, **options):
    """The error of each of `ranks`, or None."""
    store = dist.HashStore()

    def call(rank):
        try:
            monitored_barrier(store, rank, size, **options)
        except TimeoutExceeded as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def test_it_passes_when_all_arrive():
    assert arrive([2, 0, 1], size=3) == [None] * 3


@pytest.mark.parametrize(("wait_all_ranks", "named"), [(False, "rank 1 of 4"), (True, "ranks 1, 3 of 4")])
def test_it_names_the_ranks_that_did_not_arrive(wait_all_ranks, named):
    errors = arrive([0, 2], size=4, timeout=timedelta(seconds=0.2), wait_all_ranks=wait_all_ranks)
    assert all(f"{named} did not call" in error for error in errors)


def test_a_rank_that_waits_in_a_barrier_leaves_the_store_to_other_threads():
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    store = dist.PrefixStore("barrier", server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(monitored_barrier, store, 1, 2, timedelta(seconds=60))
        while not store.check(["arrived/1"]):
            pass
        for number in range(100):  # each of these would last until the barrier's time-out
            server.set("mine", str(number))
        assert not waiting.done()
        monitored_barrier(store, 0, 2)
        waiting.result(10)


def test_it_says_when_rank_0_itself_does_not_arrive():
    (error,) = arrive([1], size=2, timeout=timedelta(seconds=0.2))
    assert "rank 0 did not call" in error


def test_every_rank_gets_every_ranks_object_in_rank_order():
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda rank: GroupStore(store, rank, 3, SECRET).exchange("names", {"rank": rank}), [2, 0, 1])
    assert list(found) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_an_exchange_names_the_missing_rank():
    store = dist.PrefixStore("p", dist.HashStore())
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(TimeoutExceeded, match="rank 0 of 2 waited for rank 1 in ranks for 0.1 s"):
        GroupStore(store, 0, 2, SECRET).exchange("ranks", "here")
    failed = SimpleNamespace(failure=lambda: PeerFailed("rank 1 is gone", 1))
    with pytest.raises(PeerFailed, match="rank 1 is gone"):
        GroupStore(store, 0, 2, SECRET, failed).exchange("ranks", "here")
    waits = []

    def wait(other, has_come):
        waits.append((other, has_come()))
        if not has_come():
            raise KeyError(other)

    with pytest.raises(KeyError):
        GroupStore(store, 0, 2, SECRET).exchange("ends", "here", wait)
    assert waits == [(0, True), (1, False)]


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize(
    "forged",
    [
        lambda key: pickle.dumps(Evil()),
        lambda key: b"",
        lambda key: b"[" * 100_000,
        lambda key: b"0" * 64 + b"7",
        lambda key: sign(key, "7", b"another job's").encode(),
        lambda key: sign(key.replace("1", "0"), '"here"', SECRET).encode(),  # another rank's value, copied
    ],
)
def test_what_a_stranger_writes_to_the_store_is_rejected_unread(forged, tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    store = dist.HashStore()
    store.set("ranks/1", forged("ranks/1"))
    with pytest.raises(RingError, match="holds a value under ranks/1 that no rank of this job has written"):
        GroupStore(store, 0, 2, SECRET).exchange("ranks", "here")
    assert not list(tmp_path.iterdir())


def test_what_a_stranger_says_about_a_barrier_is_shown_as_what_it_is():
    store = dist.HashStore()
    store.set("outcome", "late\x1b[2J\nring_plugins: all is well")
    with pytest.raises(TimeoutExceeded) as raised:
        monitored_barrier(store, 1, 2)
    assert str(raised.value) == r"late\x1b[2J\nring_plugins: all is well"
