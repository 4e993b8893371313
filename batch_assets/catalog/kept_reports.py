"""What the catalog says of every batch, kept in a file from one command to the next.

The entries of 80,000 batches are 200 MB of JSON in Dagster's event log: to read them was most of what `status` cost.
The file holds them up to an event, the mark, with what `RememberedEntries` knows an unchanged past by. It only saves
work: where it is missing, damaged, of another version or of another past, the event log is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from batch_assets.catalog.ledger import LedgerVersion, Past

FORMAT = 1
LEAST = 2_000  # entries that were read anew, after which the file is written: 0.1 s to read them again


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The newest ledger entry of a batch.

    `author` is the run that wrote the object; `reporter` the run that logged this entry, which for a batch that was
    committed before is another one. `reused`: rows with the outcome of an earlier object. `reported_at`: Unix seconds.
    `simulated`: its rows are an engine simulator's; None where there are none. `where`: which rows of a batch that is
    to be made anew are asked again; "": all. `journaled`: rows that other runs than the author had asked for, by run.
    """

    version: LedgerVersion
    path: str | None
    rows: int
    ok: int
    dead: int
    reused: int
    prompt_tokens: int
    completion_tokens: int
    author: str | None
    reporter: str
    reported_at: float
    bytes: int | None = None
    sha256: str | None = None
    simulated: bool | None = None
    model: str = ""
    where: str = ""
    journaled: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def fresh(self) -> bool:
        """True when the run that logged the entry generated the batch."""
        return self.author == self.reporter


NAMES = [field.name for field in dataclasses.fields(BatchReport) if field.name != "version"]


@dataclass(frozen=True, slots=True)
class KeptReports:
    """Entries of all batches of a dataset up to the mark of a past, by key, and what they say, by storage id."""

    past: Past
    entries: Mapping[str, tuple[int, LedgerVersion]]
    reports: Mapping[int, BatchReport]

    @classmethod
    def load(cls, file: Path) -> KeptReports | None:
        """What was kept; None: nothing that can be used."""
        try:
            found = orjson.loads(file.read_bytes())
            if (found["format"], found["names"]) != (FORMAT, NAMES):
                return None
            versions = [LedgerVersion(*one) for one in zip(found["versions"], found["generations"], strict=True)]
            values = zip(versions, *found["columns"], strict=True)
            reports = [BatchReport(*one) for one in values]
            entries = zip(found["ids"], versions, strict=True)
            return cls(
                Past(*found["past"]),
                dict(zip(found["keys"], entries, strict=True)),
                dict(zip(found["ids"], reports, strict=True)),
            )
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def save(self, file: Path) -> None:
        """Write all entries, each of which has a report of its version; where that cannot be done, nothing is kept."""
        lines = [(key, number, self.reports[number]) for key, (number, _) in self.entries.items()]
        reports = [report for _, _, report in lines]
        text = orjson.dumps(
            {
                "format": FORMAT,
                "names": NAMES,
                "past": dataclasses.astuple(self.past),
                "keys": [key for key, _, _ in lines],
                "ids": [number for _, number, _ in lines],
                "versions": [report.version.data_version for report in reports],
                "generations": [report.version.generation for report in reports],
                "columns": [[getattr(report, name) for report in reports] for name in NAMES],
            }
        )
        new = file.with_name(f".{file.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            try:
                file.parent.mkdir(mode=0o700, exist_ok=True)
                new.write_bytes(text)
                new.replace(file)
            finally:
                new.unlink(missing_ok=True)
