"""What can be wrong with a source: the whole of it (SourceError), or single rows (Reject)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_runner.errors import ExitStatus, UserFacingError

LISTED = 20
SHOWN_NAME = 64


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that cannot be used. `line` is 1-based: line of a text file, row of a Parquet file or grid."""

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
        return cls(f"{count}:\n{listed}{more}\n{hint}", rejects[:LISTED])


def shown(name: str) -> str:
    """A column name as an error shows it. What stands where a header should be may be a row: only its beginning."""
    return repr(name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "…")


def no_column(file: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise SourceError when a wanted column is not there; it names the columns there are."""
    known = set(there)
    missing = [name for name in wanted if name not in known]
    if missing:
        names = ", ".join(map(shown, there[:50])) + (f" and {len(there) - 50} more" if len(there) > 50 else "")
        plural = "columns" if len(missing) > 1 else "column"
        raise SourceError(f"{file}: expected {plural} {', '.join(map(repr, missing))}, found {names or 'no columns'}")
