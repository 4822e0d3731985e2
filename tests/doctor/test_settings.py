import pytest

from ring_plugins.core.base import config
from ring_plugins.doctor.settings import examine


def test_misspelled_names_and_unusable_values_are_found():
    found = list(examine({"RING_TIMOUT": "5", "RING_AUTOTUNE": "yes", "RING_TIMEOUT": "60"}))
    assert [finding.severity.name for finding in found] == ["WARNING", "ERROR", "FINE"]
    assert "Did you mean RING_TIMEOUT?" in found[0].remedy
    assert "'yes' is neither 0 nor 1" in found[1].summary


def test_the_secret_is_never_shown():
    assert "hush" not in str(list(examine({"RING_SECRET": "hush"})))


@pytest.mark.parametrize("name", [name for name, variable in config.ALL.items() if variable.is_internal])
def test_variables_that_ring_run_sets_for_its_ranks_are_not_reported(name):
    (finding,) = examine({name: "anything"})
    assert finding.severity.name == "FINE" and name not in str(finding)


def test_every_documented_variable_is_known():
    values = {config.SECONDS: "1", config.SWITCH: "1", config.WHOLE_NUMBER: "1", config.COUNTS: "1", config.TEXT: "x"}
    words = {config.OVERLAP.name: "auto", config.ON_FAILURE.name: "end"}
    for name, variable in config.ALL.items():
        value = values.get(variable.kind) or words.get(name, "mpi")
        assert [finding.severity.name for finding in examine({name: value})] == ["FINE"], name


def test_a_former_name_is_accepted_and_the_new_one_is_named():
    renamed, listed = examine({"RING_PLANE": "mpi"})
    assert renamed.severity.name == "FINE" and "RING_TRANSPORT" in renamed.summary
    assert "RING_PLANE=mpi" in listed.summary
    assert next(examine({"RING_PLANE": "pigeons"})).severity.name == "ERROR"
