"""Every command answers wrong words, files and folders with one line on standard error and a status of 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from batch_assets.cli.main import app

COMMANDS = [
    ["run", "haiku", "--endpoint", "http://127.0.0.1:abc"],
    ["run", "haiku", "--endpoint", "http://127.0.0.1:99999"],
    ["run", "haiku", "--endpoint", "http://127.0.0.1:0"],
    ["run", "haiku", "--endpoint", "http://[::1"],
    ["run", "haiku", "--endpoint", "http://"],
    ["run", "haiku", "--endpoint", "http:///x"],
    ["run", "haiku", "--endpoint", "ftp://127.0.0.1"],
    ["run", "haiku", "--endpoint", "127.0.0.1"],
    ["run", "haiku", "--endpoint", "--model"],
    ["run", "haiku", "--endpoint", "http://127.0.0.1:9/\nx"],
    ["run", "haiku", "--endpoint", f"http://{'a' * 300}.example"],
    ["run", "haiku", "--endpoint", f"http://127.0.0.1:9/{'a' * 100_000}"],
    ["run", "haiku", "--endpoint", "http://\ud800"],
    ["run", "haiku", "--model=-x"],
    ["run", "haiku", "--model=--trust-remote-code"],
    ["run", "haiku", "--model="],
    ["run", "haiku", "--model", "a b"],
    ["run", "haiku", "--model", "a\x00b"],
    ["run", "haiku", "--budget-usd", "nan"],
    ["run", "haiku", "--budget-usd", "1e400"],
    ["run", "haiku", "--budget-usd", "abc"],
    ["run", "haiku", "--objective", "best"],
    ["run", "haiku", "--max-instances", "9" * 30],
    ["run", "haiku", "--max-instances", "9" * 5000],
    ["run", "haiku", "--deadline", "9" * 30 + "h"],
    ["run", "haiku", "--deadline", "1h" * 20_000],
    ["run", "haiku", "--deadline", "2027-01-31T06:00:00+99:99"],
    ["run", "haiku", "--deadline", "0001-01-01T00:00:00+14:00"],
    ["run", "haiku", "--deadline", "2027-01-31T06:00:00[Nowhere/City]"],
    ["run", "../haiku"],
    ["run", ""],
    ["run", "\udcff"],
    ["plan", "haiku", "--deadline", "never"],
    ["plan", "haiku", "--budget-usd=-1"],
    ["adjust", "haiku"],
    ["adjust", "haiku", "--budget-usd=0"],
    ["offers", "haiku", "--limit=-1"],
    ["offers", "nope"],
    ["status", "x" * 100_000],
    ["verify", "~nosuchuser"],
    ["rebuild-ledger", "/etc/passwd"],
    ["ui", "--port", "0"],
    ["ui", "--port", "99999"],
    ["ui", "--port", "abc"],
    ["fleet", "up"],
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one dataset, `haiku`."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_FLEET", "BATCH_ASSETS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "defs").mkdir()
    spec = {"name": "haiku", "source": {"grid": {"t": ["a"]}}, "prompt": {"user": "{{ t }}"}, "model": "m"}
    document = {"type": "batch_assets.GeneratedDataset", "attributes": spec}
    (tmp_path / "defs" / "defs.yaml").write_text(yaml.safe_dump(document))
    return tmp_path


def refused(*words: str) -> str:
    found = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert found.exit_code == 2, (found.exit_code, found.exception, found.output[-500:])
    assert "Traceback" not in found.stderr and found.stdout == ""
    assert found.stderr.strip()
    return found.stderr


@pytest.mark.parametrize(
    "words", COMMANDS, ids=[" ".join(words)[:60].encode("ascii", "replace").decode() for words in COMMANDS]
)
def test_wrong_words_are_answered_in_a_line(words: list[str], home: Path) -> None:
    said = refused(*words)
    assert len(said) < 3000 or len(max(words, key=len)) > 3000


@pytest.mark.parametrize("variable", ["DAGSTER_HOME", "BATCH_ASSETS_STORE"])
@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nope", "a name too long"])
def test_a_home_or_store_that_cannot_be_is_named(
    variable: str, place: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (variable, place) == ("BATCH_ASSETS_STORE", "/proc/nope"):
        pytest.skip("a store that is not there yet is made when something is written")
    (home / "file").write_text("x")
    places = {
        "a file": str(home / "file"),
        "below a file": str(home / "file" / "x"),
        "a name too long": "/" + "x" * 300,
    }
    monkeypatch.setenv(variable, places.get(place, place))
    refused("run", "haiku") if variable == "DAGSTER_HOME" else refused("verify", "haiku")


@pytest.mark.parametrize("address", ["nonsense", "sqlite:////proc/nope/fleet.db", "postgresql://127.0.0.1:abc/x"])
def test_a_fleet_database_that_cannot_be_is_said(address: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", address)
    assert "BATCH_ASSETS_FLEET_DB" in refused("fleet")


def test_a_file_that_may_not_grow_is_a_line(home: Path) -> None:
    """A full disk and a limit on files come from the same call; the limit can be set without a file system."""
    import subprocess
    import sys

    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "from batch_assets.cli.main import main; sys.argv = ['batch-assets', 'run', 'haiku']; main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr and "ulimit -f" in found.stderr


@pytest.mark.parametrize("seconds", ["abc", "nan", "inf", "-1", "0", "1e400"])
def test_seconds_that_are_none_are_refused_by_their_variable(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from batch_assets.settings import SettingError, capacity_seconds

    monkeypatch.setenv("BATCH_ASSETS_CAPACITY_SECONDS", seconds)
    with pytest.raises(SettingError, match="BATCH_ASSETS_CAPACITY_SECONDS"):
        capacity_seconds()
