"""Findings of ``collapipe doctor``: one line a check, and the remedy where something is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CheckStatus = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: CheckStatus
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line, and the remedy on another."""
        return f"{self.status:<8}{self.check}: {self.found}" + (f"\n        -> {self.remedy}" if self.remedy else "")


def ok(check: str, found: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return the finding of a check that passes for now."""
    return Finding(check, "warning", found, remedy)


def failure(check: str, found: str, remedy: str) -> Finding:
    """Return the finding of a check that failed."""
    return Finding(check, "failed", found, remedy)


def refuse_failed(key: str, findings: Iterable[Finding]) -> None:
    """Refuse to start a machine of which a check failed."""
    for finding in findings:
        if finding.status == "failed":
            raise ValueError(f"{key}: {finding.found}; {finding.remedy}")


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one machine."""

    role: str
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return all(finding.status != "failed" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"role": self.role, "passed": self.passed, "findings": [asdict(f) for f in self.findings]}
