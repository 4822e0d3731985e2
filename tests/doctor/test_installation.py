import pytest

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.doctor import installation
from ring_plugins.doctor.installation import Library, mismatch, recognize_library, settings, unmet, versions
from ring_plugins.launcher.mpirun import Mpirun

REQUIRED = ["torch>=2.4; extra == 'torch'", "numpy>=1.24", "rich"]


def test_packages_that_are_too_old_are_named():
    (finding,) = unmet({"torch": "2.3.1+cpu", "numpy": "1.24", "python": "3.10"}, REQUIRED)
    assert "torch is 2.3.1+cpu, but ring_plugins needs torch>=2.4" in finding.summary


def test_local_versions_and_two_digit_numbers_are_new_enough():
    assert list(unmet({"torch": "2.13.0+cpu", "numpy": "2.4.0rc1"}, REQUIRED)) == []


def test_versions_are_read_without_importing():
    assert versions().keys() >= {"python", "ring_plugins", "numpy", "torch"}


def test_misspelled_names_and_unusable_values_are_found():
    found = list(settings({"RING_TIMOUT": "5", "RING_AUTOTUNE": "yes", "RING_TIMEOUT": "60"}))
    assert [finding.severity.name for finding in found] == ["WARNING", "ERROR", "FINE"]
    assert "Did you mean RING_TIMEOUT?" in found[0].remedy
    assert "'yes' is neither 0 nor 1" in found[1].summary


def test_the_secret_is_never_shown():
    assert "hush" not in str(list(settings({"RING_SECRET": "hush"})))


@pytest.mark.parametrize("name", [name for name, variable in config.ALL.items() if variable.is_internal])
def test_variables_that_ring_run_sets_for_its_ranks_are_not_reported(name):
    (finding,) = settings({name: "anything"})
    assert finding.severity.name == "FINE" and name not in str(finding)


def test_every_documented_variable_is_known():
    values = {config.SECONDS: "1", config.SWITCH: "1", config.WHOLE_NUMBER: "1", config.COUNTS: "1", config.TEXT: "x"}
    words = {config.OVERLAP.name: "auto", config.ON_FAILURE.name: "end", config.METRICS.name: ":9400"}
    for name, variable in config.ALL.items():
        value = values.get(variable.kind) or words.get(name, "mpi")
        assert [finding.severity.name for finding in settings({name: value})] == ["FINE"], name


def test_a_former_name_is_accepted_and_the_new_one_is_named():
    renamed, listed = settings({"RING_PLANE": "mpi"})
    assert renamed.severity.name == "FINE" and "RING_TRANSPORT" in renamed.summary
    assert "RING_PLANE=mpi" in listed.summary
    assert next(settings({"RING_PLANE": "pigeons"})).severity.name == "ERROR"


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

    monkeypatch.setattr(installation, "installed", lambda name: None)
    monkeypatch.setattr(installation.mpirun, "find", unknown)
    _, finding = installation.mpi()
    assert finding.severity.name == "WARNING" and "/opt/mpirun" in finding.summary
