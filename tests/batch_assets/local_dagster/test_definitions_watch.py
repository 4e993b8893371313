"""A dataset added while Dagster runs: its definitions are loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from batch_assets.local_dagster.definitions_watch import DefinitionsWatch, log_to
from batch_assets.spec.discovery import declared


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
    write(tmp_path / "defs", "first")
    return tmp_path / "defs"


def write(folder: Path, name: str, **more: object) -> Path:
    attributes = {"name": name, "source": {"grid": {"x": ["a"]}}, "prompt": {"user": "{{ x }}"}, "model": "m", **more}
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / name / "defs.yaml"
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))
    return file


class Reloads:
    def __init__(self) -> None:
        self.count, self.said, self.broken = 0, list[str](), False
        self.watch = DefinitionsWatch(self._reload, self.said.append)

    def _reload(self) -> None:
        if self.broken:
            raise ConnectionError("nobody answers")
        self.count += 1

    def after(self, looks: int = 2) -> int:
        for _ in range(looks):
            self.watch.look()
        return self.count


def test_an_added_a_changed_and_a_removed_dataset_are_each_loaded_once(folder: Path):
    reloads = Reloads()
    assert reloads.after() == 0
    file = write(folder, "second")
    assert reloads.after() == 1
    assert reloads.after() == 1
    write(folder, "second", budget_usd=3.5)
    assert reloads.after() == 2
    file.unlink()
    assert reloads.after() == 3
    assert reloads.said == [f"loaded the definitions again: {count} datasets" for count in (2, 2, 1)]


def test_a_file_that_is_still_being_written_is_awaited(folder: Path):
    reloads = Reloads()
    for number in range(4):
        write(folder, f"new_{number}")
        assert reloads.after(looks=1) == 0
    assert reloads.after(looks=1) == 1


def test_a_file_that_cannot_be_used_is_named_and_keeps_no_other_from_being_loaded(folder: Path):
    reloads = Reloads()
    file = write(folder, "second", schedule="nonsense")
    assert reloads.after(4) == 1
    first, second, _ = reloads.said[0].splitlines()
    assert first == "loaded the definitions again: 1 datasets"
    assert second.startswith(f"cannot be used: {file}: 1 problem")
    write(folder, "third")
    assert reloads.after() == 2
    write(folder, "second")
    assert reloads.after() == 3
    assert reloads.said[2] == "loaded the definitions again: 3 datasets"


def test_a_link_that_leads_nowhere_is_a_change(folder: Path):
    reloads = Reloads()
    (folder / "second").mkdir()
    (folder / "second" / "defs.yaml").symlink_to("/nowhere/defs.yaml")
    assert reloads.after() == 1
    assert "No such file" in reloads.said[0]


def test_a_webserver_that_is_being_started_again_is_asked_again(folder: Path):
    reloads = Reloads()
    reloads.broken = True
    write(folder, "second")
    assert reloads.after() == 0
    reloads.broken = False
    assert reloads.after(1) == 1


def test_the_log_does_not_repeat_itself(tmp_path: Path):
    say = log_to(tmp_path / "log")
    for text in ("away", "away", "back", "away"):
        say(text)
    assert [line[20:] for line in (tmp_path / "log").read_text().splitlines()] == ["away", "back", "away"]


def test_an_unchanged_file_is_not_parsed_again_and_a_changed_one_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert declared()["first"][0].budget_usd is None
    with monkeypatch.context() as patched:
        patched.setattr(yaml, "safe_load_all", lambda _: pytest.fail("parsed again"))
        assert declared()["first"][0].budget_usd is None
    write(folder, "first", budget_usd=2.5)
    assert declared()["first"][0].budget_usd == 2.5
