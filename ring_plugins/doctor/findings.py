"""What a check hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How bad it is; the worst one of an examination becomes the command's exit status."""

    FINE = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at, in a word or two.
        severity: how bad it is.
        summary: what was found, in a sentence.
        remedy: what to do, with the command where there is one; "" where nothing needs to be done.
        evidence: the numbers and names behind it, as JSON can hold them, with units in their names.
    """

    check: str
    severity: Severity
    summary: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "severity": self.severity.name.lower()}


#: Looks at one thing on this host; raises nothing that it can foresee.
Check = Callable[[], Iterable[Finding]]


def fine(check: str, summary: str, remedy: str = "", **evidence: Any) -> Finding:
    """Nothing wrong; a remedy here is advice."""
    return Finding(check, Severity.FINE, summary, remedy, evidence)


def warning(check: str, summary: str, remedy: str, **evidence: Any) -> Finding:
    """Slower than it could be, or likely to fail later."""
    return Finding(check, Severity.WARNING, summary, remedy, evidence)


def error(check: str, summary: str, remedy: str, **evidence: Any) -> Finding:
    """Something does not work."""
    return Finding(check, Severity.ERROR, summary, remedy, evidence)


def status(findings: Sequence[Finding]) -> int:
    """Exit status for scripts: 0 nothing wrong, 1 warnings, 2 errors."""
    return int(max((finding.severity for finding in findings), default=Severity.FINE))


def perform(check: Check) -> list[Finding]:
    """Run a check; one that breaks is a finding too, not the end of the examination."""
    try:
        return list(check())
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}"
        return [warning(check.__name__.replace("_", " "), f"could not be looked at ({said})", "Please report this.")]
