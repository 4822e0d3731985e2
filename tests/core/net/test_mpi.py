"""Transfers by MPI, with a fake MPI; one real launch with messages above MPI's 32-bit counts."""

# ruff: noqa: N802 - methods have MPI's names

from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.base.errors import PeerFailed, RingError
from ring_plugins.core.net import mpi
from ring_plugins.core.net.mpi import MpiRequest, MpiTransport
from tests.launch import run_ranks


class MpiError(Exception):
    pass


class FakeComm:
    """Records what is started, or raises `error`. Transfers with the peers in `finished` finish, others may fail."""

    def __init__(self):
        self.started, self.error, self.freed = [], None, False
        self.finished, self.failed = set(), set()

    def test(self, rank):
        if rank in self.failed:
            raise MpiError("lost")
        return rank in self.finished

    def Dup(self):
        return self

    def Set_errhandler(self, handler):
        pass

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 3

    def Free(self):
        self.freed = True

    def _start(self, kind, buffer, rank, tag):
        if self.error is not None:
            raise self.error
        self.started.append((kind, buffer[0].size, rank, tag))
        return SimpleNamespace(Test=lambda: self.test(rank))

    def Isend(self, buffer, rank, tag):
        return self._start("send", buffer, rank, tag)

    def Irecv(self, buffer, rank, tag):
        return self._start("receive", buffer, rank, tag)

    def Iprobe(self, source, tag):
        raise MpiError("network down")


@pytest.fixture
def comm(monkeypatch):
    comm = FakeComm()
    fake = SimpleNamespace(
        COMM_WORLD=comm,
        ERRORS_RETURN=0,
        THREAD_MULTIPLE=3,
        Query_thread=lambda: 3,
        BYTE="byte",
        ANY_SOURCE=-1,
        Exception=MpiError,
        Is_finalized=lambda: False,
    )
    monkeypatch.setattr(mpi, "load", lambda: fake)
    return comm


def test_receives_start_before_sends_and_the_request_ends_when_mpi_says_so(comm):
    transport = MpiTransport()
    request = transport.exchange([(1, np.zeros(5, np.uint8))], [(2, np.zeros(7, np.uint8))], tag=9)
    assert comm.started == [("receive", 7, 2, 9), ("send", 5, 1, 9)]
    assert request in MpiRequest.under_way
    assert not request.done() and request.missing() == [1, 2]
    comm.finished = {1}
    assert not request.done() and request.missing() == [2]
    comm.finished = {1, 2}
    assert request.done() and request.done() and request.missing() == []
    assert request not in MpiRequest.under_way
    transport.close()
    assert comm.freed


def test_large_messages_are_cut_into_pieces(comm, monkeypatch):
    monkeypatch.setattr(mpi, "_LARGEST", 4)
    MpiTransport().exchange([(1, np.zeros(10, np.uint8))], [], tag=1)._requests.clear()
    assert [size for _, size, _, _ in comm.started] == [4, 4, 2]


def test_a_failure_at_the_start_is_raised_by_done_and_names_the_peer(comm):
    comm.error = MpiError("unreachable")
    request = MpiTransport().exchange([(2, np.zeros(5, np.uint8))], [(1, np.zeros(5, np.uint8))], tag=9)
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"MPI communication of rank 0 with rank 1 failed \(unreachable\)"):
            request.done()


def test_a_transfer_that_fails_names_its_own_peer_among_several(comm):
    request = MpiTransport().exchange([(1, np.zeros(5, np.uint8)), (2, np.zeros(5, np.uint8))], [], tag=9)
    comm.failed = {2}
    with pytest.raises(PeerFailed, match=r"MPI communication of rank 0 with rank 2 failed \(lost\)") as error:
        request.done()
    assert error.value.rank == 2
    request._requests.clear()  # or the process would end within seconds, since MPI may still use the memory


def test_an_error_without_a_peer_is_a_ring_error(comm):
    with pytest.raises(RingError, match="MPI on rank 0: network down"):
        MpiTransport().progress(3)


@pytest.mark.slow
@pytest.mark.mpi
def test_more_than_two_gibibytes_between_hosts():
    script = """
        import numpy as np, ring_plugins as ring
        from tests.worker import report
        ring.init()
        x = np.full((1 << 31) + 12_345, ring.rank() + 1, np.uint8)
        report("gathered", int(ring.all_gather(x[: (1 << 31) + 5] if ring.rank() else x[:3])[-1]))
    """
    result = run_ranks(script, 2, "mpirun", env={"RING_VIRTUAL_NODES": "2"}, timeout=180)
    assert result.values("gathered") == [2, 2]


@pytest.mark.parametrize(
    ("vendor", "variables", "libraries", "uses_pmix"),
    [
        (("Open MPI", (5, 0, 11)), {}, ["/lib/libc.so.6", "/lib/libpmix.so.2"], True),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_mpi_abort_delay": "60"}, ["/lib/libpmix.so.2"], False),
        (("Open MPI", (5, 0, 11)), {}, ["/lib/libc.so.6"], False),
        (("Open MPI", (4, 1, 6)), {}, ["/lib/libpmix.so.2"], False),
        (("MPICH", (5, 0, 0)), {}, ["/lib/libpmix.so.2"], False),
    ],
)
def test_open_mpi_5_aborts_without_its_banner_unless_the_user_asked_it_for_more(
    monkeypatch, vendor, variables, libraries, uses_pmix
):
    ended, comm = [], FakeComm()
    comm.Abort = lambda code: ended.append(("MPI_Abort", code))
    pmix = SimpleNamespace(PMIx_Initialized=lambda: 1, PMIx_Abort=lambda *_: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mpi, "loaded_libraries", lambda: libraries)
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: pmix)
    monkeypatch.setattr(mpi.os, "_exit", lambda code: ended.append((pmix, code)))
    transport = object.__new__(mpi.MpiTransport)
    transport.mpi = SimpleNamespace(COMM_WORLD=comm, get_vendor=lambda: vendor)
    transport.abort(3)
    assert ended[0] == (pmix if uses_pmix else "MPI_Abort", 3)
