"""What can be wrong with a source: the whole of it (SourceError), or single rows (Reject)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu_runner.errors import ExitStatus, UserFacingError

LISTED = 20
SHOWN_REJECTS = 3
SHOWN_NAME = 64
MOST_NAMES = 1_000
OTHER_ENCODING = (
    "A file that is not UTF-8: write source.encoding: windows-1252 (which reads Latin-1, too), or convert it "
    "(iconv -f ENCODING -t UTF-8)."
)


class NotUtf8(str):
    """Why a line of a file of text cannot be used: the bytes that are not UTF-8 begin at `byte`, from 1."""

    __slots__ = ()

    def __new__(cls, byte: int) -> NotUtf8:
        return super().__new__(cls, f"not valid UTF-8 at byte {byte}")


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that cannot be used. `line` is 1-based: line of a text file, row of a Parquet file or grid, place in a
    JSON array."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


class SourceError(UserFacingError):
    """The source cannot be made into a snapshot. `rejects` are the first bad rows when rows are the reason."""

    exit_status = ExitStatus.WRONG_REQUEST

    def __init__(self, message: str, rejects: Sequence[Reject] = ()) -> None:
        super().__init__(message)
        self.rejects = tuple(rejects)

    @classmethod
    def of_rows(cls, rejects: Sequence[Reject], total: int) -> SourceError:
        """All bad rows in one error; `rejects` are the first of them."""
        count = "1 row cannot be used" if total == 1 else f"{total} rows cannot be used"
        more = f"\n  … and {total - LISTED} more" if total > LISTED else ""
        listed = "\n".join(f"  {reject}" for reject in rejects[:LISTED])
        hint = "Correct the source, or set on_bad_row: skip to leave such rows out and list them in rejects.parquet."
        return cls(f"{count}:\n{listed}{more}\n{remedy(rejects)}{hint}", rejects[:LISTED])

    @classmethod
    def of_no_row(cls, source: str, rejects: Sequence[Reject], total: int) -> SourceError:
        """No row can be used; `rejects` are the first of those that are to be skipped."""
        said = f"{source}: expected at least one row, found none that can be used"
        if not total:
            return cls(said)
        more = f"\n  … and {total - SHOWN_REJECTS} more" if total > SHOWN_REJECTS else ""
        listed = "\n".join(f"  {reject}" for reject in rejects[:SHOWN_REJECTS])
        hint = f"\n{remedy(rejects)}".rstrip()
        return cls(f"{said} (all {total} were rejected):\n{listed}{more}{hint}", rejects[:LISTED])


class ConditionError(SourceError):
    """A condition on rows that are made does not fit the types of the source's columns."""


def remedy(rejects: Sequence[Reject]) -> str:
    """A line on what helps against bad rows of this kind, where a key of the source does; else ""."""
    return f"{OTHER_ENCODING}\n" if any(isinstance(reject.reason, NotUtf8) for reject in rejects) else ""


def shown(name: str) -> str:
    """A column name as an error shows it. What stands where a header should be may be a row: only its beginning."""
    return repr(name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "…")


def no_column(file: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise SourceError when a wanted column is not there; it names the columns there are."""
    there = list(dict.fromkeys(there))
    known = set(there)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise SourceError(f"{file}: expected {_columns(missing)}, found {_names(there)}{_meant(missing, there)}")


class Unseen(set[str]):
    """Wanted columns that no row had so far; `there` are the columns that rows have, at most MOST_NAMES."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.there: dict[str, None] = {}

    def look(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Take in rows of a source without a header."""
        if self:
            if len(self.there) < MOST_NAMES:
                self.there |= dict.fromkeys(key for row in rows for key in row)
            self -= {name for name in self if any(name in row for row in rows)}

    def refuse(self, file: str) -> None:
        """Raise SourceError when a column was in no row; it names those that were."""
        if self:
            missing, there = sorted(self), list(self.there)
            said = f"expected {_columns(missing)}, found it in no row, but {_names(there)}"
            raise SourceError(f"{file}: {said}{_meant(missing, there)}")


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def _names(there: Sequence[str]) -> str:
    more = f" and {len(there) - 50} more" if len(there) > 50 else ""
    return ", ".join(map(shown, there[:50])) + more or "no columns"


def _meant(missing: Sequence[str], there: Sequence[str]) -> str:
    """What was probably meant: a column that is spelt nearly alike, or one whose name is no word."""
    if "row" in missing:
        return f". In a prompt a column is written plainly, {{{{ {there[0] if there else 'column'} }}}}, not row.column"
    for name in there[:MOST_NAMES]:
        if not name.isidentifier() and any(re.match(rf"\s*{re.escape(one)}\b", name) for one in missing):
            return f". In a prompt, write {{{{ row[{shown(name)}] }}}} for the column {shown(name)}"
    near = [match for name in missing for match in difflib.get_close_matches(name, there[:MOST_NAMES], n=1)]
    return f". Did you mean {', '.join(map(shown, dict.fromkeys(near)))}?" if near else ""
