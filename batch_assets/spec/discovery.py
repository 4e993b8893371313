"""The datasets that are declared: every `defs.yaml` of a folder that asks for our component.

The folder is `batch_assets/defs`, loaded by Dagster's own component loader, or BATCH_ASSETS_DEFS: datasets that live in
another repository (and those of tests) need no copy of this project. A file that cannot be used is one broken file: all
others are declared as if it were not there.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batch_assets import settings
from batch_assets.spec.chain import ChainError, round_of
from batch_assets.spec.defs_files import YAML_FILES, defs_files, read_documents, said
from batch_assets.spec.errors import Problem, SpecError, near_miss, nearest, show
from batch_assets.spec.last_known import copy_of
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.plain_words import ambiguous_words
from batch_assets.spec.row_rules import SURPLUS, WantSpec
from batch_assets.spec.source import SourceSpec, circle_from, dataset_read_by
from resources.yaml_files import Document, YamlProblem, read_text

COMPONENT = "batch_assets.GeneratedDataset"
KEPT_FILES = 2_000
_NAME_LINE = re.compile(r"""^( +)name: *["']?([a-z0-9][a-z0-9_]{0,62})["']? *(?:#.*)?$""", re.MULTILINE)
_NEXT = re.compile(r"^---(?=\s|$)", re.MULTILINE)  # begins a document
_KEYS = ("type", "attributes", "template_vars_module", "requirements", "post_processing")  # Dagster's, of each document

Datasets = dict[str, tuple[GeneratedDatasetSpec, Path]]


@dataclass(frozen=True, slots=True)
class BrokenFile:
    """A file that declares datasets and cannot be used now.

    `name`: what the UI and `status` call it. `names`: what commands find it by: the names that stand in it, and the
    folder's.
    """

    file: Path
    error: SpecError
    name: str
    names: frozenset[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        problems = [str(problem) for problem in self.error.problems]
        return {"name": self.name, "file": str(self.file), "problems": problems}

    @property
    def place(self) -> Path:
        """The folder that cannot be used for it."""
        return self.file.parent if self.file.name in YAML_FILES else self.file


@dataclass(frozen=True, slots=True)
class Declarations:
    """What a folder declares: datasets that can be used, by name, with the folder of their file; those files; and the
    broken ones.
    """

    datasets: Datasets
    files: tuple[Path, ...]
    broken: tuple[BrokenFile, ...]

    def broken_named(self, name: str) -> BrokenFile | None:
        """The broken file that a command means by this name, unless a dataset that can be used has it."""
        return None if name in self.datasets else next((one for one in self.broken if name in one.names), None)


def external_defs() -> Path | None:
    """Folder named by BATCH_ASSETS_DEFS, or None."""
    named = os.environ.get("BATCH_ASSETS_DEFS")
    return Path(named).resolve() if named else None


def defs_folder() -> Path:
    """The folder whose defs.yaml files declare the datasets."""
    return external_defs() or settings.PROJECT / "batch_assets" / "defs"


def declared_specs() -> dict[str, GeneratedDatasetSpec]:
    """Every dataset that can be used, by name."""
    return {name: spec for name, (spec, _) in declared().items()}


def declared() -> Datasets:
    """The same, with the folder of its file."""
    return declarations().datasets


def known_datasets() -> Datasets:
    """Every dataset that is looked after: as it is declared now, or as it was last known."""
    found = declarations()
    return found.datasets | {spec.name: (spec, broken.place) for spec, broken in last_known(found)}


def last_known(found: Declarations) -> Iterator[tuple[GeneratedDatasetSpec, BrokenFile]]:
    """The datasets of broken files as they were when these could last be used, each name once."""
    taken = set(found.datasets)
    for broken in found.broken:
        for spec in read_file(copy_of(broken.file)).specs:
            if spec.name not in taken:
                taken.add(spec.name)
                yield spec, broken


def declarations(root: Path | None = None) -> Declarations:
    """What is declared now; in another folder than that of the settings, or in one file: `root`."""
    read = {
        one.path: read_file(one.path) if one.problem is None else FileContents((), SpecError(one.path, [one.problem]))
        for one in defs_files(root or defs_folder())
    }
    claimed = {path: _claimed(path, found) for path, found in read.items()}
    wrong = dict(_used_twice(claimed)) | {path: one.error for path, one in read.items() if one.error is not None}
    going = {path: one if one.error is None else read_file(copy_of(path)) for path, one in read.items()}
    sources = {spec.name: (spec.source, path) for path, one in going.items() for spec in one.specs}
    known = {name for names in claimed.values() for name in names} if root is None or root.is_dir() else None
    specs = {spec.name: (spec, path) for path, one in read.items() for spec in one.specs}
    wrong = dict(_misread(sources, known)) | dict(_unaccepted(specs, known)) | dict(_without_columns(specs)) | wrong
    files = tuple(path for path, found in read.items() if found.specs and path not in wrong)
    datasets = {spec.name: (spec, path.parent) for path in files for spec in read[path].specs}
    broken: list[BrokenFile] = []
    for path in sorted(wrong, key=lambda path: (path.parent.name not in claimed[path], path)):
        taken = {*datasets, *(one.name for one in broken)}
        broken.append(broken_file(path, wrong[path], claimed[path] or read[path].names, taken))
    return Declarations(datasets, files, tuple(broken))


def _claimed(path: Path, found: FileContents) -> tuple[str, ...]:
    """Names that no other file may take: of a broken file those that it had, and its folder's if it says so itself."""
    if found.error is None:
        return found.names
    known = read_file(copy_of(path)).names
    return known or tuple(name for name in found.names if name == path.parent.name)


def _used_twice(claimed: Mapping[Path, Sequence[str]]) -> Iterator[tuple[Path, SpecError]]:
    """Files with a name that another dataset has, too. The one whose folder has that name, too, keeps it: whoever
    copies a folder and forgets to rename the dataset in it breaks the copy only."""
    users: dict[str, list[Path]] = defaultdict(list)
    for path, names in claimed.items():
        for name in names:
            users[name].append(path)
    for name, paths in users.items():
        owners = [path for path in paths if path.parent.name == name]
        kept = owners[0] if len(owners) == 1 else None
        for path in paths if len(paths) > 1 else ():
            if path != kept:
                other = kept or next((one for one in paths if one != path), path)
                where = f"which {other} has, too" if other != path else "twice in this file"
                yield path, SpecError(path, [Problem("name", "a name of its own", f"{name!r}, {where}", "Rename one.")])


def _misread(
    sources: Mapping[str, tuple[SourceSpec, Path]], known: Collection[str] | None
) -> Iterator[tuple[Path, SpecError]]:
    """Files with a dataset that reads one that is not declared, or, by whatever way, itself. `sources`: what each
    dataset reads, and its file; `known`: names that files have, where all files were read."""
    reads = {name: dataset_read_by(source) for name, (source, _) in sources.items()}
    for name, (source, path) in sources.items():
        key = f"{name}: source.{'asset' if source.dataset is None else 'dataset'}"
        if source.dataset is not None and known is not None and source.dataset not in known:
            expected, hint = "the name of a declared dataset", nearest(source.dataset, sorted(known)) if known else ""
            yield path, SpecError(path, [Problem(key, expected, show(source.dataset), hint)])
            continue
        if circle := circle_from(name, reads):
            yield path, SpecError(path, [Problem(key, "datasets that are no circle", " → ".join(circle))])


def _unaccepted(
    specs: Mapping[str, tuple[GeneratedDatasetSpec, Path]], all_known: Collection[str] | None
) -> Iterator[tuple[Path, SpecError]]:
    """Files with a dataset that wants rows which another one accepts, that cannot. `all_known`: as in `_misread`; a
    dataset that stands in none of `specs` is another file's."""
    known = {name: spec for name, (spec, _) in specs.items()}
    for name, (spec, path) in specs.items():
        other = spec.want if spec.accepted_by != name else None
        if spec.accepted_by not in known and (all_known is None or spec.accepted_by in all_known):
            continue  # in a file that is not read now, or is broken
        if other is not None and (problem := _no_judge(known, spec, other)) is not None:
            expected, found, hint = problem
            yield path, SpecError(path, [Problem(f"{name}: want.accepted_by", expected, found, hint)])


def _no_judge(
    known: Mapping[str, GeneratedDatasetSpec], spec: GeneratedDatasetSpec, want: WantSpec
) -> tuple[str, str, str] | None:
    """What was expected of the dataset that is to accept rows, what was found, and a hint."""
    judge, of = known.get(want.accepted_by), show(want.accepted_by)
    if judge is None:
        return "passed, or the name of a declared dataset", of, nearest(want.accepted_by, sorted(known))
    try:
        steps = round_of(known, spec)
    except ChainError:
        steps = []
    if not steps or any(known[one].source.dataset is None for one in steps[1:]):
        return f"a dataset that reads {spec.name} or what is made of it (source.dataset)", f"{of}, which does not", ""
    if not any(rule.remove for rule in (judge.rules or {}).values()):
        return "a dataset with `judge.accept`, or a filter with a rule that removes", f"{of}, which has neither", ""
    if judge.want is not None or SURPLUS in (judge.rules or {}):
        return f"a dataset without `want`, and without a rule {SURPLUS}", f"{of}, which has one", ""
    if sum(one.accepted_by == judge.name and one.want is not None for one in known.values()) > 1:
        return "another dataset than others that want rows", of, "One number of rows is counted where they pass."
    if want.per is not None and want.per not in judge.keep_columns:
        return f"a dataset that keeps {show(want.per)} (keep_columns)", f"{of}, which does not", ""
    return None


def _without_columns(specs: Mapping[str, tuple[GeneratedDatasetSpec, Path]]) -> Iterator[tuple[Path, SpecError]]:
    """Files with a dataset that reads of another one what that does not have: a table of the rows that pass, or of
    those that it judged, or what is to be judged."""
    for name, (spec, path) in specs.items():
        before, _ = specs.get(spec.source.dataset or "", (None, None))
        if before is None:
            continue
        of = show(spec.source.dataset)
        if spec.source.passed and before.rules is None:
            problem = Problem(f"{name}: source.passed", "a dataset with a filter", f"{of}, which has no `filter`")
        elif spec.source.judged and before.judge is None:
            problem = Problem(f"{name}: source.judged", "a dataset with a judge", f"{of}, which has no `judge`")
        elif (missing := _missing_column(spec, before)) is not None:
            problem = missing
        else:
            continue
        yield path, SpecError(path, [problem])


def _missing_column(spec: GeneratedDatasetSpec, before: GeneratedDatasetSpec) -> Problem | None:
    """What a judge reads of the dataset `before` and that has not."""
    judge = spec.judge
    if judge is None:
        return None
    judged = spec.source.judged or (spec.source.passed and before.judge is not None)
    known = before.judged_columns if judged else before.table_columns
    known = known | ({"flags"} if spec.source.passed else set())
    read = [("judge.column", judge.column), *([("judge.question", judge.question)] if judge.question else [])]
    read += [("judge.group_by", spec.source.name_in_file(name)) for name in judge.groups]
    read += [(f"keep_columns.{i}", spec.source.name_in_file(name)) for i, name in enumerate(spec.keep_columns)]
    key, column = next(((key, name) for key, name in read if name not in known), ("", ""))
    if not key:
        return None
    hint = nearest(column, sorted(known))
    if key == "judge.question" and column == "prompt":
        hint = "It has include_prompt: false. Name a column that it keeps, or write question: null."
    return Problem(f"{spec.name}: {key}", f"a column of {before.name}", show(column), hint)


def broken_file(path: Path, error: SpecError, names: Sequence[str], taken: Collection[str]) -> BrokenFile:
    """A file, or a folder, that cannot be used: called by its names, else its folder's, but by none that is taken."""
    folder = re.sub(r"\W", "_", (path.parent if path.name in YAML_FILES else path).name, flags=re.ASCII) or "defs"
    numbered = (f"{folder}_{number}" for number in itertools.count(2))
    name = next(one for one in itertools.chain(names, [folder], numbered) if one not in taken)
    return BrokenFile(path, error, name, frozenset([name, folder, *names]))


@dataclass(frozen=True, slots=True)
class FileContents:
    """What a file declares, or what is wrong with it; the names that stand in it."""

    specs: tuple[GeneratedDatasetSpec, ...]
    error: SpecError | None = None
    names: tuple[str, ...] = ()


def read_file(file: Path) -> FileContents:
    """What is in a file. One that did not change is not read again."""
    try:
        about = file.stat()
    except OSError as error:
        return FileContents((), SpecError(file, [Problem("this file", "a readable file", said(error))]))
    return _read_kept(file, about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode)


@functools.lru_cache(maxsize=KEPT_FILES)  # sensors ask again and again, and to read 200 files takes two seconds
def _read_kept(file: Path, *_of_the_same_file: int) -> FileContents:
    return _read(file)


def _read(file: Path) -> FileContents:
    try:
        documents = read_documents(file) or [Document(None, None)]
        found = [_declared_by(documents, number, file) for number in range(len(documents))]
        if problems := [problem for one in found if isinstance(one, SpecError) for problem in one.problems]:
            raise SpecError(file, problems)
        specs = tuple(one for one in found if isinstance(one, GeneratedDatasetSpec))
    except SpecError as error:
        return FileContents((), error, _names_in(file))
    except Exception as error:  # of one file: the others are declared all the same
        said = f"one at which the reader failed: {type(error).__name__}: {error!s:.200}"
        return FileContents((), SpecError(file, [Problem("this file", "a file that can be read", said)]))
    return FileContents(specs, None, tuple(spec.name for spec in specs))


def _declared_by(documents: Sequence[Document], number: int, file: Path) -> GeneratedDatasetSpec | SpecError | None:
    """The dataset of one document, or what is wrong with it; None where it is of another component. Of several
    documents, each problem names its own."""
    value = documents[number].value
    try:
        return _load(documents[number], file) if _is_ours(value, file) else None
    except SpecError as error:
        if len(documents) == 1:
            return error
        attributes = value.get("attributes") if isinstance(value, dict) else None
        name = attributes.get("name") if isinstance(attributes, dict) else None
        where = f"document {number + 1}" + (f" ({name:.63})" if isinstance(name, str) else "")
        return SpecError(file, [replace(one, key=f"{where}: {one.key}") for one in error.problems])


def _load(document: Document, file: Path) -> GeneratedDatasetSpec:
    attributes = document.value.get("attributes") or {}
    problems = ambiguous_words(document.node)
    try:
        spec = load_spec(attributes, file)
    except SpecError as error:
        raise SpecError(file, [*error.problems, *problems]) from None
    if problems:
        raise SpecError(file, problems)
    return spec


def spec_in(file: Path, number: int) -> GeneratedDatasetSpec:
    """The dataset that a document of a file declares. Raises SpecError."""
    documents = read_documents(file)
    found = _declared_by(documents, number, file) if number < len(documents) else None
    if isinstance(found, SpecError):
        raise found
    if found is None:
        raise SpecError(
            file, [Problem("this file", f"a dataset as document {number + 1}", "none: it has just changed")]
        )
    return found


def _names_in(file: Path) -> tuple[str, ...]:
    """The names that stand in a file that is wrong elsewhere, one a document: found by lines, as it may be no YAML."""
    try:
        text = read_text(file)
    except (OSError, YamlProblem):
        return ()
    named = [min(_NAME_LINE.findall(one), key=lambda found: len(found[0]), default=None) for one in _NEXT.split(text)]
    return tuple(dict.fromkeys(one[1] for one in named if one is not None))


def _is_ours(document: Any, file: Path) -> bool:
    """Whether a document declares a dataset: those of other components are passed over. Raises SpecError."""
    if not isinstance(document, dict):
        raise SpecError(file, [Problem("this file", "a mapping with type and attributes", show(document))])
    asked = document.get("type")
    if not isinstance(asked, str):
        raise SpecError(file, [Problem("type", COMPONENT, show(asked))])
    if asked != COMPONENT:
        if not _is_meant(asked):
            return False
        raise SpecError(file, [Problem("type", COMPONENT, show(asked), nearest(asked, [COMPONENT]))])
    if unknown := [key for key in document if key not in _KEYS]:
        raise SpecError(
            file, [Problem(str(key), "a known key", show(key), nearest(str(key), _KEYS)) for key in unknown]
        )
    return True


def _is_meant(asked: str) -> bool:
    """Whether a type is ours, misspelt: whatever is said to be of this package, and what is spelt nearly alike."""
    package, _, kind = COMPONENT.rpartition(".")
    given, _, name = asked.rpartition(".")
    if given == package:
        return True
    return bool(near_miss(name, [kind])) and (not given or bool(near_miss(given, [package])))
