from ring_plugins.doctor.packages import unmet, versions

REQUIRED = ["torch>=2.4; extra == 'torch'", "numpy>=1.24", "rich"]


def test_packages_that_are_too_old_are_named():
    (finding,) = unmet({"torch": "2.3.1+cpu", "numpy": "1.24", "python": "3.10"}, REQUIRED)
    assert "torch is 2.3.1+cpu, but ring_plugins needs torch>=2.4" in finding.summary


def test_local_versions_and_two_digit_numbers_are_new_enough():
    assert list(unmet({"torch": "2.13.0+cpu", "numpy": "2.4.0rc1"}, REQUIRED)) == []


def test_versions_are_read_without_importing():
    assert versions().keys() >= {"python", "ring_plugins", "numpy", "torch"}
