"""Findings: the results of checks, with severity, remedy and evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How bad a finding is; the worst one of an examination becomes the command's exit status."""

    FINE = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: subject of the check, in a word or two.
        severity: how bad it is.
        summary: result, in a sentence.
        remedy: what to do, with the command if there is one; "" if nothing needs to be done.
        evidence: the numbers and names behind it, ready for JSON, with units in their names.
    """

    check: str
    severity: Severity
    summary: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {**asdict(self), "severity": self.severity.name.lower()}


#: Checks one thing on this host. It reports expected failures as findings instead of raising them.
Check = Callable[[], Iterable[Finding]]


def fine(check: str, summary: str, remedy: str = "", **evidence: Any) -> Finding:
    """Nothing is wrong; a remedy here is advice."""
    return Finding(check, Severity.FINE, summary, remedy, evidence)


def warning(check: str, summary: str, remedy: str, **evidence: Any) -> Finding:
    """Something is slower than it could be, or likely to fail later."""
    return Finding(check, Severity.WARNING, summary, remedy, evidence)


def error(check: str, summary: str, remedy: str, **evidence: Any) -> Finding:
    """Something does not work."""
    return Finding(check, Severity.ERROR, summary, remedy, evidence)


def status(findings: Sequence[Finding]) -> int:
    """Exit status for scripts: 0 if nothing is wrong, 1 after warnings, 2 after errors."""
    return int(max((finding.severity for finding in findings), default=Severity.FINE))


def run_check(check: Check) -> list[Finding]:
    """Run a check; an exception becomes a finding too and does not end the examination."""
    try:
        return list(check())
    except Exception as problem:
        name = check.__name__.replace("_", " ")
        return [warning(name, f"this check failed ({type(problem).__name__}: {problem})", "Please report this.")]
