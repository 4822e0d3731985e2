from ring_plugins.doctor.findings import Severity, error, fine, run_check, status, warning


def test_the_worst_finding_is_the_status():
    assert status([]) == 0
    assert status([fine("a", "b"), warning("a", "b", "c"), fine("a", "b")]) == 1
    assert status([warning("a", "b", "c"), error("a", "b", "c")]) == 2


def test_a_check_that_raises_is_a_finding():
    def broken():
        raise ZeroDivisionError("no")

    (finding,) = run_check(broken)
    assert finding.severity == Severity.WARNING and "ZeroDivisionError: no" in finding.summary
