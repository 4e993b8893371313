"""The measurements as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.peers.trial import Trial

HEAD = (
    "system|seconds|first row asked after|last answered after|rows/s between|CPU, ms a row|rows asked"
    "|rows in the output|lost|doubled|load"
)
KILL_HEAD = "system|killed after|seconds in all|rows asked|asked again|rows in the output|lost|doubled|load"


def table(trials: Iterable[Trial]) -> str:
    """One table for each work and number of rows, and one for those with a kill."""
    groups: dict[tuple[str, int, bool], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.work, trial.rows, trial.kill), []).append(trial)
    parts = []
    for (work, rows, kill), found in groups.items():
        head = KILL_HEAD if kill else HEAD
        columns = head.count("|") + 1
        lines = [f"| {head.replace('|', ' | ')} |", "|---" * columns + "|"]
        lines += [_killed(one) if kill else _whole(one) for one in sorted(found, key=lambda one: one.seconds)]
        title = f"### {work}, {rows:,} rows{', kill -9 at 60 %' if kill else ''}"
        parts.append("\n".join([title, "", *lines]))
    return "\n\n".join(parts)


def _seconds(trial: Trial) -> str:
    start = f" + {trial.engine_start:.0f} engine" if trial.engine_start else ""
    return f"{trial.seconds:.1f}{start}"


def _load(trial: Trial) -> str:
    return f"{trial.load[0]:.1f} to {trial.load[1]:.1f}"


def _output(trial: Trial) -> list[str]:
    return [f"{trial.in_output:,}", f"{trial.lost:,}", f"{trial.doubled:,}", _load(trial)]


def _asked(trial: Trial) -> str:
    return "?" if trial.asked is None else f"{trial.asked:,}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _whole(trial: Trial) -> str:
    if trial.error:
        return _row([trial.system, f"failed: {_cell(trial.error)}", *[""] * HEAD.count("|")][: HEAD.count("|") + 1])
    cells = [trial.system, _seconds(trial)]
    cells += ["?" if moment is None else f"{moment:.1f}" for moment in (trial.first, trial.last)]
    between = (trial.last or 0.0) - (trial.first or 0.0)
    cells += [f"{trial.rows / between:.0f}" if between > 0 and trial.first is not None else "?"]
    return _row([*cells, f"{1e3 * trial.cpu / trial.rows:.2f}", _asked(trial), *_output(trial)])


def _killed(trial: Trial) -> str:
    if trial.error:
        cells = [trial.system, f"failed: {_cell(trial.error)}", *[""] * KILL_HEAD.count("|")]
        return _row(cells[: KILL_HEAD.count("|") + 1])
    again = "?" if trial.asked is None else f"{trial.asked - trial.rows:,}"
    killed = "not killed" if trial.killed_at is None else f"{trial.killed_at:.1f}"
    return _row([trial.system, killed, _seconds(trial), _asked(trial), again, *_output(trial)])


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
