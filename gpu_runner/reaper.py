"""The reaper: makes what is rented agree with the books. Sweeps may overlap, and be killed anywhere.

Each decision is one transaction of the book, taken before the provider is called; the next sweep finds what a killed
one left. A provider that does not answer is unknown for this sweep: nothing is concluded from its silence (fault P5),
but what is to end is told so again. Only machines of our own tag are touched (fault P11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_runner.fleet import FleetBook, Instance
from gpu_runner.providers.base import Machine, Provider, ProviderError, ProviderUnclear

MISSING_SECONDS = 15.0


def sweep(
    book: FleetBook,
    providers: Sequence[Provider],
    *,
    tag: str,
    idle_seconds: float,
    alive: Callable[[], None] = lambda: None,
    missing_seconds: float = MISSING_SECONDS,
) -> list[str]:
    """One round; returns what was done, in sentences.

    Ends expired leases, then instances that nobody holds: never ready, retired, with a notice, or idle for
    `idle_seconds`. Then compares each provider's list with the book. `missing_seconds`: for how long a machine that
    nobody holds may be absent from the list before it counts as gone, more than the list may lag behind. `alive` is
    called whenever the book has answered: machines that hear of no sweep for long end themselves.
    """
    said = book.end_overdue(idle_seconds)
    alive()
    for provider in providers:
        said += _Round(book, provider, tag, missing_seconds).run()
        alive()
    known = {provider.name for provider in providers}
    for row in book.fleet():
        if row.provider not in known:
            said.append(f"{row.name} may still be billed: no provider {row.provider} is configured")
    return said


class _Round:
    """One provider's part of a sweep."""

    def __init__(self, book: FleetBook, provider: Provider, tag: str, missing_seconds: float) -> None:
        self.book, self.provider, self.tag, self.missing_seconds = book, provider, tag, missing_seconds
        self.said: list[str] = []
        self._all: dict[str, Instance] | None = None

    def run(self) -> list[str]:
        """Compare and settle; returns what was done."""
        machines: dict[str, Machine] | None = None
        try:
            listed = self.provider.list(self.tag)
            machines = {machine.name: machine for machine in listed if machine.name.startswith(self.tag)}
        except (ProviderError, ProviderUnclear) as error:
            self.said.append(f"{self.provider.name} does not list its machines: {error}")
        # The book is read after the list: whatever is listed was written down before it was ordered.
        rows = {row.name: row for row in self.book.fleet() if row.provider == self.provider.name}
        for name, machine in (machines or {}).items():
            row = rows.get(name) or self._settled(name)
            if machine.state == "ended":
                self._ended(row, machine)
            else:
                self._alive(row, machine)
        for name, row in rows.items():
            if machines is None:
                if row.state == "ending":
                    self._terminate(name)
            elif name not in machines:
                self._absent(row)
        return self.said

    def _settled(self, name: str) -> Instance | None:
        """The row of a machine that has ended in the book; None when the book knows no such machine here."""
        if self._all is None:
            self._all = {row.name: row for row in self.book.fleet(ended=True) if row.provider == self.provider.name}
        return self._all.get(name)

    def _ended(self, row: Instance | None, machine: Machine) -> None:
        if row is not None and (row.state != "ended" or row.end_unproven):
            self.book.ended(row.name, machine.ended_seconds or 0.0, machine.reason)
            self.said.append(f"{row.name} has ended: {row.reason or machine.reason}")

    def _alive(self, row: Instance | None, machine: Machine) -> None:
        if row is None:
            self.said.append(f"{machine.name} is not in the book")
            self._terminate(machine.name)
            return
        if not row.seen or row.missing_seconds is not None or row.state == "ended":
            self.book.seen(row.name)
        if row.state in ("ending", "ended"):
            self._terminate(row.name)
        elif machine.notice_seconds is not None and row.notice_seconds is None:
            self.book.notice(row.name, machine.notice_seconds)
            self.said.append(f"{row.name} is taken away in {machine.notice_seconds:.0f} s")

    def _absent(self, row: Instance) -> None:
        missing = self.book.missing(row.name)
        gone = missing > self.missing_seconds and self.book.begin_ending(row.name, "vanished")
        if (gone or row.state == "ending") and self._terminate(row.name) and gone:
            self.book.ended(row.name, None, "vanished")
            self.said.append(f"{row.name} is gone: not listed for {missing:.0f} s")

    def _terminate(self, name: str) -> bool:
        """Tell the provider to end it; the next list shows whether it did. False: no answer."""
        try:
            self.provider.terminate(name)
        except (ProviderError, ProviderUnclear) as error:
            self.said.append(f"{name} is to end, but {self.provider.name} did not end it: {error}")
            return False
        self.said.append(f"{name}: told {self.provider.name} to end it")
        return True
