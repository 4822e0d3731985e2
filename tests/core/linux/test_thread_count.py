"""Each rank's share of the cores: counted from affinity, hardware threads and quota, and never against the user."""

import os
from typing import ClassVar

import pytest

from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.thread_count import Applied, Cores, Library, physical_cores, set_threads, share, variables

HOST = Cores("kernel", "container", "0-7", None)
TUNED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LIBRARY_THREADS", "LIBRARY_OLD_THREADS")


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        pytest.param([HOST] * 4, [2, 2, 2, 2], id="all may run anywhere"),
        pytest.param([HOST] * 3, [2, 2, 2], id="rounded down"),
        pytest.param([HOST] * 9, [1] * 9, id="at least one"),
        pytest.param([HOST, HOST, HOST._replace(kernel="other")], [4, 4, 8], id="another host"),
        pytest.param([HOST._replace(cores="0-5"), HOST._replace(cores="6,7")], [6, 2], id="bound by the launcher"),
        pytest.param([HOST, HOST._replace(cores="0-3")], [6, 2], id="one of two is bound"),
        pytest.param([HOST._replace(quota=4.5)] * 2, [2, 2], id="ranks of one container share its quota"),
        pytest.param(
            [HOST._replace(quota=3.0), HOST._replace(quota=3.0, container="other")], [3, 3], id="a container each"
        ),
    ],
)
def test_a_ranks_share_of_the_cores(cores, shares):
    assert [share(rank, cores) for rank in range(len(cores))] == shares


def test_two_hardware_threads_are_one_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 9})
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1-1", 2: "2-3", 5: "1,5"}.items():
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(tmp_path) == [0, 1, 2, 9]  # the kernel says nothing about 9


def test_ranges_of_cores_can_be_read_back():
    for numbers in ([0], [0, 1, 2, 3, 8], [1, 3, 5], list(range(64)) + list(range(128, 192))):
        assert thread_count._numbers(thread_count._ranges(numbers)) == set(numbers)
    assert thread_count._ranges([0, 1, 2, 3, 8]) == "0-3,8"


@pytest.fixture
def library(monkeypatch):
    """A registered library, whose `applied` lists what it was set to, on a host of four cores."""
    for name in TUNED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(thread_count, "_set_here", {})
    monkeypatch.setattr(thread_count, "_libraries", [])
    monkeypatch.setattr(thread_count, "physical_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(thread_count, "_loaded_linear_algebra", list)

    class Registered:
        applied: ClassVar[list[int]] = []
        outcome = Applied.DONE

    def apply(number):
        Registered.applied = [*Registered.applied, number]
        return Registered.outcome

    thread_count.register_library(Library("Library", ("LIBRARY_THREADS", "LIBRARY_OLD_THREADS"), apply))
    yield Registered
    for name in TUNED:
        os.environ.pop(name, None)


def test_libraries_and_variables_are_set(library):
    assert variables(2) == {"OMP_NUM_THREADS": "2", "LIBRARY_THREADS": "2"}
    assert set_threads(2) == (True, [])
    assert library.applied == [2]
    assert (os.environ["OMP_NUM_THREADS"], os.environ["LIBRARY_THREADS"]) == ("2", "2")


@pytest.mark.parametrize("name", ["LIBRARY_THREADS", "LIBRARY_OLD_THREADS"])
def test_a_library_whose_variable_the_user_has_set_is_left_alone(name, library, monkeypatch):
    monkeypatch.setenv(name, "3")
    set_threads(2)
    assert library.applied == []
    assert "LIBRARY_THREADS" not in variables(2)
    assert os.environ[name] == "3"


def test_nothing_changes_if_the_user_has_set_everything(library, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setenv("LIBRARY_THREADS", "3")
    assert set_threads(2) == (False, [])
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_second_job_sets_other_numbers(library):
    set_threads(1)
    assert thread_count.is_default(1)
    set_threads(2)
    assert library.applied == [1, 2]
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_a_library_that_has_started_its_threads_is_named(library):
    library.outcome = Applied.TOO_LATE
    _, too_late = set_threads(2)
    assert [one.name for one in too_late] == ["Library"]


def test_linear_algebra_keeps_what_the_user_set_and_loses_a_thread_per_core(library, monkeypatch):
    puts = []
    pools = [(lambda: 4, lambda number: puts.append(("default", number))), (lambda: 3, lambda number: puts.append("!"))]
    monkeypatch.setattr(thread_count, "_loaded_linear_algebra", lambda: pools)
    set_threads(2)
    assert puts == [("default", 2)]


def test_the_library_that_numpy_computes_with_is_found():
    found = list(thread_count._loaded_linear_algebra())
    assert found
    for get, put in found:
        number = get()
        put(number)
        assert get() == number >= 1


def test_loaded_linear_algebra_computes_with_another_number_for_a_while():
    with thread_count.linear_algebra_threads(None) as before, thread_count.linear_algebra_threads(1) as inside:
        assert inside == 1
    with thread_count.linear_algebra_threads(None) as after:
        assert after == before
