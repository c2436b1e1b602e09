"""What ``collapipe doctor`` finds: one line a check, and what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        """One line, and the remedy on another."""
        return f"{self.status:<8}{self.check}: {self.found}" + (f"\n        -> {self.remedy}" if self.remedy else "")


Check = Callable[[], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works for now."""
    return Finding(check, "warning", found, remedy)


def failure(check: str, found: str, remedy: str) -> Finding:
    """It cannot work."""
    return Finding(check, "failed", found, remedy)


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one machine."""

    role: str
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(finding.status != "failed" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"role": self.role, "passed": self.passed, "findings": [asdict(f) for f in self.findings]}
