import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.doctor import mpi
from ring_plugins.doctor.mpi import Library, mismatch, recognize_library
from ring_plugins.launcher.mpirun import Mpirun


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@build Distribution, ident: 5.0.11", ("Open MPI", "5.0.11")),
        ("MPICH Version:      4.2.1\nMPICH Release date: x", ("MPICH", "4.2.1")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", ("Intel MPI", "2021.11")),
        ("MVAPICH2 Version      : 2.3.7", ("MVAPICH", "2.3.7")),
        ("An MPI of our own\nwith more to say", ("An MPI of our own", "")),
        ("", ("unknown", "")),
    ],
)
def test_a_library_is_recognized_by_its_text(text, expected):
    assert recognize_library(text) == expected


def test_an_mpirun_must_belong_to_the_library():
    open_mpi, hydra = Mpirun("mpirun", "Open MPI 5", "5.0.11"), Mpirun("mpirun", "MPICH", "5.0.2")
    assert mismatch(open_mpi, Library("Open MPI", "5.0.3")) == ""
    assert "major" in mismatch(open_mpi, Library("Open MPI", "4.1.4"))
    assert "the only one" in mismatch(open_mpi, Library("MPICH", "5.0.2"))
    assert mismatch(hydra, Library("Intel MPI", "2021")) == ""


def test_an_unknown_mpirun_is_a_finding(monkeypatch):
    def unknown():
        raise LaunchError("/opt/mpirun is none of Open MPI, MPICH and Intel MPI")

    monkeypatch.setattr(mpi, "installed", lambda name: None)
    monkeypatch.setattr(mpi.mpirun, "find", unknown)
    _, finding = mpi.mpi()
    assert finding.severity.name == "WARNING" and "/opt/mpirun" in finding.summary
