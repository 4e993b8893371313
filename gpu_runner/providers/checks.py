"""What `batch-assets fleet check` asks a configured provider. Nothing is rented by it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable


class CheckSubject(Enum):
    """What is looked at."""

    CREDENTIALS = "credentials"
    PERMISSIONS = "permissions"
    QUOTA = "quota"
    IMAGE = "image"
    PRICES = "prices"
    MACHINES = "machines"


class CheckOutcome(Enum):
    """OK: it will do. WARNING: it may not, or could not be looked at without renting. FAILED: nothing can be rented."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One look: what was found, and what to do about it where it is not OK. No secret stands in either."""

    subject: CheckSubject
    outcome: CheckOutcome
    found: str
    remedy: str = ""


@runtime_checkable
class CheckedProvider(Protocol):
    """A provider that can be looked at without renting."""

    def check(self) -> list[CheckResult]:
        """Look at everything that renting needs, for some seconds at most. Never raises for what it finds."""
        ...
