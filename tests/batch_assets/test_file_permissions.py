"""What is written on disk can be read by its user only, or by one group."""

from __future__ import annotations

import grp
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_assets import file_permissions
from batch_assets.local_dagster.home import LOGS, prepare_home, prepare_store
from batch_assets.local_dagster.stack import Stack, _Child


@pytest.fixture(autouse=True)
def usual_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BATCH_ASSETS_GROUP", raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    return tmp_path / "home"


@pytest.fixture
def our_group(monkeypatch: pytest.MonkeyPatch) -> str:
    name = grp.getgrgid(os.getegid()).gr_name
    monkeypatch.setenv("BATCH_ASSETS_GROUP", name)
    return name


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> set[int]:
    """Of all files below."""
    return {mode(file) for file in folder.rglob("*") if file.is_file()}


def child_umask(home: Path) -> str:
    """What a process of the stack has, and so every run of it."""
    child = _Child("probe", [sys.executable, "-c", "import os; print(oct(os.umask(0)))"])
    Stack(home)._start(child)
    assert child.process is not None and child.process.stdin is not None
    child.process.wait(timeout=60)
    child.process.stdin.close()
    return (home / LOGS / "probe.log").read_text().strip()


def test_a_new_home_and_what_is_made_in_it_belong_to_their_user_alone(home: Path):
    prepare_home()
    (home / "made later").touch()
    assert child_umask(home) == "0o77"
    assert mode(home) == 0o700
    assert modes(home) == {0o600}
    prepare_store()
    assert mode(home.parent / "store") == 0o700


def test_a_home_that_was_open_is_closed_and_that_is_said_once(home: Path, capsys: pytest.CaptureFixture[str]):
    home.mkdir(mode=0o755)
    (home / "dagster.yaml").touch()
    prepare_home()
    assert mode(home) == 0o700
    assert "was open to other users (mode 755): closed to them" in capsys.readouterr().err
    prepare_home()
    assert capsys.readouterr().err == ""


def test_a_store_that_is_open_is_left_so_and_the_command_that_closes_it_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
):
    store = home.parent / "store"
    store.mkdir(mode=0o755)
    prepare_store()
    assert mode(store) == 0o755
    assert f"`chmod g-rwx,o-rwx {store}`" in capsys.readouterr().err


def test_a_group_may_share_home_and_store(home: Path, our_group: str):
    prepare_home()
    (home / "made later").touch()
    prepare_store()
    assert child_umask(home) == "0o7"
    for folder in (home, home.parent / "store"):
        assert mode(folder) == 0o2770
        assert grp.getgrgid(folder.stat().st_gid).gr_name == our_group
    assert mode(home / "made later") == 0o660


def test_a_group_that_does_not_exist_is_named(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATCH_ASSETS_GROUP", "no such group")
    with pytest.raises(file_permissions.AccessError, match="expected a group of this machine, found 'no such group'"):
        prepare_home()


def test_a_bucket_has_no_mode(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCH_ASSETS_STORE", "s3://bucket/prefix")
    prepare_store()
    assert list(tmp_path.iterdir()) == []
    assert file_permissions.too_wide(tmp_path / "not there") is None
